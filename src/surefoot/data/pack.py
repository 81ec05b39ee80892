"""Packing: which samples share a sequence. Pure arithmetic over lengths."""

from bisect import insort
from collections.abc import Sequence

WINDOW_SAMPLES = 4096
"""Samples considered together; bounds memory and how far a sample can move from its place in the order."""


def best_fit(lengths: Sequence[int], capacity: int, window: int = WINDOW_SAMPLES) -> list[list[int]]:
    """Group sample indices into packs of at most `capacity` tokens, by best fit over windows of the order.

    Within a window the longest samples are placed first, each into the pack it leaves the least room in. Packs are
    given in the order of their earliest sample, samples within a pack likewise; the result depends on nothing else.
    Raises: ValueError for a sample longer than the capacity.
    """
    packs: list[list[int]] = []
    for begin in range(0, len(lengths), window):
        span = range(begin, min(begin + window, len(lengths)))
        rooms: list[tuple[int, int]] = []  # (free tokens, pack), sorted
        window_packs: list[list[int]] = []
        for index in sorted(span, key=lambda i: (-lengths[i], i)):
            length = lengths[index]
            if length > capacity:
                raise ValueError(f"sample {index} has {length} tokens, more than a pack of {capacity}")
            fit = _first_at_least(rooms, length)
            if fit is None:
                pack = len(window_packs)
                window_packs.append([index])
                insort(rooms, (capacity - length, pack))
            else:
                free, pack = rooms.pop(fit)
                window_packs[pack].append(index)
                insort(rooms, (free - length, pack))
        packs += sorted(sorted(pack) for pack in window_packs)
    return packs


def _first_at_least(rooms: list[tuple[int, int]], length: int) -> int | None:
    """The position of the smallest room that holds `length`, by bisection."""
    low, high = 0, len(rooms)
    while low < high:
        middle = (low + high) // 2
        if rooms[middle][0] < length:
            low = middle + 1
        else:
            high = middle
    return low if low < len(rooms) else None
