"""The live page of `surefoot watch --web`."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.diagnostics.report import live
from tests.support.processes import kill_tree, surefoot

TIMEOUT_S = 60


def listen_to_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run folder in which no step was taken yet."""
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    (run / "run.yaml").write_text("model: m\ndataset: d\noutput_dir: o\n")
    return run


@pytest.fixture
def port(running: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(live, "EVERY_S", 0.05)
    server = live.make_server(running, 0, "// charts")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join(TIMEOUT_S)
    server.server_close()


def get(port: int, path: str, host: str | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}", "Connection": "close"})
    return connection.getresponse()


def next_page(events: http.client.HTTPResponse) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while not (line := events.readline()).startswith(b"data: "):
        assert line, "the server closed the connection"
        assert time.monotonic() < deadline
    return dict(json.loads(line.removeprefix(b"data: ")))


def test_the_page_is_sent_again_when_the_run_goes_on(port: int, running: Path) -> None:
    with get(port, "/") as page:
        assert b"took no step" in page.read()
    with get(port, "/events") as events:
        assert next_page(events)["charts"] == {}
        lines = [{"step": step, "loss": 3.0 / step, "learning_rate": 1e-3} for step in (1, 2)]
        (running / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        shown = next_page(events)
        assert [row["loss"] for row in shown["charts"]["loss"]["layer"][0]["data"]["values"]] == [3.0, 1.5]
        assert 'id="loss"' in shown["grid"]


@pytest.mark.parametrize(("path", "host", "status"), [("/run.yaml", None, 404), ("/", "example.com:80", 403)])
def test_nothing_else_is_served_and_no_other_host(port: int, path: str, host: str | None, status: int) -> None:
    with get(port, path, host) as response:
        assert response.status == status


@pytest.mark.long
def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = surefoot("watch", "--web", "--port", "0", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "none" in done.stderr


@pytest.mark.long
def test_the_verb_says_where_the_page_is_and_ends_with_ctrl_c(running: Path) -> None:
    command = [sys.executable, "-m", "surefoot", "watch", "--web", "--port", "0", str(running)]
    # A shell that runs the suite in the background makes its programs ignore Ctrl-C.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_interrupts)
    try:
        assert process.stderr is not None
        (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/", process.stderr.readline())
        with get(int(port), "/") as page:
            assert page.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        kill_tree(process)
