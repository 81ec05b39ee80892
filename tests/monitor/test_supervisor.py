"""Runs that never begin and runs that never end, with real processes; only their ten minutes of patience are cut."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.diagnostics.monitor import supervisor as supervising
from surefoot.diagnostics.monitor.event_log import Recorder
from surefoot.diagnostics.monitor.processes import ProcessSample
from surefoot.diagnostics.monitor.rank_state import RankState
from surefoot.diagnostics.monitor.ring_buffer import RingReader
from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.events import PhaseBegan
from surefoot.findings import Finding

STAYS = """
import sys, time
from pathlib import Path
from surefoot.events import PhaseBegan, PhaseEnded, RunEnded
from surefoot.diagnostics.monitor.event_log import Recorder
recorder = Recorder(Path(sys.argv[1]), 0)
for event in (PhaseBegan(0, 1, 'forward'), PhaseEnded(0, 1, 'forward'), RunEnded({'status': 'completed'})):
    recorder.observe(event)
print('ended', flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "LONGEST_S", 3.0)
    monkeypatch.setattr(supervising, "COLLECTIVE_S", 3.0)


def watch(supervisor: Supervisor) -> list[Finding]:
    """Look until something is found."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = supervisor.poll(time.time())
        if found:
            return found
        time.sleep(0.2)
    return []


@pytest.mark.long
def test_a_run_in_which_no_rank_begins_is_named(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 2, time.time())
    (finding,) = watch(supervisor)
    supervisor.end()
    assert finding.code == "SF111"
    assert "no rank" in finding.cause


@pytest.mark.long
def test_a_run_that_has_ended_and_does_not_leave_is_named(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 1, time.time())
    with subprocess.Popen([sys.executable, "-c", STAYS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ended\n"
            (finding,) = watch(supervisor)
        finally:
            process.kill()
            supervisor.end()
    assert finding.code == "SF111"
    assert finding.evidence["evidence"].startswith("evidence/stall-")


OF_ANOTHER_TRAINER = """
import sys, time
from pathlib import Path
from surefoot.events import PhaseBegan, PhaseEnded, StepEnded
from surefoot.diagnostics.monitor.event_log import Recorder
recorder = Recorder(Path(sys.argv[1]), 0)
for step in range(1, 6):
    recorder.observe(PhaseBegan(0, step, 'forward_backward'))
    recorder.observe(PhaseEnded(0, step, 'forward_backward'))
    took_s = 2.0 if step == 1 else 0.01
    recorder.observe(StepEnded(step, 9, False, 0.0, 1.0, 1.0, 1e-4, 1, 1, 1.0, took_s, 0))
recorder.observe(PhaseBegan(0, 6, 'forward_backward'))
print('quiet', flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_a_step_of_another_trainer_may_take_what_its_first_one_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "LEAST_S", 0.5)
    monkeypatch.setattr(supervising, "BUSY_S", 0.0)
    supervisor = Supervisor(tmp_path, 1, time.time())
    command = [sys.executable, "-c", OF_ANOTHER_TRAINER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "quiet\n"
            began = time.monotonic()
            (finding,) = watch(supervisor)
        finally:
            process.kill()
            supervisor.end()
    assert time.monotonic() - began > 2 * 2.0 - 0.5
    assert finding.code == "SF106"


COMPUTES = """
import sys, time
from pathlib import Path
from surefoot.events import PhaseBegan, PhaseEnded, StepEnded
from surefoot.diagnostics.monitor.event_log import Recorder
recorder = Recorder(Path(sys.argv[1]), 0)
for step in range(1, 6):
    recorder.observe(PhaseBegan(0, step, 'forward'))
    recorder.observe(PhaseEnded(0, step, 'forward'))
    recorder.observe(StepEnded(step, 9, False, 0.0, 1.0, 1.0, 1e-4, 1, 1, 1.0, 0.01, 0))
    recorder.observe(PhaseBegan(0, step, sys.argv[2]))
    recorder.observe(PhaseEnded(0, step, sys.argv[2]))
recorder.observe(PhaseBegan(0, 6, sys.argv[2]))
print('quiet', flush=True)
while True:
    pass
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "ranks", "after_s"), [pytest.param("evaluate", 2, 8.0, marks=pytest.mark.matrix), ("evaluate", 1, 10.0)]
)
def test_a_long_phase_that_computes_for_ever_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, ranks: int, after_s: float
) -> None:
    monkeypatch.setattr(supervising, "COLLECTIVE_S", 8.0)
    monkeypatch.setattr(supervising, "LONGEST_BUSY_S", 10.0)
    supervisor = Supervisor(tmp_path, ranks, time.time())
    command = [sys.executable, "-c", COMPUTES, str(tmp_path), phase]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "quiet\n"
            (finding,) = watch(supervisor)
        finally:
            process.kill()
            supervisor.end()
    assert (finding.code, finding.evidence["rank"]) == ("SF106", 0)
    assert f" in {phase} of step 6" in finding.cause
    assert finding.evidence["silent_for_s"] >= after_s
    assert finding.evidence["limit_s"] == after_s


def test_what_took_long_to_tell_is_no_gap_and_a_clock_may_be_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(tmp_path, 1, 1000.0)
    (finding,) = supervisor.poll(1003.5)
    assert finding.code == "SF111"
    monkeypatch.setattr(supervising.time, "time", lambda: 1018.0)
    supervisor.mark_reported()  # a webhook that answers slowly
    assert supervisor.poll(1019.0) == []
    assert supervisor.stalled_since_s == 1003.5
    assert supervisor.poll(500.0) == []
    supervisor.end()
    supervisor = Supervisor(tmp_path, 1, 1000.0)
    monkeypatch.setattr(supervising.time, "time", lambda: 1000.0)
    assert supervisor.poll(1001.0) == []
    assert supervisor.poll(100.0) == []
    assert supervisor.poll(102.0) == []
    assert [finding.code for finding in supervisor.poll(104.5)] == ["SF111"]
    supervisor.end()


@pytest.mark.parametrize(("state", "is_idle"), [("sleeping", True), ("running", False)])
def test_a_process_that_gets_no_core_is_not_idle(state: str, is_idle: bool, tmp_path: Path) -> None:
    """On a busy machine a rank may be ready for long and compute hardly anything: it is not stalled."""
    Recorder(tmp_path, 0).observe(PhaseBegan(0, 2, "backward"))
    (path,) = (tmp_path / "events").glob("*.ring")
    rank = RankState(RingReader(path), 1)
    for second in range(10):
        rank.add_sample(float(second), ProcessSample(state, {rank.process: 0.02 * second}), is_silent=True)
    assert rank.is_idle is is_idle
