"""Lines travel between two processes whole and in order, and no wait is longer than its deadline."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from surefoot.system.line_pipe import LinePipe


@pytest.fixture
def ends() -> Iterator[tuple[LinePipe, LinePipe]]:
    from_first, to_second = os.pipe()
    from_second, to_first = os.pipe()
    yield LinePipe(from_second, to_second), LinePipe(from_first, to_first)
    for descriptor in (from_first, to_second, from_second, to_first):
        try:
            os.close(descriptor)
        except OSError:  # a test has closed it
            continue


def test_lines_of_any_size_arrive_whole_and_in_order(ends: tuple[LinePipe, LinePipe]) -> None:
    parent, worker = ends
    lines = [b"a", b"", b"b" * (1 << 20), "é".encode()]
    sender = threading.Thread(target=lambda: [parent.send(line) for line in lines])
    sender.start()
    assert [worker.receive(time.monotonic() + 30) for _ in lines] == lines
    sender.join(30)


def test_a_wait_ends_at_its_deadline(ends: tuple[LinePipe, LinePipe]) -> None:
    parent, worker = ends
    os.write(worker._outgoing, b"half a line")
    with pytest.raises(TimeoutError):
        parent.receive(time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):  # nobody reads
        parent.send(b"x" * (1 << 20), time.monotonic() + 0.05)


def test_the_end_of_the_other_process_is_an_error(ends: tuple[LinePipe, LinePipe]) -> None:
    parent, worker = ends
    worker.send(b"last")
    worker.close()
    assert parent.receive_available() == [b"last"]
    for read in (parent.receive, parent.receive_available):
        with pytest.raises(EOFError):
            read()
    with pytest.raises(BrokenPipeError):
        parent.send(b"more")


def test_a_line_too_long_is_an_error(ends: tuple[LinePipe, LinePipe]) -> None:
    parent, worker = ends
    bounded = LinePipe(parent.incoming, parent._outgoing, max_line_bytes=100)
    os.write(worker._outgoing, b"x" * 1000)
    with pytest.raises(ValueError, match="100"):
        bounded.receive(time.monotonic() + 30)


def test_requests_that_arrive_together_are_all_answered_before_the_process_is_idle(
    ends: tuple[LinePipe, LinePipe],
) -> None:
    parent, worker = ends
    for number in range(3):
        parent.send(str(number).encode())
    worker.answer_requests(lambda number: [number], idle_s=0.05)
    assert [parent.receive(time.monotonic() + 30) for _ in range(3)] == [b"[0]", b"[1]", b"[2]"]
