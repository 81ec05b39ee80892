"""What the system says of the ranks' processes, from outside."""

import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ProcessSample:
    """One process at one moment."""

    state: str
    """As psutil names it; gone where there is none."""
    cpu_s: float
    """Used so far, with the processes it started where they were asked for."""
    io_bytes: int
    """Read and written so far, by it and the processes it started; 0 where that may not be read."""
    children: tuple[str, ...]
    """States of the processes it started, where they were asked for."""
    waits_for_disk: bool = False
    """Whether a thread of it is in uninterruptible sleep; looked at where children are."""


GONE = ProcessSample("gone", 0.0, 0, ())


FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Machine -> the number of the system call in which locks wait."""


def syscall_of(process: int) -> str:
    """`futex` where the main thread of a process waits for a lock; empty for others, or where it may not be read."""
    try:
        number = Path(f"/proc/{process}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return ""
    return "futex" if number == FUTEX.get(platform.machine()) else ""


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
                return ProcessSample(state, 0.0, 0, ())
            family = [known, *(known.children(recursive=True) if with_children else ())]
        except psutil.NoSuchProcess:
            return GONE
        cpu_s, io_bytes, children = 0.0, 0, []
        for one in family:
            try:
                times = one.cpu_times()
                cpu_s += times.user + times.system
                if one is not known:
                    children.append(str(one.status()))
                counters = one.io_counters()
                io_bytes += counters.read_chars + counters.write_chars
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        waits = with_children and _waits_for_disk(process)
        return ProcessSample(state, cpu_s, io_bytes, tuple(children), waits)
