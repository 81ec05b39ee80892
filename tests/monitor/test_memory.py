"""Leaks are told from memory that grows once, settles, or belongs to files."""

import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from surefoot.diagnostics.monitor import process_stats
from surefoot.diagnostics.monitor.process_stats import OwnMemory, RunQueueWait
from surefoot.diagnostics.monitor.rank_trends import find_in_history
from surefoot.diagnostics.rules.memory import MemoryTrend, find_replicated_load
from tests.support.histories import MIB, history


@pytest.mark.parametrize("owner", ["forward", "optimizer"])
def test_a_mebibyte_a_step_is_found_with_its_phase(owner: str) -> None:
    swing = {"forward": 300.0, "backward": -300.0, "optimizer": 0.0}  # activations come and go
    (finding,) = find_in_history(list(history(lambda _, phase: swing[phase] + (1.0 if phase == owner else 0.0))))
    assert finding.code == "SF202"
    assert " 1.00 MiB " in finding.cause


def test_the_owner_is_the_phase_in_which_it_grows() -> None:
    (finding,) = find_in_history(list(history(lambda _, phase: 2.0 * (phase == "backward"))))
    assert finding.evidence["phase"] == "backward"
    assert " 100% " in finding.cause


@pytest.mark.parametrize(
    "grown_by",
    [
        lambda step, phase: 4000.0 * (step == 60 and phase == "forward"),  # a buffer that doubled once
        lambda step, phase: 4000.0 * (step == 300 and phase == "forward"),  # the same, not long ago
        lambda step, phase: 5.0 * (step < 90 and phase == "forward"),  # it settles
        lambda step, phase: (300.0 if step % 2 else -300.0) * (phase == "forward"),  # it comes and goes
        lambda _, phase: 0.1 * (phase == "forward"),
    ],
)
def test_other_growth_is_no_leak(grown_by: Callable[[int, str], float]) -> None:
    assert find_in_history(list(history(grown_by, steps=400))) == []


def test_a_leak_of_an_earlier_start_is_over() -> None:
    leaked = [replace(entry, start=1) for entry in history(lambda *_: 2.0)]
    assert len(find_in_history(leaked)) == 1
    assert find_in_history([*history(lambda *_: 0.0), *leaked]) == []


def test_few_steps_say_nothing() -> None:
    assert find_in_history(list(history(lambda *_: 5.0, steps=100))) == []
    assert MemoryTrend(0).finding() is None


def test_own_memory_counts_what_is_allocated_and_no_files() -> None:
    memory = OwnMemory()
    before = memory.anonymous_bytes()
    kept = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not what others have given back
    for page in range(0, len(kept), mmap.PAGESIZE):
        kept[page] = 1
    assert memory.anonymous_bytes() - before == pytest.approx(len(kept), rel=0.1)


def test_ranks_that_each_held_the_whole_model_are_named() -> None:
    gib = float(1 << 30)
    whole = {"whole": 14 * gib, "kept": 0.0, "peak": 15 * gib}
    finding = find_replicated_load({0: whole, 1: whole}, 40 * gib)
    assert finding is not None
    assert (finding.code, finding.evidence["ranks"], finding.evidence["model_gib"]) == ("SF206", "0, 1", 14.0)
    assert " 14.0 GiB " in finding.cause
    assert " 30.0 GiB " in finding.cause
    part = {**whole, "peak": 4 * gib}
    for loads in (
        {0: whole},
        {0: whole, 1: part},  # one reads and sends
        {0: part, 1: part},
        {0: {**whole, "kept": 14 * gib}, 1: {**whole, "kept": 14 * gib}},  # training on the CPU, each with its copy
        {0: {**whole, "whole": gib}, 1: {**whole, "whole": gib}},  # a small one
    ):
        assert find_replicated_load(loads, 40 * gib) is None, loads
    assert find_replicated_load({0: whole, 1: whole}, 500 * gib) is None, "there is memory enough"


def test_the_peak_of_a_load_is_seen_after_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stats, "PEAK_EVERY_S", 0.02)
    before = OwnMemory().anonymous_bytes()
    watching = process_stats.LoadPeak()
    held = bytearray(os.urandom(64 << 20))
    time.sleep(0.3)
    del held
    peak = watching.end()
    assert peak is not None
    assert peak - before > 60 << 20
    assert watching.end() is None, "it is told once"


def test_time_in_line_is_what_others_had_the_core_for() -> None:
    told: list[float] = []

    def work(core: int) -> None:
        os.sched_setaffinity(threading.get_native_id(), {core})
        waits = RunQueueWait()
        for _ in range(2):
            until = time.thread_time() + 0.2
            while time.thread_time() < until:
                pass
            told.append(waits.since_last_s())
        time.sleep(0.3)
        told.append(waits.since_last_s())

    core = max(os.sched_getaffinity(0))
    crowd = [subprocess.Popen(["taskset", "-c", str(core), "sh", "-c", "while :; do :; done"]) for _ in range(2)]
    try:
        thread = threading.Thread(target=work, args=(core,))
        thread.start()
        thread.join(60)
    finally:
        for one in crowd:
            one.kill()
            one.wait()
    first, second, asleep = told
    assert min(first, second) > 0.1, "two others had it for twice as long"
    assert asleep < 0.1, "who sleeps waits for no core"
