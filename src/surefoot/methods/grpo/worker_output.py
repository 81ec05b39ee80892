"""Forwarding of a worker process's output to standard error, up to a bound. The rest is read and dropped.

A worker never waits for a reader, whatever it prints, and neither a terminal nor a log file fills up with it.
"""

import os
import sys
import threading
from contextlib import suppress
from typing import IO

MOST_BYTES = 256 << 10
"""Largest output that is forwarded of a worker, including the workers that replace it."""
READ_BYTES = 1 << 16
LAST_OUTPUT_S = 1.0
"""Seconds that the last output of a process has to be forwarded."""
LEFT_OUT = (
    f"\n[a reward worker printed more than {MOST_BYTES >> 10} KiB; the rest of its output is left out. Let your reward "
    "function write into a file to keep all of it]\n"
)


class BoundedOutput:
    """The output of the processes of one worker, one process after the other."""

    def __init__(self) -> None:
        self._room = MOST_BYTES
        self._reader: threading.Thread | None = None

    def follow(self, stream: IO[bytes]) -> None:
        """Read a stream to its end, and close it, in a new thread."""
        self._reader = threading.Thread(target=self._read, args=[stream], name="reward output", daemon=True)
        self._reader.start()

    def finish(self) -> None:
        """Wait a moment for the last output of a process that ended. Its children may hold the stream open."""
        if self._reader is not None:
            self._reader.join(LAST_OUTPUT_S)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while piece := os.read(stream.fileno(), READ_BYTES):
                if not self._room:
                    continue
                _write_to_stderr(piece[: self._room])
                self._room -= min(len(piece), self._room)
                if not self._room:
                    _write_to_stderr(LEFT_OUT.encode())


def _write_to_stderr(content: bytes) -> None:
    """Write to the standard error that this process was started with, if it is open. Nothing is buffered."""
    if sys.__stderr__ is None:
        return
    remaining = memoryview(content)
    with suppress(OSError, ValueError):
        while remaining:
            remaining = remaining[os.write(sys.__stderr__.fileno(), remaining) :]
