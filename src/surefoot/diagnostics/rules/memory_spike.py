"""The rule for a step that needed much more memory than earlier steps: the next one like it may not fit. Pure."""

from collections import deque
from collections.abc import Mapping
from statistics import median

from surefoot.findings import Finding

LEAST_STEPS = 20
"""Number of first steps in which a new peak means nothing."""
TIMES = 1.25
"""Factor by which a new peak must exceed the peak before."""
LEAST_BYTES = 256 << 20
RECENT_STEPS = 50
"""Number of steps after which the free memory no longer relates to that step."""
LARGE_TIMES = 1.5
"""Multiple of the usual tokens, or image patches, from which a batch is large."""
SIZES = {"patches": "patches of images", "tokens": "tokens"}
"""Sizes of a batch. If both are large, the first is reported, because images are also tokens."""


class Peaks:
    """The memory peak of one start of one rank after each step, and its batches' sizes: tokens and image patches."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._usual: dict[str, deque[float]] = {name: deque(maxlen=200) for name in SIZES}
        self._batch = dict.fromkeys(SIZES, 0.0)
        self._peak = 0.0
        self._num_steps = self._steps_at_rise = 0
        self._was_between = False
        self._rise: tuple[int, float, float, Mapping[str, float]] | None = None
        """(step, peak before, peak after, sizes of its batch) of the newest rise; None if there was none."""

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Add one event. Call it in the order of events."""
        if kind == "batch":
            self._batch = {"tokens": values["tokens"], "patches": 0.0}
        elif kind == "images":
            self._batch["patches"] = values["patches"]
        elif kind == "step":
            peak = values["peak_memory_bytes"]
            is_rise = self._num_steps >= LEAST_STEPS and peak >= max(TIMES * self._peak, self._peak + LEAST_BYTES)
            if is_rise and not self._was_between:
                self._rise, self._steps_at_rise = (step, self._peak, peak, self._batch), self._num_steps
            else:
                for name, size in self._batch.items():
                    if size:  # the usual number of patches comes from batches that have images
                        self._usual[name].append(size)
            self._num_steps, self._peak, self._was_between = self._num_steps + 1, max(self._peak, peak), False

    def between(self) -> None:
        """Record that a save or an evaluation took place: it may cause the next peak."""
        self._was_between = True

    def finding(self, room_bytes: float) -> Finding | None:
        """Return the rise if another one like it exceeds `room_bytes`, the free memory at the peak."""
        if self._rise is None or self._num_steps - self._steps_at_rise > RECENT_STEPS:
            return None
        step, before, after, batch = self._rise
        if room_bytes >= after - before:
            return None
        usual = {name: median(sizes or (0.0,)) for name, sizes in self._usual.items()}
        large = [name for name in SIZES if batch[name] > 0 and batch[name] >= LARGE_TIMES * usual[name]]
        why = ""
        if large:
            why = f": its batch has {batch[large[0]]:.0f} {SIZES[large[0]]}, {usual[large[0]]:.0f} are usual"
        return Finding(
            "SF205",
            f"step {step} needed {after / 2**30:.1f} GiB on rank {self._rank}, the steps before it "
            f"{before / 2**30:.1f} GiB{why}; {room_bytes / 2**30:.1f} GiB are left",
            {
                "rank": self._rank,
                "step": step,
                **{f"{name}_of_its_batch": round(size) for name, size in batch.items()},
                **{f"usual_{name}": round(size) for name, size in usual.items()},
                "peak_gib": f"{before / 2**30:.2f} -> {after / 2**30:.2f}",
                "room_gib": round(room_bytes / 2**30, 2),
            },
            confidence=0.9 if large else 0.6,
        )
