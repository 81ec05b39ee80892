"""Rules for host memory of a rank that grows with every step, measured at the bounds of its phases. Pure.

Only anonymous memory counts, so the page cache and mapped data are never mistaken for a leak.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.diagnostics.monitor.object_census import Census
from surefoot.diagnostics.rules.leak_trend import MOST_STEPS, WARMUP_STEPS, steady_growth
from surefoot.findings import Finding

SUSPECTED = 0.5
"""Share of the evidence of a leak from which counting Python's objects is worthwhile."""
HELD, KEPT = 0.9, 0.5
"""Shares of a model: a rank whose memory reached the first held all of it; a rank that keeps less than the second did
not need to.
"""
WORTH = 0.5
"""Share of the available memory from which a replicated load is reported."""
LEAST_MODEL = float(2 << 30)
"""Bytes of the smallest model that counts: below it Python and its libraries are a large part of the peak."""
OWNED = 0.3
"""Share of the growth that a kind of object must have to be its owner."""


@dataclass(frozen=True)
class Owner:
    """The Python objects whose memory grows."""

    description: str
    """Description in a sentence."""
    evidence: str
    """Description as evidence."""


UNCOUNTED = Owner("it has too many Python objects to count them", "not counted: there are too many")


class MemoryTrend:
    """The memory of one start of one rank, step by step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=MOST_STEPS)
        """(step, bytes at its end, phase -> bytes it grew in that phase)."""
        self._num_steps = 0
        self._before: float | None = None
        self._open: list[str] = []
        self._grown: dict[str, float] = defaultdict(float)
        self._step = 0

    def add(self, kind: str, phase: str, step: int, anonymous_bytes: float) -> None:
        """Add one event, in the order of events. `kind`: `phase began` or `phase ended`."""
        if step != self._step:
            self._end_step()
            self._step = step
        inside = self._open[-1] if self._open else "the time between phases"
        if self._before is not None:
            self._grown[inside] += anonymous_bytes - self._before
        self._before = anonymous_bytes
        if kind == "phase began":
            self._open.append(phase)
        elif self._open:
            self._open.pop()

    def _end_step(self) -> None:
        if self._step and self._before:
            self._num_steps += 1
            if self._num_steps > WARMUP_STEPS:
                self._steps.append((self._step, self._before, dict(self._grown)))
        self._grown.clear()

    @property
    def is_suspect(self) -> bool:
        """Whether memory grows like a leak, over fewer steps."""
        return steady_growth(self._make_points(), SUSPECTED) is not None

    def finding(self, room_bytes: float | None = None, owner: Owner | None = None) -> Finding | None:
        """Return the leak if memory grew steadily through the newer half of the steps.

        `room_bytes`: free memory, if known; the finding tells when it is exhausted.
        `owner`: Python objects that grew meanwhile, if they were counted.
        """
        growth = steady_growth(self._make_points())
        if growth is None:
            return None
        by_phase: dict[str, float] = defaultdict(float)
        for step, _, grown_in in self._steps:
            if step > growth.first_step:
                for phase, size in grown_in.items():
                    by_phase[phase] += size
        phase = max(by_phase, key=lambda name: by_phase[name])
        return Finding(
            "SF202",
            f"memory of rank {self._rank} grows by {growth.speed}, "
            f"{min(1.0, by_phase[phase] / growth.grown_bytes):.0%} of it in {phase}"
            f"{f'; {owner.description}' if owner else ''}{growth.forecast(room_bytes)}",
            {
                **growth.as_evidence(self._rank, "anonymous_memory"),
                "phase": phase,
                **({"objects": owner.evidence} if owner else {}),
            },
            confidence=0.9,
        )

    def _make_points(self) -> list[tuple[int, float]]:
        return [(step, size) for step, size, _ in self._steps]


def name_owner(before: Census | None, after: Census | None) -> Owner | None:
    """Return the kind of Python object that grew between two counts of one process, and the container that holds it.

    None if the objects were not counted twice.
    """
    if before is None or after is None:
        return None
    grown = after.anonymous_bytes - before.anonymous_bytes
    gains = {}
    for kind, (count, size) in after.kinds.items():
        count_before, size_before = before.kinds.get(kind, (0, 0))
        gains[kind] = (size - size_before, count - count_before)
    kind = max(gains, key=lambda name: gains[name][0], default="")
    size, count = gains.get(kind, (0, 0))
    if size < OWNED * grown or size <= 0:
        return Owner("no kind of Python object has grown as much: native code holds it", "none has grown as much")
    held_before = {(holder.identity, holder.kind): holder.held_bytes for holder in before.holders}
    gain = {holder: holder.held_bytes - held_before.get((holder.identity, holder.kind), 0) for holder in after.holders}
    holder = max(gain, key=lambda item: gain[item], default=None)
    where = ""
    if holder is not None and gain[holder] >= OWNED * size:
        where = f" in a {holder.kind} of {holder.count}{f', {holder.name}' if holder.name else ''}"
    return Owner(
        f"it is {kind} objects{where}",
        f"{kind}: {count} more, {size / 2**20:.0f} MiB of {grown / 2**20:.0f} MiB{where}",
    )


def find_replicated_load(loads: Mapping[int, Mapping[str, float]], limit_bytes: float) -> Finding | None:
    """Return a finding if ranks of one machine each held the whole model in host memory, and keep a part of it or none.

    `loads`: rank -> its values of `events.ModelLoaded`. `limit_bytes`: memory that is available to the ranks; if they
    took little of it, there is no finding.
    """
    full = {rank: load for rank, load in loads.items() if load["peak"] >= HELD * load["whole"] >= HELD * LEAST_MODEL}
    if len(full) < 2 or any(load["kept"] > KEPT * load["whole"] for load in full.values()):
        return None
    largest, total = max(load["whole"] for load in full.values()), sum(load["peak"] for load in full.values())
    if total < WORTH * limit_bytes:
        return None
    return Finding(
        "SF206",
        f"{len(full)} ranks of this machine each held the whole model of {largest / 2**30:.1f} GiB in host memory "
        f"while it was loaded, {total / 2**30:.1f} GiB together, and keep a part of it or none",
        {
            "ranks": ", ".join(str(rank) for rank in sorted(full)),
            "model_gib": round(largest / 2**30, 2),
            "of_gib": round(limit_bytes / 2**30, 1),
            "peaks_gib": ", ".join(f"{full[rank]['peak'] / 2**30:.1f}" for rank in sorted(full)),
        },
        confidence=0.8,
    )


def find_growing_helpers(
    rank: int, points: Sequence[tuple[int, float]], names: Sequence[str], room_bytes: float | None = None
) -> Finding | None:
    """Return a finding if the memory of the processes that a rank started grows.

    `points`: (step, bytes of all of them together), sampled at equal intervals. `names`: their names.
    """
    growth = steady_growth(points)
    if growth is None or growth.last_step == growth.first_step:
        return None
    return Finding(
        "SF208",
        f"memory of the {len(names)} processes that rank {rank} started grows by {growth.speed}"
        f"{growth.forecast(room_bytes)}",
        {**growth.as_evidence(rank, "anonymous_memory"), "processes": ", ".join(sorted(set(names)))},
        confidence=0.8,
    )
