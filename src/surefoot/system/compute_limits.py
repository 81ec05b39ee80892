"""Limits of CPU time and memory for computations that may take all of both, such as an untrusted template."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_AFTER_S = 0.25
OVERRUN_S = 1.0
"""CPU time beyond the limit, within one operation of Python, after which the process ends."""
STUCK_SIGNAL = signal.SIGVTALRM
"""Signal that ends a process which is stuck in one operation."""


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds` of CPU time, in the main thread of a process that does nothing else.

    During a single long operation (`10 ** 10 ** 8`) no handler can run: then the system ends the process.
    """

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, late)
    # Repeat the signal, because Python suppresses exceptions in callbacks of the garbage collector.
    signal.setitimer(signal.ITIMER_PROF, seconds, REPEAT_AFTER_S)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds + OVERRUN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Limit this process to `num_bytes` more than now; beyond that it raises MemoryError. Linux only."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY)  # takes a third of the time of `Path.read_text`
    except OSError:
        yield
        return
    pages = int(os.read(descriptor, 100).split()[0])
    os.close(descriptor)
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + num_bytes
    limits = [limit for limit in (most, *before) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
