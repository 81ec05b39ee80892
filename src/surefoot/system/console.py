"""Console output that survives its reader: a closed terminal or pipe ends no run, and changes no exit status."""

import errno
import io
import json
import os
import select
import sys
from contextlib import suppress
from typing import Any, TextIO

GONE = (errno.EIO, errno.EPIPE)
"""Errors of a write to a closed terminal, and to a pipe that nobody reads."""
TAKES_WITHIN_S = 5.0
"""Seconds to wait for the reader of a non-blocking pipe before the output is dropped."""
CLEAR_LINE = "\r\x1b[K"
"""Control characters that move the cursor to the beginning of the line and clear it."""
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


class _Output(io.FileIO):
    """A descriptor whose failed writes are dropped."""

    error: OSError | None = None
    """Last error of a write, such as a full disk; a reader that has gone away is none."""

    def write(self, content: Any, /) -> int:
        """Write as much as possible; return the full length."""
        try:
            written: int | None = super().write(content)
            if written is None and select.select([], [self.fileno()], [], TAKES_WITHIN_S)[1]:
                written = super().write(content)
            return len(memoryview(content)) if written is None else written
        except OSError as error:
            if error.errno in GONE:
                drop(self.fileno())
            else:
                self.error = error
            return len(memoryview(content))


def protect_streams() -> None:
    """Replace the standard streams so that no write to them raises. Call this first in a program.

    A closed descriptor (`>&-`) is pointed at /dev/null: otherwise the next file that is opened would take its number,
    and printed text would go into that file. Streams that a caller of this program has replaced are left alone.
    """
    for number, (name, mode) in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            drop(number)
        stream: TextIO | None = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if mode == "r":
            sys.stdin = stream or open(number, encoding="utf-8", closefd=False)  # noqa: SIM115 - stays open
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")  # what a terminal or a pipe sends need not be text
            continue
        output = io.BufferedWriter(_Output(number, "w", closefd=False))
        encoding = stream.encoding if stream is not None else "utf-8"
        is_line_buffered = name == "stderr" or output.isatty()
        text = io.TextIOWrapper(output, encoding, errors="backslashreplace", line_buffering=is_line_buffered)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)  # also marks the stream as protected


def report_lost_output(status: int) -> int:
    """Flush standard output at the end of a program and return its exit status: 1 instead of 0 if text was lost."""
    sys.stdout.flush()
    output = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(output, _Output) or output.error is None:
        return status
    say(f"error: standard output could not be written: {output.error.strerror}. What was printed is incomplete.")
    return status or 1


def format_time_left(seconds: float) -> str:
    """Return a time as minutes and seconds (`2:07`), with hours (`1:15:13`), or from a day on as `2d 15h`."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"{minutes}:{rest_s:02d}"


def say(text: str) -> None:
    """Write a line to standard error; on a terminal in place of a line that is being rewritten there."""
    write(sys.stderr, f"{CLEAR_LINE if sys.stderr.isatty() else ''}{text}\n")


def say_at_once(text: str) -> None:
    """Write a line to standard error from a signal handler: the stream may be full, or in the middle of a line."""
    with suppress(OSError):
        if select.select([], [sys.stderr.fileno()], [], 0)[1]:
            start = CLEAR_LINE if sys.stderr.isatty() else ""
            os.write(sys.stderr.fileno(), f"{start}{text}\n".encode())


def write(stream: TextIO, text: str) -> None:
    """Write and flush. If nobody reads the stream, this and all later text is dropped; a full disk drops this text."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno in GONE:
            drop(stream.fileno())


def drop(descriptor: int) -> None:
    """Point a descriptor that nobody reads at /dev/null, for this process and its child processes."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    os.set_inheritable(descriptor, True)


def print_json(value: dict[str, Any]) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value, ensure_ascii=False))
