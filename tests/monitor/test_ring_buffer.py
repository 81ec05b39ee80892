"""Rings: what is written can be read while it is written, after the newest took the oldest's place, after a kill."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.diagnostics.monitor.ring_buffer import HEADER, RECORD_BYTES, RingError, RingReader, RingWriter
from surefoot.errors import StorageError


def write(ring: RingWriter, *steps: int) -> None:
    for step in steps:
        ring.write(1000.0 + step, 3, 2, step, (step * 1.0, 0.5, 0.0, -1.0, 7.0))


def test_a_reader_follows_the_writer(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "events" / "a.ring", rank=3)
    reader = RingReader(tmp_path / "events" / "a.ring")
    assert (reader.rank, reader.process, reader.count, reader.records()) == (3, os.getpid(), 0, [])
    write(ring, 0, 1)
    assert [record.step for record in reader.records()] == [0, 1]
    write(ring, 2)
    (new,) = reader.records(since=2)
    assert (new.number, new.time_s, new.kind, new.phase, new.values) == (2, 1002.0, 3, 2, (2.0, 0.5, 0.0, -1.0, 7.0))


def test_the_layer_a_rank_is_in_has_one_place(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "a.ring", rank=0)
    reader = RingReader(tmp_path / "a.ring")
    assert reader.layer is None
    for layer in (0, 12, None):
        ring.enter_layer(layer)
        assert (reader.layer, reader.count) == (layer, 0)


def test_the_newest_records_take_the_place_of_the_oldest(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "a.ring", rank=0, capacity=4)
    write(ring, *range(10))
    reader = RingReader(tmp_path / "a.ring")
    assert reader.count == 10
    assert [record.step for record in reader.records()] == [6, 7, 8, 9]
    assert [record.number for record in reader.records(since=8)] == [8, 9]


def test_a_record_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "a.ring", rank=0, capacity=4)
    write(ring, 0, 1, 2)
    with open(tmp_path / "a.ring", "r+b") as file:
        file.seek(HEADER.size + RECORD_BYTES)
        file.write(bytes(8))  # as the writer leaves it before a record is whole
    assert [record.step for record in RingReader(tmp_path / "a.ring").records()] == [0, 2]


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    writes_for_ever = (
        "import sys; from pathlib import Path; from surefoot.diagnostics.monitor.ring_buffer import RingWriter\n"
        "ring, step = RingWriter(Path(sys.argv[1]), 0, 64), 0\n"
        "while True:\n"
        "    step += 1\n"
        "    ring.write(0.0, 0, 0, step, (0.0, 0.0, 0.0, 0.0, 0.0))\n"
        "    if step == 5000: print('ready', flush=True)\n"
    )
    arguments = [sys.executable, "-c", writes_for_ever, str(tmp_path / "a.ring")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    reader = RingReader(tmp_path / "a.ring")
    steps = [record.step for record in reader.records()]
    assert reader.count >= 5000
    assert 63 <= len(steps) <= 64  # all but one that was being written
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_a_ring_takes_its_room_at_once_or_not_at_all(tmp_path: Path) -> None:
    RingWriter(tmp_path / "a.ring", rank=0, capacity=100)
    assert (tmp_path / "a.ring").stat().st_blocks * 512 >= 100 * RECORD_BYTES
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"b\.ring: "):
            RingWriter(tmp_path / "b.ring", rank=0, capacity=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000])
def test_a_file_that_is_no_ring_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ring").write_bytes(content)
    with pytest.raises(RingError, match="a.ring"):
        RingReader(tmp_path / "a.ring")


def test_a_ring_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    RingWriter(tmp_path / "a.ring", rank=0, capacity=8).close()
    os.truncate(tmp_path / "a.ring", 200)
    with pytest.raises(RingError, match="cut short"):
        RingReader(tmp_path / "a.ring")
