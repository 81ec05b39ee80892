"""What costs time is told from steps that are sound, short, or slow for once."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from surefoot.diagnostics.monitor.event_log import Entry
from surefoot.diagnostics.monitor.flight_recorder import MEANINGS, FlightRecord
from surefoot.diagnostics.monitor.rank_trends import find_in_history
from surefoot.diagnostics.rules.data_waits import DataWaits
from surefoot.diagnostics.rules.speed import (
    find_idle_ranks,
    find_slow,
    find_swapping,
    has_own_cause,
)
from surefoot.diagnostics.rules.step_times import RankTimes
from surefoot.diagnostics.rules.stragglers import find_straggler, find_uneven_experts

SOUND = {"data_wait": 0.02, "forward": 0.4, "backward": 0.5, "collectives": 0.05, "optimizer": 0.03}
TakesS = Callable[[int, str], float]


def takes(**more_s: float) -> TakesS:
    return lambda _, phase: SOUND[phase] + more_s.get(phase, 0.0)


def times(
    takes_s: TakesS,
    *,
    steps: int = 60,
    garbage_s: Callable[[int], float] = lambda _: 0.0,
    tokens: Callable[[int], float] = lambda _: 100.0,
    padding: float = 0.0,
    in_line_s: Callable[[int], float] = lambda _: 0.0,
) -> RankTimes:
    """One rank whose phases take as long as `takes_s(step, phase)` says."""
    found, now = RankTimes(), 1000.0
    for step in range(1, steps + 1):
        began = now
        found.add("batch", "", step, now, {"tokens": tokens(step), "padding": padding})
        for phase in SOUND:
            found.add("phase began", phase, step, now, {})
            now += takes_s(step, phase)
            found.add("phase ended", phase, step, now, {})
        found.add("learning rate", "", step, now, {"learning_rate": 1.0, "in_line_s": in_line_s(step)})
        found.add("step", "", step, now, {"step_time_s": now - began, "garbage_s": garbage_s(step)})
    return found


def codes(*ranks: RankTimes, throttled: float | None = None) -> list[str]:
    return [finding.code for finding in find_slow(dict(enumerate(ranks)), throttled)]


def test_sound_steps_have_no_finding() -> None:
    sound = times(takes())
    assert codes(sound) == []
    assert codes(sound, sound, throttled=0.1) == []
    assert find_slow({}) == []


def test_padding_is_named_with_what_it_takes() -> None:
    (finding,) = find_slow({0: times(takes()), 1: times(takes(), padding=60.0)})
    assert (finding.code, finding.evidence["rank"]) == ("SF311", 1)
    assert re.findall(r"\d+%", finding.cause) == ["60%", "54%"]
    assert codes(times(takes(), padding=20.0)) == []
    assert codes(times(takes(optimizer=3.0), padding=60.0)) == [], "little of a step depends on its tokens"
    assert codes(times(takes(), padding=100.0, tokens=lambda _: 0.0)) == [], "nothing is known"
    assert codes(times(takes(data_wait=0.5), padding=60.0)) == ["SF302", "SF311"]


def test_data_that_are_waited_for_are_named_with_their_rank() -> None:
    (finding,) = find_slow({0: times(takes()), 1: times(takes(data_wait=0.5))})
    assert (finding.code, finding.evidence["rank"]) == ("SF302", 1)
    assert " 35% " in finding.cause


def test_one_long_wait_is_no_slowness() -> None:
    assert codes(times(lambda step, phase: SOUND[phase] + 30.0 * (step == 50 and phase == "data_wait"))) == []
    assert codes(times(takes(data_wait=5.0), steps=20)) == [], "too few steps"
    fast = times(lambda _, phase: SOUND[phase] / 100 + 0.01 * (phase == "data_wait"))
    assert codes(fast) == [], "two thirds of a second in all"


def test_communication_is_the_cause_where_all_ranks_spend_their_time_there() -> None:
    waiting = times(takes(collectives=2.0))
    assert codes(waiting, waiting) == ["SF304"]
    assert codes(waiting, times(takes(forward=2.0))) == [], "one of them comes late"
    assert codes(waiting) == [], "one rank talks to no one"


@pytest.mark.parametrize(
    ("state", "children", "blocked", "reason", "fixes"),
    [
        ("sleeping", ("running", "sleeping"), False, "workers 8", ("dataset_num_proc", "dataloader_num_workers")),
        ("running", ("sleeping",), False, "own process 8", ("max_pixels", "dataloader_num_workers")),
        ("sleeping", ("disk-sleep",), False, "storage 8", ("local disk", "dataloader_prefetch_factor")),
        ("sleeping", (), True, "storage 8", ("local disk", "local disk")),
        ("sleeping", (), False, "nothing 8", ("storage", "storage")),
    ],
)
def test_why_data_are_late(
    state: str, children: tuple[str, ...], blocked: bool, reason: str, fixes: tuple[str, str]
) -> None:
    """The remedy is one that the trainer has which is watched: Surefoot, or one with transformers' arguments."""
    waits, late = DataWaits(), find_slow({0: times(takes(data_wait=0.5))})[0]
    for _ in range(4):
        waits.add(state, children, waits_for_disk=blocked)
    assert waits.explain(late, is_own_run=True) == late, "too few samples"
    for _ in range(4):
        waits.add(state, children, waits_for_disk=blocked)
    for is_own_run, fix in zip((True, False), fixes, strict=True):
        explained = waits.explain(late, is_own_run=is_own_run)
        assert explained.evidence["while_waiting"] == reason
        assert fix in explained.fix
    for _ in range(8):
        waits.add("zombie" if state == "running" else "running", (), waits_for_disk=False)
    assert waits.explain(late, is_own_run=True) == late, "no clear reason"


def test_short_pauses_at_different_steps_add_up() -> None:
    """Each of four ranks pauses in every fourth step: the others wait for it, so that every step is longer."""
    apart = [times(takes(), garbage_s=lambda step, rank=rank: 0.2 * (step % 4 == rank)) for rank in range(4)]  # type: ignore[misc]
    (finding,) = find_slow(dict(enumerate(apart)))
    assert finding.code == "SF305"
    assert "20%" in finding.cause
    assert codes(*([apart[0]] * 4)) == [], "together they cost a twentieth"
    late = [
        times(lambda step, phase, rank=rank: SOUND[phase] + 0.8 * (phase == "data_wait" and step % 4 == rank))  # type: ignore[misc]
        for rank in range(4)
    ]
    (finding,) = find_slow(dict(enumerate(late)))
    assert (finding.code, "rank" in finding.evidence) == ("SF302", False)
    assert codes(*([late[0]] * 4)) == []


def test_garbage_collection_and_throttling_are_named() -> None:
    assert codes(times(takes(), garbage_s=lambda _: 0.2)) == ["SF305"]
    assert codes(times(takes(), garbage_s=lambda _: 0.02)) == []
    assert codes(times(takes(data_wait=0.5)), throttled=0.9) == ["SF306"], "the rest is its consequence"


def test_steps_that_become_slower_are_named_with_the_phase() -> None:
    slower = times(lambda step, phase: SOUND[phase] * (4 if phase == "backward" and step > 40 else 1), steps=90)
    (finding,) = find_slow({0: slower})
    assert (finding.code, finding.evidence["phase"]) == ("SF301", "backward")
    assert " 2.5 times " in finding.cause


def test_steps_that_wait_for_cores_are_told_from_those_that_do_more() -> None:
    def slower(in_line_s: float) -> RankTimes:
        return times(
            lambda step, phase: SOUND[phase] * (4 if phase == "backward" and step > 40 else 1),
            steps=90,
            in_line_s=lambda step: 0.3 + in_line_s * (step > 40),  # 1.5 s are added
        )

    (finding,) = find_slow({0: slower(0.1), 1: slower(1.3), 2: slower(0.9)})
    assert (finding.code, finding.evidence["rank"], finding.evidence["in_line"]) == ("SF313", 1, "64%")
    assert " 2.5 times " in finding.cause
    nearly = times(lambda step, phase: SOUND[phase] * (2.8 if phase == "backward" and step > 40 else 1), steps=90,
                   in_line_s=lambda step: 0.7 * (step > 40))  # fmt: skip
    assert codes(slower(0.1)) == ["SF301"]
    assert codes(slower(0.1), nearly) == ["SF313"], "the others are slow because of it"
    assert codes(nearly) == [], "1.9 times"
    assert codes(slower(0.5)) == ["SF301"], "most of it is not for want of a core"
    assert codes(times(takes(), steps=90, in_line_s=lambda _: 0.8)) == [], "it was always so"


def test_ranks_without_cores_are_not_said_to_communicate() -> None:
    def waiting(in_line_s: float) -> RankTimes:
        return times(takes(collectives=2.0), in_line_s=lambda _: in_line_s)

    assert codes(waiting(0.5), waiting(0.5)) == ["SF304"]
    assert codes(waiting(0.5), waiting(1.5)) == []


def test_longer_batches_are_no_slowness() -> None:
    def size(step: int) -> float:
        return 4.0 if step > 40 else 1.0

    grown = times(lambda step, phase: SOUND[phase] * size(step), steps=90, tokens=lambda step: 100 * size(step))
    assert codes(grown) == []
    shrunk = times(
        lambda step, phase: SOUND[phase] * (0.8 if step > 40 else 1.0),
        steps=90,
        tokens=lambda step: 100.0 if step > 40 else 500.0,
    )
    assert codes(shrunk) == [], "fewer tokens, in less time"


def test_a_history_is_judged_by_the_newest_start_of_each_rank() -> None:
    def entries(start: int, wait_s: float) -> list[Entry]:
        made, now = [], 1000.0 * start
        numbers = {"grad_norm": 1.0, "peak_memory_bytes": 1.0}
        for step in range(1, 61):
            for kind, phase, after_s, values in (
                ("batch", "", 0.0, {"tokens": 10.0}),
                ("phase began", "data_wait", 0.0, {}),
                ("phase ended", "data_wait", wait_s, {}),
                (
                    "step",
                    "",
                    0.5,
                    {**numbers, "loss": 1.0 - step / 1000, "step_time_s": 0.5 + wait_s, "garbage_s": 0.0},
                ),
            ):
                now += after_s
                made.append(Entry(0, start, 7, now, kind, phase, step, values))
        return made

    slow, sound = entries(1, 0.5), entries(2, 0.01)
    assert [finding.code for finding in find_in_history(slow)] == ["SF302"]
    assert find_in_history([*sound, *slow]) == []  # in this order the older one would count last


def flight(asked: Mapping[int, float], call: str = "all_reduce of Float [9]") -> FlightRecord:
    times = MappingProxyType({("0", number): when for number, when in asked.items()})
    return FlightRecord({}, (), {}, times, {}, dict.fromkeys(times, call))


def meetings(late_s: Callable[[int], float], count: int = 100, together: int = 1) -> dict[int, Any]:
    """Two ranks that meet once a second, `run_or_raise_on_all` collectives at a time; the second is late."""
    first = {number: number // together + number % together * 1e-4 for number in range(count)}
    return {0: flight(first), 1: flight({number: when + late_s(number) for number, when in first.items()})}


@pytest.mark.parametrize("together", [1, 5])
def test_the_rank_that_comes_late_again_and_again_is_named(together: int) -> None:
    finding = find_straggler(meetings(lambda _: 0.4, together=together))
    assert finding is not None
    assert (finding.code, finding.evidence["rank"]) == ("SF303", 1)
    assert re.search(r" 4[012]% ", finding.cause)
    assert find_straggler(meetings(lambda _: 0.4, together=together), are_idle=True) is None, "it may be the network"
    assert find_straggler(meetings(lambda _: 0.8, together=together), are_idle=True) is not None


def test_a_rank_that_is_late_for_want_of_a_core_is_no_straggler() -> None:
    def late(late_s: float, in_line: Mapping[int, float]) -> str | None:
        finding = find_straggler(meetings(lambda _: late_s), in_line=in_line)
        return finding.code if finding is not None else None

    assert late(0.8, {0: 0.1, 1: 0.6}) == "SF313"
    assert late(0.4, {0: 0.1, 1: 0.6}) is None, "others lose less than half of the time"
    assert late(0.4, {0: 0.1, 1: 0.2}) == "SF303", "it waits hardly longer than they do"
    assert late(0.8, {0: 0.6, 1: 0.6}) == "SF303", "all want cores, and one is slow"


@pytest.mark.parametrize(
    "late_s",
    [
        lambda _: 0.05,  # a little
        lambda number: 40.0 if number == 99 else 0.0,  # once
        lambda number: 0.4 if number % 2 else -0.4,  # in turns
    ],
)
def test_ranks_that_come_late_at_times_are_no_stragglers(late_s: Callable[[int], float]) -> None:
    assert find_straggler(meetings(late_s)) is None


def test_experts_that_are_used_unevenly_are_named_where_ranks_wait_for_them() -> None:
    exchanges = {number: number * 1.0 for number in range(100)}
    travelling = "all_to_all of Float [9, 64]"
    in_turns = {  # of one layer this rank has the busier experts, of the next the other one
        0: flight({number: when + 0.3 * (number % 2) for number, when in exchanges.items()}, travelling),
        1: flight({number: when + 0.3 * (1 - number % 2) for number, when in exchanges.items()}, travelling),
    }
    assert find_straggler(in_turns) is None
    finding = find_uneven_experts(in_turns, 1.6)
    assert finding is not None
    assert (finding.code, finding.evidence["load"]) == ("SF312", 1.6)
    assert re.search(r" 30% .* 1\.6 times ", finding.cause)
    assert find_uneven_experts(in_turns, 1.1) is None, "even experts: something else is slow"
    others = {rank: flight({key[1]: when for key, when in one.called_s.items()}) for rank, one in in_turns.items()}
    assert find_uneven_experts(others, 1.6) is None, "no tokens travel there"
    sums = {rank: replace(one, meanings={"0": MEANINGS["mesh_fsdp"]}) for rank, one in in_turns.items()}
    assert find_uneven_experts(sums, 1.6) is None, "gradients do, with gloo by the same call"


def test_too_little_is_known_of_few_collectives_or_one_rank() -> None:
    assert find_straggler(meetings(lambda _: 0.4, count=20)) is None
    assert find_straggler({0: flight({})}) is None


def test_memory_that_is_read_back_from_swap_is_named() -> None:
    finding = find_swapping(40 * 2**20, 3 << 30, 5000.0)
    assert finding is not None
    assert finding.code == "SF309"
    assert (finding.evidence["read_back_mib_per_s"], finding.evidence["in_swap_gib"]) == (40.0, 3.0)


@pytest.mark.parametrize(
    ("read", "there", "faults"),
    [(1 << 20, 3 << 30, 5000.0), (40 * 2**20, 0, 5000.0), (40 * 2**20, 3 << 30, 10.0)],
    ids=["little", "not ours", "another program's"],
)
def test_swap_that_costs_nothing(read: float, there: int, faults: float) -> None:
    assert find_swapping(read, there, faults) is None


def test_the_share_of_phases_in_the_newest_steps() -> None:
    window = times(takes()).window
    assert window is not None
    assert window.share("forward", "backward") == pytest.approx(0.9)
    assert times(takes(), steps=10).window is None


def test_a_cause_of_its_own_is_seen_before_there_are_steps_enough_for_a_finding() -> None:
    assert not has_own_cause(times(takes(), steps=10))
    assert has_own_cause(times(takes(), steps=10, garbage_s=lambda _: 0.3))
    assert has_own_cause(times(takes(data_wait=0.5), steps=10))
    assert not has_own_cause(RankTimes())


def test_ranks_that_compute_nothing_wait_for_the_network() -> None:
    ranks = {rank: times(takes()) for rank in range(3)}
    shares = sum(SOUND.get(phase, 0.0) for phase in ("forward", "backward", "collectives")) / sum(SOUND.values())
    assert shares > 0.8
    idle: dict[int, float | None] = dict.fromkeys(ranks, 0.05)
    finding = find_idle_ranks(ranks, idle)
    assert finding is not None
    assert (finding.code, finding.evidence["busiest_rank_cores"]) == ("SF304", 0.05)
    assert find_idle_ranks(ranks, {**idle, 1: 0.9}) is None, "one of them computes"
    assert find_idle_ranks(ranks, {**idle, 1: None}) is None, "not known yet"
    assert find_idle_ranks({0: ranks[0]}, {0: 0.05}) is None
    waiting = {rank: times(lambda _, phase: SOUND[phase] * (20 if phase == "data_wait" else 1)) for rank in range(2)}
    assert find_idle_ranks(waiting, dict.fromkeys(waiting, 0.05)) is None
