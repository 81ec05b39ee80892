"""A step that needed much more memory than those before it, where the next of its kind may not fit. Pure."""

from collections import deque
from collections.abc import Mapping
from statistics import median

from surefoot.findings import CATALOGUE, Finding

LEAST_STEPS = 20
"""Before which a new peak means nothing."""
TIMES = 1.25
"""So much higher than the peak before must the new one be."""
LEAST_BYTES = 256 << 20
RECENT_STEPS = 50
"""After which what is free no longer says anything about that step."""
LARGE_TIMES = 1.5
"""So many times the usual tokens, or patches of images, make a batch a large one."""
SIZES = {"patches": "patches of images", "tokens": "tokens"}
"""Of a batch; what is named first, where both are large: each image is tokens, too."""


class Peaks:
    """The peak of one start of one rank after each step, and what its batches hold: tokens, and patches of images."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._usual: dict[str, deque[float]] = {name: deque(maxlen=200) for name in SIZES}
        self._batch = dict.fromkeys(SIZES, 0.0)
        self._peak = 0.0
        self._seen = self._rise_seen = 0
        self._was_between = False
        self._rise: tuple[int, float, float, Mapping[str, float]] | None = None
        """(step, peak before, peak after, sizes of its batch) of the newest rise."""

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """What happened, in its order."""
        if kind == "batch":
            self._batch = {"tokens": values["tokens"], "patches": 0.0}
        elif kind == "images":
            self._batch["patches"] = values["patches"]
        elif kind == "step":
            peak = values["peak_memory_bytes"]
            is_rise = self._seen >= LEAST_STEPS and peak >= max(TIMES * self._peak, self._peak + LEAST_BYTES)
            if is_rise and not self._was_between:
                self._rise, self._rise_seen = (step, self._peak, peak, self._batch), self._seen
            else:
                for name, size in self._batch.items():
                    if size:  # what is usual of images is told by batches that have some
                        self._usual[name].append(size)
            self._seen, self._peak, self._was_between = self._seen + 1, max(self._peak, peak), False

    def between(self) -> None:
        """A save or an evaluation took place: the next peak may be its own."""
        self._was_between = True

    def finding(self, room_bytes: float) -> Finding | None:
        """The rise, where `room_bytes`, that were left at the peak, are less than another one like it would take."""
        if self._rise is None or self._seen - self._rise_seen > RECENT_STEPS:
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
            CATALOGUE["SF205"].fix,
            confidence=0.9 if large else 0.6,
        )
