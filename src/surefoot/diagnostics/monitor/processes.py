"""What the system says of the ranks' processes, from outside."""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from surefoot.system import cgroup


@dataclass(frozen=True)
class ProcessSample:
    """One process at one moment, and those it started where they were asked for."""

    state: str
    """As psutil names it; gone where there is none."""
    cpu_s: Mapping[int, float] = field(default_factory=dict)
    """Process -> seconds it used so far."""
    io_bytes: Mapping[int, float] = field(default_factory=dict)
    """Process -> bytes it read and wrote so far, where that may be read."""
    children: tuple[str, ...] = ()
    """States of the processes it started."""
    waits_for_disk: bool = False
    """Whether a thread of it is in uninterruptible sleep; looked at where children are."""


GONE = ProcessSample("gone")


def growth(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Of all processes together: one that has ended since counts nothing, one that has begun all it used."""
    return sum(used - before.get(process, 0.0) for process, used in after.items())


FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Machine -> the number of the system call in which locks wait."""


def syscall_of(process: int) -> str:
    """`futex` where the main thread of a process waits for a lock; empty for others, or where it may not be read."""
    try:
        number = Path(f"/proc/{process}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return ""
    return "futex" if number == FUTEX.get(platform.machine()) else ""


def uses_gpus(process: int) -> bool:
    """Whether a process has a device of NVIDIA's driver open."""
    try:
        return any(str(file.readlink()).startswith("/dev/nvidia") for file in Path(f"/proc/{process}/fd").glob("*"))
    except OSError:
        return False


def _waits_for_disk(process: int) -> bool:
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError, IndexError):
            if path.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


class Processes:
    """Samples processes; knows each from its first sample on, so that no other is taken for it."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def sample(self, process: int, *, with_children: bool) -> ProcessSample:
        """`process` is the number of one that was alive when it was first sampled. Finding children costs more."""
        try:
            known = self._known.setdefault(process, psutil.Process(process))
            if not known.is_running():  # another one may have its number now
                return GONE
            state = str(known.status())
            if state == psutil.STATUS_ZOMBIE:
                return ProcessSample(state)
            started = known.children(recursive=True) if with_children else []
            family = [known, *(child for child in started if child.pid != os.getpid())]  # who watches is no part of it
        except psutil.NoSuchProcess:
            return GONE
        cpu_s, io_bytes, children = {}, {}, []
        for one in family:
            try:
                times = one.cpu_times()
                cpu_s[one.pid] = times.user + times.system
                if one is not known:
                    children.append(str(one.status()))
                counters = one.io_counters()
                # By calls, and by the disk: what is read through a map is in the second alone.
                moved = (counters.read_chars, counters.write_chars, counters.read_bytes, counters.write_bytes)
                io_bytes[one.pid] = float(sum(moved))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        waits = with_children and _waits_for_disk(process)
        return ProcessSample(state, cpu_s, io_bytes, tuple(children), waits)


def swapped_bytes(process: int) -> int:
    """What of a process's memory lies in swap; 0 where it may not be read."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSwap:"))


def in_line_s(process: int) -> float | None:
    """How long the threads of a process have waited for a core so far; None where the kernel does not tell."""
    waited_ns = 0
    try:
        for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
                waited_ns += int(path.read_text().split()[1])
        return waited_ns / 1e9 if Path(f"/proc/{process}/schedstat").is_file() else None
    except (OSError, IndexError, ValueError):
        return None


def started_by(process: int) -> list[int]:
    """The processes that one started and that are there, and those they started; none where that may not be seen."""
    found: list[int] = []
    with suppress(OSError):  # it ends meanwhile
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            found += [int(child) for child in path.read_text().split() if int(child) != os.getpid()]  # not who watches
    return [*found, *(one for child in found for one in started_by(child))]


def name_of(process: int) -> str:
    """What the system calls it; empty where there is none."""
    with suppress(psutil.Error):
        return str(psutil.Process(process).name())
    return ""


def open_files(process: int) -> int | None:
    """How many files, sockets and pipes a process has open; None where that may not be seen."""
    with suppress(psutil.Error):
        return int(psutil.Process(process).num_fds())
    return None


def most_open_files(process: int) -> int | None:
    """How many it may have open (its soft limit); None without a limit, or where that may not be seen."""
    with suppress(psutil.Error, OSError):
        soft = int(psutil.Process(process).rlimit(psutil.RLIMIT_NOFILE)[0])
        return soft if soft != psutil.RLIM_INFINITY else None
    return None


def num_threads(process: int) -> int | None:
    """Of a process; None where there is none."""
    with suppress(psutil.Error):
        return int(psutil.Process(process).num_threads())
    return None


def proportional_bytes(process: int) -> int:
    """The memory of no file that a process has, where pages that several share count in parts (PSS).

    What it copied of its parent's memory since it was forked is in it, and what they still share is not. 0 where it
    may not be read.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))


def major_faults(process: int) -> int:
    """Pages that a process had to wait for, since it began: from swap, or from files; 0 where it may not be read."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[9])
    except (OSError, IndexError, ValueError):
        return 0


def swapped_in_bytes() -> int | None:
    """What this machine has read back from swap since it was started; None where that is not told."""
    try:
        return int(psutil.swap_memory().sin)
    except (OSError, RuntimeError):
        return None


def memory_bytes() -> int:
    """The memory that processes here may use together: the cgroup's limit, or what the machine has."""
    limit, total = cgroup.memory_limit_bytes(), psutil.virtual_memory().total
    return min(limit, total) if limit is not None else int(total)


def room_bytes() -> int:
    """What this machine, or the limit of this cgroup, still has for programs, without swap."""
    free = int(psutil.virtual_memory().available)
    limit, used = cgroup.memory_limit_bytes(), cgroup.memory_used_bytes()
    return free if limit is None or used is None else min(free, max(0, limit - used))
