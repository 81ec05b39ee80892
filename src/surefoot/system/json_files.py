"""Reading JSON files that lost power, a failing disk or a person may have damaged. Standard library only."""

import json
import os
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from surefoot.system.atomic_io import write_bytes

MAX_BYTES = 64 << 20
MAX_LINE_BYTES = 64 << 20
MAX_DEPTH = 200
"""Nesting that no file of this project comes near, and that every reader of it can follow."""
MAX_SIZE = 1 << 31


class DamagedFile(ValueError):
    """A file with unexpected content; the text names the file and the reason."""


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the one JSON object that a file holds.

    Refuses what parsers accept but this project never writes: duplicate keys, NaN, infinity, deep nesting.
    Raises: DamagedFile.
    """
    try:
        if not path.exists():
            raise DamagedFile(f"{path} is missing")
        if not path.is_file():  # opening a named pipe would block forever
            raise DamagedFile(f"{path} is not a file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size  # Python allocates the full size that is requested
            content = file.read(min(size, max_bytes) + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedFile):
            raise
        raise DamagedFile(f"{path} is unreadable ({error})") from error
    if len(content) > max_bytes:
        raise DamagedFile(f"{path} is unreadable (it is larger than {max_bytes >> 20} MiB)")
    try:
        value = json.loads(
            content.decode("utf-8"), object_pairs_hook=_refuse_duplicate_keys, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is unreadable ({error})") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} is unreadable (it holds no JSON object)")
    if nesting_depth(value) > MAX_DEPTH:
        raise DamagedFile(f"{path} is unreadable (it is nested more than {MAX_DEPTH} levels deep)")
    return value


def read_objects(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line of a file that is not blank, with its JSON object, or None if it holds no object.

    A path that is not a file has no lines. Raises: OSError.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:  # in bytes, because text may hold other line separators of Unicode
        while line := file.readline(MAX_LINE_BYTES):
            if not line.isspace():
                yield line, parse_object(line)


def keep_lines(path: Path, is_kept: Callable[[dict[str, Any] | None], bool]) -> None:
    """Replace a file by the lines whose object, or None for a line that holds none, `is_kept` accepts.

    Raises: OSError; StorageError.
    """
    if path.is_file():
        lines = [text.rstrip(b"\n") + b"\n" for text, value in read_objects(path) if is_kept(value)]
        write_bytes(path, b"".join(lines))


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None if it holds none."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_count(value: object) -> bool:
    """Return whether a value is an integer >= 0; true and false are not integers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_size(value: object) -> bool:
    """Return whether a value is an integer in [0, 2**31), small enough to calculate with."""
    return isinstance(value, int) and is_count(value) and value < MAX_SIZE


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object has a key twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def nesting_depth(value: Any) -> int:
    """Return the nesting depth of JSON lists and objects, without recursion; 0 for any other value."""
    depth, level = 0, [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return depth
