"""Text for people who may be gone: a run does not end because its terminal, or a pipe behind it, was closed."""

import errno
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

GONE = (errno.EIO, errno.EPIPE)
"""A terminal that was closed; a pipe that nobody reads."""


def say(text: str) -> None:
    """A line on standard error."""
    write(sys.stderr, f"{text}\n")


def say_at_once(text: str) -> None:
    """A line on standard error, from a signal handler: the stream may be in the middle of another one, and be full."""
    with suppress(OSError):
        if select.select([], [sys.stderr.fileno()], [], 0)[1]:
            os.write(sys.stderr.fileno(), f"{text}\n".encode())


def write(stream: TextIO, text: str) -> None:
    """Write at once. Where nobody reads any more, this and all that follows is dropped; a full disk drops this."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno in GONE:
            drop(stream)


def drop(stream: TextIO) -> None:
    """Nobody reads it: whatever is still written there, at the end of this process too, goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
