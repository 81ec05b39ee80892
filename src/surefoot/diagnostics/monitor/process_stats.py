"""Statistics of this process: its memory, and the time it loses to garbage collection and to other processes."""

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress

PEAK_EVERY_S = 0.5
AGAIN_AFTER_S = 0.05


class _ProcFile:
    """A file of /proc that stays open, so that a read takes microseconds."""

    def __init__(self, path: str) -> None:
        self._file: int | None = None
        with suppress(OSError):  # another system, or the kernel does not count it
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> list[int]:
        """Return the numbers in the file; none if it does not exist."""
        return [int(number) for number in os.pread(self._file, 128, 0).split()] if self._file is not None else []

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class OwnMemory(_ProcFile):
    """A reader of this process's memory. Without /proc/self/statm every result is 0."""

    def __init__(self) -> None:
        super().__init__("/proc/self/statm")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def anonymous_bytes(self) -> int:
        """Return the resident bytes that belong to no file: allocations increase them, the page cache does not."""
        _, resident, of_files, *_ = self.read() or (0, 0, 0)
        return (resident - of_files) * self._page_bytes


class RunQueueWait(_ProcFile):
    """A counter of the seconds in which the creating thread was ready and waited for a core that others used.

    Every result is 0 if the kernel does not count it.
    """

    def __init__(self) -> None:
        super().__init__(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last_total_s = 0.0
        self.since_last_s()

    def since_last_s(self) -> float:
        """Return the seconds since the last call, or since creation. Call it only in the thread that created it."""
        _, waited_ns, *_ = self.read() or (0, 0)
        before_s, self._last_total_s = self._last_total_s, waited_ns / 1e9
        return self._last_total_s - before_s


class LoadPeak:
    """A sampler of this process's peak anonymous memory, from its creation until `end`."""

    def __init__(self) -> None:
        self._memory = OwnMemory()
        self._peak_bytes = self._memory.anonymous_bytes()
        self._stop = threading.Event()
        threading.Thread(target=self._sample, name="load-peak", daemon=True).start()

    def end(self) -> int | None:
        """Stop sampling; return the peak in bytes, or None if it was stopped before."""
        if self._stop.is_set():
            return None
        self._stop.set()
        return max(self._peak_bytes, self._memory.anonymous_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(PEAK_EVERY_S):
            self._peak_bytes = max(self._peak_bytes, self._memory.anonymous_bytes())


class GarbageTime:
    """A counter of the seconds that Python's garbage collector takes, from its creation until `end`."""

    def __init__(self) -> None:
        self._began_s = self._total_s = 0.0
        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._resend_interrupt
        gc.callbacks.append(self._on_collection)

    def since_last_s(self) -> float:
        """Return the seconds since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def end(self) -> None:
        with suppress(ValueError):  # ended already
            gc.callbacks.remove(self._on_collection)
        if sys.unraisablehook == self._resend_interrupt:  # else another hook is set, which may still call this one
            sys.unraisablehook = self._previous_hook

    def _on_collection(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self._total_s += time.perf_counter() - self._began_s

    def _resend_interrupt(self, ignored: "sys.UnraisableHookArgs") -> None:
        """Send the signal again if its interrupt was raised where Python ignores exceptions, as in `_on_collection`.

        A signal during a collection is handled there, because that is the next line of Python to run.
        """
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            self._previous_hook(ignored)
            return
        number = signal.Signals.__members__.get(str(ignored.exc_value), signal.SIGINT)
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(AGAIN_AFTER_S, signal.pthread_kill, (main, number))
        timer.daemon = True
        timer.start()
