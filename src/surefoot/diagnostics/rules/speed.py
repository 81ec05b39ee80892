"""What a run loses time with: from what its ranks wrote down of their phases, and when they came to meet. Pure.

A finding needs a window of steps that is long enough to matter, and a loss that is large in shares and in seconds:
runs of a few seconds have none.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from surefoot.diagnostics.monitor.event_log import Entry, newest_starts
from surefoot.diagnostics.monitor.flight_recorder import MEANINGS, TRAVELLING, FlightRecord
from surefoot.findings import CATALOGUE, Finding

WARMUP_STEPS = 5
"""First steps that say nothing: compilers and caches warm up."""
WINDOW_STEPS = 20
WINDOW_S = 20.0
"""A window has at least so many steps and lasts at least so long."""
KEPT_STEPS = 2000
DATA_SHARE = 0.25
COMMUNICATION_SHARE = 0.5
BEHIND_SHARE = 0.2
IDLE_BEHIND_SHARE = 0.5
GARBAGE_SHARE = 0.1
PADDING_SHARE = 0.25
THROTTLED_SHARE = 0.25
"""Of a window, from which on a loss is a finding."""
OF_TOKENS = ("forward", "backward", "forward and backward")
"""Phases that take longer the more tokens a batch has."""
SWAPPED_IN_PER_S = float(8 << 20)
LEAST_SWAPPED_BYTES = 64 << 20
FAULTS_PER_S = 256.0
"""From which on swap is a loss: what was put there and is never needed costs nothing."""
IDLE_CORES = 0.25
WAITING_SHARE = 0.8
"""Ranks that use so little of a core, in phases that take so much of the time, wait."""
WITH_COLLECTIVES = ("forward", "backward", "communicate")
MOST_OF = 0.8
"""Of a window's steps: what is slow only now and then is none of these."""
LEAST_COLLECTIVES = 40
MOST_AT_ONCE = 0.2
"""Of the time that is lost to one rank: what is lost in one collective, a save or an evaluation, is no straggler's."""
STRAGGLER_WINDOW_S = 5.0
UNEVEN_LOAD = 1.25
"""Of the rank whose experts are busiest, from which on they may be why others wait."""
SLOWED_TIMES = 2.0
"""How many times longer than before steps must take."""
NEARLY_SLOWED_TIMES = 1.5
"""The same of a rank whose want of cores may be why others reach it: ranks that meet are slow together, not equally."""
FOR_CORES_SHARE = 0.5
"""Of the time that is lost, from which on it is for want of a core."""
MOST_IN_LINE = 0.2
"""Of the time: a rank that waits longer for cores says nothing of its network."""


OF_SHARDED_WEIGHTS = (MEANINGS["mesh_fsdp"], MEANINGS["mesh_dp_replicate"])


@dataclass(frozen=True)
class StepTimes:
    """Where one rank's time of one step went, in seconds."""

    step: int
    ended_s: float
    """Since 1970."""
    took_s: float
    by_phase: Mapping[str, float]
    garbage_s: float
    tokens: float
    """Of this rank's part of the batch, with the padding."""
    padding: float = 0.0
    in_line_s: float = 0.0
    """For which the thread that trains was ready and waited for a core."""

    def of(self, phase: str) -> float:
        return self.by_phase.get(phase, 0.0)


@dataclass
class RankTimes:
    """The steps of one start of one rank, gathered from what it says."""

    warmup_steps: int = WARMUP_STEPS
    """First steps that are left out."""
    steps: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _open: list[tuple[str, float]] = field(default_factory=list)
    _by_phase: dict[str, float] = field(default_factory=dict)
    _tokens: float = 0.0
    _padding: float = 0.0
    _in_line_s: float = 0.0
    _seen: int = 0

    def add(self, kind: str, phase: str, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """What happened, in its order."""
        if kind == "phase began":
            self._open.append((phase, time_s))
        elif kind == "phase ended" and self._open:
            name, began_s = self._open.pop()
            if not self._open:  # phases inside others are theirs
                self._by_phase[name] = self._by_phase.get(name, 0.0) + time_s - began_s
        elif kind == "batch":
            self._tokens, self._padding = values["tokens"], values.get("padding", 0.0)
        elif kind == "learning rate":  # before its step
            self._in_line_s = values.get("in_line_s", 0.0)
        elif kind == "step":
            self._seen += 1
            if self._seen > self.warmup_steps:
                by_phase, batch = dict(self._by_phase), (self._tokens, self._padding)
                took_s, garbage_s = values["step_time_s"], values["garbage_s"]
                self.steps.append(StepTimes(step, time_s, took_s, by_phase, garbage_s, *batch, self._in_line_s))
            self._by_phase.clear()


def find_slow(
    ranks: Mapping[int, RankTimes], throttled_share: float | None = None, *, num_ranks: int | None = None
) -> list[Finding]:
    """What costs much of the newest steps; at most one finding of each kind.

    `num_ranks`: of the run, where some may be on other machines; of these nothing is known.
    `throttled_share`: of the kernel's periods of the last window, those in which the cgroup had used up its share.
    """
    windows = {rank: _window(times.steps) for rank, times in ranks.items()}
    if not windows or not all(windows.values()):
        return []
    throttled = list(_throttled(windows, throttled_share))
    if throttled:  # whatever else is slow is slow because of it
        return throttled
    found = [
        *_waits_for_data(windows),
        *(_communicates(windows) if num_ranks in (None, len(windows)) else ()),
        *_collects_garbage(windows),
    ]
    return [*(found or _slowed(ranks, windows)), *_pads(windows)]


def find_swapping(swapped_in_per_s: float, swapped_bytes: int, faults_per_s: float) -> Finding | None:
    """`swapped_in_per_s`: bytes the machine reads back from swap; `swapped_bytes`: of the ranks, that lie there.

    `faults_per_s`: pages that the ranks waited for: without them it is another program's memory that is read.
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
    """The same from a whole history, at its end; of the newest start of each rank."""
    ranks: dict[int, RankTimes] = {}
    for entry in newest_starts(entries):
        times = ranks.setdefault(entry.rank, RankTimes())
        times.add(entry.kind, entry.phase, entry.step, entry.time_s, entry.values)
    return find_slow(ranks)


def share_of_steps(times: RankTimes, phases: Sequence[str]) -> float | None:
    """Of the newest steps' time, that of some phases; None where there are too few steps."""
    window = _window(times.steps)
    return sum(_share(window, phase) for phase in phases) if window else None


def _window(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """The newest steps that together are long enough; none where there are too few."""
    took_s, window = 0.0, []
    for one in reversed(steps):
        window.append(one)
        took_s += one.took_s
        if len(window) >= WINDOW_STEPS and took_s >= WINDOW_S:
            return window[::-1]
    return []


def _share(window: Sequence[StepTimes], phase: str) -> float:
    """Of the window's time."""
    return sum(one.of(phase) for one in window) / sum(one.took_s for one in window)


def _is_usual(window: Sequence[StepTimes], phase: str, share: float) -> bool:
    """Whether most steps lose so much of their time, not a few much more."""
    return sum(one.of(phase) >= share * one.took_s for one in window) >= MOST_OF * len(window)


def _seen(window: Sequence[StepTimes], **more: object) -> dict[str, object]:
    shares = sorted(((_share(window, name), name) for name in window[-1].by_phase), reverse=True)
    return {
        "steps": f"{window[0].step} to {window[-1].step}",
        "step_time_s": round(median(one.took_s for one in window), 3),
        **more,
        "time_by_phase": ", ".join(f"{name} {share:.0%}" for share, name in shares[:5] if share >= 0.01),
    }


def _waits_for_data(windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    rank = max(windows, key=lambda number: _share(windows[number], "wait for data"))
    window = windows[rank]
    share = _share(window, "wait for data")
    if share < DATA_SHARE or not _is_usual(window, "wait for data", DATA_SHARE):
        return
    yield Finding(
        "SF302",
        f"rank {rank} waits for its data in {share:.0%} of the time",
        _seen(window, rank=rank),
        "Look at the storage of the data and of the cache; raise dataset_num_proc while they are being prepared.",
    )


def find_straggler(
    flights: Mapping[int, FlightRecord], *, are_idle: bool = False, in_line: Mapping[int, float] | None = None
) -> Finding | None:
    """The rank for which the others wait again and again, from when each asked for the collectives they share.

    `are_idle`: no rank computes; then a slow network, which lets one of them come last, too, must be told from it. The
    clocks of the ranks must be one: those of one machine. `in_line`: of each rank's time, that in which it waited for
    a core; where that is why it is late, others must lose half of the time, and SF313 is the finding.
    """
    met = _meetings(flights)
    if met is None:
        return None
    shared, took_s, waits = met
    waits_s = {rank: _together([span for _, span in spans]) for rank, spans in waits.items()}
    rank = max(waits_s, key=lambda number: sum(waits_s[number]))
    lost_s = sum(waits_s[rank])
    is_regular = max(waits_s[rank], default=0.0) < MOST_AT_ONCE * lost_s
    is_always_it = lost_s >= MOST_OF * sum(sum(waits) for waits in waits_s.values())
    rest = [share for one, share in (in_line or {}).items() if one != rank]
    more_in_line = in_line[rank] - median(rest) if in_line and rank in in_line and rest else 0.0
    is_in_line = took_s > 0 and more_in_line >= FOR_CORES_SHARE * lost_s / took_s
    least_share = IDLE_BEHIND_SHARE if are_idle or is_in_line else BEHIND_SHARE
    if took_s < STRAGGLER_WINDOW_S or lost_s < least_share * took_s or not (is_regular and is_always_it):
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
            "waited_s_by_last_rank": ", ".join(f"rank {one}: {sum(seconds):.1f}" for one, seconds in waits_s.items()),
        },
        "Look at what else runs on its machine or device, at its clocks and temperature, and at its part of the data.",
        confidence=0.9,
    )


def share_in_line(times: RankTimes) -> float:
    """Of the newest steps' time, that in which the rank was ready and waited for a core."""
    return _in_line(list(times.steps)[-WINDOW_STEPS:])


def _in_line(steps: Sequence[StepTimes]) -> float:
    took_s = sum(one.took_s for one in steps)
    return sum(one.in_line_s for one in steps) / took_s if took_s > 0 else 0.0


def has_own_cause(times: RankTimes) -> bool:
    """Whether a rank's newest steps show why it is slow, though they are too few for a finding yet."""
    newest = list(times.steps)[-WINDOW_STEPS:]
    took_s, garbage_s = sum(one.took_s for one in newest), sum(one.garbage_s for one in newest)
    return took_s > 0 and (garbage_s >= GARBAGE_SHARE * took_s or _share(newest, "wait for data") >= DATA_SHARE)


def find_uneven_experts(flights: Mapping[int, FlightRecord], load: float) -> Finding | None:
    """Ranks that wait for those whose experts got more rows. `load`: of the busiest rank over the mean one's."""
    met = _meetings(flights) if load >= UNEVEN_LOAD else None
    if met is None:
        return None
    _, took_s, waits = met
    calls = {one: call for flight in flights.values() for one, call in flight.over.items()}
    # With gloo gradients are summed by the same call.
    others = {
        group for flight in flights.values() for group, what in flight.meanings.items() if what in OF_SHARDED_WEIGHTS
    }
    spans = [
        span
        for of_rank in waits.values()
        for one, span in of_rank
        if TRAVELLING in calls.get(one, "") and one[0] not in others
    ]
    lost_s = sum(_together(spans))
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


def _meetings(flights: Mapping[int, FlightRecord]) -> tuple[int, float, dict[int, list[tuple[Key, Span]]]] | None:
    """(collectives of all ranks, seconds they span, rank -> those it came last to, from the others' coming to its own);
    None where there are too few.
    """
    if len(flights) < 2:
        return None
    shared = set.intersection(*(set(flight.asked) for flight in flights.values()))
    if len(shared) < LEAST_COLLECTIVES:
        return None
    waits: dict[int, list[tuple[Key, Span]]] = {rank: [] for rank in flights}
    for one in shared:
        asked = {rank: flight.asked[one] for rank, flight in flights.items()}
        last = max(asked, key=lambda rank: asked[rank])
        waits[last].append((one, (median(when for rank, when in asked.items() if rank != last), asked[last])))
    times = [flight.asked[one] for flight in flights.values() for one in shared]
    return len(shared), max(times) - min(times), waits


def _together(spans: Sequence[tuple[float, float]]) -> list[float]:
    """The lengths of spans of time, those that overlap as one: collectives may be asked for at once."""
    merged: list[list[float]] = []
    for began, ended in sorted(spans):
        if merged and began <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], ended)
        else:
            merged.append([began, ended])
    return [ended - began for began, ended in merged]


def _communicates(windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    """Every rank spends most of its time at the meeting point, so none of them is the cause."""
    if len(windows) < 2 or not all(
        _is_usual(window, "communicate", COMMUNICATION_SHARE) and _in_line(window) <= MOST_IN_LINE
        for window in windows.values()
    ):
        return
    share = min(_share(window, "communicate") for window in windows.values())
    yield Finding(
        "SF304",
        f"all ranks spend at least {share:.0%} of the time in communication",
        _seen(next(iter(windows.values()))),
        "Raise gradient_accumulation_steps or the batch, use fewer ranks or a lower zero_stage, and check the network "
        "interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
    )


def find_idle_ranks(ranks: Mapping[int, RankTimes], busy_cores: Mapping[int, float | None]) -> Finding | None:
    """All ranks are in forward, backward and their meetings, and none computes: what they wait for is on its way.

    Of ranks on a CPU of which none is slower than the others: see `find_straggler`.
    """
    windows = {rank: _window(times.steps) for rank, times in ranks.items()}
    is_idle = all(cores is not None and cores < IDLE_CORES for cores in busy_cores.values())
    if len(windows) < 2 or not all(windows.values()) or not is_idle:
        return None
    shares = [sum(_share(window, phase) for phase in WITH_COLLECTIVES) for window in windows.values()]
    if min(shares) < WAITING_SHARE:
        return None
    cores = max(cores for cores in busy_cores.values() if cores is not None)
    return Finding(
        "SF304",
        f"all ranks are in forward, backward and communication for {min(shares):.0%} of the time and use {cores:.2f} "
        "cores at most: they wait for what the network carries",
        _seen(next(iter(windows.values())), busiest_rank_cores=round(cores, 2)),
        CATALOGUE["SF304"].fix,
        confidence=0.7,
    )


def _collects_garbage(windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    for rank, window in windows.items():
        share = sum(one.garbage_s for one in window) / sum(one.took_s for one in window)
        if share >= GARBAGE_SHARE:
            yield Finding(
                "SF305",
                f"Python's garbage collector takes {share:.0%} of the time of rank {rank}",
                _seen(window, rank=rank, garbage_s=round(sum(one.garbage_s for one in window), 2)),
                "Something makes many Python objects in each step, or keeps millions alive: call gc.freeze() after "
                "what is kept was made, or raise gc.set_threshold().",
            )
            return


def _pads(windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    """What is computed for padding takes its share of the time in which the model computes."""
    for rank, window in windows.items():
        tokens, padding = sum(one.tokens for one in window), sum(one.padding for one in window)
        computing = sum(_share(window, phase) for phase in OF_TOKENS)
        if not tokens or padding / tokens * computing < PADDING_SHARE:
            continue
        yield Finding(
            "SF311",
            f"{padding / tokens:.0%} of the tokens that rank {rank} computes are padding: up to "
            f"{padding / tokens * computing:.0%} of the time",
            _seen(window, rank=rank, tokens=round(tokens), padding=round(padding)),
            CATALOGUE["SF311"].fix,
        )
        return


def _throttled(windows: Mapping[int, Sequence[StepTimes]], share: float | None) -> Iterator[Finding]:
    if share is None or share < THROTTLED_SHARE:
        return
    yield Finding(
        "SF306",
        f"the container may not use the CPUs it wants: in {share:.0%} of the kernel's periods it had to wait",
        _seen(next(iter(windows.values())), throttled_periods=f"{share:.0%}"),
        "Give the container more CPUs (limits.cpu, --cpus, --cpus-per-task), or start fewer threads: OMP_NUM_THREADS.",
    )


@dataclass(frozen=True)
class _Slower:
    """A rank whose steps take longer than they did."""

    rank: int
    window: Sequence[StepTimes]
    best: Sequence[StepTimes]
    times: float
    """As long, for the same number of tokens."""
    for_cores: float
    """Of what was added, the share in which the rank waited for a core."""


def _slowed(ranks: Mapping[int, RankTimes], windows: Mapping[int, Sequence[StepTimes]]) -> Iterator[Finding]:
    """Steps take much longer than they did, for as many tokens, and none of the rules above knows why.

    Unless ranks wait for cores: then the one that waits longest is named.
    """
    slower = [one for one in (_slower(rank, ranks[rank], window) for rank, window in windows.items()) if one]
    if not any(one.times >= SLOWED_TIMES for one in slower):
        return
    one = max(slower, key=lambda rank: rank.for_cores)
    is_crowded = one.for_cores >= FOR_CORES_SHARE
    one = one if is_crowded else next(rank for rank in slower if rank.times >= SLOWED_TIMES)
    longer = (
        f"steps take {one.times:.1f} times as long for the same number of tokens as in steps {one.best[0].step} to "
        f"{one.best[-1].step}"
    )
    before_s = round(_typical_s(one.best), 3)
    if is_crowded:
        share = f"{_in_line(one.window):.0%}"
        yield Finding(
            "SF313",
            f"{longer}: rank {one.rank} is ready and gets no core in {share} of the time",
            _seen(one.window, rank=one.rank, in_line=share, step_time_before_s=before_s),
            CATALOGUE["SF313"].fix,
            confidence=0.9,
        )
        return
    grown = {name: _per_step(one.window, name) - _per_step(one.best, name) for name in one.window[-1].by_phase}
    phase = max(grown, key=lambda name: grown[name])
    yield Finding(
        "SF301",
        f"{longer}; most of it was added in {phase}",
        _seen(one.window, rank=one.rank, phase=phase, step_time_before_s=before_s),
        "Look at what else runs on this machine, at its clocks and temperature, and at what that phase does more.",
        confidence=0.7,
    )


def _slower(rank: int, times: RankTimes, window: Sequence[StepTimes]) -> _Slower | None:
    """None where its steps take hardly longer, or that cannot be known."""
    before = [one for one in times.steps if one.step < window[0].step]
    earlier = [before[first : first + WINDOW_STEPS] for first in range(0, len(before), WINDOW_STEPS)]
    whole = [block for block in earlier if len(block) == WINDOW_STEPS]
    if not whole or not all(one.tokens for one in (*before, *window)):  # without their number nothing is comparable
        return None
    best = min(whole, key=_pace_s)
    as_long = _pace_s(window) / _pace_s(best)
    if as_long < NEARLY_SLOWED_TIMES or _typical_s(window) <= _typical_s(best):  # fewer tokens, in less time
        return None
    in_line_s = _in_line_pace_s(window) - _in_line_pace_s(best)
    return _Slower(rank, window, best, as_long, in_line_s / (_pace_s(window) - _pace_s(best)))


def _pace_s(steps: Sequence[StepTimes]) -> float:
    """Seconds a step takes, as if all were of one size."""
    return median(one.took_s / one.tokens for one in steps)


def _in_line_pace_s(steps: Sequence[StepTimes]) -> float:
    """The same of the time that a rank waits for a core."""
    return median(one.in_line_s / one.tokens for one in steps)


def _typical_s(steps: Sequence[StepTimes]) -> float:
    return median(one.took_s for one in steps)


def _per_step(steps: Sequence[StepTimes], phase: str) -> float:
    return sum(one.of(phase) for one in steps) / len(steps)
