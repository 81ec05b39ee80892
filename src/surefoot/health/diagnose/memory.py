"""Memory of a rank that grows with every step, from what it wrote down as its phases began and ended. Pure.

Only memory of no file is looked at, so the page cache and mapped data are never taken for a leak.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise

from surefoot.findings import Finding
from surefoot.health.recorder import Entry, newest_starts

WARMUP_STEPS = 20
"""First steps that say nothing: allocators, caches and compilers fill up."""
LEAST_STEPS = 100
"""Over which growth is looked at, at least."""
MOST_STEPS = 2000
LEAST_BYTES_PER_STEP = 1 << 18
LEAST_GROWTH_BYTES = 48 << 20
"""Over these steps."""
PARTS = 10
LEAST_GROWING_PARTS = 8
"""In how many of them memory must grow: a leak is steady, a buffer that doubled once is none."""


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

    def finding(self, room_bytes: float | None = None) -> Finding | None:
        """The leak, where memory grew steadily through the newer half of the steps.

        `room_bytes`: what may still be used here, where that is known; the finding says when it is used up.
        """
        steps = list(self._steps)[-max(LEAST_STEPS, len(self._steps) // 2) :]
        if len(steps) < LEAST_STEPS:
            return None
        grown = steps[-1][1] - steps[0][1]
        per_step = grown / (len(steps) - 1)
        bounds = [steps[round(part * (len(steps) - 1) / PARTS)][1] for part in range(PARTS + 1)]
        growing = sum(later - earlier > per_step for earlier, later in pairwise(bounds))
        if per_step < LEAST_BYTES_PER_STEP or grown < LEAST_GROWTH_BYTES or growing < LEAST_GROWING_PARTS:
            return None
        by_phase: dict[str, float] = defaultdict(float)
        for _, _, grown_in in steps[1:]:
            for phase, size in grown_in.items():
                by_phase[phase] += size
        owner = max(by_phase, key=lambda phase: by_phase[phase])
        forecast = ""
        if room_bytes is not None:
            forecast = f". There is room for {room_bytes / 2**30:.1f} GiB: it is used up at about step "
            forecast += f"{steps[-1][0] + round(room_bytes / per_step)}"
        return Finding(
            "SF202",
            f"memory of rank {self._rank} grows by {per_step / 2**20:.2f} MiB a step, "
            f"{min(1.0, by_phase[owner] / grown):.0%} of it in {owner}{forecast}",
            {
                "rank": self._rank,
                "steps": f"{steps[0][0]} to {steps[-1][0]}",
                "anonymous_memory": f"{steps[0][1] / 2**20:.0f} -> {steps[-1][1] / 2**20:.0f} MiB",
                "grown_in": f"{growing} of {PARTS} parts of these steps",
                "phase": owner,
            },
            f"Look at what {owner} keeps from step to step: tensors with their graphs, lists, caches without a limit.",
            confidence=0.9,
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
