"""Rules for the memory of a rank's accelerator: tensors that accumulate, and a fragmented allocator. Pure.

Input: the counters of CUDA's caching allocator at the end of each step.
"""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

from surefoot.diagnostics.rules.leak_trend import MOST_STEPS, WARMUP_STEPS, steady_growth
from surefoot.findings import Finding

WINDOW_STEPS = 20
LEAST_RETRYING_STEPS = 5
"""Number of steps of a window in which the allocator returned its cache and requested memory from the driver again."""
UNUSED_SHARE = 0.1
"""Share of its reserved memory that is unused inside blocks in use: below it, memory is exhausted, not fragmented."""


class DeviceMemory:
    """The accelerator memory of one start of one rank, step by step; empty on a CPU."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MOST_STEPS)
        self._num_steps = 0
        self._peak = 0.0

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Add one event. Call it in the order of events."""
        if kind == "step":
            self._peak = values["peak_memory_bytes"]
        elif kind == "device memory":
            self._num_steps += 1
            if self._num_steps > WARMUP_STEPS:
                self._steps.append((step, values))

    @property
    def room_bytes(self) -> float | None:
        """Free bytes at the peak of tensor memory; None without a device."""
        if not self._steps:
            return None
        newest = self._steps[-1][1]
        return newest["free"] + newest["reserved"] - max(self._peak, newest["allocated"])

    def findings(self) -> list[Finding]:
        """Return the findings of the steps so far."""
        return [finding for finding in (self._find_leak(), self._find_fragmentation()) if finding is not None]

    def _find_leak(self) -> Finding | None:
        growth = steady_growth([(step, values["allocated"]) for step, values in self._steps])
        if growth is None:
            return None
        cause = f"tensors on the GPU of rank {self._rank} grow by {growth.speed}{growth.forecast(self.room_bytes)}"
        evidence = growth.as_evidence(self._rank, "allocated_at_the_end_of_a_step")
        return Finding("SF203", cause, evidence, confidence=0.9)

    def _find_fragmentation(self) -> Finding | None:
        window = list(self._steps)[-WINDOW_STEPS - 1 :]
        if len(window) <= WINDOW_STEPS:
            return None
        retrying = sum(after["retries"] > before["retries"] for (_, before), (_, after) in pairwise(window))
        step, newest = window[-1]
        if retrying < LEAST_RETRYING_STEPS or newest["inactive"] < UNUSED_SHARE * newest["reserved"]:
            return None
        retries = newest["retries"] - window[0][1]["retries"]
        return Finding(
            "SF204",
            f"GPU memory of rank {self._rank} is fragmented: in {retrying} of {WINDOW_STEPS} steps the allocator found "
            f"no block that was large enough, while {newest['inactive'] / 2**30:.1f} GiB of its "
            f"{newest['reserved'] / 2**30:.1f} GiB were unused between tensors",
            {
                "rank": self._rank,
                "step": step,
                "asked_again": round(retries),
                "allocated_gib": round(newest["allocated"] / 2**30, 2),
                "reserved_gib": round(newest["reserved"] / 2**30, 2),
                "unused_in_pieces_gib": round(newest["inactive"] / 2**30, 2),
            },
            confidence=0.9,
        )
