"""Delivery of findings to users: a webhook, and TensorBoard's text page. Imports no torch."""

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
"""Largest size of a text: WeCom takes 2048."""
REFUSALS = ("errcode", "code", "StatusCode")
"""Keys whose non-zero number in a reply with status 200 is a refusal by DingTalk, WeCom or Feishu."""


def body_for(url: str, run_folder: Path, finding: Finding) -> dict[str, Any]:
    """Return the body to post: in the form of Feishu/Lark, DingTalk and WeCom, elsewhere `text` (Slack, Mattermost)
    and all other fields."""
    text = f"surefoot {run_folder}: {finding.as_text()}".encode()[:MOST_TEXT_BYTES].decode(errors="ignore")
    host = urlsplit(url).hostname or ""
    if host.endswith(("feishu.cn", "larksuite.com")):
        return {"msg_type": "text", "content": {"text": text}}
    if host.endswith(("dingtalk.com", "weixin.qq.com")):
        return {"msgtype": "text", "text": {"content": text}}
    return {"text": text, "run_folder": str(run_folder), "finding": finding.as_dict()}


def post(url: str, run_folder: Path, finding: Finding) -> str | None:
    """Send a finding to a webhook, and return the problem, if any. Waits a few seconds at most.

    The returned text never holds the address: anyone who has it can write there.
    """
    problems = [f"no answer within {POST_WITHIN_S:.0f} s"]

    def send() -> None:
        try:
            problems[:] = [_send_request(url, run_folder, finding)]
        except urllib.error.HTTPError as error:
            problems[:] = [f"status {error.code}"]
        except Exception as error:  # noqa: BLE001 - its text may hold the address; no alert may end a run
            problems[:] = [type(error).__name__]

    thread = threading.Thread(target=send, name="webhook", daemon=True)  # a name server may never answer
    thread.start()
    thread.join(POST_WITHIN_S)
    return f"the webhook did not take finding {finding.code}: {problems[0]}" if problems[0] else None


def _send_request(url: str, run_folder: Path, finding: Finding) -> str:
    """Return an empty text, or the problem that the service reports."""
    body = json.dumps(body_for(url, run_folder, finding)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=POST_WITHIN_S) as response:
        answer = response.read(4096)
    try:
        reply = json.loads(answer)
    except ValueError:  # Slack says "ok"
        return ""
    refused = [f"{name} {reply[name]}" for name in REFUSALS if isinstance(reply, dict) and reply.get(name)]
    return ", ".join(refused)


def write_text_page(run_folder: Path, finding: Finding, step: int) -> None:
    """Add a finding to the run's TensorBoard folder. Raises: ImportError if tensorboard is missing; OSError."""
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
