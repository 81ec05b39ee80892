"""Sequence packing: assigns samples to shared sequences. Pure arithmetic over lengths."""

from collections import defaultdict
from collections.abc import Sequence

WINDOW_SAMPLES = 4096
"""Number of samples packed together; bounds memory and how far a sample can move from its place in the order."""


def best_fit(lengths: Sequence[int], capacity: int, window: int = WINDOW_SAMPLES) -> list[list[int]]:
    """Group sample indices into packs of at most `capacity` tokens, by best fit over windows of the order.

    Within a window the longest samples are placed first, each into the pack it leaves the least room in. Packs are
    ordered by their earliest sample, and samples within a pack by index; the result depends on nothing else.
    Raises: ValueError for a sample longer than the capacity.
    """
    packs: list[list[int]] = []
    for begin in range(0, len(lengths), window):
        span = range(begin, min(begin + window, len(lengths)))
        room_of_pack = min(capacity, sum(lengths[index] for index in span))  # more than that is never used
        window_packs: list[list[int]] = []
        with_room: defaultdict[int, list[int]] = defaultdict(list)  # free tokens -> packs
        rooms = 0  # bit n is set while some pack has n free tokens
        for index in sorted(span, key=lambda i: (-lengths[i], i)):
            length = lengths[index]
            if length > capacity:
                raise ValueError(f"sample {index} has {length} tokens, more than a pack of {capacity}")
            enough = rooms >> length
            if enough:
                room = length + (enough & -enough).bit_length() - 1  # the lowest set bit: the tightest fit
                pack = with_room[room].pop()
                rooms ^= (not with_room[room]) << room
            else:
                room, pack = room_of_pack, len(window_packs)
                window_packs.append([])
            window_packs[pack].append(index)
            with_room[room - length].append(pack)
            rooms |= 1 << (room - length)
        packs += sorted(sorted(pack) for pack in window_packs)
    return packs
