"""Rows from files: JSON lines, JSON and Parquet. Every row knows the file and line it came from.

Knows nothing of what the columns mean.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Row:
    """One record as it stands in its file."""

    columns: dict[str, Any]
    place: str
    """`data.jsonl:203`: the line in JSON lines, the number of the record (from 1) elsewhere."""


def read_rows(paths: str | list[str], where: str = "dataset") -> Iterator[Row]:
    """The rows of one file or several, in order.

    `where` is shown in errors about the setting itself (`run.yaml:4`).
    Raises: DataError for a missing, empty or unreadable file, with the line where there is one.
    """
    for text in [paths] if isinstance(paths, str) else paths:
        path = Path(text)
        if not path.is_file():
            kind = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise DataError(f"dataset {path} {kind}. Give a .jsonl, .json or .parquet file ({where}).")
        if path.stat().st_size == 0:
            raise DataError(f"dataset {path} is empty (0 bytes) ({where}).")
        is_blank = True
        try:
            for row in _read_file(path, where):
                is_blank = False
                yield row
        except OSError as error:
            raise DataError(f"dataset {path} cannot be read: {error.strerror or error} ({where}).") from error
        if is_blank:
            raise DataError(f"dataset {path} holds no rows ({where}).")


def _read_file(path: Path, where: str) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        return _json_lines(path)
    if path.suffix == ".json":
        return _json(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise DataError(f"dataset {path}: '{path.suffix}' files are not read. Known: {', '.join(SUFFIXES)} ({where}).")


def _row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object with named columns, found a {type(value).__name__}.")
    return Row(value, place)


def _decode(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line. "
            "Save the file as UTF-8 (iconv -f LATIN1 -t UTF-8, for example)."
        ) from error


def _json_lines(path: Path) -> Iterator[Row]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path.name}:{number}"
            text = _decode(line, place).removeprefix("\ufeff")
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{place}: not valid JSON: {error.msg} (column {error.colno}). In a .jsonl file each line is one "
                    "JSON object."
                ) from error
            except RecursionError:
                raise DataError(f"{place}: JSON nested too deeply to be a row of training data.") from None
            yield _row(value, place)


def _json(path: Path) -> Iterator[Row]:
    content = path.read_bytes()
    text = _decode(content, path.name).removeprefix("\ufeff")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path.name}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno}).") from error
    except RecursionError:
        raise DataError(f"{path.name}: JSON nested too deeply to be training data.") from None
    if not isinstance(value, list):
        raise DataError(f"{path.name}: expected a JSON array of objects, found a {type(value).__name__}.")
    for number, item in enumerate(value, 1):
        yield _row(item, f"{path.name}:{number}")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield _row(value, f"{path.name}:{number}")
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path.name}: not a readable Parquet file: {error}") from error
