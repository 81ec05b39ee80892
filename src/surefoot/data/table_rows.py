"""Readers for rows of tables: CSV, Parquet and Arrow. Columnar files are read in small groups of rows."""

import codecs
import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from surefoot.data.rows import MAX_ROW_BYTES, Broken, Row
from surefoot.errors import DataError
from surefoot.system.encodings import describe_encoding

OTHER_SEPARATORS = ";\t|"
ROWS_AT_ONCE = 32
"""Number of rows converted at a time: few bytes of a dictionary-encoded column can hold many long texts."""


def csv_rows(file: IO[bytes]) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = _DecodedLines(file)
    reader = csv.reader(lines, strict=True)
    line = 1
    try:
        header = next(reader, None)
        if not header:
            return
        separator = next((mark for mark in OTHER_SEPARATORS if mark in header[0]), None) if len(header) == 1 else None
        if separator is not None:
            raise Broken(f":1: the values are separated by {separator!r}, not by commas. Save it with commas")
        named = [name for name in header if name]
        if len(set(named)) != len(named):
            raise Broken(f":1: the header names a column twice: {', '.join(header[:8])}")
        line = reader.line_num + 1
        lines.begin_row(line)
        for values in reader:
            if values:
                problem = None
                if len(values) != len(header):
                    problem = f"{len(values)} values for {len(header)} columns. Put texts that hold commas in quotes"
                yield Row(
                    {name: value for name, value in zip(header, values) if name} if problem is None else {},
                    line,
                    problem,
                )
            line = reader.line_num + 1
            lines.begin_row(line)
    except csv.Error as error:
        raise Broken(f":{line}: not valid CSV in the row that begins here: {error}") from error
    except UnicodeDecodeError as error:
        raise Broken(f":{reader.line_num + 1}: not UTF-8: {error.reason}. {describe_encoding(error.object)}") from error


class _DecodedLines:
    """Decoded lines for the CSV reader, at most MAX_ROW_BYTES for a row."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._number = 0
        self._row_line = 1
        self._row_bytes = 0

    def begin_row(self, line: int) -> None:
        """Begin a new row at `line`: the row before it is complete."""
        self._row_line, self._row_bytes = line, 0

    def __iter__(self) -> "_DecodedLines":
        return self

    def __next__(self) -> str:
        content = self._file.readline(MAX_ROW_BYTES + 1)
        self._row_bytes += len(content)
        if self._row_bytes > MAX_ROW_BYTES:
            raise Broken(
                f":{self._row_line}: the row that begins here goes on for over {MAX_ROW_BYTES >> 20} MiB. "
                "Is a closing quote missing?"
            )
        text = self._decoder.decode(content, final=not content)
        if not content:
            raise StopIteration
        self._number += 1
        if "\0" in text:
            raise Broken(f":{self._number}: the line holds a NUL byte, so this is no CSV text")
        return text


def parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            yield from _convert_batches(file.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path.name}: not a readable Parquet file: {error}") from error


def arrow_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of both kinds of Arrow files: with a footer (`.arrow`, Feather 2), and streams (`datasets`)."""
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
            yield from _convert_batches(batches)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path.name}: not a readable Arrow file: {error}") from error


def _convert_batches(batches: Iterable[Any]) -> Iterator[Row]:
    number = 0
    import pyarrow

    for batch in batches:
        try:
            batch.validate(full=True)  # offsets of a damaged file may point anywhere in memory
        except pyarrow.ArrowInvalid as error:
            raise Broken(f":{number + 1}: a value in this row or those behind it is damaged: {error}") from error
        for begin in range(0, batch.num_rows, ROWS_AT_ONCE):
            try:
                values = batch.slice(begin, ROWS_AT_ONCE).to_pylist()
            except (ValueError, OverflowError) as error:  # a date outside of Python's range
                raise Broken(f":{number + 1}: a value in this row or those behind it is unreadable: {error}") from error
            for value in values:
                number += 1
                yield Row({name: _remove_nulls(item) for name, item in value.items()}, number)


def _remove_nulls(value: Any) -> Any:
    """Remove nulls: columnar files give each object of a column the keys of all objects, as null where it has none."""
    if isinstance(value, dict):
        return {key: _remove_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_remove_nulls(item) for item in value]
    return value
