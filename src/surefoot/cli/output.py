"""Shared parts of the commands: the type of their parsers, counts as arguments, and the output of results."""

import argparse
from typing import Any

from surefoot.system.console import print_json


class Parser(argparse.ArgumentParser):
    """Parser that takes no abbreviations, and remembers the options of the command for suggestions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the namespace and the unknown arguments; `options`: those of the command."""
        parsed, extra = super().parse_known_args(args, namespace)
        if not hasattr(parsed, "options"):  # the command's own parser runs first
            parsed.options = list(self._option_string_actions)
        return parsed, extra


def parse_count(text: str) -> int:
    """Parse an integer of 0 or more, for argparse."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def parse_positive(text: str) -> int:
    """Parse an integer of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def show(value: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command: one line of JSON, or text for a person."""
    if as_json:
        print_json(value)
    else:
        print(text)
