"""What a rank uses up by and by: open files, threads, and memory of the processes it started."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.diagnostics.monitor import detectors
from surefoot.diagnostics.monitor.evidence_client import EvidenceClient
from surefoot.diagnostics.monitor.processes import (
    count_open_files,
    count_threads,
    list_descendants,
    max_open_files,
    proportional_bytes,
    run_queue_wait_s,
)
from surefoot.diagnostics.monitor.rank_state import WatchedRun
from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.diagnostics.rules.limits import LimitTrend
from surefoot.diagnostics.rules.memory import find_growing_helpers
from surefoot.findings.reported import ReportedFindings
from surefoot.system import cgroup

MIB = 1 << 20


def trend(count: Callable[[int], int], steps: int = 40) -> LimitTrend:
    found = LimitTrend(1, "open files")
    for step in range(steps):
        found.add(step, count(step))
    return found


def test_open_files_that_grow_towards_the_limit_are_named_with_the_step_of_the_end() -> None:
    finding = trend(lambda step: 100 + 16 * step).finding(724, 1024, "It")
    assert finding is not None
    assert (finding.code, finding.evidence["rank"], finding.evidence["count"]) == ("SF207", 1, "116 -> 724")
    assert (finding.evidence["used"], finding.evidence["limit"]) == (724, 1024)
    assert " 16 a step" in finding.cause
    assert "724 of 1024" in finding.cause
    assert finding.cause.endswith("step 58")


@pytest.mark.parametrize(
    ("count", "used", "most"),
    [
        (lambda step: 100 + 16 * step, 724, 1 << 20),  # far from the limit
        (lambda step: 700 if step > 5 else 100, 700, 1024),  # opened once, and kept
        (lambda step: 700 + step % 7, 706, 1024),  # come and go
        (lambda step: 600 + step, 640, 1024),  # hardly grow
    ],
)
def test_other_open_files_are_none(count: Callable[[int], int], used: int, most: int) -> None:
    assert trend(count).finding(used, most, "It") is None


def test_few_looks_say_nothing() -> None:
    assert trend(lambda step: 100 + 90 * step, steps=8).finding(730, 1024, "It") is None


def test_processes_that_grow_are_named() -> None:
    points = [(step, 1000.0 * MIB + 2 * MIB * step) for step in range(20, 240)]
    finding = find_growing_helpers(0, points, ["python", "python"], 10 * 1024.0 * MIB)
    assert finding is not None
    assert (finding.code, finding.evidence["rank"]) == ("SF208", 0)
    assert finding.evidence["processes"] == "python"
    assert " 2 processes " in finding.cause
    assert " 2.00 MiB " in finding.cause
    assert finding.cause.endswith("step 5359")
    settled = [(step, 1000.0 * MIB + 2 * MIB * min(step, 60)) for step in range(20, 240)]
    assert find_growing_helpers(0, settled, ["python"]) is None


COPIES = """
import os, sys
kept = bytearray(os.urandom(64 << 20))
if not os.fork():
    print('forked', flush=True)
    sys.stdin.readline()
    for place in range(0, len(kept), 4096):
        kept[place] = 1
    print('copied', flush=True)
    sys.stdin.readline()
    os._exit(0)
os.wait()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", COPIES], stdin=pipe, stdout=pipe, text=True) as started:
        yield started
        started.kill()


def test_what_a_forked_process_copies_is_its_own(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "forked\n"
    (child,) = list_descendants(process.pid)
    before = proportional_bytes(child)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "copied\n"
    assert proportional_bytes(child) - before == pytest.approx(32 * MIB, rel=0.1)  # half of it was its share before
    process.stdin.write("\n")
    process.stdin.flush()


def test_files_and_threads_of_a_process_are_counted() -> None:
    me = os.getpid()
    files, threads = count_open_files(me), count_threads(me)
    assert files is not None
    assert threads is not None
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with open(os.devnull):
        assert (count_open_files(me), count_threads(me)) == (files + 1, threads + 1)
    done.set()
    thread.join()
    assert (max_open_files(me) or 0) > files
    assert (count_open_files(2**22 + 1), count_threads(2**22 + 1), list_descendants(2**22 + 1)) == (None, None, [])


def test_the_lowest_limit_of_threads_around_a_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    for folder, most, used in ((tmp_path / "job", "400", "390"), (inner, "max", "12")):
        (folder / "pids.max").write_text(most)
        (folder / "pids.current").write_text(used)
    groups = tmp_path / "groups"
    groups.write_text("0::/job/step\n")
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path)
    monkeypatch.setattr(cgroup, "GROUPS", groups)
    assert cgroup.tasks() == (390, 400)
    (tmp_path / "job" / "pids.max").write_text("max")
    assert cgroup.tasks() is None


GROWS = """
import subprocess, sys, time
from pathlib import Path
from surefoot.events import PhaseBegan, PhaseEnded, StepEnded
from surefoot.diagnostics.monitor.event_log import Recorder
recorder = Recorder(Path(sys.argv[1]), 0)
child = "kept = []\\nwhile input(): kept.append(bytearray(b'x' * (2 << 20)))"
worker = subprocess.Popen([sys.executable, '-c', child], stdin=subprocess.PIPE, text=True)
for step in range(1, 100_000):
    recorder.observe(PhaseBegan(0, step, 'forward'))
    worker.stdin.write('on\\n')
    worker.stdin.flush()
    time.sleep(0.02)
    recorder.observe(PhaseEnded(0, step, 'forward'))
    recorder.observe(StepEnded(step, 100_000, False, 0.0, 1.0, 1.0, 1e-4, 1, 1, 1.0, 0.02, 0))
"""


@pytest.mark.long
def test_a_process_of_a_rank_that_leaks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detectors, "DETECT_EVERY_S", 0.03)
    monkeypatch.setattr(detectors, "CHILDREN_EVERY_S", 0.03)
    supervisor = Supervisor(tmp_path, 1, time.time())
    with subprocess.Popen([sys.executable, "-c", GROWS, str(tmp_path)]) as rank:
        try:
            deadline = time.monotonic() + 60
            found = []
            while "SF208" not in found and time.monotonic() < deadline:
                found += [finding.code for finding in supervisor.poll(time.time())]
                time.sleep(0.03)
        finally:
            rank.kill()
            supervisor.end()
    assert "SF208" in found
    assert "SF202" not in found  # its own memory does not grow


@pytest.mark.long
def test_a_process_that_gets_no_core_stands_in_line() -> None:
    """Two that want one core; and one that wants none."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    programs = [spin, spin, "import time; time.sleep(60)"]
    running = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        time.sleep(1.0)
        before = [run_queue_wait_s(process.pid) for process in running]
        time.sleep(2.0)
        after = [run_queue_wait_s(process.pid) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    waited = [then - earlier for earlier, then in zip(before, after, strict=True) if earlier is not None and then]
    assert min(waited[:2]) > 0.4
    assert waited[2] < 0.1
    assert run_queue_wait_s(running[0].pid) is None


def test_ranks_that_stand_in_line_are_not_idle(tmp_path: Path) -> None:
    """Where the kernel does not tell, or nothing was counted over a time, nothing is known of them."""
    run = WatchedRun(tmp_path, 2, 0, {0: object(), 1: object()})  # type: ignore[dict-item]
    found = detectors.SlowSteps(run, EvidenceClient(tmp_path), ReportedFindings(), 0.0)
    for before, after, is_in_line in (
        ({0: 1.0, 1: 1.0}, {0: 1.5, 1: 2.0}, False),
        ({0: 1.0, 1: 1.0}, {0: 1.5, 1: 9.0}, True),
        ({0: 1.0, 1: None}, {0: 1.5, 1: None}, True),
        ({0: 1.0}, {0: 1.5, 1: 1.0}, True),
    ):
        found._core_waits.clear()
        found._core_waits.extend([(0.0, before), (20.0, after)])
        assert found._is_waiting_for_cores() == is_in_line, (before, after)
    found._core_waits.pop()
    assert found._is_waiting_for_cores()
