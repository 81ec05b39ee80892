"""What the kernel says while a run goes on: errors of GPUs (Xid), processes that it killed for memory, disks that fail.

/dev/kmsg may be read by root, and by others where kernel.dmesg_restrict is 0; elsewhere nothing is known of it.
"""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOG = Path("/dev/kmsg")
JUST_S = 120.0
MOST_AT_ONCE = 100_000
"""Lines of one look."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[^)]+)\): (?P<number>\d+)(?:, (?P<more>.*))?")
OF_PROGRAMS = frozenset({13, 31, 43, 45})
"""Xids that a program causes as a rule, by NVIDIA's list (docs.nvidia.com/deploy/xid-errors), read 2026-11."""
PROCESS = re.compile(r"pid=(\d+)")
KILLED = re.compile(r"^Out of memory: Killed process (?P<process>\d+) ")


@dataclass(frozen=True)
class GpuError:
    """One Xid of NVIDIA's driver."""

    device: str
    """PCI address."""
    number: int
    said: str
    process: int | None = None
    """That did it, by the driver, where it is told."""


class KernelLog:
    """Reads what is new since it was made, or all that is kept."""

    def __init__(self, path: Path = LOG, *, from_the_start: bool = False) -> None:
        self._file: int | None = None
        self.why_not = ""
        """Why it cannot be read, if it cannot."""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_SET if from_the_start else os.SEEK_END)
        except OSError as error:
            self.why_not = str(error)

    def read(self, newest_s: float | None = None) -> list[str]:
        """Messages without their headers, of the last `newest_s`; a reader that is too slow misses some."""
        lines: list[str] = []
        since_us = 0.0 if newest_s is None else (time.monotonic() - newest_s) * 1e6
        for _ in range(MOST_AT_ONCE):
            said = self._next()
            if not said:
                break
            for line in said.decode("utf-8", "replace").splitlines():
                header, _, text = line.partition(";")
                fields = header.split(",")  # priority, number, microseconds since the machine was started
                if text and len(fields) > 2 and fields[2].isdigit() and int(fields[2]) >= since_us:
                    lines.append(text)
        return lines

    def _next(self) -> bytes:
        """One message of the device, or what is left of a file; empty where there is no more."""
        if self._file is None:
            return b""
        try:
            return os.read(self._file, 8192)
        except BrokenPipeError:  # older ones were overwritten; the next one comes with the next call
            return b"\n"
        except OSError:  # nothing is new
            return b""

    def end(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def gpu_errors(lines: list[str]) -> list[GpuError]:
    """The Xids among messages of the kernel."""
    found = (XID.search(line) for line in lines)
    return [
        GpuError(one["device"], int(one["number"]), one[0], int(pid[1]) if (pid := PROCESS.search(one[0])) else None)
        for one in found
        if one
    ]


def killed_for_memory(path: Path = LOG, newest_s: float = JUST_S) -> frozenset[int]:
    """Processes that the kernel killed just now because the whole machine had no memory left."""
    log = KernelLog(path, from_the_start=True)
    found = (KILLED.search(line) for line in log.read(newest_s))
    log.end()
    return frozenset(int(one["process"]) for one in found if one)
