"""Findings on their way to where people look: a webhook, and TensorBoard's text page. Imports no torch."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from surefoot.findings import Finding

POST_WITHIN_S = 4.0


def body_for(url: str, run_folder: Path, finding: Finding) -> dict[str, Any]:
    """What is posted: as Feishu/Lark, DingTalk and WeCom take it, elsewhere `text` (Slack, Mattermost) and all else."""
    text = f"surefoot {run_folder}: {finding.as_text()}"
    host = urlsplit(url).hostname or ""
    if host.endswith(("feishu.cn", "larksuite.com")):
        return {"msg_type": "text", "content": {"text": text}}
    if host.endswith(("dingtalk.com", "weixin.qq.com")):
        return {"msgtype": "text", "text": {"content": text}}
    return {"text": text, "run_folder": str(run_folder), "finding": finding.as_dict()}


def post(url: str, run_folder: Path, finding: Finding) -> str | None:
    """Send a finding to a webhook; returns what went wrong, if anything. Waits a few seconds at most."""
    body = json.dumps(body_for(url, run_folder, finding)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=POST_WITHIN_S) as answer:
            answer.read(1)
    except (OSError, ValueError) as error:  # HTTP errors are OSErrors
        # The address is a secret: whoever has it can write there.
        return f"the webhook at {urlsplit(url).hostname} did not take finding {finding.code}: {error}"
    return None


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
