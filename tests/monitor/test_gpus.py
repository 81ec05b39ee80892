"""What is read of GPUs and what is made of it. No card is here: the samples of the rules are written by hand, after
published figures, and the sampler talks through NVIDIA's own bindings to a library that a test compiles.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.diagnostics.monitor import rank_state
from surefoot.diagnostics.monitor.event_log import KINDS, PHASES
from surefoot.diagnostics.monitor.gpus import GpuSample, GpuSampler, GpuSnapshot, read_snapshots
from surefoot.diagnostics.monitor.rank_state import RankState
from surefoot.diagnostics.monitor.ring_buffer import RingWriter
from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.diagnostics.report.html import write_report
from surefoot.diagnostics.rules.accelerators import find_in_gpus, find_launch_bound, find_worse_gpus, in_words
from surefoot.system.kernel_log import KernelLog

SPINNING = GpuSample(0, 1.0, 71.0, 700.0, 1980, 3 << 30, 41)
WORKING = GpuSample(0, 0.99, 610.0, 700.0, 1755, 60 << 30, 64)
IDLE = GpuSample(0, 0.0, 71.0, 700.0, 345, 3 << 30, 33)
HOT = GpuSample(0, 1.0, 400.0, 700.0, 900, 60 << 30, 91, ("too hot (hardware)",))
BUSES = ("3b", "1b")
UNKNOWN = GpuSample(0, None, None, None, None, None, None)


def looks(*samples: GpuSample, count: int = 20, every_s: float = 2.0) -> list[GpuSnapshot]:
    """The same seen again and again."""
    return [GpuSnapshot(1000.0 + n * every_s, samples) for n in range(count)]


def codes(seen: list[GpuSnapshot]) -> list[str]:
    return [finding.code for finding in find_in_gpus(seen)]


def test_a_card_that_is_busy_at_idle_power_spins() -> None:
    (finding,) = find_in_gpus(looks(SPINNING))
    assert (finding.code, finding.evidence["of"]) == ("SF307", 1)
    assert re.findall(r"\d+%?", finding.evidence["gpus"]) == ["0", "100%", "10%"]
    assert finding.evidence["gpus"] in finding.cause


def test_a_card_alone_may_run_small_kernels() -> None:
    small = replace(SPINNING, power_w=150.0)
    assert codes(looks(small)) == []
    assert codes(looks(small, replace(small, index=1))) == ["SF307"]


def test_a_card_that_is_too_hot_is_named_with_its_reason() -> None:
    (finding,) = find_in_gpus(looks(HOT))
    assert (finding.code, finding.evidence["gpu"], finding.evidence["clock_mhz"]) == ("SF308", 0, 900)
    assert "too hot (hardware)" in finding.cause


@pytest.mark.parametrize("sample", [WORKING, IDLE, UNKNOWN], ids=["working", "idle", "unknown"])
def test_cards_without_a_finding(sample: GpuSample) -> None:
    assert codes(looks(sample)) == []


def test_moments_are_no_window() -> None:
    assert codes([]) == []
    assert codes(looks(SPINNING, count=5)) == []
    assert codes(looks(SPINNING, count=20, every_s=0.1)) == []
    assert codes(looks(SPINNING, count=20) + [GpuSnapshot(1040.0 + n, (WORKING,)) for n in range(40)]) == []


SOUND = replace(WORKING, lost_data=3, links_up=18, pcie_lanes=16)


@pytest.mark.parametrize(
    ("changes", "code", "numbers"),
    [
        ({"lost_data": 5}, "SF722", ["0", "2"]),
        ({"links_up": 12}, "SF724", ["0", "12", "18"]),
        ({"pcie_lanes": 4}, "SF725", ["0", "4", "16"]),
    ],
)
def test_a_card_that_gets_worse_during_a_run_is_named(changes: dict[str, int], code: str, numbers: list[str]) -> None:
    (finding,) = find_worse_gpus(GpuSnapshot(0.0, (SOUND,)), looks(replace(SOUND, **changes)))
    assert (finding.code, finding.evidence["device"]) == (code, 0)
    assert finding.cause.startswith("GPU 0")
    assert re.findall(r"\d+", finding.cause) == numbers


@pytest.mark.parametrize("sample", [SOUND, WORKING], ids=["as it was", "not told"])
def test_cards_that_stay_what_they_were(sample: GpuSample) -> None:
    assert find_worse_gpus(GpuSnapshot(0.0, (sample,)), looks(SOUND)) == []
    assert find_worse_gpus(GpuSnapshot(0.0, (SOUND,)), looks(sample)) == []
    assert find_worse_gpus(None, looks(replace(SOUND, links_up=1))) == []
    for_a_moment = [*looks(replace(SOUND, links_up=17)), GpuSnapshot(1041.0, (SOUND,))]
    assert find_worse_gpus(GpuSnapshot(0.0, (SOUND,)), for_a_moment) == []


HALF_USED = GpuSample(0, 0.38, 250.0, 700.0, 1980, 30 << 30, 50)


def test_a_program_that_cannot_start_kernels_fast_enough_is_named() -> None:
    finding = find_launch_bound(looks(HALF_USED), cores=1.02, computing=0.93)
    assert finding is not None
    assert finding.code == "SF310"
    assert (finding.evidence["gpu_utilisation"], finding.evidence["computing"]) == ("38%", "93%")


@pytest.mark.parametrize(
    ("sample", "cores", "computing"),
    [(WORKING, 1.0, 0.9), (HALF_USED, 0.4, 0.9), (HALF_USED, 1.0, 0.4), (HALF_USED, None, 0.9), (UNKNOWN, 1.0, 0.9)],
    ids=["it works", "the program waits", "data or network take the time", "not known yet", "not told"],
)
def test_programs_that_are_not_to_blame(sample: GpuSample, cores: float | None, computing: float) -> None:
    assert find_launch_bound(looks(sample), cores, computing) is None


def test_a_look_in_words() -> None:
    assert (
        in_words(GpuSnapshot(0.0, (SPINNING, UNKNOWN))) == "0: 100% busy, 71 W of 700 W, 3.0 GiB; 0: ? busy, ? W of ? W"
    )


def test_without_a_driver_there_are_no_samples_and_a_reason(tmp_path: Path) -> None:
    sampler = GpuSampler(tmp_path, 8)
    deadline = time.monotonic() + 20
    while not sampler.problem and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sampler.problem.startswith("NVMLError")
    assert sampler.snapshots() == []


@pytest.mark.long
def test_nvml_is_read_through_its_own_bindings(tmp_path: Path, nvml_driver: dict[str, str]) -> None:
    code = (
        "import sys, time; from pathlib import Path; from surefoot.diagnostics.monitor.gpus import GpuSampler\n"
        "folder = Path(sys.argv[1]); (folder / 'events').mkdir()\n"
        "seen = GpuSampler(folder, 8); time.sleep(3); print(seen.snapshots()[0][1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, **nvml_driver}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    expected = (
        GpuSample(0, 1.0, 71.0, 700.0, 1980, 3 << 30, None, (), 0, 18, 16),
        GpuSample(1, 1.0, 650.0, 700.0, 1980, 3 << 30, None, ("too hot (hardware)",), 2, 17, 8),
    )
    assert done.stdout == f"{expected}\n", done.stderr
    assert read_snapshots(tmp_path)[0][1] == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("visible", "count", "indices"),
    [
        (None, 8, [0, 1]),
        (None, 1, [0]),
        ("1", 8, [1]),
        ("", 8, []),
        ("-1", 8, []),
        ("GPU-b", 8, [1]),
        ("MIG-b1,MIG-b2", 8, [0]),
    ],
)
def test_only_cards_that_the_run_may_use_are_sampled(
    tmp_path: Path, nvml_driver: dict[str, str], visible: str | None, count: int, indices: list[int]
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from surefoot.diagnostics.monitor.gpus import GpuSampler\n"
        "seen = GpuSampler(Path(sys.argv[1]), int(sys.argv[2])); time.sleep(2.5)\n"
        "print([gpu.index for gpu in (seen.snapshots() or [(0, ())])[0][1]])\n"
        "print([n for n, device in enumerate(['0000:1b:00', '0000:2b:00']) if seen.may_use(device)])"
    )
    told = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(count)], env={**os.environ, **nvml_driver, **told},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    is_slice = visible is not None and visible.startswith("MIG-")  # number 0 for CUDA; of the second card
    whose_errors_count = (
        [0, 1] if count == 1 or not indices else [1] if is_slice else indices
    )  # a server may use others
    assert done.stdout == f"{indices}\n{whose_errors_count}\n", done.stderr


def test_cards_are_not_blamed_on_runs_that_do_not_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process here has a card open; whether one has is the one thing that is pretended."""
    supervisor = Supervisor(tmp_path, 1, 0.0)
    (tmp_path / "events").mkdir()
    ring = RingWriter(tmp_path / "events" / f"rank-00000-{time.time_ns()}.ring", 0)
    for step in range(40):
        ring.write(1000.0 + step, KINDS.index("step"), 0, step, (1.0, 1.0, 1.0, 0.0, 0.0))
    supervisor._detectors.gpus._sampler._snapshots.extend(looks(SPINNING))
    assert [finding.code for finding in supervisor.poll(1039.5)] == []
    monkeypatch.setattr(rank_state, "uses_gpus", lambda _: True)
    assert [finding.code for finding in supervisor.poll(1044.6)] == ["SF307"]
    ring.write(1049.0, KINDS.index("step"), 0, 40, (1.0, 1.0, 1.0, 0.0, 0.0))
    assert [finding.code for finding in supervisor.poll(1050.0)] == [], "it is said once"
    supervisor._detectors.gpus._sampler.first = GpuSnapshot(1000.0, (replace(SPINNING, links_up=18),))
    supervisor._detectors.gpus._sampler._snapshots.clear()
    supervisor._detectors.gpus._sampler._snapshots.extend(looks(replace(SPINNING, links_up=17), count=27))
    ring.write(1054.0, KINDS.index("step"), 0, 41, (1.0, 1.0, 1.0, 0.0, 0.0))
    assert [finding.code for finding in supervisor.poll(1055.2)] == ["SF724"]
    second = replace(SPINNING, index=1, links_up=18)
    supervisor._detectors.gpus._sampler.first = GpuSnapshot(1000.0, (replace(SPINNING, links_up=18), second))
    worse = replace(SPINNING, links_up=16), replace(second, links_up=16)
    supervisor._detectors.gpus._sampler._snapshots.clear()
    supervisor._detectors.gpus._sampler._snapshots.extend(looks(*worse, count=30))
    ring.write(1060.0, KINDS.index("step"), 0, 42, (1.0, 1.0, 1.0, 0.0, 0.0))
    assert [(finding.code, finding.evidence["device"]) for finding in supervisor.poll(1061.0)] == [("SF724", 1)]
    ring.close()


@pytest.mark.parametrize(("offloads", "codes"), [(False, ["SF310"]), (True, [])])
def test_a_card_that_waits_for_what_is_offloaded_is_not_blamed_on_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offloads: bool, codes: list[str]
) -> None:
    monkeypatch.setattr(rank_state, "uses_gpus", lambda _: True)
    monkeypatch.setattr(RankState, "busy_cores", 1.0)
    (tmp_path / "events").mkdir()
    supervisor = Supervisor(tmp_path, 1, 0.0)
    ring = RingWriter(tmp_path / "events" / f"rank-00000-{time.time_ns()}.ring", 0)
    ring.write(999.0, KINDS.index("run started"), 0, 1, (float(offloads), 0.0, 0.0, 0.0, 0.0))
    for step in range(40):
        ring.write(1000.05 + step, KINDS.index("phase began"), PHASES.index("forward"), step, (0.0,) * 5)
        ring.write(1000.95 + step, KINDS.index("phase ended"), PHASES.index("forward"), step, (0.0,) * 5)
        ring.write(1001.0 + step, KINDS.index("step"), 0, step, (1.0, 1.0, 1.0, 0.0, 0.0))
    supervisor._detectors.gpus._sampler._snapshots.extend(looks(HALF_USED, count=30))
    assert [finding.code for finding in supervisor.poll(1041.0)] == codes
    ring.close()


def test_errors_of_cards_that_the_run_may_not_use_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_state, "uses_gpus", lambda _: True)
    (tmp_path / "events").mkdir()
    supervisor = Supervisor(tmp_path, 1, 0.0)
    ring = RingWriter(tmp_path / "events" / f"rank-00000-{time.time_ns()}.ring", 0)
    ring.write(1000.0, KINDS.index("step"), 0, 1, (1.0, 1.0, 1.0, 0.0, 0.0))
    supervisor._detectors.gpus._sampler._addresses = ["00000000:1B:00.0"]
    supervisor._detectors.gpus._kernel_log.end()
    (tmp_path / "kmsg").write_text("")
    supervisor._detectors.gpus._kernel_log = KernelLog(tmp_path / "kmsg")
    said = [f"3,{n},99,-;NVRM: Xid (PCI:0000:{bus}:00): 79, GPU has fallen off the bus." for n, bus in enumerate(BUSES)]
    (tmp_path / "kmsg").write_text("\n".join(said) + "\n")
    assert [(one.code, one.evidence["device"]) for one in supervisor.poll(1001.0)] == [("SF112", "0000:1b:00")]
    ring.close()


def test_cards_that_wait_for_a_rank_that_saves_are_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_state, "uses_gpus", lambda _: True)
    supervisor = Supervisor(tmp_path, 1, 0.0)
    (tmp_path / "events").mkdir()
    ring = RingWriter(tmp_path / "events" / f"rank-00000-{time.time_ns()}.ring", 0)
    for step in range(40):
        ring.write(1000.0 + step, KINDS.index("step"), 0, step, (1.0, 1.0, 1.0, 0.0, 0.0))
    ring.write(1040.0, KINDS.index("phase began"), PHASES.index("save"), 40, (0.0,) * 5)
    supervisor._detectors.gpus._sampler._snapshots.extend(looks(SPINNING))
    assert [finding.code for finding in supervisor.poll(1041.0)] == []
    ring.close()


def test_a_supervisor_that_looks_no_more_leaves_no_thread(tmp_path: Path) -> None:
    sampler = GpuSampler(tmp_path, 1)
    sampler.end()
    sampler._thread.join(20)
    assert not sampler._thread.is_alive()


@pytest.mark.long
def test_the_page_of_a_run_shows_its_cards(settings: dict[str, Any]) -> None:
    run = surefoot.train(settings, screen=False, max_steps=2).run_folder
    lines = [{"time_s": time.time() + n, "gpus": [[0, 1.0, 71.0, 700.0, 1980, 1, None, []]]} for n in range(5)]
    (run / "events" / "gpus-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{cut")
    assert "GPUs: busy" in write_report(run).read_text()
