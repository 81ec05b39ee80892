"""A row, what readers of rows share, and how long a row may be."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

MAX_ROW_BYTES = 8 << 20
"""A longer row is no training sample but a mistake; reading it would cost memory without bound."""
MAX_DEPTH = 100
"""Values inside each other in a row."""
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Row:
    """One record as it stands in its file. `problem` says why it is no row of named columns; then there are none."""

    columns: dict[str, Any]
    line: int
    """Line on which it begins, from 1; its number where rows have no lines of their own (Parquet, Arrow)."""
    problem: str | None = None


class Broken(Exception):
    """The file is broken from some line on."""


def lines_of(file: IO[bytes]) -> Iterator[tuple[bytes, bool, bool]]:
    """(piece, ends its line, is a row) of lines, those beyond MAX_ROW_BYTES in several pieces.

    A long line is one row, told by its first piece; a short one is a row unless it is blank.
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
