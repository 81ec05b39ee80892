"""Rules for causes of lost time, from the time of the ranks' steps by phase. Pure.

A finding needs a window of steps that is long enough to matter, and a loss that is large in shares and in seconds:
runs of a few seconds have no findings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from surefoot.diagnostics.rules.step_times import WINDOW_STEPS, RankTimes, Window
from surefoot.findings import Finding

DATA_SHARE = 0.25
COMMUNICATION_SHARE = 0.5
GARBAGE_SHARE = 0.1
PADDING_SHARE = 0.25
THROTTLED_SHARE = 0.25
"""Shares of a window from which a loss is a finding."""
OF_TOKENS = ("forward", "backward", "forward_backward")
"""Phases whose duration grows with the tokens of a batch."""
SWAPPED_IN_PER_S = float(8 << 20)
LEAST_SWAPPED_BYTES = 64 << 20
FAULTS_PER_S = 256.0
"""Thresholds from which swap is a loss: swapped memory that is never needed costs nothing."""
IDLE_CORES = 0.25
WAITING_SHARE = 0.8
"""Ranks wait if they use less than the first of a core, in phases that take more than the second of the time."""
WITH_COLLECTIVES = ("forward", "backward", "collectives")
SLOWED_TIMES = 2.0
"""Factor by which steps must take longer than before."""
NEARLY_SLOWED_TIMES = 1.5
"""The same for a rank whose lack of cores may slow the others: ranks slow down together, but not equally."""
FOR_CORES_SHARE = 0.5
"""Share of the added time from which a lack of cores is its cause."""
MOST_IN_LINE = 0.2
"""Share of the time: a rank that waits longer for cores gives no evidence on its network."""


def find_slow(
    ranks: Mapping[int, RankTimes], throttled_share: float | None = None, *, num_ranks: int | None = None
) -> list[Finding]:
    """Return the large losses of time in the newest steps; at most one finding of each kind.

    `num_ranks`: number of ranks of the run; those on other machines are unknown here.
    `throttled_share`: share of the kernel periods of the last window in which the cgroup had used up its CPU quota.
    """
    windows = _select_windows(ranks)
    if windows is None:
        return []
    if throttled_share is not None and throttled_share >= THROTTLED_SHARE:  # this causes all other slowness
        share = f"{throttled_share:.0%}"
        cause = f"the container has used up its CPU quota in {share} of the kernel's periods"
        return [Finding("SF306", cause, next(iter(windows.values())).as_evidence(throttled_periods=share))]
    losses = [
        _find_data_waits(windows),
        _find_communication(windows) if num_ranks in (None, len(windows)) else None,
        _find_garbage_collection(windows),
    ]
    slowed = None if any(losses) else _find_slowed(ranks, windows)
    return [finding for finding in (*losses, slowed, _find_padding(windows)) if finding is not None]


def find_swapping(swapped_in_per_s: float, swapped_bytes: int, faults_per_s: float) -> Finding | None:
    """Return a finding if the ranks' memory is read back from swap.

    `swapped_in_per_s`: bytes that the machine reads back from swap. `swapped_bytes`: bytes of the ranks in swap.
    `faults_per_s`: pages that the ranks waited for; without them the memory belongs to another program.
    """
    if swapped_in_per_s < SWAPPED_IN_PER_S or swapped_bytes < LEAST_SWAPPED_BYTES or faults_per_s < FAULTS_PER_S:
        return None
    return Finding(
        "SF309",
        f"the ranks' memory is read back from swap at {swapped_in_per_s / 2**20:.0f} MiB/s; "
        f"{swapped_bytes / 2**30:.1f} GiB of it are swapped out",
        {"read_back_mib_per_s": round(swapped_in_per_s / 2**20, 1), "in_swap_gib": round(swapped_bytes / 2**30, 2)},
    )


def has_own_cause(times: RankTimes) -> bool:
    """Return whether a rank's newest steps show why it is slow, even if they are too few for a finding yet."""
    newest = times.newest
    return newest.took_s > 0 and (
        newest.garbage_s >= GARBAGE_SHARE * newest.took_s or newest.share("data_wait") >= DATA_SHARE
    )


def find_idle_ranks(ranks: Mapping[int, RankTimes], busy_cores: Mapping[int, float | None]) -> Finding | None:
    """Return a finding if all ranks are in forward, backward and collectives, and all wait for the network.

    Valid for ranks on a CPU of which none is slower than the others: see `stragglers.find_straggler`.
    """
    windows = _select_windows(ranks)
    cores = [used for used in busy_cores.values() if used is not None and used < IDLE_CORES]
    if windows is None or len(windows) < 2 or len(cores) < len(busy_cores):
        return None
    share = min(window.share(*WITH_COLLECTIVES) for window in windows.values())
    if share < WAITING_SHARE:
        return None
    return Finding(
        "SF304",
        f"all ranks are in forward, backward and communication for {share:.0%} of the time and use {max(cores):.2f} "
        "cores at most: they wait for the network",
        next(iter(windows.values())).as_evidence(busiest_rank_cores=round(max(cores), 2)),
        confidence=0.7,
    )


def _select_windows(ranks: Mapping[int, RankTimes]) -> dict[int, Window] | None:
    """Return the window of each rank; None if there is no rank, or if one has too few steps."""
    windows = {rank: window for rank, times in ranks.items() if (window := times.window) is not None}
    return windows if windows and len(windows) == len(ranks) else None


def _find_data_waits(windows: Mapping[int, Window]) -> Finding | None:
    rank = max(windows, key=lambda number: windows[number].share("data_wait"))
    window, cause, evidence = windows[rank], f"rank {rank} waits for its data", {"rank": rank}
    if window.share("data_wait") < DATA_SHARE:
        window, cause, evidence = _take_slowest(windows), "ranks wait for their data in turn", {}
    share = window.share("data_wait") if window.steps else 0.0
    if share < DATA_SHARE or not window.has_regular_share("data_wait", DATA_SHARE):
        return None
    return Finding("SF302", f"{cause} in {share:.0%} of the time", window.as_evidence(**evidence))


def _find_communication(windows: Mapping[int, Window]) -> Finding | None:
    """Return a finding if every rank spends most of its time in collectives, so that none of them is the cause."""
    if len(windows) < 2 or not all(
        window.has_regular_share("collectives", COMMUNICATION_SHARE) and window.core_wait_share <= MOST_IN_LINE
        for window in windows.values()
    ):
        return None
    share = min(window.share("collectives") for window in windows.values())
    cause = f"all ranks spend at least {share:.0%} of the time in communication"
    return Finding("SF304", cause, next(iter(windows.values())).as_evidence())


def _find_garbage_collection(windows: Mapping[int, Window]) -> Finding | None:
    for rank, window in windows.items():
        share = window.garbage_s / window.took_s
        if share >= GARBAGE_SHARE:
            cause = f"Python's garbage collector takes {share:.0%} of the time of rank {rank}"
            return Finding("SF305", cause, window.as_evidence(rank=rank, garbage_s=round(window.garbage_s, 2)))
    slowest = _take_slowest(windows)
    share = slowest.garbage_s / slowest.took_s if slowest.steps else 0.0
    if share < GARBAGE_SHARE:
        return None
    cause = f"Python's garbage collector stops ranks at different steps, and the others wait: {share:.0%} of the time"
    by_rank = ", ".join(f"rank {rank}: {window.garbage_s:.2f}" for rank, window in windows.items())
    return Finding("SF305", cause, slowest.as_evidence(garbage_s_by_rank=by_rank))


def _take_slowest(windows: Mapping[int, Window]) -> Window:
    """Return the steps that all windows have, each with the longest time that a rank spent in each phase.

    Ranks wait for each other in each step, so short pauses of ranks add up if they are at different steps.
    """
    by_rank = [{step.step: step for step in window.steps} for window in windows.values()]
    slowest = []
    for number in sorted(set.intersection(*map(set, by_rank))):
        steps = [steps[number] for steps in by_rank]
        phases = {phase for step in steps for phase in step.by_phase}
        slowest.append(
            replace(
                steps[0],
                took_s=max(step.took_s for step in steps),
                by_phase={phase: max(step.by_phase.get(phase, 0.0) for step in steps) for phase in phases},
                garbage_s=max(step.garbage_s for step in steps),
            )
        )
    return Window(slowest)


def _find_padding(windows: Mapping[int, Window]) -> Finding | None:
    """Return a finding if padding takes a large share of the time in which the model computes."""
    for rank, window in windows.items():
        tokens = sum(step.tokens for step in window.steps)
        padding = sum(step.padding for step in window.steps)
        lost = padding / tokens * window.share(*OF_TOKENS) if tokens else 0.0
        if lost >= PADDING_SHARE:
            cause = f"{padding / tokens:.0%} of the tokens that rank {rank} computes are padding"
            evidence = window.as_evidence(rank=rank, tokens=round(tokens), padding=round(padding))
            return Finding("SF311", f"{cause}: up to {lost:.0%} of the time", evidence)
    return None


@dataclass(frozen=True)
class _Slowdown:
    """The newest steps of a rank, which take longer than its best ones."""

    rank: int
    newest: Window
    best: Window
    factor: float
    """Factor by which steps take longer, for the same number of tokens."""
    for_cores: float
    """Share of the added time in which the rank waited for a core."""


def _find_slowed(ranks: Mapping[int, RankTimes], windows: Mapping[int, Window]) -> Finding | None:
    """Return a finding if steps take much longer than before for as many tokens, and no other rule gives the cause.

    If ranks wait for cores, the finding names the rank that waits longest.
    """
    compared = (_compare_with_best(rank, ranks[rank], window) for rank, window in windows.items())
    slowdowns = [slowdown for slowdown in compared if slowdown is not None]
    slowed = next((slowdown for slowdown in slowdowns if slowdown.factor >= SLOWED_TIMES), None)
    if slowed is None:
        return None
    crowded = max(slowdowns, key=lambda slowdown: slowdown.for_cores)
    is_crowded = crowded.for_cores >= FOR_CORES_SHARE
    slowed = crowded if is_crowded else slowed
    newest, best = slowed.newest, slowed.best
    longer = (
        f"steps take {slowed.factor:.1f} times as long for the same number of tokens as in steps "
        f"{best.steps[0].step} to {best.steps[-1].step}"
    )
    before_s = round(best.step_s, 3)
    if is_crowded:
        share = f"{newest.core_wait_share:.0%}"
        return Finding(
            "SF313",
            f"{longer}: rank {slowed.rank} is ready but gets no core in {share} of the time",
            newest.as_evidence(rank=slowed.rank, in_line=share, step_time_before_s=before_s),
            confidence=0.9,
        )
    phase = max(
        newest.steps[-1].by_phase,
        key=lambda name: newest.phase_s(name) / len(newest.steps) - best.phase_s(name) / len(best.steps),
    )
    return Finding(
        "SF301",
        f"{longer}; most of it was added in {phase}",
        newest.as_evidence(rank=slowed.rank, phase=phase, step_time_before_s=before_s),
        confidence=0.7,
    )


def _compare_with_best(rank: int, times: RankTimes, newest: Window) -> _Slowdown | None:
    """Compare a rank's newest steps with its best; return None if they take hardly longer or are not comparable."""
    before = [step for step in times.steps if step.step < newest.steps[0].step]
    blocks = [
        Window(before[first : first + WINDOW_STEPS]) for first in range(0, len(before) - WINDOW_STEPS + 1, WINDOW_STEPS)
    ]
    # Without the number of tokens, steps are not comparable.
    if not blocks or not all(step.tokens for step in (*before, *newest.steps)):
        return None
    best = min(blocks, key=_measure_pace_s)
    factor = _measure_pace_s(newest) / _measure_pace_s(best)
    # Steps with fewer tokens may take longer for each token, but less time.
    if factor < NEARLY_SLOWED_TIMES or newest.step_s <= best.step_s:
        return None
    added_in_line_s = _measure_core_wait_s(newest) - _measure_core_wait_s(best)
    return _Slowdown(rank, newest, best, factor, added_in_line_s / (_measure_pace_s(newest) - _measure_pace_s(best)))


def _measure_pace_s(window: Window) -> float:
    """Return the median seconds per token of steps."""
    return median(step.took_s / step.tokens for step in window.steps)


def _measure_core_wait_s(window: Window) -> float:
    """Return the median seconds per token for which the rank waits for a core."""
    return median(step.in_line_s / step.tokens for step in window.steps)
