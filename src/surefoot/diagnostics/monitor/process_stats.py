"""What this process says of itself: its own memory, and the time that it loses to the collector and to others."""

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress

PEAK_EVERY_S = 0.5
AGAIN_AFTER_S = 0.05


class OwnMemory:
    """Reads /proc/self/statm, in microseconds; without it nothing is known, and every answer is 0."""

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def anonymous_bytes(self) -> int:
        """Resident and of no file: what allocations make grow, and the page cache does not."""
        if self._file is None:
            return 0
        _, resident, of_files, *_ = os.pread(self._file, 128, 0).split()
        return (int(resident) - int(of_files)) * self._page_bytes

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class TimeInLine:
    """Seconds for which the thread that asks was ready and waited for a core that others had."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._told_s = 0.0
        with suppress(OSError):  # of a kernel that does not count it: then every answer is 0
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self.since_last_s()

    def since_last_s(self) -> float:
        """Since it was last asked, or made; always by the thread that made it."""
        if self._file is None:
            return 0.0
        before_s, self._told_s = self._told_s, int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        return self._told_s - before_s

    def end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class LoadPeak:
    """The most memory of its own that this process had, looked at now and then from when this is made until `end`."""

    def __init__(self) -> None:
        self._memory = OwnMemory()
        self._most = self._memory.anonymous_bytes()
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="load-peak", daemon=True).start()

    def end(self) -> int | None:
        """In bytes; None where it ended before."""
        if self._is_over.is_set():
            return None
        self._is_over.set()
        return max(self._most, self._memory.anonymous_bytes())

    def _look(self) -> None:
        while not self._is_over.wait(PEAK_EVERY_S):
            self._most = max(self._most, self._memory.anonymous_bytes())


class GarbageTime:
    """Seconds that Python's garbage collector stood in the way of this process, from when this is made until `end`."""

    def __init__(self) -> None:
        self._began_s = self._total_s = 0.0
        self._ignore = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        gc.callbacks.append(self._hear)

    def since_last_s(self) -> float:
        """Since it was last asked."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def end(self) -> None:
        with suppress(ValueError):  # ended already
            gc.callbacks.remove(self._hear)
        if sys.unraisablehook == self._unraisable:  # else another's, which may still ask this one
            sys.unraisablehook = self._ignore

    def _hear(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self._total_s += time.perf_counter() - self._began_s

    def _unraisable(self, ignored: "sys.UnraisableHookArgs") -> None:
        """Signal again where an interrupt was raised in what Python lets no exception out of, as in `_hear`.

        A signal that comes during a collection is handled there, since it is the next line of Python to run.
        """
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            self._ignore(ignored)
            return
        number = signal.Signals.__members__.get(str(ignored.exc_value), signal.SIGINT)
        main = threading.main_thread().ident
        assert main is not None
        again = threading.Timer(AGAIN_AFTER_S, signal.pthread_kill, (main, number))
        again.daemon = True
        again.start()
