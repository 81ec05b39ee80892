"""Shared parts of the commands: the type of their parsers, counts as arguments, and the output of results."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from surefoot.system.console import CLEAR_LINE, print_json, write


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


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show on a terminal what a command does while it works; the line is cleared at the end."""
    is_live = sys.stderr.isatty()
    if is_live:
        write(sys.stderr, f"{text} ...\r")  # what is printed meanwhile takes its place
    try:
        yield
    finally:
        if is_live:
            write(sys.stderr, CLEAR_LINE)


def show(value: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command: one line of JSON, or text for a person."""
    if as_json:
        print_json(value)
    else:
        print(text)
