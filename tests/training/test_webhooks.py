"""Findings reach a webhook and TensorBoard; what does not take them ends no run."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.config import load_config
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.training.run_summary import FindingLog
from surefoot.training.webhooks import body_for

FINDING = Finding("SF301", "steps take 3 times as long", {"step": 40}, "Look at the clocks.")


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(the address of a webhook, what was posted there); posts to /broken are refused."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path.startswith("/broken") else 200)
            self.end_headers()
            if self.path.startswith("/refused"):
                self.wfile.write(b'{"errcode": 310000, "errmsg": "keywords not in content"}')

        def log_message(self, *_: Any) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}", posted
    listening.shutdown()
    listening.server_close()


def test_a_finding_is_written_down_and_posted(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, posted = server
    monkeypatch.setenv("MY_HOOK", url)
    FindingLog(tmp_path, "$MY_HOOK").note(FINDING)
    assert json.loads((tmp_path / "findings.jsonl").read_text())["code"] == "SF301"
    (said,) = posted
    assert said["finding"]["evidence"] == {"step": 40}
    assert f"SF301 {FINDING.title}" in said["text"]


def test_an_address_that_is_not_set_is_refused_before_the_run(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"webhook=\$NO_SUCH_HOOK.* NO_SUCH_HOOK.*\(argument\)"):
        load_config(None, (), {**settings, "webhook": "$NO_SUCH_HOOK"})


def test_an_address_that_is_not_set_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FindingLog(tmp_path, "$NO_SUCH_HOOK").note(FINDING)
    assert all(name in caplog.text for name in ("webhook", "$NO_SUCH_HOOK", "SF301"))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("{url}/broken/secret", "status 500"),
        ("{url}/refused/secret", "errcode 310000"),
        ("http://127.0.0.1:9/secret", "URLError"),
        ("http://127.0.0.1:port/secret", "InvalidURL"),
        ("hooks.slack.com/services/secret", "ValueError"),
        ("http://127.0.0.1/a secret", "InvalidURL"),
    ],
)
def test_a_webhook_that_fails_is_named_without_its_secret(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str,
    said: str,
) -> None:  # fmt: skip
    url, _ = server
    monkeypatch.setenv("MY_HOOK", address.format(url=url))
    FindingLog(tmp_path, "$MY_HOOK").note(FINDING)
    assert (tmp_path / "findings.jsonl").is_file()
    assert re.search(f"webhook .*SF301.*: {said}", caplog.text)
    assert "secret" not in caplog.text


def test_a_service_that_is_no_web_server_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("MY_HOOK", f"http://127.0.0.1:{listening.getsockname()[1]}/")

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        FindingLog(tmp_path, "$MY_HOOK").note(FINDING)
        thread.join(10)
    assert re.search("webhook .*SF301", caplog.text)


def test_the_address_stands_in_no_file_of_a_run(
    settings: dict[str, Any], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = server
    monkeypatch.setenv("MY_HOOK", f"{url}/my-secret")
    run = surefoot.train(settings, screen=False, max_steps=1, webhook="$MY_HOOK").run_folder
    assert not [path for path in run.rglob("*") if path.is_file() and b"my-secret" in path.read_bytes()]


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FindingLog(tmp_path / "gone").note(FINDING)
    assert re.search("SF301 .*No such file", caplog.text)


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
    assert FINDING.cause.encode() in page.tensor_proto.string_val[0]


@pytest.mark.parametrize("address", ["https://host/secret", "$", "MY_HOOK", "$1"])
def test_what_is_no_address_is_refused(settings: dict[str, Any], address: str) -> None:
    with pytest.raises(ConfigError, match="webhook"):
        load_config(None, (), {**settings, "webhook": address})
