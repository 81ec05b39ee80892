"""Rules for causes of lost time, from the ranks' phases and the times at which they enter collectives. Pure.

A finding needs a window of steps that is long enough to matter, and a loss that is large in shares and in seconds:
runs of a few seconds have no findings.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from surefoot.diagnostics.monitor.event_log import Entry, newest_starts
from surefoot.diagnostics.monitor.flight_recorder import MEANINGS, TRAVELLING, FlightRecord
from surefoot.findings import CATALOGUE, Finding

WARMUP_STEPS = 5
"""Number of first steps without information: compilers and caches warm up."""
WINDOW_STEPS = 20
WINDOW_S = 20.0
"""Fewest steps, and shortest duration, of a window."""
KEPT_STEPS = 2000
DATA_SHARE = 0.25
COMMUNICATION_SHARE = 0.5
BEHIND_SHARE = 0.2
IDLE_BEHIND_SHARE = 0.5
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
MOST_OF = 0.8
"""Share of a window's steps that must be slow: occasional slowness is no finding."""
LEAST_COLLECTIVES = 40
MOST_AT_ONCE = 0.2
"""Largest share of a straggler's lost time in a single collective: such a loss is due to a save or an evaluation."""
STRAGGLER_WINDOW_S = 5.0
UNEVEN_LOAD = 1.25
"""Load of the rank with the busiest experts from which it may be the reason why others wait."""
SLOWED_TIMES = 2.0
"""Factor by which steps must take longer than before."""
NEARLY_SLOWED_TIMES = 1.5
"""The same for a rank whose lack of cores may slow the others: ranks slow down together, but not equally."""
FOR_CORES_SHARE = 0.5
"""Share of the lost time from which a lack of cores is its cause."""
MOST_IN_LINE = 0.2
"""Share of the time: a rank that waits longer for cores gives no evidence on its network."""


OF_SHARDED_WEIGHTS = (MEANINGS["mesh_fsdp"], MEANINGS["mesh_dp_replicate"])


@dataclass(frozen=True)
class StepTimes:
    """The split of one rank's time in one step, in seconds."""

    step: int
    ended_s: float
    """Seconds since 1970."""
    took_s: float
    by_phase: Mapping[str, float]
    garbage_s: float
    tokens: float
    """Number of tokens in this rank's part of the batch, including padding."""
    padding: float = 0.0
    in_line_s: float = 0.0
    """Seconds in which the training thread was ready and waited for a core."""

    def of(self, phase: str) -> float:
        return self.by_phase.get(phase, 0.0)


@dataclass
class RankTimes:
    """The steps of one start of one rank, collected from its events."""

    warmup_steps: int = WARMUP_STEPS
    """Number of first steps that are omitted."""
    steps: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _open: list[tuple[str, float]] = field(default_factory=list)
    _by_phase: dict[str, float] = field(default_factory=dict)
    _tokens: float = 0.0
    _padding: float = 0.0
    _in_line_s: float = 0.0
    _num_steps: int = 0

    def add(self, kind: str, phase: str, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add one event. Call it in the order of events."""
        if kind == "phase began":
            self._open.append((phase, time_s))
        elif kind == "phase ended" and self._open:
            name, began_s = self._open.pop()
            if not self._open:  # a nested phase counts for the outer one
                self._by_phase[name] = self._by_phase.get(name, 0.0) + time_s - began_s
        elif kind == "batch":
            self._tokens, self._padding = values["tokens"], values.get("padding", 0.0)
        elif kind == "learning rate":  # this event comes before its step
            self._in_line_s = values.get("in_line_s", 0.0)
        elif kind == "step":
            self._num_steps += 1
            if self._num_steps > self.warmup_steps:
                by_phase, batch = dict(self._by_phase), (self._tokens, self._padding)
                took_s, garbage_s = values["step_time_s"], values["garbage_s"]
                self.steps.append(StepTimes(step, time_s, took_s, by_phase, garbage_s, *batch, self._in_line_s))
            self._by_phase.clear()


def find_slow(
    ranks: Mapping[int, RankTimes], throttled_share: float | None = None, *, num_ranks: int | None = None
) -> list[Finding]:
    """Return the large losses of time in the newest steps; at most one finding of each kind.

    `num_ranks`: number of ranks of the run; those on other machines are unknown here.
    `throttled_share`: share of the kernel periods of the last window in which the cgroup had used up its CPU quota.
    """
    windows = {rank: _select_window(times.steps) for rank, times in ranks.items()}
    if not windows or not all(windows.values()):
        return []
    throttled = list(_find_throttled(windows, throttled_share))
    if throttled:  # this causes all other slowness
        return throttled
    findings = [
        *_find_data_waits(windows),
        *(_find_communication(windows) if num_ranks in (None, len(windows)) else ()),
        *_find_garbage_collection(windows),
    ]
    return [*(findings or _find_slowed(ranks, windows)), *_find_padding(windows)]


def find_swapping(swapped_in_per_s: float, swapped_bytes: int, faults_per_s: float) -> Finding | None:
    """Return a finding if the ranks' memory is read back from swap.

    `swapped_in_per_s`: bytes that the machine reads back from swap. `swapped_bytes`: bytes of the ranks in swap.
    `faults_per_s`: pages that the ranks waited for; without them the memory belongs to another program.
    """
    if swapped_in_per_s < SWAPPED_IN_PER_S or swapped_bytes < LEAST_SWAPPED_BYTES or faults_per_s < FAULTS_PER_S:
        return None
    return Finding(
        "SF309",
        f"memory of the ranks is read back from swap: {swapped_in_per_s / 2**20:.0f} MiB/s, while "
        f"{swapped_bytes / 2**30:.1f} GiB of theirs lie there",
        {"read_back_mib_per_s": round(swapped_in_per_s / 2**20, 1), "in_swap_gib": round(swapped_bytes / 2**30, 2)},
        CATALOGUE["SF309"].fix,
    )


def find_slow_in(entries: Sequence[Entry]) -> list[Finding]:
    """Return the findings of `find_slow` at the end of a complete history, for the newest start of each rank."""
    ranks: dict[int, RankTimes] = {}
    for entry in newest_starts(entries):
        times = ranks.setdefault(entry.rank, RankTimes())
        times.add(entry.kind, entry.phase, entry.step, entry.time_s, entry.values)
    return find_slow(ranks)


def share_of_steps(times: RankTimes, phases: Sequence[str]) -> float | None:
    """Return the share of some phases in the newest steps' time; None if there are too few steps."""
    window = _select_window(times.steps)
    return sum(_measure_share(window, phase) for phase in phases) if window else None


def _select_window(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """Return the newest steps that together are long enough; empty if there are too few."""
    took_s, window = 0.0, []
    for step in reversed(steps):
        window.append(step)
        took_s += step.took_s
        if len(window) >= WINDOW_STEPS and took_s >= WINDOW_S:
            return window[::-1]
    return []


def _measure_share(window: Sequence[StepTimes], phase: str) -> float:
    """Return the share of a phase in the window's time."""
    return sum(step.of(phase) for step in window) / sum(step.took_s for step in window)


def _has_regular_share(window: Sequence[StepTimes], phase: str, share: float) -> bool:
    """Return whether most steps lose this share of their time, rather than a few of them much more."""
    return sum(step.of(phase) >= share * step.took_s for step in window) >= MOST_OF * len(window)


def _collect_evidence(window: Sequence[StepTimes], **values: object) -> dict[str, object]:
    shares = sorted(((_measure_share(window, name), name) for name in window[-1].by_phase), reverse=True)
    return {
        "steps": f"{window[0].step} to {window[-1].step}",
        "step_time_s": round(median(step.took_s for step in window), 3),
        **values,
        "time_by_phase": ", ".join(f"{name} {share:.0%}" for share, name in shares[:5] if share >= 0.01),
    }


def _find_data_waits(windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    rank = max(windows, key=lambda number: _measure_share(windows[number], "data_wait"))
    window = windows[rank]
    share = _measure_share(window, "data_wait")
    if share < DATA_SHARE or not _has_regular_share(window, "data_wait", DATA_SHARE):
        return
    yield Finding(
        "SF302",
        f"rank {rank} waits for its data in {share:.0%} of the time",
        _collect_evidence(window, rank=rank),
        "Look at the storage of the data and of the cache; raise dataset_num_proc while they are being prepared.",
    )


def find_straggler(
    flights: Mapping[int, FlightRecord], *, are_idle: bool = False, in_line: Mapping[int, float] | None = None
) -> Finding | None:
    """Return a finding on the rank that the others wait for again and again, from the times of shared collectives.

    The ranks must share a clock, so they must be on one machine. `are_idle`: no rank computes; then a slow network,
    which also makes one rank the last, must be excluded. `in_line`: rank -> share of its time in which it waited for a
    core; if that is why it is late, the others must lose half of the time, and SF313 is the finding.
    """
    comparison = _compare_arrivals(flights)
    if comparison is None:
        return None
    shared, took_s, waits = comparison
    waits_s = {rank: _merge_spans([span for _, span in spans]) for rank, spans in waits.items()}
    rank = max(waits_s, key=lambda number: sum(waits_s[number]))
    lost_s = sum(waits_s[rank])
    is_regular = max(waits_s[rank], default=0.0) < MOST_AT_ONCE * lost_s
    is_dominant = lost_s >= MOST_OF * sum(sum(waits) for waits in waits_s.values())
    rest = [share for other, share in (in_line or {}).items() if other != rank]
    more_in_line = in_line[rank] - median(rest) if in_line and rank in in_line and rest else 0.0
    is_in_line = took_s > 0 and more_in_line >= FOR_CORES_SHARE * lost_s / took_s
    least_share = IDLE_BEHIND_SHARE if are_idle or is_in_line else BEHIND_SHARE
    if took_s < STRAGGLER_WINDOW_S or lost_s < least_share * took_s or not (is_regular and is_dominant):
        return None
    if is_in_line and in_line is not None:
        return Finding(
            "SF313",
            f"rank {rank} is ready and gets no core in {in_line[rank]:.0%} of the time, and the other ranks wait for "
            f"that rank in {lost_s / took_s:.0%}",
            {"rank": rank, "in_line": f"{in_line[rank]:.0%}", "collectives": shared, "seconds": round(took_s, 1)},
            CATALOGUE["SF313"].fix,
            confidence=0.9,
        )
    return Finding(
        "SF303",
        f"rank {rank} is slower than the others again and again: they wait for it in {lost_s / took_s:.0%} of the time",
        {
            "rank": rank,
            "collectives": shared,
            "seconds": round(took_s, 1),
            "waited_s_by_last_rank": ", ".join(
                f"rank {other}: {sum(seconds):.1f}" for other, seconds in waits_s.items()
            ),
        },
        "Look at what else runs on its machine or device, at its clocks and temperature, and at its part of the data.",
        confidence=0.9,
    )


def share_in_line(times: RankTimes) -> float:
    """Return the share of the newest steps' time in which the rank was ready and waited for a core."""
    return _measure_core_waits(list(times.steps)[-WINDOW_STEPS:])


def _measure_core_waits(steps: Sequence[StepTimes]) -> float:
    took_s = sum(step.took_s for step in steps)
    return sum(step.in_line_s for step in steps) / took_s if took_s > 0 else 0.0


def has_own_cause(times: RankTimes) -> bool:
    """Return whether a rank's newest steps show why it is slow, even if they are too few for a finding yet."""
    newest = list(times.steps)[-WINDOW_STEPS:]
    took_s, garbage_s = sum(step.took_s for step in newest), sum(step.garbage_s for step in newest)
    return took_s > 0 and (garbage_s >= GARBAGE_SHARE * took_s or _measure_share(newest, "data_wait") >= DATA_SHARE)


def find_uneven_experts(flights: Mapping[int, FlightRecord], load: float) -> Finding | None:
    """Return a finding if ranks wait for others whose experts got more rows.

    `load`: rows of the busiest rank relative to the mean rank.
    """
    comparison = _compare_arrivals(flights) if load >= UNEVEN_LOAD else None
    if comparison is None:
        return None
    _, took_s, waits = comparison
    calls = {key: call for flight in flights.values() for key, call in flight.over.items()}
    # With gloo the same call reduces gradients.
    others = {
        group
        for flight in flights.values()
        for group, traffic in flight.meanings.items()
        if traffic in OF_SHARDED_WEIGHTS
    }
    spans = [
        span
        for of_rank in waits.values()
        for key, span in of_rank
        if TRAVELLING in calls.get(key, "") and key[0] not in others
    ]
    lost_s = sum(_merge_spans(spans))
    if took_s < STRAGGLER_WINDOW_S or lost_s < BEHIND_SHARE * took_s or len(spans) < LEAST_COLLECTIVES:
        return None
    return Finding(
        "SF312",
        f"ranks wait for those with busier experts in {lost_s / took_s:.0%} of the time: the busiest gets {load:.1f} "
        "times as many rows as the mean one",
        {"load": round(load, 2), "waited_s": round(lost_s, 1), "seconds": round(took_s, 1), "exchanges": len(spans)},
        CATALOGUE["SF312"].fix,
        confidence=0.8,
    )


Key = tuple[str, int]
Span = tuple[float, float]


def _compare_arrivals(
    flights: Mapping[int, FlightRecord],
) -> tuple[int, float, dict[int, list[tuple[Key, Span]]]] | None:
    """Return (number of shared collectives, seconds they span, rank -> the collectives that it entered last).

    Each of these is (key, span from the others' median arrival to its own). None if there are too few.
    """
    if len(flights) < 2:
        return None
    shared = set.intersection(*(set(flight.called_s) for flight in flights.values()))
    if len(shared) < LEAST_COLLECTIVES:
        return None
    waits: dict[int, list[tuple[Key, Span]]] = {rank: [] for rank in flights}
    for key in shared:
        arrivals = {rank: flight.called_s[key] for rank, flight in flights.items()}
        last = max(arrivals, key=lambda rank: arrivals[rank])
        waits[last].append((key, (median(time_s for rank, time_s in arrivals.items() if rank != last), arrivals[last])))
    times = [flight.called_s[key] for flight in flights.values() for key in shared]
    return len(shared), max(times) - min(times), waits


def _merge_spans(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the lengths of time spans, with overlapping ones merged: collectives may be called at the same time."""
    merged: list[list[float]] = []
    for began, ended in sorted(spans):
        if merged and began <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], ended)
        else:
            merged.append([began, ended])
    return [ended - began for began, ended in merged]


def _find_communication(windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    """Yield a finding if every rank spends most of its time in collectives, so that none of them is the cause."""
    if len(windows) < 2 or not all(
        _has_regular_share(window, "collectives", COMMUNICATION_SHARE) and _measure_core_waits(window) <= MOST_IN_LINE
        for window in windows.values()
    ):
        return
    share = min(_measure_share(window, "collectives") for window in windows.values())
    yield Finding(
        "SF304",
        f"all ranks spend at least {share:.0%} of the time in communication",
        _collect_evidence(next(iter(windows.values()))),
        "Raise gradient_accumulation_steps or the batch, use fewer ranks or a lower zero_stage, and check the network "
        "interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
    )


def find_idle_ranks(ranks: Mapping[int, RankTimes], busy_cores: Mapping[int, float | None]) -> Finding | None:
    """Return a finding if all ranks are in forward, backward and collectives, and all wait for the network.

    Valid for ranks on a CPU of which none is slower than the others: see `find_straggler`.
    """
    windows = {rank: _select_window(times.steps) for rank, times in ranks.items()}
    is_idle = all(cores is not None and cores < IDLE_CORES for cores in busy_cores.values())
    if len(windows) < 2 or not all(windows.values()) or not is_idle:
        return None
    shares = [sum(_measure_share(window, phase) for phase in WITH_COLLECTIVES) for window in windows.values()]
    if min(shares) < WAITING_SHARE:
        return None
    cores = max(cores for cores in busy_cores.values() if cores is not None)
    return Finding(
        "SF304",
        f"all ranks are in forward, backward and communication for {min(shares):.0%} of the time and use {cores:.2f} "
        "cores at most: they wait for what the network carries",
        _collect_evidence(next(iter(windows.values())), busiest_rank_cores=round(cores, 2)),
        CATALOGUE["SF304"].fix,
        confidence=0.7,
    )


def _find_garbage_collection(windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    for rank, window in windows.items():
        share = sum(step.garbage_s for step in window) / sum(step.took_s for step in window)
        if share >= GARBAGE_SHARE:
            yield Finding(
                "SF305",
                f"Python's garbage collector takes {share:.0%} of the time of rank {rank}",
                _collect_evidence(window, rank=rank, garbage_s=round(sum(step.garbage_s for step in window), 2)),
                "Something makes many Python objects in each step, or keeps millions alive: call gc.freeze() after "
                "what is kept was made, or raise gc.set_threshold().",
            )
            return


def _find_padding(windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    """Yield a finding if padding takes a large share of the time in which the model computes."""
    for rank, window in windows.items():
        tokens, padding = sum(step.tokens for step in window), sum(step.padding for step in window)
        computing = sum(_measure_share(window, phase) for phase in OF_TOKENS)
        if not tokens or padding / tokens * computing < PADDING_SHARE:
            continue
        yield Finding(
            "SF311",
            f"{padding / tokens:.0%} of the tokens that rank {rank} computes are padding: up to "
            f"{padding / tokens * computing:.0%} of the time",
            _collect_evidence(window, rank=rank, tokens=round(tokens), padding=round(padding)),
            CATALOGUE["SF311"].fix,
        )
        return


def _find_throttled(windows: Mapping[int, Sequence[StepTimes]], share: float | None) -> Iterator[Finding]:
    if share is None or share < THROTTLED_SHARE:
        return
    yield Finding(
        "SF306",
        f"the container may not use the CPUs it wants: in {share:.0%} of the kernel's periods it had to wait",
        _collect_evidence(next(iter(windows.values())), throttled_periods=f"{share:.0%}"),
        "Give the container more CPUs (limits.cpu, --cpus, --cpus-per-task), or start fewer threads: OMP_NUM_THREADS.",
    )


@dataclass(frozen=True)
class _Slower:
    """A rank whose steps take longer than before."""

    rank: int
    window: Sequence[StepTimes]
    best: Sequence[StepTimes]
    times: float
    """Factor by which steps take longer, for the same number of tokens."""
    for_cores: float
    """Share of the added time in which the rank waited for a core."""


def _find_slowed(ranks: Mapping[int, RankTimes], windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    """Yield a finding if steps take much longer than before for as many tokens, and no other rule gives the cause.

    If ranks wait for cores, the finding names the rank that waits longest.
    """
    slower = [
        slowed
        for slowed in (_compare_with_best(rank, ranks[rank], window) for rank, window in windows.items())
        if slowed
    ]
    if not any(slowed.times >= SLOWED_TIMES for slowed in slower):
        return
    slowed = max(slower, key=lambda rank: rank.for_cores)
    is_crowded = slowed.for_cores >= FOR_CORES_SHARE
    slowed = slowed if is_crowded else next(rank for rank in slower if rank.times >= SLOWED_TIMES)
    longer = (
        f"steps take {slowed.times:.1f} times as long for the same number of tokens as in steps "
        f"{slowed.best[0].step} to {slowed.best[-1].step}"
    )
    before_s = round(_measure_typical_s(slowed.best), 3)
    if is_crowded:
        share = f"{_measure_core_waits(slowed.window):.0%}"
        yield Finding(
            "SF313",
            f"{longer}: rank {slowed.rank} is ready and gets no core in {share} of the time",
            _collect_evidence(slowed.window, rank=slowed.rank, in_line=share, step_time_before_s=before_s),
            CATALOGUE["SF313"].fix,
            confidence=0.9,
        )
        return
    grown = {
        name: _measure_phase_s(slowed.window, name) - _measure_phase_s(slowed.best, name)
        for name in slowed.window[-1].by_phase
    }
    phase = max(grown, key=lambda name: grown[name])
    yield Finding(
        "SF301",
        f"{longer}; most of it was added in {phase}",
        _collect_evidence(slowed.window, rank=slowed.rank, phase=phase, step_time_before_s=before_s),
        "Look at what else runs on this machine, at its clocks and temperature, and at what that phase does more.",
        confidence=0.7,
    )


def _compare_with_best(rank: int, times: RankTimes, window: Sequence[StepTimes]) -> _Slower | None:
    """Compare a rank's newest steps with its best; return None if they take hardly longer or are not comparable."""
    before = [step for step in times.steps if step.step < window[0].step]
    earlier = [before[first : first + WINDOW_STEPS] for first in range(0, len(before), WINDOW_STEPS)]
    full_blocks = [block for block in earlier if len(block) == WINDOW_STEPS]
    # Without the number of tokens, steps are not comparable.
    if not full_blocks or not all(step.tokens for step in (*before, *window)):
        return None
    best = min(full_blocks, key=_measure_pace_s)
    factor = _measure_pace_s(window) / _measure_pace_s(best)
    # These steps have fewer tokens and take less time.
    if factor < NEARLY_SLOWED_TIMES or _measure_typical_s(window) <= _measure_typical_s(best):
        return None
    in_line_s = _measure_core_wait_pace_s(window) - _measure_core_wait_pace_s(best)
    return _Slower(rank, window, best, factor, in_line_s / (_measure_pace_s(window) - _measure_pace_s(best)))


def _measure_pace_s(steps: Sequence[StepTimes]) -> float:
    """Return the median seconds per token of steps."""
    return median(step.took_s / step.tokens for step in steps)


def _measure_core_wait_pace_s(steps: Sequence[StepTimes]) -> float:
    """Return the median seconds per token for which the rank waits for a core."""
    return median(step.in_line_s / step.tokens for step in steps)


def _measure_typical_s(steps: Sequence[StepTimes]) -> float:
    return median(step.took_s for step in steps)


def _measure_phase_s(steps: Sequence[StepTimes], phase: str) -> float:
    return sum(step.of(phase) for step in steps) / len(steps)
