"""What is said of a rank that died, from what it had recorded."""

import pytest

from surefoot.health.diagnose.death import find_death
from surefoot.health.recorder import Entry


def entry(kind: str, phase: str = "", step: int = 0, *, rank: int = 1, process: int = 70) -> Entry:
    return Entry(rank, process, process, 0.0, kind, phase, step, {})


@pytest.mark.parametrize(
    ("entries", "where"),
    [
        ([], ", before it had begun"),
        ([entry("phase began", "load")], " in load before the first step"),
        ([entry("phase began", "load"), entry("phase ended", "load")], " before the first step"),
        ([entry("phase began", "save", 5), entry("phase ended", "save", 5), entry("phase began", "forward", 6)],
         " in forward of step 6"),
        ([entry("phase began", "forward", 5), entry("phase ended", "forward", 5)], " of step 5"),
        ([entry("step", "", 5), entry("run ended")], " of step 5"),
        ([entry("step", "", 9, process=60), entry("step", "", 5), entry("step", "", 8, rank=0)], " of step 5"),
    ],
)  # fmt: skip
def test_where_a_rank_was_is_the_innermost_phase_of_its_last_start(entries: list[Entry], where: str) -> None:
    finding = find_death(1, "was killed by signal 9 (SIGKILL)", for_memory=False, history=entries)
    assert finding.code == "SF101"
    assert finding.cause.startswith(f"rank 1 was killed by signal 9 (SIGKILL){where}. ")


def test_the_launcher_is_no_rank() -> None:
    finding = find_death(None, "was killed by signal 9 (SIGKILL)", for_memory=False, history=[entry("step", "", 3)])
    assert finding.cause.startswith("the launcher of the ranks was killed")
    assert "rank" not in finding.evidence


@pytest.mark.parametrize(
    ("for_memory", "code", "said"),
    [
        (True, "SF201", "it reached the limit of its cgroup for memory"),
        (False, "SF101", "No memory limit of its cgroup was reached"),
        (None, "SF101", "Whether for memory cannot be told here"),
    ],
)
def test_a_kill_for_memory_is_told_from_others(for_memory: bool | None, code: str, said: str) -> None:
    finding = find_death(0, "was killed by signal 9 (SIGKILL)", for_memory=for_memory, history=[])
    assert finding.code == code
    assert said in finding.cause


def test_a_machine_without_memory_is_told_by_the_kernels_log() -> None:
    history = [Entry(0, 1, 70, 0.0, "step", "", 3, {})]
    finding = find_death(0, "was killed by signal 9 (SIGKILL)", for_memory=False, history=history, killed={70})
    assert finding.code == "SF201"
    assert "because the machine had no memory" in finding.cause
    crashed = find_death(0, "was ended by signal 11 (SIGSEGV)", for_memory=False, history=history, killed={70})
    assert crashed.code == "SF101"
    other = find_death(0, "was killed by signal 9 (SIGKILL)", for_memory=False, history=history, killed={71})
    assert other.code == "SF101"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([500, 500, 520, 1900], ", in a batch of 1900 tokens, where 500 are usual"),
        ([500, 500, 520, 510], "limit of its cgroup for memory"),
        ([1900], "limit of its cgroup for memory"),
    ],
)
def test_a_large_batch_is_named_with_the_kill(tokens: list[int], said: str) -> None:
    history = [
        Entry(0, 1, 70, 0.0, "batch", "", step, {"tokens": float(count)}) for step, count in enumerate(tokens, 1)
    ]
    finding = find_death(0, "was killed by signal 9 (SIGKILL)", for_memory=True, history=history)
    assert finding.cause.endswith(said)


def test_a_batch_of_another_step_is_not_blamed() -> None:
    """Other trainers tell of a batch at the end of its step."""
    history = [Entry(0, 1, 70, 0.0, "batch", "", step, {"tokens": 8.0}) for step in (1, 2, 3)]
    history += [Entry(0, 1, 70, 0.0, "batch", "", 4, {"tokens": 40.0}), Entry(0, 1, 70, 0.0, "step", "", 4, {})]
    history.append(Entry(0, 1, 70, 0.0, "phase began", "forward and backward", 5, {}))
    finding = find_death(0, "was killed by signal 9 (SIGKILL)", for_memory=True, history=history)
    assert "tokens" not in finding.cause


def test_a_batch_that_was_done_is_not_blamed() -> None:
    history = [Entry(0, 1, 70, 0.0, "batch", "", step, {"tokens": 500.0 * step}) for step in (1, 2, 3)]
    history.append(Entry(0, 1, 70, 0.0, "step", "", 3, {}))
    finding = find_death(0, "was killed by signal 9 (SIGKILL)", for_memory=True, history=history)
    assert "tokens" not in finding.cause
