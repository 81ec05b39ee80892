"""Findings reach a webhook and TensorBoard; what does not take them ends no run."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from surefoot.alerts import body_for
from surefoot.config import load_config
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.training.record import FindingLog

FINDING = Finding("SF301", "steps take 3 times as long", {"step": 40}, "Look at the clocks.")


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(the address of a webhook, what was posted there); posts to /broken are refused."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path == "/broken" else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}", posted
    listening.shutdown()
    listening.server_close()


def test_a_finding_is_written_down_and_posted(tmp_path: Path, server: Any) -> None:
    url, posted = server
    FindingLog(tmp_path, url).note(FINDING)
    assert json.loads((tmp_path / "findings.jsonl").read_text())["code"] == "SF301"
    (said,) = posted
    assert said["finding"]["evidence"] == {"step": 40}
    assert "SF301 steps have become slower" in said["text"]


def test_the_address_can_come_from_the_environment(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, posted = server
    monkeypatch.setenv("MY_HOOK", url)
    FindingLog(tmp_path, "$MY_HOOK").note(FINDING)
    assert len(posted) == 1
    monkeypatch.delenv("MY_HOOK")
    FindingLog(tmp_path, "$MY_HOOK").note(FINDING)
    assert len(posted) == 1
    assert "the environment has no MY_HOOK; finding SF301 is not sent" in caplog.text


def test_a_webhook_that_fails_is_named_without_its_secret(
    tmp_path: Path, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = server
    FindingLog(tmp_path, f"{url}/broken").note(FINDING)
    FindingLog(tmp_path, "http://127.0.0.1:9/secret").note(FINDING)
    assert len((tmp_path / "findings.jsonl").read_text().splitlines()) == 2
    assert caplog.text.count("the webhook at 127.0.0.1 did not take finding SF301") == 2
    assert "secret" not in caplog.text


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FindingLog(tmp_path / "gone").note(FINDING)
    assert "finding SF301 could not be written down" in caplog.text


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("https://open.feishu.cn/open-apis/bot/v2/hook/x", {"msg_type", "content"}),
        ("https://oapi.dingtalk.com/robot/send?access_token=x", {"msgtype", "text"}),
        ("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=x", {"msgtype", "text"}),
        ("https://hooks.slack.com/services/x", {"text", "run_folder", "finding"}),
    ],
)
def test_each_service_gets_its_form(url: str, keys: set[str]) -> None:
    assert body_for(url, Path("run"), FINDING).keys() == keys


def test_tensorboard_shows_findings_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    FindingLog(tmp_path, tensorboard=True).note(FINDING)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (page,) = events.Tensors("findings/SF301")
    assert page.step == 40
    assert b"steps take 3 times as long" in page.tensor_proto.string_val[0]


@pytest.mark.parametrize("address", ["ftp://host", "$", "example.com", "https://a b"])
def test_what_is_no_address_is_refused(settings: dict[str, Any], address: str) -> None:
    with pytest.raises(ConfigError, match="webhook"):
        load_config(None, (), {**settings, "webhook": address})
