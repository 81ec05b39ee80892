"""Functions that observe the ranks' processes from outside, through the operating system."""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ProcessSample:
    """The state of one process at one moment, and of the processes it started if they were requested."""

    state: str
    """State, as psutil names it; `gone` if there is no such process."""
    cpu_s: Mapping[int, float] = field(default_factory=dict)
    """Process -> CPU seconds it has used so far."""
    io_bytes: Mapping[int, float] = field(default_factory=dict)
    """Process -> bytes it has read and written so far, where this may be read."""
    children: tuple[str, ...] = ()
    """States of the processes that it started."""
    waits_for_disk: bool = False
    """Whether a thread of it is in uninterruptible sleep; sampled only together with children."""


GONE = ProcessSample("gone")
EXITED = ("gone", psutil.STATUS_ZOMBIE)
"""States of a process that has exited."""


def growth(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the sum of what all processes used in between: nothing for an ended one, its whole use for a new one."""
    return sum(used - before.get(process, 0.0) for process, used in after.items())


FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Machine -> number of the system call in which locks wait."""


def syscall_of(process: int) -> str:
    """Return `futex` if the main thread of a process waits for a lock; empty otherwise, or if it may not be read."""
    try:
        number = Path(f"/proc/{process}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return ""
    return "futex" if number == FUTEX.get(platform.machine()) else ""


def uses_gpus(process: int) -> bool:
    """Return whether a process has a device of NVIDIA's driver open."""
    try:
        return any(str(file.readlink()).startswith("/dev/nvidia") for file in Path(f"/proc/{process}/fd").glob("*"))
    except OSError:
        return False


def _is_waiting_for_disk(process: int) -> bool:
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError, IndexError):
            if path.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


class Processes:
    """A sampler of processes. It keeps their identities, so it detects a process that reuses a number."""

    def __init__(self) -> None:
        self._handles: dict[int, psutil.Process] = {}

    def sample(self, process: int, *, with_children: bool) -> ProcessSample:
        """Return the state of a process that was alive when it was first sampled. Finding children costs more."""
        try:
            handle = self._handles.setdefault(process, psutil.Process(process))
            if not handle.is_running():  # another process may have its number now
                return GONE
            state = str(handle.status())
            if state == psutil.STATUS_ZOMBIE:
                return ProcessSample(state)
            started = handle.children(recursive=True) if with_children else []
            family = [
                handle,
                *(child for child in started if child.pid != os.getpid()),
            ]  # without the supervisor itself
        except psutil.NoSuchProcess:
            return GONE
        cpu_s, io_bytes, children = {}, {}, []
        for member in family:
            try:
                times = member.cpu_times()
                cpu_s[member.pid] = times.user + times.system
                if member is not handle:
                    children.append(str(member.status()))
                counters = member.io_counters()
                # Bytes of system calls and of the disk: only the second count what is read through a memory map.
                transferred = (counters.read_chars, counters.write_chars, counters.read_bytes, counters.write_bytes)
                io_bytes[member.pid] = float(sum(transferred))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        waits = with_children and _is_waiting_for_disk(process)
        return ProcessSample(state, cpu_s, io_bytes, tuple(children), waits)


def swapped_bytes(process: int) -> int:
    """Return the bytes of a process's memory that are in swap; 0 if unreadable."""
    return _read_kib(process, "status", "VmSwap:") << 10


def proportional_bytes(process: int) -> int:
    """Return a process's proportional anonymous memory (PSS), in which each sharer of a page counts only its part.

    It includes what the process copied of its parent's memory since the fork, and excludes what they still share. 0 if
    unreadable.
    """
    return _read_kib(process, "smaps_rollup", "Pss_Anon:") << 10


def _read_kib(process: int, file: str, name: str) -> int:
    try:
        lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(name))


def run_queue_wait_s(process: int) -> float | None:
    """Return the seconds that a process's threads have waited for a core so far; None if the kernel does not count."""
    waited_ns = 0
    try:
        for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
                waited_ns += int(path.read_text().split()[1])
        return waited_ns / 1e9 if Path(f"/proc/{process}/schedstat").is_file() else None
    except (OSError, IndexError, ValueError):
        return None


def list_descendants(process: int) -> list[int]:
    """Return the live descendants of a process; none if they may not be read."""
    children: list[int] = []
    with suppress(OSError):  # it ends meanwhile
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            # without the supervisor itself
            children += [int(child) for child in path.read_text().split() if int(child) != os.getpid()]
    return [*children, *(descendant for child in children for descendant in list_descendants(child))]


def name_of(process: int) -> str:
    """Return the system's name of a process; empty if there is no such process."""
    with suppress(psutil.Error):
        return str(psutil.Process(process).name())
    return ""


def count_open_files(process: int) -> int | None:
    """Return the number of open files, sockets and pipes of a process; None if it may not be read."""
    with suppress(psutil.Error):
        return int(psutil.Process(process).num_fds())
    return None


def max_open_files(process: int) -> int | None:
    """Return a process's soft limit of open files; None without a limit, or if it may not be read."""
    with suppress(psutil.Error, OSError):
        soft = int(psutil.Process(process).rlimit(psutil.RLIMIT_NOFILE)[0])
        return soft if soft != psutil.RLIM_INFINITY else None
    return None


def count_threads(process: int) -> int | None:
    """Return the number of threads of a process; None if there is no such process."""
    with suppress(psutil.Error):
        return int(psutil.Process(process).num_threads())
    return None


def count_major_faults(process: int) -> int:
    """Return the number of pages that a process has waited for, from swap or files, since it began; 0 if unreadable."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[9])
    except (OSError, IndexError, ValueError):
        return 0


def swapped_in_bytes() -> int | None:
    """Return the bytes that this machine has read back from swap since it started; None if not reported."""
    try:
        return int(psutil.swap_memory().sin)
    except (OSError, RuntimeError):
        return None
