"""What the supervisor does with a stall, in real runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from surefoot.config import load_config
from surefoot.diagnostics.drill import settings_of
from surefoot.diagnostics.monitor import explain as explaining
from surefoot.diagnostics.monitor.event_log import KINDS, PHASES
from surefoot.diagnostics.monitor.explain import explain
from surefoot.diagnostics.monitor.observers import FAULT_VARIABLE
from surefoot.diagnostics.monitor.ring_buffer import RingWriter
from surefoot.diagnostics.monitor.watch import watch
from surefoot.launch import run_supervisor, run_verb
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import FAULTS, kill_tree

pytestmark = pytest.mark.slow

RESTARTS = [
    (-signal.SIGKILL, False, 2),
    (-signal.SIGKILL, True, 2),
    (run_verb.CRASHED, False, 2),
    (7, False, 2),
    (-signal.SIGTERM, False, 0),
    (run_verb.DONE, False, 0),
    (run_verb.FAILED, False, 0),
    (2, False, 0),
    (3, False, 0),
]
"""(exit status, whether it stalled, restarts that max_restarts: 2 allows)."""


@pytest.fixture
def settings(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    data = write_jsonl(tmp_path / "rows.jsonl", counting_rows(200))
    return {**settings_of(model_folder("mixtral"), data), "output_dir": str(tmp_path / "run"), "save_steps": 5}


def start(settings: dict[str, Any], fault: str = "") -> "subprocess.Popen[str]":
    config = Path(settings["output_dir"]).parent / "run.json"
    config.write_text(json.dumps(settings))
    told = {FAULT_VARIABLE: f"{fault}:{config.parent / 'struck'}"} if fault else {}
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", str(config)],
        env={**os.environ, **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
def test_a_deadline_of_a_phase_holds_where_a_rank_works(settings: dict[str, Any]) -> None:
    """Without it nothing is late before ten seconds."""
    settings = {**settings, "on_stall": "stop", "stall_timeout_s": 1, "phase_timeout_s": {"forward": 3.0}}
    process = start(settings, "spinning:0:12")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    (finding,) = summary_of(settings)["findings"]
    assert finding["code"] == "SF106"
    assert finding["evidence"]["limit_s"] == 3.0
    assert 3.0 <= finding["evidence"]["silent_for_s"] < 9.5


@pytest.mark.matrix
def test_native_stacks_show_the_call_below_python(settings: dict[str, Any]) -> None:
    process = start({**settings, "on_stall": "report"}, "gil-held:0:12")
    evidence = Path(settings["output_dir"]) / "evidence"

    def written() -> str:
        return "".join(path.read_text() for path in evidence.glob("native-*.txt"))

    try:
        wait_for(lambda: written().count("\n") > 1)
        assert written().startswith("rank 0, process ")
        # Where no process may be looked into, that is what must be said.
        assert "pthread_mutex_lock" in written() or "Permission denied" in written()
    finally:
        kill_tree(process)


def summary_of(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(settings["output_dir"]) / "summary.json").read_text())
    return found


@pytest.mark.campaign
def test_a_run_that_goes_on_again_keeps_its_finding(settings: dict[str, Any]) -> None:
    settings = {**settings, "max_steps": 100_000, "on_stall": "report", "stall_timeout_s": 1}
    process = start(settings)
    wait_for(lambda: (Path(settings["output_dir"]) / "checkpoints" / "step-00000010").is_dir())
    (job,) = psutil.Process(process.pid).children()
    job.send_signal(signal.SIGSTOP)
    findings = Path(settings["output_dir"]) / "findings.jsonl"
    wait_for(lambda: findings.is_file() and findings.stat().st_size > 0)
    time.sleep(3)
    assert process.poll() is None, "it only reports"
    job.send_signal(signal.SIGCONT)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted" in stdout
    assert "recovered after a" in stderr
    assert [finding["code"] for finding in summary_of(settings)["findings"]] == ["SF102"]


@pytest.mark.campaign
def test_a_rank_that_stands_in_its_experts_is_named_with_the_layer(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAULTS), prepend=os.pathsep)
    monkeypatch.setenv("FAULT", f"1:sleep:40@experts:{tmp_path / 'struck'}")
    settings = {**settings, "nproc_per_node": 2, "expert_parallel_size": 2, "on_stall": "stop", "stall_timeout_s": 1}
    _, stderr = start(settings).communicate(timeout=120)
    (finding,) = summary_of(settings)["findings"]
    assert (finding["code"], finding["evidence"]["rank"]) == ("SF106", 1), stderr
    assert "layer 1, at " in finding["cause"]
    assert re.search(r" all_to_all.*, layer 1\)", finding["cause"]), finding["cause"]


@pytest.mark.campaign
def test_a_stalled_run_is_started_again_from_its_checkpoint(settings: dict[str, Any]) -> None:
    settings = {**settings, "max_steps": 30, "on_stall": "restart", "stall_timeout_s": 1}
    process = start(settings, "sleeping:0:12")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert re.search(r"resum.* step 10\b", stderr)
    summary = summary_of(settings)
    assert (summary["status"], summary["steps"]) == ("completed", 30)
    assert [finding["code"] for finding in summary["findings"]] == ["SF106"]


def test_a_run_that_is_killed_is_named_by_its_supervisor(settings: dict[str, Any]) -> None:
    process = start({**settings, "max_steps": 100_000}, "killed:0:7")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "SF101 " in stderr
    assert re.search(r"rank 0 .*\(SIGKILL\).* forward of step 7", stderr)
    summary = summary_of(settings)
    assert (summary["status"], summary["steps"]) == ("failed", 6)
    assert [finding["code"] for finding in summary["findings"]] == ["SF101"]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["SIGKILL", pytest.param("raise", marks=pytest.mark.matrix)])
def test_a_run_of_one_rank_that_died_restarts_from_its_checkpoint(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAULTS), prepend=os.pathsep)
    monkeypatch.setenv("FAULT", f"alone:{fault}:7@step:{tmp_path / 'struck'}")
    process = start({**settings, "max_steps": 20, "max_restarts": 1})
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert re.search(r"resuming .*step 5\b", stderr)
    summary = summary_of(settings)
    assert (summary["status"], summary["steps"]) == ("completed", 20)
    (finding,) = summary["findings"]
    assert finding["code"] == "SF101"
    assert re.search(r"rank 0.*(broken on purpose|SIGKILL).*\b1 of 1\b", finding["cause"])
    written = (Path(settings["output_dir"]) / "findings.jsonl").read_text().splitlines()
    assert [json.loads(line)["cause"] for line in written] == [finding["cause"]]
    lines = (Path(settings["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 21))


@pytest.mark.parametrize(("status", "was_stopped", "restarts"), RESTARTS)
def test_how_often_a_run_restarts_after_an_end(
    settings: dict[str, Any], status: int, was_stopped: bool, restarts: int
) -> None:
    settings = {**settings, "max_restarts": 2, "on_stall": "restart"}
    loaded = load_config(None, [], settings)
    attempt = run_supervisor._Attempt(loaded, run_supervisor._SignalForwarding(), as_json=False)
    attempt.was_stopped = was_stopped
    assert attempt.max_restarts(status) == restarts


@pytest.mark.matrix
def test_each_death_of_a_run_of_one_rank_counts(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault strikes in each start, before the first checkpoint."""
    monkeypatch.setenv("PYTHONPATH", str(FAULTS), prepend=os.pathsep)
    monkeypatch.setenv("FAULT", "alone:SIGKILL:3@step")
    process = start({**settings, "max_steps": 20, "max_restarts": 1})
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3
    assert f"no checkpoint yet in {settings['output_dir']}: starting again at step 1" in stderr
    summary = summary_of(settings)
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert [("1 of 1" in finding["cause"]) for finding in summary["findings"]] == [True, False]


@pytest.mark.long
def test_a_supervisor_that_is_killed_takes_the_run_along(settings: dict[str, Any]) -> None:
    settings = {**settings, "max_steps": 100_000}
    process = start(settings)
    wait_for(lambda: (Path(settings["output_dir"]) / "checkpoints" / "step-00000005").is_dir())
    (job,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not is_there(job))
    assert summary_of(settings)["status"] == "interrupted"


@pytest.mark.long
def test_a_run_that_is_killed_with_all_who_watch_it_is_explained_from_its_folder(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a machine loses power: nothing is left that could write down how it ended."""
    folder = Path(settings["output_dir"])
    process = start({**settings, "max_steps": 100_000, "nproc_per_node": 2})
    wait_for(lambda: (folder / "checkpoints" / "step-00000005").is_dir())
    assert explain(folder).status == "running"
    live = subprocess.Popen([sys.executable, "-m", "surefoot", "watch", str(folder)], stdout=subprocess.DEVNULL)
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    with pytest.raises(subprocess.TimeoutExpired):
        live.wait(3)  # it shows the run for as long as that goes on
    live.kill()
    live.wait()
    for one in everyone:
        one.suspend()  # or one of them would tell of another's end
    for one in everyone:
        one.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not any(map(is_there, everyone)))
    assert explain(folder).status == "unknown", "it may be started again"
    monkeypatch.setattr(explaining, "GONE_AFTER_S", 0.0)
    told = explain(folder)
    (finding,) = told.findings
    assert (told.status, finding.code, finding.evidence["ranks_gone"]) == ("killed", "SF101", "0, 1")
    assert "whoever watched" in finding.cause
    watch(folder)  # ends by itself
    assert "killed" in capsys.readouterr().out
    monkeypatch.setattr("surefoot.diagnostics.monitor.ring_buffer.this_machine", lambda: b"x" * 16)
    elsewhere = explain(folder)
    assert (elsewhere.status, elsewhere.findings) == ("unknown", [])
    (missing,) = elsewhere.missing
    assert re.search("ranks 0, 1 .*another machine", missing)


def test_a_younger_process_of_the_same_number_is_no_rank(tmp_path: Path) -> None:
    for began_s, status in ((1000.0, "killed"), (time.time(), "running")):
        folder = tmp_path / status
        ring = RingWriter(folder / "events" / "rank-00000-1.ring", 0)
        ring.write(began_s, KINDS.index("phase began"), PHASES.index("forward"), 7, (0.0,) * 5)
        ring.close()
        assert explain(folder).status == status


def test_a_signal_that_finds_the_run_ended_ends_its_next_start(settings: dict[str, Any]) -> None:
    """Between a stall and the restart there is no process that could hear it; a signal is heard once."""
    loaded = load_config(None, [], settings)
    signals = run_supervisor._SignalForwarding()
    signals.process = subprocess.Popen([sys.executable, "-c", ""])
    signals.process.wait(20)
    signals._forward(signal.SIGTERM, None)
    assert signals.undelivered == signal.SIGTERM
    assert run_supervisor._Attempt(loaded, signals, as_json=False).run_to_end() != 0
    assert not Path(settings["output_dir"], "metrics.jsonl").exists()
