"""Findings on their way to where people look: a webhook, and TensorBoard's text page. Imports no torch."""

import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from surefoot.findings import Finding

POST_WITHIN_S = 4.0
MOST_TEXT_BYTES = 1900
"""WeCom takes 2048."""
REFUSALS = ("errcode", "code", "StatusCode")
"""What DingTalk, WeCom and Feishu answer with status 200 and a number that is not 0."""


def body_for(url: str, run_folder: Path, finding: Finding) -> dict[str, Any]:
    """What is posted: as Feishu/Lark, DingTalk and WeCom take it, elsewhere `text` (Slack, Mattermost) and all else."""
    text = f"surefoot {run_folder}: {finding.as_text()}".encode()[:MOST_TEXT_BYTES].decode(errors="ignore")
    host = urlsplit(url).hostname or ""
    if host.endswith(("feishu.cn", "larksuite.com")):
        return {"msg_type": "text", "content": {"text": text}}
    if host.endswith(("dingtalk.com", "weixin.qq.com")):
        return {"msgtype": "text", "text": {"content": text}}
    return {"text": text, "run_folder": str(run_folder), "finding": finding.as_dict()}


def post(url: str, run_folder: Path, finding: Finding) -> str | None:
    """Send a finding to a webhook; returns what went wrong, if anything. Waits a few seconds at most.

    What is returned never holds the address: whoever has it can write there.
    """
    said = [f"no answer within {POST_WITHIN_S:.0f} s"]

    def send() -> None:
        try:
            said[:] = [_send(url, run_folder, finding)]
        except urllib.error.HTTPError as error:
            said[:] = [f"status {error.code}"]
        except Exception as error:  # noqa: BLE001 - its text may hold the address; no alert may end a run
            said[:] = [type(error).__name__]

    thread = threading.Thread(target=send, name="webhook", daemon=True)  # a name server may be silent for ever
    thread.start()
    thread.join(POST_WITHIN_S)
    return f"the webhook did not take finding {finding.code}: {said[0]}" if said[0] else None


def _send(url: str, run_folder: Path, finding: Finding) -> str:
    """Empty, or what the service does not like."""
    body = json.dumps(body_for(url, run_folder, finding)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=POST_WITHIN_S) as response:
        answer = response.read(4096)
    try:
        told = json.loads(answer)
    except ValueError:  # Slack says "ok"
        return ""
    refused = [f"{name} {told[name]}" for name in REFUSALS if isinstance(told, dict) and told.get(name)]
    return ", ".join(refused)


def write_text_page(run_folder: Path, finding: Finding, step: int) -> None:
    """Add a finding to the run's TensorBoard folder. Raises: ImportError where tensorboard is missing; OSError."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    text = f"**{finding.code} {finding.title}**\n\n```\n{finding.as_text()}\n```"
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[text.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag=f"findings/{finding.code}", metadata=metadata, tensor=tensor)
    writer = EventFileWriter(str(run_folder / "tensorboard"), filename_suffix=".findings")
    writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
    writer.close()
