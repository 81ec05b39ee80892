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
"""Number of parts in which memory must grow: a leak is steady, and a buffer that doubled once is no leak."""


@dataclass(frozen=True)
class Growth:
    """The growth of memory over the newer half of the steps."""

    first_step: int
    last_step: int
    first_bytes: float
    last_bytes: float
    growing_parts: int

    @property
    def grown(self) -> float:
        return self.last_bytes - self.first_bytes

    def forecast(self, room_bytes: float | None) -> str:
        """Return when the free memory is exhausted, as the end of a sentence; empty if the free memory is unknown."""
        if room_bytes is None:
            return ""
        per_step = self.grown / (self.last_step - self.first_step)
        return (
            f". There is room for {room_bytes / 2**30:.1f} GiB: it is used up at about step "
            f"{self.last_step + round(room_bytes / per_step)}"
        )


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
    bounds = [points[round(part * (len(points) - 1) / PARTS)][1] for part in range(PARTS + 1)]
    growing = sum(later - earlier > per_step for earlier, later in pairwise(bounds))
    is_much = per_step >= LEAST_BYTES_PER_STEP and after - before >= share * LEAST_GROWTH_BYTES
    return Growth(first, last, before, after, growing) if is_much and growing >= LEAST_GROWING_PARTS else None
