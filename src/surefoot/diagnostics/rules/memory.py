"""Memory of a rank that grows with every step, from what it wrote down as its phases began and ended. Pure.

Only memory of no file is looked at, so the page cache and mapped data are never taken for a leak.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.diagnostics.monitor.event_log import Entry, newest_starts
from surefoot.diagnostics.monitor.object_census import Census
from surefoot.diagnostics.rules.leak_trend import MOST_STEPS, PARTS, WARMUP_STEPS, steady_growth
from surefoot.findings import CATALOGUE, Finding

SUSPECTED = 0.5
"""Share of the evidence of a leak from which on it is worth while to count Python's objects."""
HELD, KEPT = 0.9, 0.5
"""Shares of a model: a rank that had so much memory held it all; one that keeps less than so much need not have."""
WORTH = 0.5
"""Of the memory that there is."""
LEAST_MODEL = float(2 << 30)
"""Bytes: of smaller ones Python and its libraries are no small part of the peak."""
OWNED = 0.3
"""Share of the growth that a kind of objects must have to be its owner."""


@dataclass(frozen=True)
class Owner:
    """Whose memory grows, among Python's objects."""

    what: str
    """In a sentence."""
    seen: str
    """As evidence."""


UNCOUNTED = Owner("its Python objects are too many to count", "not counted: there are too many")


class MemoryTrend:
    """The memory of one start of one rank, step by step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=MOST_STEPS)
        """(step, bytes at its end, phase -> bytes it grew in that phase)."""
        self._seen = 0
        self._before: float | None = None
        self._open: list[str] = []
        self._grown: dict[str, float] = defaultdict(float)
        self._step = 0

    def add(self, kind: str, phase: str, step: int, anonymous_bytes: float) -> None:
        """`kind`: `phase began` or `phase ended`, in the order in which they happened."""
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
            self._seen += 1
            if self._seen > WARMUP_STEPS:
                self._steps.append((self._step, self._before, dict(self._grown)))
        self._grown.clear()

    @property
    def is_suspect(self) -> bool:
        """Whether it grows as a leak does, over fewer steps."""
        return steady_growth(self._points(), SUSPECTED) is not None

    def finding(self, room_bytes: float | None = None, owner: Owner | None = None) -> Finding | None:
        """The leak, where memory grew steadily through the newer half of the steps.

        `room_bytes`: what may still be used here, where that is known; the finding says when it is used up.
        `owner`: what of Python's objects has grown meanwhile, where they were counted.
        """
        growth = steady_growth(self._points())
        if growth is None:
            return None
        by_phase: dict[str, float] = defaultdict(float)
        for step, _, grown_in in self._steps:
            if step > growth.first_step:
                for phase, size in grown_in.items():
                    by_phase[phase] += size
        phase = max(by_phase, key=lambda name: by_phase[name])
        per_step = growth.grown / (growth.last_step - growth.first_step)
        return Finding(
            "SF202",
            f"memory of rank {self._rank} grows by {per_step / 2**20:.2f} MiB a step, "
            f"{min(1.0, by_phase[phase] / growth.grown):.0%} of it in {phase}"
            f"{f'; {owner.what}' if owner else ''}{growth.forecast(room_bytes)}",
            {
                "rank": self._rank,
                "steps": f"{growth.first_step} to {growth.last_step}",
                "anonymous_memory": f"{growth.first_bytes / 2**20:.0f} -> {growth.last_bytes / 2**20:.0f} MiB",
                "grown_in": f"{growth.growing_parts} of {PARTS} parts of these steps",
                "phase": phase,
                **({"objects": owner.seen} if owner else {}),
            },
            f"Look at what {phase} keeps from step to step: tensors with their graphs, lists, caches without a limit.",
            confidence=0.9,
        )

    def _points(self) -> list[tuple[int, float]]:
        return [(step, size) for step, size, _ in self._steps]


def name_owner(before: Census | None, after: Census | None) -> Owner | None:
    """The kind of Python's objects that grew between two counts of one process, and what holds them.

    None where they were not counted twice.
    """
    if before is None or after is None:
        return None
    grown = after.anonymous_bytes - before.anonymous_bytes
    more = {kind: (many - before.kinds.get(kind, (0, 0))[0], size - before.kinds.get(kind, (0, 0))[1])
            for kind, (many, size) in after.kinds.items()}  # fmt: skip
    kind, (many, size) = max(more.items(), key=lambda one: one[1][1], default=("", (0, 0)))
    if size < OWNED * grown or size <= 0:
        return Owner("no kind of Python's objects has grown by it: native code keeps it", "none has grown as much")
    known = {(holder.identity, holder.kind): holder.held_bytes for holder in before.holders}
    gain = {holder: holder.held_bytes - known.get((holder.identity, holder.kind), 0) for holder in after.holders}
    holder = max(gain, key=lambda one: gain[one], default=None)
    where = ""
    if holder is not None and gain[holder] >= OWNED * size:
        where = f" in a {holder.kind} of {holder.count}{f', {holder.name}' if holder.name else ''}"
    return Owner(
        f"it is {kind} objects{where}",
        f"{kind}: {many} more, {size / 2**20:.0f} MiB of {grown / 2**20:.0f} MiB{where}",
    )


def find_replicated_load(loads: Mapping[int, Mapping[str, float]], limit_bytes: float) -> Finding | None:
    """Ranks of one machine that each held the whole model in host memory, and keep a part of it or none.

    `loads`: what ranks said of their model: see `events.ModelLoaded`. `limit_bytes`: of memory that there is for them;
    where they took little of it, nothing is said.
    """
    held = {rank: said for rank, said in loads.items() if said["peak"] >= HELD * said["whole"] >= HELD * LEAST_MODEL}
    if len(held) < 2 or any(said["kept"] > KEPT * said["whole"] for said in held.values()):
        return None
    whole, total = max(said["whole"] for said in held.values()), sum(said["peak"] for said in held.values())
    if total < WORTH * limit_bytes:
        return None
    return Finding(
        "SF206",
        f"{len(held)} ranks of this machine each held the whole model of {whole / 2**30:.1f} GiB in host memory while "
        f"it was loaded, {total / 2**30:.1f} GiB together, and keep a part of it or none",
        {
            "ranks": ", ".join(str(rank) for rank in sorted(held)),
            "model_gib": round(whole / 2**30, 2),
            "of_gib": round(limit_bytes / 2**30, 1),
            "peaks_gib": ", ".join(f"{held[rank]['peak'] / 2**30:.1f}" for rank in sorted(held)),
        },
        CATALOGUE["SF206"].fix,
        confidence=0.8,
    )


def find_growing_helpers(
    rank: int, points: Sequence[tuple[int, float]], names: Sequence[str], room_bytes: float | None = None
) -> Finding | None:
    """Memory of the processes that a rank started, where it grows.

    `points`: (step, bytes of all of them together), seen at equal times. `names`: what they are.
    """
    growth = steady_growth(points)
    if growth is None or growth.last_step == growth.first_step:
        return None
    per_step = growth.grown / (growth.last_step - growth.first_step)
    return Finding(
        "SF208",
        f"memory of the {len(names)} processes that rank {rank} started grows by {per_step / 2**20:.2f} MiB a step"
        f"{growth.forecast(room_bytes)}",
        {
            "rank": rank,
            "steps": f"{growth.first_step} to {growth.last_step}",
            "anonymous_memory": f"{growth.first_bytes / 2**20:.0f} -> {growth.last_bytes / 2**20:.0f} MiB",
            "grown_in": f"{growth.growing_parts} of {PARTS} parts of this time",
            "processes": ", ".join(sorted(set(names))),
        },
        CATALOGUE["SF208"].fix,
        confidence=0.8,
    )


def find_leaks(entries: Sequence[Entry]) -> list[Finding]:
    """A finding for each rank whose memory grows, from a whole history; of the newest start of each."""
    trends: dict[int, MemoryTrend] = {}
    for entry in newest_starts(entries):
        if "anonymous_bytes" in entry.values:
            trend = trends.setdefault(entry.rank, MemoryTrend(entry.rank))
            trend.add(entry.kind, entry.phase, entry.step, entry.values["anonymous_bytes"])
    findings = (trend.finding() for trend in trends.values())
    return [finding for finding in findings if finding is not None]
