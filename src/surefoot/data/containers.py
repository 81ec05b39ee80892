"""Rows from one file: JSON lines, JSON, CSV, Parquet and Arrow, compressed or not. Memory does not grow with the file.

Rows come in chunks: the unit of preparing, caching and shuffling. What a chunk holds depends on the file alone.
Knows nothing of what the columns mean.
"""

import codecs
import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from surefoot.errors import DataError

CHUNK_ROWS = 4096
CHUNK_BYTES = 4 << 20
MAX_ROW_BYTES = 8 << 20
"""A longer row is no training sample but a mistake; reading it would cost memory without bound."""
READ_BYTES = 1 << 20
NEAR_END = 64
"""Characters before the end of what is read within which a JSON error may mean that more must be read."""

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class Row:
    """One record as it stands in its file. `problem` says why it is no row of named columns; then there are none."""

    columns: dict[str, Any]
    line: int
    """Line on which it begins, from 1; its number where rows have no lines of their own (Parquet, Arrow)."""
    problem: str | None = None


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file. `offset` and `num_bytes` say where, in files that can be entered anywhere."""

    index: int
    first_row: int
    num_rows: int
    offset: int = 0
    num_bytes: int = 0
    first_line: int = 1


@dataclass(frozen=True)
class Scan:
    """What one pass over a file's bytes tells: its SHA-256, and for plain JSON lines its chunks."""

    sha256: str
    chunks: tuple[Chunk, ...] | None


def kind_of(path: Path) -> tuple[str, str] | None:
    """(kind, compression) by the file's name; None for files that are no dataset."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None or (compression and kind in ("parquet", "arrow")):
        return None
    return kind, compression


def scan(path: Path) -> Scan:
    """Read a file once.

    Raises: OSError where it cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if kind_of(path) == ("jsonl", ""):
            chunks = tuple(_scan_lines(file, digest.update))
            return Scan(digest.hexdigest(), chunks)
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return Scan(digest.hexdigest(), None)


def _scan_lines(file: IO[bytes], see: Callable[[bytes], object]) -> Iterator[Chunk]:
    index = first_row = rows = offset = num_bytes = 0
    line = first_line = 1
    for piece, is_whole, is_row in _lines(file):
        see(piece)
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


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, bool, bool]]:
    """(piece, ends its line, is a row) of lines, those beyond MAX_ROW_BYTES in several pieces.

    A long line is one row, told by its first piece; a short one is a row unless it is blank.
    """
    begins = True
    while piece := file.readline(MAX_ROW_BYTES):
        is_whole = piece.endswith(b"\n") or len(piece) < MAX_ROW_BYTES
        yield piece, is_whole, begins and (not is_whole or bool(piece.strip()))
        begins = is_whole


def read_chunk(path: Path, chunk: Chunk) -> list[Row]:
    """The rows of one chunk of a plain JSON-lines file."""
    with open(path, "rb") as file:
        file.seek(chunk.offset)
        return list(_json_lines(file, chunk.first_line, chunk.num_bytes))


def stream_chunks(path: Path) -> Iterator[tuple[Chunk, list[Row]]]:
    """All chunks of a file that must be read from its beginning.

    Raises: DataError for a file that is broken as a whole.
    """
    found = kind_of(path)
    assert found is not None
    kind, compression = found
    try:
        if kind in ("parquet", "arrow"):
            rows = (_parquet if kind == "parquet" else _arrow)(path)
            yield from _chunked(_named(rows, path))
        else:
            with _opened(path, compression) as file:
                rows = {"jsonl": _json_lines, "json": _json, "csv": _csv}[kind](file)
                yield from _chunked(_named(rows, path))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path.name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except Exception as error:
        if compression and type(error).__name__ == "ZstdError":
            raise DataError(f"{path.name}: not readable as Zstandard: {error}") from error
        raise


class _Broken(Exception):
    """The file is broken from some line on."""


Item = TypeVar("Item")


def _named(rows: Iterable[Item], path: Path) -> Iterator[Item]:
    try:
        yield from rows
    except _Broken as error:
        raise DataError(f"{path.name}{error}") from error.__cause__


def _chunked(rows: Iterable[Row]) -> Iterator[tuple[Chunk, list[Row]]]:
    index = first_row = size = 0
    chunk: list[Row] = []
    for row in rows:
        size += _size(row.columns)
        if size > MAX_ROW_BYTES and _size(row.columns) > MAX_ROW_BYTES:
            row, size = Row({}, row.line, _too_long(_size(row.columns))), 0
        chunk.append(row)
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(index, first_row, len(chunk)), chunk
            index, first_row, size, chunk = index + 1, first_row + len(chunk), 0, []
    if chunk:
        yield Chunk(index, first_row, len(chunk)), chunk


def _size(value: Any) -> int:
    """About the bytes of a value's texts."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(len(str(key)) + _size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return 8


def _too_long(num_bytes: int) -> str:
    return (
        f"the row has {num_bytes / 2**20:.1f} MiB; rows over {MAX_ROW_BYTES >> 20} MiB are not read. "
        "Split it, or leave it out"
    )


def _opened(path: Path, compression: str) -> Any:
    if compression == ".gz":
        return gzip.open(path, "rb")
    if compression == ".zst":
        return io.BufferedReader(_Zstandard(path), READ_BYTES)
    return open(path, "rb")


class _Zstandard(io.RawIOBase):
    """Decompressed bytes of a Zstandard file. Unlike the library's own reader it notices a file that is cut short.

    Raises: EOFError for a file that ends within a frame.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._ready:
            content = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            content = content or self._file.read(READ_BYTES)
            if not content:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the compressed file ends before its data do. Was it copied whole?")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(content)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        is_wide = b"\0" in line[:64] or line[:2] in (b"\xff\xfe", b"\xfe\xff")
        wide, name = (" It looks like UTF-16.", "UTF-16") if is_wide else ("", "LATIN1")
        raise ValueError(
            f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line.{wide} "
            f"Save the file as UTF-8 (iconv -f {name} -t UTF-8, for example)"
        ) from error


def _json_row(value: Any, line: int) -> Row:
    if isinstance(value, dict):
        return Row(value, line)
    return Row({}, line, f"expected a JSON object with named columns, found a {type(value).__name__}")


def _json_lines(file: IO[bytes], first_line: int = 1, num_bytes: int | None = None) -> Iterator[Row]:
    """Rows of JSON lines; a line that is none is a row with a problem."""
    line, long_bytes, done = first_line, 0, 0
    for piece, is_whole, _ in _lines(file):
        if num_bytes is not None and done >= num_bytes:
            return
        done += len(piece)
        if not is_whole or long_bytes:
            long_bytes += len(piece)
            if is_whole:
                yield Row({}, line, _too_long(long_bytes))
                line, long_bytes = line + 1, 0
            continue
        stripped = piece.strip()
        if stripped:
            yield _line_row(stripped.removeprefix(b"\xef\xbb\xbf"), line)
        line += 1
    if long_bytes:
        yield Row({}, line, _too_long(long_bytes))


def _line_row(stripped: bytes, line: int) -> Row:
    try:
        return _json_row(json.loads(_text(stripped)), line)
    except json.JSONDecodeError as error:
        nul = " The line holds a NUL byte." if b"\0" in stripped else ""
        problem = (
            f"not valid JSON: {error.msg} (column {error.colno}).{nul} In a .jsonl file each line is one JSON object"
        )
        return Row({}, line, problem)
    except RecursionError:
        return Row({}, line, "JSON nested too deeply to be a row of training data")
    except ValueError as error:
        return Row({}, line, str(error))


def _json(file: IO[bytes]) -> Iterator[Row]:
    """Objects of a JSON array, one after the other, as they are read. Where several share a line, they are numbered."""
    text = _Text(file)
    if text.next_mark() == "{":  # JSON lines under another name
        while text.next_mark():
            line = text.line
            yield _json_row(text.value(), line)
        return
    if text.next_mark() != "[":
        raise _Broken(f":{text.line}: expected a JSON array of objects, or one object a line")
    text.position += 1
    number, has_lines = 0, True
    before: Row | None = None
    if text.next_mark() == "]":
        return
    while True:
        text.next_mark()
        number, line = number + 1, text.line
        row = _json_row(text.value(), line)
        if number == 2 and before is not None:  # the first row waits for the second: do they share a line?
            has_lines = before.line != line
            yield Row(before.columns, before.line if has_lines else 1, before.problem)
        if number == 1:
            before = row
        else:
            yield row if has_lines else Row(row.columns, number, row.problem)
        mark = text.next_mark()
        if mark == "]":
            text.position += 1
            if trailing := text.next_mark():
                raise _Broken(f":{text.line}: {trailing!r} after the end of the array")
            break
        if mark != ",":
            raise _Broken(f":{text.line}: {_cut_short(mark)}")
        text.position += 1
    if number == 1 and before is not None:
        yield before


def _cut_short(mark: str) -> str:
    if mark:
        return f"not valid JSON: expected ',' or ']' after an object, found {mark!r}"
    return "the JSON array is cut short: the file ends before its ']'. Was it copied whole?"


class _Text:
    """A window of decoded text over a file of JSON, which grows to the size of one value."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._counted = 0
        self.position = 0
        self._line = 1

    @property
    def line(self) -> int:
        """The line at the present position."""
        self._line += self._text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def _more(self) -> bool:
        """Drop what is behind, read on; False at the end of the file."""
        try:
            while True:
                content = self._file.read(max(READ_BYTES, len(self._text) - self.position))
                piece = self._utf8.decode(content, final=not content)
                if piece or not content:
                    break
        except UnicodeDecodeError as error:
            raise _Broken(
                f": not UTF-8: {error.reason} (byte 0x{error.object[error.start]:02x}). Save it as UTF-8"
            ) from error
        if not piece:
            return False
        _ = self.line
        self._text = self._text[self.position :] + piece
        self.position = self._counted = 0
        return True

    def next_mark(self) -> str:
        """Skip white space; the next character, or nothing at the end of the file."""
        while True:
            while self.position < len(self._text):
                if not self._text[self.position].isspace():
                    return self._text[self.position]
                self.position += 1
            if not self._more():
                return ""

    def value(self) -> Any:
        """The JSON value at the present position, read on as far as it goes."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self.position)
            except json.JSONDecodeError as error:
                near_end = "Unterminated string" in error.msg or error.pos > len(self._text) - NEAR_END
                if near_end and len(self._text) - self.position > MAX_ROW_BYTES * 4:
                    raise _Broken(f":{self.line}: {_too_long(len(self._text) - self.position)}") from error
                if near_end and self._more():
                    continue
                if error.pos >= len(self._text.rstrip()) or "Unterminated string" in error.msg:
                    raise _Broken(f":{self.line}: {_cut_short('')} (in the object that begins here)") from error
                line = self.line + self._text.count("\n", self.position, error.pos)
                raise _Broken(f":{line}: not valid JSON: {error.msg}") from error
            except ValueError as error:  # an integer of thousands of digits
                raise _Broken(f":{self.line}: not readable as JSON: {error}") from error
            except RecursionError as error:
                raise _Broken(f":{self.line}: JSON nested too deeply to be training data") from error
            if end == len(self._text) and self._more():  # a number might go on
                continue
            self.position = end
            return value


def _csv(file: IO[bytes]) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader(_without_nul(codecs.iterdecode(file, "utf-8-sig")), strict=True)
    line = 1
    try:
        header = next(reader, None)
        if not header:
            return
        if len(set(header)) != len(header):
            raise _Broken(f":1: the header names a column twice: {', '.join(header[:8])}")
        line = reader.line_num + 1
        for values in reader:
            if values:
                problem = None
                if len(values) != len(header):
                    problem = f"{len(values)} values for {len(header)} columns. Is a text not in quotes?"
                yield Row(dict(zip(header, values)) if problem is None else {}, line, problem)
            line = reader.line_num + 1
    except csv.Error as error:
        raise _Broken(f":{line}: not valid CSV in the row that begins here: {error}") from error
    except UnicodeDecodeError as error:
        raise _Broken(f":{reader.line_num + 1}: not UTF-8: {error.reason}. Save it as UTF-8") from error


def _without_nul(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise _Broken(f":{number}: the line holds a NUL byte, so this is no CSV text")
        yield line


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            yield from _columnar(file.iter_batches(batch_size=256))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path.name}: not a readable Parquet file: {error}") from error


def _arrow(path: Path) -> Iterator[Row]:
    """Both forms of Arrow files: with a footer (`.arrow`, Feather 2), and the stream that `datasets` writes."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as file:
            if file.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(file)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                file.seek(0)
                batches = iter(pyarrow.ipc.open_stream(file))
            yield from _columnar(batches)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path.name}: not a readable Arrow file: {error}") from error


def _columnar(batches: Iterable[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for begin in range(0, batch.num_rows, 256):
            try:
                values = batch.slice(begin, 256).to_pylist()
            except UnicodeDecodeError as error:
                raise _Broken(f":{number + 1}: a text in this row or the 255 behind it is not UTF-8") from error
            for value in values:
                number += 1
                yield Row({name: _without_nulls(item) for name, item in value.items()}, number)


def _without_nulls(value: Any) -> Any:
    """Columnar files give every object of a column the keys of all; those an object never had are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
