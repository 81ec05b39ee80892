"""Runs that no `surefoot train` started are watched too: from Python, under torchrun, in TRL."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.diagnostics.drill import settings_of
from surefoot.diagnostics.monitor.explain import explain
from surefoot.diagnostics.monitor.observers import FAULT_VARIABLE
from surefoot.diagnostics.monitor.ring_buffer import CAPACITY, HEADER, MAGIC, VERSION, RingWriter, this_machine
from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.diagnostics.report.run_history import read_run_history
from surefoot.launch import sidecar
from surefoot.launch.sidecar import SUPERVISED
from surefoot.launch.watcher import WatchSpec
from surefoot.training.run_summary import FindingLog
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import command_lines, kill_tree

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_watched.py"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command with a fault; whatever of it is left at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, fault: str = "") -> "subprocess.Popen[str]":
        env = {name: value for name, value in os.environ.items() if name != SUPERVISED}
        told = {FAULT_VARIABLE: f"{fault}:{tmp_path / 'struck'}"} if fault else {}
        process = subprocess.Popen(
            command, env={**env, **told, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        kill_tree(process)


@pytest.fixture
def settings(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    data = write_jsonl(tmp_path / "rows.jsonl", counting_rows(200))
    settings = {**settings_of(model_folder("mixtral"), data), "output_dir": str(tmp_path / "run"), "max_steps": 100_000}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    return settings


def first_finding(folder: Path) -> dict[str, Any]:
    """Waits for it."""
    deadline = time.monotonic() + 180
    while not (folder / "findings.jsonl").is_file() or not (folder / "findings.jsonl").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found: dict[str, Any] = json.loads((folder / "findings.jsonl").read_text().splitlines()[0])
    return found


@pytest.mark.long
def test_a_run_from_python_that_is_killed_is_named(settings: dict[str, Any], tmp_path: Path, start: Start) -> None:
    code = f"import surefoot; surefoot.train({str(tmp_path / 'run.json')!r})"
    process = start(sys.executable, "-c", code, fault="killed:0:7")
    process.wait(timeout=60)
    found = first_finding(Path(settings["output_dir"]))
    assert (found["code"], found["evidence"]["rank"], found["evidence"]["last_step"]) == ("SF101", 0, 7)


@pytest.mark.matrix
def test_a_run_under_torchrun_that_stands_still_is_named(
    settings: dict[str, Any], tmp_path: Path, start: Start
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start(sys.executable, *launcher, "-m", "surefoot", "train", str(tmp_path / "run.json"), fault="sleeping:1:9")
    found = first_finding(Path(settings["output_dir"]))
    assert (found["code"], found["evidence"]["rank"]) == ("SF106", 1)
    assert "fault_injection.py:" in found["cause"]


@pytest.mark.long
def test_a_rank_that_dies_under_torchrun_is_named(settings: dict[str, Any], tmp_path: Path, start: Start) -> None:
    """Not the one that only lost it, in whose process the run ends with an error."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = start(
        sys.executable, *launcher, "-m", "surefoot", "train", str(tmp_path / "run.json"), fault="killed:1:9"
    )
    process.wait(timeout=60)
    found = first_finding(Path(settings["output_dir"]))
    assert (found["code"], found["evidence"]["rank"], found["evidence"]["last_step"]) == ("SF101", 1, 9)
    assert "forward" in found["cause"]


def test_ranks_that_began_before_the_supervisor_are_seen(tmp_path: Path) -> None:
    """Those of this run, not those of one that is over."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as over:
        over.wait()
    before_s = time.time() - 5.0
    for rank, process in enumerate((os.getpid(), over.pid)):
        ring = RingWriter(tmp_path / "events" / f"rank-{rank:05d}-{round(before_s * 1e9)}.ring", rank)
        HEADER.pack_into(ring._map, 0, MAGIC, VERSION, rank, process, CAPACITY, 0, this_machine(), 0)
        ring.close()
    began_s = time.time()
    assert Supervisor(tmp_path, 2, began_s).gone() == []
    late = Supervisor(tmp_path, 2, began_s, early_s=60.0)
    late.poll(time.time())
    assert late.gone() == []
    assert list(late._ranks) == [0]


@pytest.mark.matrix
def test_a_run_of_trl_that_stands_still_is_named(settings: dict[str, Any], tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "trl"
    arguments = [settings["model"], settings["dataset"], str(folder), "--steps", "10000"]
    process = start(sys.executable, str(EXAMPLE), *arguments, fault="sleeping-optimizer:0:12")
    found = first_finding(folder)
    assert found["code"] == "SF106"
    assert "optimizer of step 12" in found["cause"]
    process.kill()


@pytest.mark.matrix
def test_a_run_of_trl_without_a_fault_has_no_finding(settings: dict[str, Any], tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "trl"
    process = start(sys.executable, str(EXAMPLE), settings["model"], settings["dataset"], str(folder))
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    told = explain(folder)
    assert told.findings == []
    assert [row["step"] for row in read_run_history(folder).steps] == list(range(1, 21))
    assert [(rank.step, rank.doing) for rank in told.ranks] == [(20, "has ended")]
    assert not any("surefoot.launch.sidecar" in line for line in command_lines(os.getpid()).values())


def test_a_terminal_that_closes_ends_no_supervisor(tmp_path: Path) -> None:
    """It goes on looking while the run saves, and ends when that is over."""
    (tmp_path / "events").mkdir()
    watcher = sidecar.start(WatchSpec(FindingLog(tmp_path, None), 1, 0))
    try:
        deadline = time.monotonic() + 60
        ignored = 0
        while not ignored & 1 and time.monotonic() < deadline:
            (line,) = [one for one in Path(f"/proc/{watcher.pid}/status").read_text().splitlines() if "SigIgn" in one]
            ignored = int(line.split()[1], 16)  # bit 0 is SIGHUP
            time.sleep(0.05)
        watcher.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert watcher.poll() is None
    finally:
        sidecar.end(watcher)
    assert watcher.poll() is not None
