"""A ring of records on disk, written by one process and read by others, also after that process was killed.

The file is mapped into memory and shared, so what was written is in the system's page cache at once: it survives
SIGKILL, an abort, and a lock that is never given back. Standard library only.

    header   magic, version, rank, process, capacity, number of records so far, machine, layer
    records  number, seconds, kind, phase, step, five values; 64 bytes each, the newest over the oldest

A record's number is written last and in one store, so that a reader takes only whole ones.
"""

import hashlib
import mmap
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from surefoot.system.atomic_io import storage_error

MAGIC = b"SFRING\0\0"
VERSION = 3
HEADER = struct.Struct("<8s4Iq16sq8x")
COUNT_AT = 24
"""Where in the header the number of records stands."""
LAYER_AT = 48
"""And the layer of the decoder that the rank is in, from 1; 0 where it is in none, or does not say."""
NUMBER = struct.Struct("<q")
BODY = struct.Struct("<dHHi5d")
RECORD_BYTES = NUMBER.size + BODY.size
CAPACITY = 65_536
"""Records of a ring: 4 MiB, some thousand steps."""

Values = tuple[float, float, float, float, float]


class RingError(Exception):
    """A file is no ring, or one of another version."""


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that happened."""

    number: int
    """From 0 over the life of the ring."""
    time_s: float
    """Since 1970."""
    kind: int
    phase: int
    step: int
    values: Values


def this_machine() -> bytes:
    """Names this machine among those that share a folder; 16 bytes.

    Where processes are numbered apart, as in containers that share a host's name, it is another machine.
    """
    with suppress(OSError):
        return _digest(f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}")
    return _digest(socket.gethostname())


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class RingWriter:
    """The one process that writes a ring, to a new file. Raises: StorageError."""

    def __init__(self, path: Path, rank: int, capacity: int = CAPACITY) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x+b") as file:
                size = HEADER.size + capacity * RECORD_BYTES
                if hasattr(os, "posix_fallocate"):
                    # Its room is taken now: a disk that is full later would kill a process that writes to the map.
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
                self._map = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            raise storage_error(path, error) from error
        self._words = memoryview(self._map).cast("q")
        self._capacity = capacity
        self._count = 0
        HEADER.pack_into(self._map, 0, MAGIC, VERSION, rank, os.getpid(), capacity, 0, this_machine(), 0)

    def write(self, time_s: float, kind: int, phase: int, step: int, values: Values) -> None:
        """Append a record."""
        place = HEADER.size + self._count % self._capacity * RECORD_BYTES
        self._count += 1
        word = place // NUMBER.size
        self._words[word] = 0  # no record, until it is whole; the first is number 1
        BODY.pack_into(self._map, place + NUMBER.size, time_s, kind, phase, step, *values)
        self._words[word] = self._count
        self._words[COUNT_AT // NUMBER.size] = self._count

    def enter_layer(self, layer: int | None) -> None:
        """Say in which layer the rank is, from 0: in one place, for there are too many to record."""
        self._words[LAYER_AT // NUMBER.size] = 0 if layer is None else layer + 1

    def close(self) -> None:
        """Nothing more will be written; the file stays."""
        self._words.release()
        self._map.close()


class RingReader:
    """Reads a ring while it is written, or after. Raises: RingError for a file that is none."""

    def __init__(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = HEADER.unpack_from(self._map)
            magic, version, self.rank, self.process, self._capacity, _, self._machine, _ = header
        except (OSError, ValueError, struct.error) as error:
            raise RingError(f"{path} cannot be read: {error}") from error
        whole = HEADER.size + self._capacity * RECORD_BYTES
        if magic != MAGIC or version != VERSION or len(self._map) != whole:
            raise RingError(f"{path} is no ring of version {VERSION}, or was cut short")

    @property
    def is_of_this_machine(self) -> bool:
        """Whether its process runs here, so that its number means something."""
        return bool(self._machine == this_machine())

    @property
    def count(self) -> int:
        """Records written so far, those included that newer ones have taken the place of."""
        return int(NUMBER.unpack_from(self._map, COUNT_AT)[0])

    @property
    def layer(self) -> int | None:
        """The layer of the decoder that the rank is in, from 0."""
        number = int(NUMBER.unpack_from(self._map, LAYER_AT)[0])
        return number - 1 if number else None

    def records(self, since: int = 0) -> list[Record]:
        """The records from number `since` on that are still there, oldest first."""
        count = self.count
        found = []
        for number in range(max(since, count - self._capacity), count):
            place = HEADER.size + number % self._capacity * RECORD_BYTES
            body = BODY.unpack_from(self._map, place + NUMBER.size)
            if NUMBER.unpack_from(self._map, place)[0] == number + 1:  # read after the body: not overwritten meanwhile
                time_s, kind, phase, step, *values = body
                found.append(Record(number, time_s, kind, phase, step, tuple(values)))
        return found

    def close(self) -> None:
        self._map.close()
