"""The row type, helpers of the row readers, and the limits of a row."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

MAX_ROW_BYTES = 8 << 20
"""Size limit of a row: a longer row is a mistake, and reading it would take unbounded memory."""
MAX_DEPTH = 100
"""Limit of nested values in a row."""
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Row:
    """A record of a file. `problem`: the reason why it is no row of named columns; then `columns` is empty."""

    columns: dict[str, Any]
    line: int
    """Line on which the row begins, from 1; its row number in files without lines (Parquet, Arrow)."""
    problem: str | None = None


class Broken(Exception):
    """A file that is broken from some line on."""


def lines_of(file: IO[bytes]) -> Iterator[tuple[bytes, bool, bool]]:
    """Yield (piece, ends its line, is a row) of lines; lines beyond MAX_ROW_BYTES are split into several pieces.

    A long line is one row, marked at its first piece; a short one is a row unless it is blank.
    """
    begins = True
    while piece := file.readline(MAX_ROW_BYTES):
        is_whole = piece.endswith(b"\n") or len(piece) < MAX_ROW_BYTES
        yield piece, is_whole, begins and (not is_whole or bool(piece.strip()))
        begins = is_whole


def too_long(num_bytes: int) -> str:
    return (
        f"the row has {num_bytes / 2**20:.1f} MiB; rows over {MAX_ROW_BYTES >> 20} MiB are not read. "
        "Split it, or leave it out"
    )
