"""Rows from one file: JSON lines, JSON, CSV, Parquet and Arrow, compressed or not. Memory does not grow with the file.

Rows come in chunks, the unit of preparation, caching and shuffling. The rows of a chunk depend on the file alone.
This module does not interpret columns.
"""

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from surefoot.data.json_rows import json_lines, json_values
from surefoot.data.rows import MAX_ROW_BYTES, READ_BYTES, Broken, Row, lines_of, too_long
from surefoot.data.table_rows import arrow_rows, csv_rows, parquet_rows
from surefoot.errors import DataError

CHUNK_ROWS = 4096
CHUNK_BYTES = 4 << 20
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
TEXT_READERS = {"jsonl": json_lines, "json": json_values, "csv": csv_rows}
COMPRESSIONS = (".gz", ".zst")
CONTENTS = (
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", ".zst"),
    (b"PAR1", "Parquet", ".parquet"),
    (b"ARROW1", "Arrow", ".arrow"),
)
"""(first bytes, name, ending) of the file formats that begin with fixed bytes."""
ZSTANDARD_BYTES = 1 << 10
"""Compressed bytes read at a time. They expand to at most 32 MiB: a block of 4 bytes can hold 128 KiB."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file. `offset` and `first_line` locate them in files that can be entered anywhere."""

    index: int
    first_row: int
    num_rows: int
    offset: int = 0
    num_bytes: int = 0
    """Bytes of the file; in files that cannot be entered anywhere, this chunk's share of them by rows."""
    first_line: int = 1


@dataclass(frozen=True)
class Scan:
    """The SHA-256 and the chunks of a file, from reading it once."""

    sha256: str
    chunks: tuple[Chunk, ...]


def kind_of(path: Path) -> tuple[str, str] | None:
    """Return (kind, compression) by the file's name; None for files that are no dataset."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None or (compression and kind in ("parquet", "arrow")):
        return None
    return kind, compression


def can_be_entered(path: Path) -> bool:
    """Return whether a chunk can be read without those before it, as in plain JSON lines."""
    return kind_of(path) == ("jsonl", "")


def scan(path: Path) -> Scan:
    """Scan a file for its hash and chunks. This is far cheaper than preparing it; any chunk can then be prepared first.

    Raises: OSError where it cannot be read; DataError for a file that is broken as a whole.
    """
    _check_content(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if can_be_entered(path):
            chunks = tuple(_scan_lines(file, digest.update))
            return Scan(digest.hexdigest(), chunks)
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    all_chunks = [chunk for chunk, _ in stream_chunks(path)]
    bytes_per_row = path.stat().st_size / max(sum(chunk.num_rows for chunk in all_chunks), 1)
    return Scan(
        digest.hexdigest(),
        tuple(replace(chunk, num_bytes=round(chunk.num_rows * bytes_per_row)) for chunk in all_chunks),
    )


def _check_content(path: Path) -> None:
    """Raise DataError if the first bytes of a file are those of another format than its name says."""
    kind_and_compression = kind_of(path)
    assert kind_and_compression is not None
    kind, compression = kind_and_compression
    with open(path, "rb") as file:
        begin = file.read(8)
    actual, ending = next(((name, ending) for magic, name, ending in CONTENTS if begin.startswith(magic)), ("", ""))
    name = path.name[: len(path.name) - len(compression)]
    if begin and compression == ".gz" and not actual:
        raise DataError(f"{path.name}: it is not gzip. If it is not compressed, name it {name}")
    if actual and ending not in (compression, f".{kind}"):
        new_name = name + ending if ending in COMPRESSIONS else str(Path(name).with_suffix(ending))
        raise DataError(f"{path.name}: it is {actual}. Name it {new_name}")


def _scan_lines(file: IO[bytes], update_digest: Callable[[bytes], object]) -> Iterator[Chunk]:
    index = first_row = rows = offset = num_bytes = 0
    line = first_line = 1
    for piece, is_whole, is_row in lines_of(file):
        update_digest(piece)
        num_bytes += len(piece)
        rows += is_row
        line += is_whole
        if is_whole and (rows == CHUNK_ROWS or num_bytes >= CHUNK_BYTES):
            if rows:
                yield Chunk(index, first_row, rows, offset, num_bytes, first_line)
                index += 1
            first_row, offset, first_line = first_row + rows, offset + num_bytes, line
            rows = num_bytes = 0
    if rows:
        yield Chunk(index, first_row, rows, offset, num_bytes, first_line)


class ChunkReader:
    """A reader of chunks in any order; forwards is cheapest, because most files must be read from their beginning.

    It holds one file open at a time.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._next = 0
        self._chunks: Iterator[tuple[Chunk, list[Row]]] = iter(())

    def rows(self, path: Path, chunk: Chunk) -> list[Row]:
        """Return the rows of one chunk.

        Raises: OSError where the file cannot be read; DataError where it is broken, or no longer has this chunk.
        """
        if can_be_entered(path):
            with open(path, "rb") as file:
                file.seek(chunk.offset)
                return list(json_lines(file, chunk.first_line, chunk.num_bytes))
        if self._path != path or self._next > chunk.index:
            self._path, self._next, self._chunks = path, 0, stream_chunks(path)
        for current, rows in self._chunks:
            self._next = current.index + 1
            if current.index == chunk.index:
                return rows
        raise DataError(f"{path.name} was changed while it was being read. Start again.")


def stream_chunks(path: Path) -> Iterator[tuple[Chunk, list[Row]]]:
    """Yield all chunks of a file that must be read from its beginning.

    Raises: DataError for a file that is broken as a whole.
    """
    kind_and_compression = kind_of(path)
    assert kind_and_compression is not None
    kind, compression = kind_and_compression
    try:
        if kind in ("parquet", "arrow"):
            yield from _split_into_chunks((parquet_rows if kind == "parquet" else arrow_rows)(path))
        else:
            with _open_decompressed(path, compression) as file:
                yield from _split_into_chunks(TEXT_READERS[kind](file))
    except Broken as error:
        raise DataError(f"{path.name}{error}") from error.__cause__
    except EOFError as error:
        raise DataError(
            f"{path.name}: cannot be read: the compressed file ends before its data do, so it is cut short or damaged. "
            "Copy or compress it again"
        ) from error
    except (OSError, zlib.error) as error:
        raise DataError(f"{path.name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except Exception as error:
        if compression and type(error).__name__ == "ZstdError":
            name = path.name[: -len(compression)]
            raise DataError(
                f"{path.name}: not readable as Zstandard: {error}. If it is not compressed, name it {name}"
            ) from error
        raise


def _split_into_chunks(rows: Iterable[Row]) -> Iterator[tuple[Chunk, list[Row]]]:
    index = first_row = size = 0
    chunk: list[Row] = []
    for row in rows:
        row_size = _estimate_bytes(row.columns)
        size += row_size
        if row_size > MAX_ROW_BYTES:
            row, size = Row({}, row.line, too_long(row_size)), 0
        chunk.append(row)
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(index, first_row, len(chunk)), chunk
            index, first_row, size, chunk = index + 1, first_row + len(chunk), 0, []
    if chunk:
        yield Chunk(index, first_row, len(chunk)), chunk


def _estimate_bytes(value: Any) -> int:
    """Return the approximate number of bytes of a value's texts."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(len(str(key)) + _estimate_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_estimate_bytes, value))
    return 8


def _open_decompressed(path: Path, compression: str) -> Any:
    if compression == ".gz":
        return gzip.open(path, "rb")
    if compression == ".zst":
        return io.BufferedReader(ZstandardFile(path), READ_BYTES)
    return open(path, "rb")


class ZstandardFile(io.RawIOBase):
    """Decompressed bytes of a Zstandard file. Unlike the library's own reader, this class detects truncated files.

    Raises: EOFError for a file that ends within a frame.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._ready:
            content = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            content = content or self._file.read(ZSTANDARD_BYTES)
            if not content:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(content))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
