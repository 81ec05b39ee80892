"""Streaming readers for rows of JSON lines and of JSON arrays."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import IO, Any

from surefoot.data.rows import MAX_DEPTH, MAX_ROW_BYTES, READ_BYTES, Broken, Row, lines_of, too_long
from surefoot.system.encodings import describe_encoding
from surefoot.system.json_files import nesting_depth

TOO_DEEP = f"more than {MAX_DEPTH} JSON values inside each other, so it is no row of training data"
ARRAY = "not valid JSON lines: the file is one JSON array. Name it .json"
NEAR_END = 64
"""Number of characters at the end of the read text in which a JSON error may mean that more must be read."""


def _decode_utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line. "
            f"{describe_encoding(line)}"
        ) from error


def _build_row(value: Any, line: int, num_brackets: int | None = None) -> Row:
    """Return the row of a JSON value; `num_brackets`: opening brackets in its text, which bound its depth."""
    if isinstance(value, dict):
        is_deep = (num_brackets is None or num_brackets > MAX_DEPTH) and nesting_depth(value) > MAX_DEPTH
        return Row({} if is_deep else value, line, TOO_DEEP if is_deep else None)
    return Row({}, line, f"expected a JSON object with named columns, found a {type(value).__name__}")


def json_lines(file: IO[bytes], first_line: int = 1, num_bytes: int | None = None) -> Iterator[Row]:
    """Yield the rows of JSON lines; an invalid line is a row with a problem."""
    line, long_bytes, bytes_read = first_line, 0, 0
    for piece, is_whole, _ in lines_of(file):
        if num_bytes is not None and bytes_read >= num_bytes:
            return
        bytes_read += len(piece)
        if not is_whole or long_bytes:
            long_bytes += len(piece)
            if is_whole:
                yield Row({}, line, too_long(long_bytes))
                line, long_bytes = line + 1, 0
            continue
        stripped = piece.strip()
        if stripped:
            yield _parse_line(stripped.removeprefix(b"\xef\xbb\xbf"), line)
        line += 1
    if long_bytes:
        yield Row({}, line, too_long(long_bytes))


def _parse_line(stripped: bytes, line: int) -> Row:
    try:
        value = json.loads(_decode_utf8(stripped))
        if line == 1 and isinstance(value, list):
            return Row({}, line, ARRAY)
        return _build_row(value, line, stripped.count(b"{") + stripped.count(b"["))
    except json.JSONDecodeError as error:
        if line == 1 and stripped.startswith(b"["):
            return Row({}, line, ARRAY)
        nul = " The line holds a NUL byte." if b"\0" in stripped else ""
        problem = (
            f"not valid JSON: {error.msg} (column {error.colno}).{nul} In a .jsonl file each line is one JSON object"
        )
        return Row({}, line, problem)
    except RecursionError:
        return Row({}, line, TOO_DEEP)
    except ValueError as error:
        return Row({}, line, str(error))


def json_values(file: IO[bytes]) -> Iterator[Row]:
    """Yield the objects of a JSON array as they are read. If objects share a line, they are numbered instead."""
    text = _TextWindow(file)
    if text.next_mark() == "{":  # JSON lines under another name
        while text.next_mark():
            line = text.line
            yield _build_row(text.value(), line)
        return
    items = _array_items(text)
    first = list(islice(items, 2))
    share_a_line = len(first) == 2 and first[0].line == first[1].line
    for number, row in enumerate(chain(first, items), 1):
        yield replace(row, line=number) if share_a_line else row


def _array_items(text: "_TextWindow") -> Iterator[Row]:
    """Yield the items of a JSON array. Raises: Broken."""
    if text.next_mark() != "[":
        raise Broken(f":{text.line}: expected a JSON array of objects, or one object a line")
    text.position += 1
    mark = "" if text.next_mark() == "]" else ","
    while mark == ",":
        text.next_mark()
        line = text.line
        yield _build_row(text.value(), line)
        mark = text.next_mark()
        if mark not in (",", "]"):
            raise Broken(f":{text.line}: {_describe_cut(mark)}")
        text.position += 1
    if mark and (trailing := text.next_mark()):
        raise Broken(f":{text.line}: {trailing!r} after the end of the array")


def _describe_cut(mark: str) -> str:
    if mark:
        return f"not valid JSON: expected ',' or ']' after an object, found {mark!r}"
    return "the JSON array is cut short: the file ends before its ']'. Was it copied whole?"


class _TextWindow:
    """A window of decoded text over a JSON file, which grows to the size of one value."""

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
        """Line number at the present position."""
        self._line += self._text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def _read_more(self) -> bool:
        """Drop the text before the position and read more; return False at the end of the file."""
        try:
            while True:
                content = self._file.read(max(READ_BYTES, len(self._text) - self.position))
                piece = self._utf8.decode(content, final=not content)
                if piece or not content:
                    break
        except UnicodeDecodeError as error:
            raise Broken(
                f": not UTF-8: {error.reason} (byte 0x{error.object[error.start]:02x}). "
                f"{describe_encoding(error.object)}"
            ) from error
        if not piece:
            return False
        _ = self.line
        self._text = self._text[self.position :] + piece
        self.position = self._counted = 0
        return True

    def next_mark(self) -> str:
        """Skip white space and return the next character, or an empty string at the end of the file."""
        while True:
            while self.position < len(self._text):
                if not self._text[self.position].isspace():
                    return self._text[self.position]
                self.position += 1
            if not self._read_more():
                return ""

    def value(self) -> Any:
        """Read the JSON value at the present position, however long it is."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self.position)
            except json.JSONDecodeError as error:
                near_end = "Unterminated string" in error.msg or error.pos > len(self._text) - NEAR_END
                if near_end and len(self._text) - self.position > MAX_ROW_BYTES * 4:
                    raise Broken(f":{self.line}: {too_long(len(self._text) - self.position)}") from error
                if near_end and self._read_more():
                    continue
                if error.pos >= len(self._text.rstrip()) or "Unterminated string" in error.msg:
                    raise Broken(f":{self.line}: {_describe_cut('')} (in the object that begins here)") from error
                line = self.line + self._text.count("\n", self.position, error.pos)
                before = self._text[: error.pos].rstrip()
                is_trailing = before.endswith(",") and self._text[error.pos : error.pos + 1] in ("]", "}")
                reason = "a comma stands behind the last entry" if is_trailing else error.msg
                raise Broken(f":{line}: not valid JSON: {reason}") from error
            except ValueError as error:  # an integer of thousands of digits
                raise Broken(f":{self.line}: not readable as JSON: {error}") from error
            except RecursionError as error:
                raise Broken(f":{self.line}: JSON nested too deeply to be training data") from error
            if end == len(self._text) and self._read_more():  # a number might continue
                continue
            self.position = end
            return value
