"""A reward under which no group of completions is without spread, whatever was sampled."""

from typing import Any


def in_turn(completions: list[Any], **_: Any) -> list[float]:
    return [float(index % 2) for index in range(len(completions))]
