"""Rows of tables: CSV, Parquet and Arrow. Columnar files are read a few hundred rows at a time."""

import codecs
import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from surefoot.data.rows import MAX_ROW_BYTES, Broken, Row
from surefoot.errors import DataError


def csv_rows(file: IO[bytes]) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader(_without_nul(codecs.iterdecode(file, "utf-8-sig")), strict=True)
    line = 1
    try:
        header = next(reader, None)
        if not header:
            return
        named = [name for name in header if name]
        if len(set(named)) != len(named):
            raise Broken(f":1: the header names a column twice: {', '.join(header[:8])}")
        line = reader.line_num + 1
        for values in reader:
            if values:
                problem = None
                if len(values) != len(header):
                    problem = f"{len(values)} values for {len(header)} columns. Is a text not in quotes?"
                yield Row(
                    {name: value for name, value in zip(header, values) if name} if problem is None else {},
                    line,
                    problem,
                )
            line = reader.line_num + 1
    except csv.Error as error:
        raise Broken(f":{line}: not valid CSV in the row that begins here: {error}") from error
    except UnicodeDecodeError as error:
        raise Broken(f":{reader.line_num + 1}: not UTF-8: {error.reason}. Save it as UTF-8") from error


def _without_nul(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise Broken(f":{number}: the line holds a NUL byte, so this is no CSV text")
        yield line


def parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            yield from _columnar(file.iter_batches(batch_size=256))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path.name}: not a readable Parquet file: {error}") from error


def arrow_rows(path: Path) -> Iterator[Row]:
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
                raise Broken(f":{number + 1}: a text in this row or the 255 behind it is not UTF-8") from error
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
