"""What is said of a rank that died, from what it had recorded."""

import re
from dataclasses import replace

import pytest

from surefoot.diagnostics.monitor.event_log import Entry
from surefoot.diagnostics.monitor.gpus import GpuSample, GpuSnapshot
from surefoot.diagnostics.rules.accelerators import find_last_errors
from surefoot.diagnostics.rules.rank_death import MachineAtDeath, find_death
from surefoot.findings import Finding
from surefoot.system.kernel_log import GpuError

KILLED = "was killed by signal 9 (SIGKILL)"


def entry(kind: str, phase: str = "", step: int = 0, *, rank: int = 1, process: int = 70) -> Entry:
    return Entry(rank, process, process, 0.0, kind, phase, step, {})


@pytest.mark.parametrize(
    ("entries", "phases", "step"),
    [
        ([], [], "none"),
        ([entry("phase began", "load")], ["load"], 0),
        ([entry("phase began", "load"), entry("phase ended", "load")], [], 0),
        ([entry("phase began", "save", 5), entry("phase ended", "save", 5), entry("phase began", "forward", 6)],
         ["forward"], 6),
        ([entry("phase began", "forward", 5), entry("phase ended", "forward", 5)], [], 5),
        ([entry("step", "", 5), entry("run ended")], [], 5),
        ([entry("step", "", 9, process=60), entry("step", "", 5), entry("step", "", 8, rank=0)], [], 5),
    ],
)  # fmt: skip
def test_where_a_rank_was_is_the_innermost_phase_of_its_last_start(
    entries: list[Entry], phases: list[str], step: int | str
) -> None:
    finding = find_death(1, KILLED, for_memory=False, history=entries)
    assert (finding.code, finding.evidence["rank"], finding.evidence["last_step"]) == ("SF101", 1, step)
    who, _, rest = finding.cause.partition(KILLED)
    where = rest.partition(".")[0]
    assert who == "rank 1 "
    assert re.findall("load|save|forward", where) == phases
    assert re.findall(r"step (\d+)", where) == ([str(step)] if step in (5, 6) else [])
    assert ("first step" in where, "begun" in where) == (step == 0, step == "none")


def test_the_launcher_is_no_rank() -> None:
    finding = find_death(None, KILLED, for_memory=False, history=[entry("step", "", 3)])
    assert finding.cause.startswith("the launcher ")
    assert "rank" not in finding.evidence


@pytest.mark.parametrize(
    ("for_memory", "code", "confidence", "said"),
    [
        (True, "SF201", 1.0, "limit of its cgroup"),
        (False, "SF101", 1.0, "did not reach the memory limit"),
        (None, "SF101", 0.8, "is unknown"),
    ],
)
def test_a_kill_for_memory_is_told_from_others(
    for_memory: bool | None, code: str, confidence: float, said: str
) -> None:
    finding = find_death(0, KILLED, for_memory=for_memory, history=[])
    assert (finding.code, finding.confidence) == (code, confidence)
    assert said in finding.cause


def test_a_machine_without_memory_is_told_by_the_kernels_log() -> None:
    history = [Entry(0, 1, 70, 0.0, "step", "", 3, {})]
    finding = find_death(0, KILLED, for_memory=False, history=history, machine=MachineAtDeath(killed={70}))
    assert finding.code == "SF201"
    assert "machine had no memory" in finding.cause
    crashed = find_death(
        0, "was ended by signal 11 (SIGSEGV)", for_memory=False, history=history, machine=MachineAtDeath(killed={70})
    )
    assert crashed.code == "SF101"
    other = find_death(0, KILLED, for_memory=False, history=history, machine=MachineAtDeath(killed={71}))
    assert other.code == "SF101"


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([500, 500, 520, 1900], ["1900 tokens", "500"]),
        ([500, 500, 520, 510], []),
        ([1900], []),
    ],
)
def test_a_large_batch_is_named_with_the_kill(tokens: list[int], named: list[str]) -> None:
    history = [
        Entry(0, 1, 70, 0.0, "batch", "", step, {"tokens": float(count)}) for step, count in enumerate(tokens, 1)
    ]
    finding = find_death(0, KILLED, for_memory=True, history=history)
    assert re.findall(r"\d+(?: tokens)?", finding.cause.rpartition(" memory")[2]) == named


def test_a_batch_of_another_step_is_not_blamed() -> None:
    """Other trainers tell of a batch at the end of its step."""
    history = [Entry(0, 1, 70, 0.0, "batch", "", step, {"tokens": 8.0}) for step in (1, 2, 3)]
    history += [Entry(0, 1, 70, 0.0, "batch", "", 4, {"tokens": 40.0}), Entry(0, 1, 70, 0.0, "step", "", 4, {})]
    history.append(Entry(0, 1, 70, 0.0, "phase began", "forward_backward", 5, {}))
    finding = find_death(0, KILLED, for_memory=True, history=history)
    assert "tokens" not in finding.cause


def test_a_batch_that_was_done_is_not_blamed() -> None:
    history = [Entry(0, 1, 70, 0.0, "batch", "", step, {"tokens": 500.0 * step}) for step in (1, 2, 3)]
    history.append(Entry(0, 1, 70, 0.0, "step", "", 3, {}))
    finding = find_death(0, KILLED, for_memory=True, history=history)
    assert "tokens" not in finding.cause


def test_the_number_of_a_rank_is_not_shown_as_a_count() -> None:
    finding = Finding("SF101", "rank 0 is gone", {"ranks_gone": "0"})
    assert finding.as_dict()["evidence"] == {"ranks_gone": "0"}
    (line,) = [line for line in finding.as_text().splitlines() if line.endswith(": 0")]
    assert "rank number" in line


def test_errors_of_a_gpu_at_the_death_are_its_cause() -> None:
    """The driver's error and lost data come before a plain death, and after memory; the end itself is no error."""
    fallen = GpuError("0000:3b:00", 79, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    removed = GpuError("0000:3b:00", 45, "NVRM: Xid (PCI:0000:3b:00): 45, pid=70", 70)
    sample = GpuSample(2, 0.5, 300.0, 700.0, 1500, 1, 40, lost_data=1)
    first, last = GpuSnapshot(1.0, (sample,)), GpuSnapshot(9.0, (replace(sample, lost_data=4),))
    history = [entry("phase began", "forward", 6)]

    def explain(errors: list[GpuError], for_memory: bool = False) -> Finding:
        found = find_last_errors(errors, {70}, first, last)
        return find_death(1, KILLED, for_memory=for_memory, history=history, machine=MachineAtDeath(gpu_errors=found))

    finding = explain([fallen])
    assert (finding.code, finding.evidence["xid"], finding.evidence["rank"]) == ("SF112", 79, 1)
    assert re.search("step 6, and .*Xid 79", finding.cause)
    finding = explain([removed])
    assert (finding.code, finding.evidence["device"]) == ("SF722", 2)
    assert "3 times" in finding.cause
    assert explain([fallen], for_memory=True).code == "SF201"
    assert find_last_errors([removed], {70}, first, first) == []
    assert find_last_errors([], {70}, None, None) == []


def test_messages_of_the_kernel_are_evidence() -> None:
    messages = [f"mce: [Hardware Error]: {number}" for number in range(5)]
    finding = find_death(1, KILLED, for_memory=False, history=[], machine=MachineAtDeath(kernel_messages=messages))
    assert finding.evidence["kernel_says"] == "; ".join(messages[-3:])
    assert "kernel_says" not in find_death(1, KILLED, for_memory=False, history=[]).evidence
