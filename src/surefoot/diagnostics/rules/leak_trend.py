"""Detection of memory that grows steadily with the steps, as opposed to once, up to a level, or temporarily. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

WARMUP_STEPS = 20
"""Number of first steps without information: allocators, caches and compilers fill up."""
LEAST_STEPS = 100
"""Fewest steps over which growth is measured."""
MOST_STEPS = 2000
LEAST_BYTES_PER_STEP = 1 << 18
LEAST_GROWTH_BYTES = 48 << 20
"""Least growth over these steps."""
PARTS = 10
LEAST_GROWING_PARTS = 8
"""Number of parts in which a leak must grow: it is steady, and a buffer that doubled once is no leak."""


@dataclass(frozen=True)
class Growth:
    """The growth of memory over the newer half of the steps."""

    first_step: int
    last_step: int
    first_bytes: float
    last_bytes: float
    growing_parts: int

    @property
    def grown_bytes(self) -> float:
        return self.last_bytes - self.first_bytes

    @property
    def bytes_per_step(self) -> float:
        return self.grown_bytes / (self.last_step - self.first_step)

    @property
    def speed(self) -> str:
        return f"{self.bytes_per_step / 2**20:.2f} MiB a step"

    def forecast(self, room_bytes: float | None) -> str:
        """Return when the free memory is exhausted, as the end of a sentence; empty if the free memory is unknown."""
        if room_bytes is None:
            return ""
        last_step = self.last_step + round(room_bytes / self.bytes_per_step)
        return f". {room_bytes / 2**30:.1f} GiB are free: they are used up at about step {last_step}"

    def as_evidence(self, rank: int, memory: str) -> dict[str, object]:
        """Return the evidence of a finding. `memory`: name of the memory that grows."""
        return {
            "rank": rank,
            "steps": f"{self.first_step} to {self.last_step}",
            memory: f"{self.first_bytes / 2**20:.0f} -> {self.last_bytes / 2**20:.0f} MiB",
            "grown_in": f"{self.growing_parts} of {PARTS} parts of these steps",
        }


def steady_growth(points: Sequence[tuple[int, float]], share: float = 1.0) -> Growth | None:
    """Return the growth if memory grows steadily, else None.

    `points`: (step, bytes at its end). `share`: share of the evidence that a leak needs; less for a suspicion.
    """
    least_steps = round(share * LEAST_STEPS)
    points = points[-max(least_steps, len(points) // 2) :]
    if len(points) < least_steps:
        return None
    (first, before), (last, after) = points[0], points[-1]
    per_step = (after - before) / (len(points) - 1)
    growing = count_growing_parts([size for _, size in points], per_step)
    is_much = per_step >= LEAST_BYTES_PER_STEP and after - before >= share * LEAST_GROWTH_BYTES
    return Growth(first, last, before, after, growing) if is_much and growing >= LEAST_GROWING_PARTS else None


def count_growing_parts(values: Sequence[float], least_growth: float = 0.0) -> int:
    """Return in how many of `PARTS` equal parts of a series its values grow by more than `least_growth`."""
    bounds = [values[round(part * (len(values) - 1) / PARTS)] for part in range(PARTS + 1)]
    return sum(later - earlier > least_growth for earlier, later in pairwise(bounds))
