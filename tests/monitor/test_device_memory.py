"""Memory of accelerators, as their allocator counts it, and peaks that leave no room. No card is here: the counts are
written by hand."""

from collections.abc import Callable, Mapping

import pytest

from surefoot.diagnostics.monitor.event_log import Entry
from surefoot.diagnostics.monitor.rank_trends import find_in_history
from surefoot.diagnostics.rules.device_memory import DeviceMemory
from surefoot.diagnostics.rules.memory_spike import Peaks

MIB, GIB = 1 << 20, 1 << 30
Counts = Callable[[int], Mapping[str, float]]


def counts(
    *, allocated: float = 20 * GIB, inactive: float = 0.2 * GIB, retries: float = 0.0, free: float = 10 * GIB
) -> dict[str, float]:
    return {"allocated": allocated, "reserved": 30 * GIB, "inactive": inactive, "retries": retries, "free": free}


def codes(said: Counts, steps: int = 200) -> list[str]:
    memory = DeviceMemory(1)
    for step in range(1, steps + 1):
        memory.add("device memory", step, said(step))
    return [finding.code for finding in memory.findings()]


def test_tensors_that_pile_up_are_found_with_the_step_at_which_memory_ends() -> None:
    history = [
        Entry(1, 7, 7, float(step), "device memory", "", step, counts(allocated=20 * GIB + 2 * MIB * step))
        for step in range(1, 201)
    ]
    (finding,) = find_in_history(history)
    assert (finding.code, finding.evidence["rank"]) == ("SF203", 1)
    assert " 2.00 MiB " in finding.cause
    assert " 19.6 GiB" in finding.cause
    left_mib = (10 * GIB + 30 * GIB - 20 * GIB - 400 * MIB) / MIB  # what is free, and held by the allocator
    assert finding.cause.endswith(f"step {200 + round(left_mib / 2)}")


def test_an_allocator_that_finds_no_piece_is_found() -> None:
    assert codes(lambda step: counts(inactive=6 * GIB, retries=step // 2)) == ["SF204"]


@pytest.mark.parametrize(
    "said",
    [
        lambda _: counts(),
        lambda step: counts(inactive=6 * GIB, retries=float(step > 190)),  # once, after an evaluation
        lambda step: counts(inactive=0.2 * GIB, retries=step // 2),  # there is no memory, cut up or not
        lambda step: counts(allocated=20 * GIB + (300 * MIB if step % 2 else 0)),  # it comes and goes
        lambda step: counts(allocated=20 * GIB + min(step, 60) * 4 * MIB),  # it settles
    ],
    ids=["sound", "retried once", "used up", "swings", "settles"],
)
def test_healthy_counts(said: Counts) -> None:
    assert codes(said) == []


def peaks(rise_at: int = 40, *, tokens: float = 4000.0, rise: float = 8 * GIB, saved_before: int = 0) -> Peaks:
    found = Peaks(0)
    for step in range(1, 61):
        if step == saved_before:
            found.between()
        found.add("batch", step, {"tokens": tokens if step == rise_at else 1000.0})
        found.add("step", step, {"peak_memory_bytes": 16 * GIB + (rise if step >= rise_at else 0.0)})
    return found


def test_a_step_that_nearly_did_not_fit_is_named_with_its_batch() -> None:
    finding = peaks().finding(room_bytes=2 * GIB)
    assert finding is not None
    assert (finding.code, finding.evidence["step"]) == ("SF205", 40)
    assert (finding.evidence["tokens_of_its_batch"], finding.evidence["usual_tokens"]) == (4000, 1000)
    assert "4000 tokens, 1000 " in finding.cause


def test_a_save_long_before_excuses_no_peak() -> None:
    assert peaks(saved_before=39).finding(room_bytes=2 * GIB) is not None


def test_large_images_are_named_before_their_tokens() -> None:
    found = Peaks(0)
    for step in range(1, 61):
        found.add("batch", step, {"tokens": 4000.0 if step == 40 else 1000.0})
        if step % 2 == 0:  # the others are text alone
            found.add("images", step, {"images": 1.0, "patches": 9000.0 if step == 40 else 1200.0})
        found.add("step", step, {"peak_memory_bytes": 16 * GIB + (8 * GIB if step >= 40 else 0.0)})
    finding = found.finding(room_bytes=2 * GIB)
    assert finding is not None
    assert (finding.evidence["patches_of_its_batch"], finding.evidence["usual_patches"]) == (9000, 1200)
    assert "9000 patches" in finding.cause
    assert (finding.evidence["tokens_of_its_batch"], finding.evidence["usual_tokens"]) == (4000, 1000)


def test_a_usual_batch_is_not_blamed() -> None:
    finding = peaks(tokens=1000.0).finding(room_bytes=2 * GIB)
    assert finding is not None
    assert "tokens" not in finding.cause


@pytest.mark.parametrize(
    ("seen", "room"),
    [(peaks(), 20 * GIB), (peaks(rise_at=10), 0.0), (peaks(rise=2 * GIB), 0.0), (peaks(saved_before=40), 0.0)],
    ids=["there is room", "while it warms up", "a little more", "a save came before it"],
)
def test_healthy_peaks(seen: Peaks, room: float) -> None:
    assert seen.finding(room) is None


def test_room_is_what_is_left_at_the_peak_of_a_step() -> None:
    memory = DeviceMemory(0)
    for step in range(1, 40):
        memory.add("step", step, {"peak_memory_bytes": 38 * GIB})
        memory.add("device memory", step, counts())
    assert memory.room_bytes == 2 * GIB
