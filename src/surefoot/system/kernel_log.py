"""Messages of the kernel during a run: GPU errors (Xid), processes that it killed for memory, disks that fail.

Root can read /dev/kmsg, and other users can if kernel.dmesg_restrict is 0; otherwise there are no messages.
"""

import os
import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOG = Path("/dev/kmsg")
JUST_S = 120.0
MOST_AT_ONCE = 100_000
"""Most messages of one read."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[^)]+)\): (?P<number>\d+)(?:, (?P<more>.*))?")
OF_PROGRAMS = frozenset({13, 31, 43, 45})
"""Xids that a program usually causes, by NVIDIA's list (docs.nvidia.com/deploy/xid-errors), read 2026-11."""
PROCESS = re.compile(r"pid=(\d+)")
KILLED = re.compile(r"^Out of memory: Killed process (?P<process>\d+) ")
TROUBLE = re.compile(r"Hardware Error|[Mm]achine check|EDAC .*\bUE\b|I/O error|server \S+ not responding")
"""Messages about a processor, memory, disk or network file system that fails."""
FAULT = re.compile(r"^(?:traps: )?[^\[]+\[(?P<process>\d+)\]:? (?:segfault at|general protection|trap )")
"""Message about a process that native code made crash."""


@dataclass(frozen=True)
class GpuError:
    """One Xid of NVIDIA's driver."""

    device: str
    """PCI address."""
    number: int
    message: str
    process: int | None = None
    """Process that caused the error, if the driver names one."""


class KernelLog:
    """Reader of the kernel's messages since it was opened, or of all in the kernel's buffer."""

    def __init__(self, path: Path = LOG, *, from_the_start: bool = False) -> None:
        self._file: int | None = None
        self.why_not = ""
        """Reason why the log cannot be read; empty if it can."""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_SET if from_the_start else os.SEEK_END)
        except OSError as error:
            self.why_not = str(error)

    def read(self, newest_s: float | None = None) -> list[str]:
        """Return new messages without headers, not older than `newest_s`; a reader that is too slow misses some."""
        lines: list[str] = []
        since_us = 0.0 if newest_s is None else (time.monotonic() - newest_s) * 1e6
        for _ in range(MOST_AT_ONCE):
            message = self._read_message()
            if not message:
                break
            for line in message.decode("utf-8", "replace").splitlines():
                header, _, text = line.partition(";")
                fields = header.split(",")  # priority, number, microseconds since boot
                if text and len(fields) > 2 and fields[2].isdigit() and int(fields[2]) >= since_us:
                    lines.append(text)
        return lines

    def _read_message(self) -> bytes:
        """Read one message of the device, or the next 8 KiB of a file; empty at the end."""
        if self._file is None:
            return b""
        try:
            return os.read(self._file, 8192)
        except BrokenPipeError:  # older messages were overwritten; the next call returns the next one
            return b"\n"
        except OSError:  # no new message
            return b""

    def end(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def gpu_errors(lines: list[str]) -> list[GpuError]:
    """Return the Xids among the kernel's messages."""
    matches = (XID.search(line) for line in lines)
    return [
        GpuError(
            match["device"], int(match["number"]), match[0], int(pid[1]) if (pid := PROCESS.search(match[0])) else None
        )
        for match in matches
        if match
    ]


def recent_messages(path: Path = LOG, newest_s: float = JUST_S) -> list[str]:
    """Return the messages of the last `newest_s`; none if the log cannot be read."""
    log = KernelLog(path, from_the_start=True)
    lines = log.read(newest_s)
    log.end()
    return lines


def killed_for_memory(lines: Sequence[str]) -> frozenset[int]:
    """Return the processes that the kernel killed because the whole machine ran out of memory."""
    return frozenset(int(match["process"]) for match in map(KILLED.search, lines) if match)


def troubles(lines: Sequence[str], processes: Collection[int]) -> list[str]:
    """Return the messages about hardware or storage that fails, and about crashes of these processes."""
    return [
        line
        for line in lines
        if TROUBLE.search(line) or ((fault := FAULT.search(line)) is not None and int(fault["process"]) in processes)
    ]
