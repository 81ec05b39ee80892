"""A reward that depends on the whole group of a completion."""

from typing import Any


def longest(completions: list[Any], **_: Any) -> list[float]:
    """1 for the longest of its group; and something for how many there are."""
    lengths = [len(str(one)) for one in completions]
    return [float(length == max(lengths)) + len(lengths) / 100 for length in lengths]
