"""Reading JSON files that lost power, a failing disk or a person may have damaged. Standard library only."""

import json
import os
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

MAX_BYTES = 64 << 20
MAX_LINE_BYTES = 64 << 20
MAX_DEPTH = 200
"""Nesting that no writer of ours comes near, and that every reader of ours can follow."""


MAX_SIZE = 1 << 31


class DamagedFile(ValueError):
    """A file that does not hold what it should; the text names the file and says why."""


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the one JSON object that a file holds.

    Refuses what JSON allows and what is never written here: duplicate keys, NaN, infinity, deep nesting.
    Raises: DamagedFile.
    """
    try:
        if not path.exists():
            raise DamagedFile(f"{path} is missing")
        if not path.is_file():  # to open a named pipe would wait for ever
            raise DamagedFile(f"{path} is not a file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size  # Python takes the memory for all that is asked for
            content = file.read(min(size, max_bytes) + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedFile):
            raise
        raise DamagedFile(f"{path} is unreadable ({error})") from error
    if len(content) > max_bytes:
        raise DamagedFile(f"{path} is unreadable (it is larger than {max_bytes >> 20} MiB)")
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is unreadable ({error})") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} is unreadable (it holds no JSON object)")
    if nesting_depth(value) > MAX_DEPTH:
        raise DamagedFile(f"{path} is unreadable (it is nested more than {MAX_DEPTH} levels deep)")
    return value


def read_objects(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line of a file that is not blank, with its JSON object, or None where it holds no object.

    What is no file has no lines. Raises: OSError.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:  # in bytes, since texts may hold the other line ends that Unicode has
        while line := file.readline(MAX_LINE_BYTES):
            if not line.isspace():
                yield line, parse_object(line)


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None where it holds none."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 on; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_size(value: object) -> bool:
    """Return whether a value is an integer from 0 on that can be calculated with, and is no integer of 1000 digits."""
    return isinstance(value, int) and is_count(value) and value < MAX_SIZE


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def nesting_depth(value: Any) -> int:
    """Return how deep lists and objects of JSON are nested, without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return depth
