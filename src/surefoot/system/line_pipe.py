"""Lines over pipes between this process and a worker process, with a deadline for each of them. Standard library only.

The content of a line is JSON. No process unpickles what another one sends.
"""

import json
import math
import os
import select
import subprocess
import time
from collections.abc import Callable
from typing import Any

PIECE_BYTES = 1 << 16


class LinePipe:
    """The pipe ends through which this process receives lines from another process and sends lines to it."""

    def __init__(self, incoming: int, outgoing: int, *, max_line_bytes: float = math.inf) -> None:
        self.incoming = incoming
        self._outgoing = outgoing
        self._max_line_bytes = max_line_bytes
        self._unread = bytearray()

    @staticmethod
    def to_process(process: subprocess.Popen[bytes], *, max_line_bytes: float = math.inf) -> "LinePipe":
        """Return the pipe to the standard input and from the standard output of a process."""
        assert process.stdin is not None
        assert process.stdout is not None
        return LinePipe(process.stdout.fileno(), process.stdin.fileno(), max_line_bytes=max_line_bytes)

    def send(self, line: bytes, deadline: float = math.inf) -> None:
        """Send a line. `deadline`: on the monotonic clock. Raises: TimeoutError; BrokenPipeError."""
        remaining = memoryview(line + b"\n")
        while remaining:
            if not _is_ready(self._outgoing, select.POLLOUT, deadline):
                raise TimeoutError
            # A pipe that is ready takes PIPE_BUF bytes without blocking.
            remaining = remaining[os.write(self._outgoing, remaining[: select.PIPE_BUF]) :]

    def receive(self, deadline: float = math.inf) -> bytes:
        """Return the next line. Raises: TimeoutError; EOFError at the end; ValueError for a line too long."""
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            if searched > self._max_line_bytes:
                raise ValueError(f"a line of more than {self._max_line_bytes} bytes")
            if not _is_ready(self.incoming, select.POLLIN, deadline):
                raise TimeoutError
            self._read_piece()
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    def receive_available(self) -> list[bytes]:
        """Read once, and return the lines that are complete. Raises: EOFError at the end of the pipe."""
        self._read_piece()
        *lines, self._unread = self._unread.split(b"\n")
        return [bytes(line) for line in lines]

    def answer_requests(self, answer: Callable[[Any], Any], *, idle_s: float = math.inf) -> None:
        """Answer each JSON value with another one, until the pipe ends or nothing comes for `idle_s`."""
        while self._unread or _is_ready(self.incoming, select.POLLIN, time.monotonic() + idle_s):
            try:
                line = self.receive()
            except EOFError:
                return
            self.send(json.dumps(answer(json.loads(line))).encode())

    def close(self) -> None:
        """Close both ends."""
        os.close(self.incoming)
        os.close(self._outgoing)

    def _read_piece(self) -> None:
        piece = os.read(self.incoming, PIECE_BYTES)
        if not piece:
            raise EOFError
        self._unread += piece


def _is_ready(descriptor: int, event: int, deadline: float) -> bool:
    """Wait until `event` or the deadline. Polls, because select takes no descriptor over 1023 and a rank has more."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if deadline == math.inf else max(deadline - time.monotonic(), 0) * 1000))
