"""What is said to people who are gone ends nothing."""

import os
from pathlib import Path
from typing import TextIO

import pytest

from surefoot.system.console import format_time_left, write


def leads_to(stream: TextIO) -> str:
    return str(Path(f"/proc/self/fd/{stream.fileno()}").readlink())


def test_a_pipe_that_nobody_reads_takes_whatever_is_written_later() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as stream:
        write(stream, "one\n")
        assert leads_to(stream) == "/dev/null"
        print("two", file=stream, flush=True)  # as whatever is left at the end of a process


def test_a_full_disk_drops_a_line_and_no_more() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    with open("/dev/full", "w", encoding="utf-8") as stream:
        write(stream, "one\n")
        assert leads_to(stream) == "/dev/full", "later there may be room again"
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that it can be closed


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0:00"), (127.9, "2:07"), (3599, "59:59"), (4513, "1:15:13"), (86_399, "23:59:59"), (228_313, "2d 15h")],
)
def test_the_time_left_is_shown_in_the_units_of_its_size(seconds: float, text: str) -> None:
    assert format_time_left(seconds) == text
