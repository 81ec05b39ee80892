"""A ring buffer of records on disk, written by one process and read by others, even after that process was killed.

The file is a shared memory map, so a write is in the system's page cache at once: it survives SIGKILL, an abort, and
a lock that is never released. Standard library only.

    header   magic, version, rank, process, capacity, number of records so far, machine, layer
    records  number, seconds, kind, phase, step, five values; 64 bytes each, the newest overwrites the oldest

    A record's number is written last and in one store, so that a reader takes only complete records.
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
"""Offset of the number of records in the header."""
LAYER_AT = 48
"""Offset of the rank's current decoder layer in the header, from 1; 0 if it is in none, or does not record it."""
NUMBER = struct.Struct("<q")
BODY = struct.Struct("<dHHi5d")
RECORD_BYTES = NUMBER.size + BODY.size
CAPACITY = 65_536
"""Number of records of a ring: 4 MiB, some thousand steps."""

Values = tuple[float, float, float, float, float]


class RingError(Exception):
    """A file is no ring, or has another version."""


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded event."""

    number: int
    """Number from 0 over the life of the ring."""
    time_s: float
    """Seconds since 1970."""
    kind: int
    phase: int
    step: int
    values: Values


def this_machine() -> bytes:
    """Return a 16-byte identifier of this machine among those that share a folder.

    Containers that share a host's name but number their processes separately count as different machines.
    """
    with suppress(OSError):
        return _hash_text(f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}")
    return _hash_text(socket.gethostname())


def _hash_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class RingWriter:
    """The only writer of a ring, in a new file. Raises: StorageError."""

    def __init__(self, path: Path, rank: int, capacity: int = CAPACITY) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x+b") as file:
                size = HEADER.size + capacity * RECORD_BYTES
                if hasattr(os, "posix_fallocate"):
                    # Reserve the space now: if the disk is full later, a write to the map would kill the process.
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
        """Append one record."""
        offset = HEADER.size + self._count % self._capacity * RECORD_BYTES
        self._count += 1
        word = offset // NUMBER.size
        self._words[word] = 0  # no record until it is complete; the first has number 1
        BODY.pack_into(self._map, offset + NUMBER.size, time_s, kind, phase, step, *values)
        self._words[word] = self._count
        self._words[COUNT_AT // NUMBER.size] = self._count

    def enter_layer(self, layer: int | None) -> None:
        """Store the rank's current layer, from 0, in one field: layers change too often for records."""
        self._words[LAYER_AT // NUMBER.size] = 0 if layer is None else layer + 1

    def close(self) -> None:
        """Close the map; the file remains."""
        self._words.release()
        self._map.close()


class RingReader:
    """A reader of a ring during or after its writing. Raises: RingError for a file that is no ring."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
            raise RingError(f"{path} is not a file")
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = HEADER.unpack_from(self._map)
            magic, version, self.rank, self.process, self._capacity, _, self._machine, _ = header
        except (OSError, ValueError, struct.error) as error:
            raise RingError(f"{path} cannot be read: {error}") from error
        expected_bytes = HEADER.size + self._capacity * RECORD_BYTES
        if magic != MAGIC or version != VERSION or len(self._map) != expected_bytes:
            raise RingError(f"{path} is no ring of version {VERSION}, or was cut short")

    @property
    def is_of_this_machine(self) -> bool:
        """Whether its process runs on this machine, so that the process number is valid here."""
        return bool(self._machine == this_machine())

    @property
    def count(self) -> int:
        """Number of records written so far, including those that were overwritten."""
        return int(NUMBER.unpack_from(self._map, COUNT_AT)[0])

    @property
    def layer(self) -> int | None:
        """Current decoder layer of the rank, from 0; None outside layers."""
        number = int(NUMBER.unpack_from(self._map, LAYER_AT)[0])
        return number - 1 if number else None

    def records(self, since: int = 0) -> list[Record]:
        """Return the remaining records from number `since` on, oldest first."""
        count = self.count
        records = []
        for number in range(max(since, count - self._capacity), count):
            offset = HEADER.size + number % self._capacity * RECORD_BYTES
            body = BODY.unpack_from(self._map, offset + NUMBER.size)
            if NUMBER.unpack_from(self._map, offset)[0] == number + 1:  # read after the body: not overwritten meanwhile
                time_s, kind, phase, step, *values = body
                records.append(Record(number, time_s, kind, phase, step, tuple(values)))
        return records

    def close(self) -> None:
        self._map.close()
