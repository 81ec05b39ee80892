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
"""So many times the usual tokens make a batch a large one."""


class Peaks:
    """The peak of one start of one rank after each step, and the tokens of its batches."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tokens: deque[float] = deque(maxlen=200)
        self._batch = self._peak = 0.0
        self._seen = self._rise_seen = 0
        self._rise: tuple[int, float, float, float] | None = None
        """(step, peak before, peak after, tokens of its batch) of the newest rise."""

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """What happened, in its order."""
        if kind == "batch":
            self._batch = values["tokens"]
        elif kind == "step":
            peak = values["peak_memory_bytes"]
            if self._seen >= LEAST_STEPS and peak >= max(TIMES * self._peak, self._peak + LEAST_BYTES):
                self._rise, self._rise_seen = (step, self._peak, peak, self._batch), self._seen
            else:
                self._tokens.append(self._batch)
            self._seen, self._peak = self._seen + 1, max(self._peak, peak)

    def finding(self, room_bytes: float) -> Finding | None:
        """The rise, where `room_bytes`, that were left at the peak, are less than another one like it would take."""
        if self._rise is None or self._seen - self._rise_seen > RECENT_STEPS:
            return None
        step, before, after, tokens = self._rise
        if room_bytes >= after - before:
            return None
        usual = median(self._tokens)
        is_large = usual > 0 and tokens >= LARGE_TIMES * usual
        why = f": its batch has {tokens:.0f} tokens, {usual:.0f} are usual" if is_large else ""
        return Finding(
            "SF205",
            f"step {step} needed {after / 2**30:.1f} GiB on rank {self._rank}, the steps before it "
            f"{before / 2**30:.1f} GiB{why}; {room_bytes / 2**30:.1f} GiB are left",
            {
                "rank": self._rank,
                "step": step,
                "tokens_of_its_batch": round(tokens),
                "usual_tokens": round(usual),
                "peak_gib": f"{before / 2**30:.2f} -> {after / 2**30:.2f}",
                "room_gib": round(room_bytes / 2**30, 2),
            },
            CATALOGUE["SF205"].fix,
            confidence=0.9 if is_large else 0.6,
        )
