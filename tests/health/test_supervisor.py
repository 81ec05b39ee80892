"""Runs that never begin and runs that never end, with real processes; only their ten minutes of patience are cut."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.findings import Finding
from surefoot.health import supervisor as supervising
from surefoot.health.supervisor import Supervisor

STAYS = """
import sys, time
from pathlib import Path
from surefoot.events import PhaseBegan, PhaseEnded, RunEnded
from surefoot.health.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), 0)
for event in (PhaseBegan(0, 1, 'forward'), PhaseEnded(0, 1, 'forward'), RunEnded({'status': 'completed'})):
    recorder.observe(event)
print('ended', flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "LONGEST_S", 3.0)


def watch(supervisor: Supervisor) -> list[Finding]:
    """Look until something is found."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = supervisor.look(time.time())
        if found:
            return found
        time.sleep(0.2)
    return []


def test_a_run_in_which_no_rank_begins_is_named(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 2, time.time())
    (finding,) = watch(supervisor)
    supervisor.end()
    assert finding.code == "SF111"
    assert "no rank" in finding.cause


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
