"""Memory of a rank's accelerator: tensors that pile up, and an allocator that holds pieces no tensor fits into. Pure.

From what CUDA's caching allocator counts at the end of each step.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from surefoot.diagnostics.monitor.event_log import Entry, newest_starts
from surefoot.diagnostics.rules.leak_trend import MOST_STEPS, PARTS, WARMUP_STEPS, steady_growth
from surefoot.findings import CATALOGUE, Finding

WINDOW_STEPS = 20
LEAST_RETRYING_STEPS = 5
"""Of a window, in which the allocator gave back what it held and asked the driver again."""
UNUSED_SHARE = 0.1
"""Of what it holds, that lies in pieces of blocks in use: with less, memory is used up and not cut up."""


class DeviceMemory:
    """Of one start of one rank, step by step; empty on a CPU."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MOST_STEPS)
        self._seen = 0
        self._peak = 0.0

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """What happened, in its order."""
        if kind == "step":
            self._peak = values["peak_memory_bytes"]
        elif kind == "device memory":
            self._seen += 1
            if self._seen > WARMUP_STEPS:
                self._steps.append((step, values))

    @property
    def room_bytes(self) -> float | None:
        """What was left when tensors were the most; None where there is no device."""
        if not self._steps:
            return None
        newest = self._steps[-1][1]
        return newest["free"] + newest["reserved"] - max(self._peak, newest["allocated"])

    def findings(self) -> list[Finding]:
        """What the steps so far show."""
        return [one for one in (self._leak(), self._fragmented()) if one is not None]

    def _leak(self) -> Finding | None:
        growth = steady_growth([(step, values["allocated"]) for step, values in self._steps])
        if growth is None:
            return None
        per_step = growth.grown / (growth.last_step - growth.first_step)
        return Finding(
            "SF203",
            f"tensors on the GPU of rank {self._rank} grow by {per_step / 2**20:.2f} MiB a step"
            f"{growth.forecast(self.room_bytes)}",
            {
                "rank": self._rank,
                "steps": f"{growth.first_step} to {growth.last_step}",
                "allocated_at_the_end_of_a_step": f"{growth.first_bytes / 2**20:.0f} -> "
                f"{growth.last_bytes / 2**20:.0f} MiB",
                "grown_in": f"{growth.growing_parts} of {PARTS} parts of these steps",
            },
            CATALOGUE["SF203"].fix,
            confidence=0.9,
        )

    def _fragmented(self) -> Finding | None:
        window = list(self._steps)[-WINDOW_STEPS - 1 :]
        if len(window) <= WINDOW_STEPS:
            return None
        retrying = sum(after["retries"] > before["retries"] for (_, before), (_, after) in pairwise(window))
        step, newest = window[-1]
        if retrying < LEAST_RETRYING_STEPS or newest["inactive"] < UNUSED_SHARE * newest["reserved"]:
            return None
        tries = newest["retries"] - window[0][1]["retries"]
        return Finding(
            "SF204",
            f"memory of the GPU of rank {self._rank} is cut up: in {retrying} of {WINDOW_STEPS} steps the allocator "
            f"found no piece that was large enough, while {newest['inactive'] / 2**30:.1f} GiB of its "
            f"{newest['reserved'] / 2**30:.1f} GiB lay unused between tensors",
            {
                "rank": self._rank,
                "step": step,
                "asked_again": round(tries),
                "allocated_gib": round(newest["allocated"] / 2**30, 2),
                "reserved_gib": round(newest["reserved"] / 2**30, 2),
                "unused_in_pieces_gib": round(newest["inactive"] / 2**30, 2),
            },
            CATALOGUE["SF204"].fix,
            confidence=0.9,
        )


def find_in_device_memory(entries: Sequence[Entry]) -> list[Finding]:
    """From a whole history; of the newest start of each rank."""
    ranks: dict[int, DeviceMemory] = {}
    for entry in newest_starts(entries):
        ranks.setdefault(entry.rank, DeviceMemory(entry.rank)).add(entry.kind, entry.step, entry.values)
    return [finding for memory in ranks.values() for finding in memory.findings()]
