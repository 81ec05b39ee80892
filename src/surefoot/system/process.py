"""Start and end of processes: stop signals, ranks of a launcher, and the description of an exit status."""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from surefoot.errors import ConfigError
from surefoot.system.cgroup import oom_kills
from surefoot.system.console import say_at_once

PYTHON = (sys.executable, "-P")
"""Python command for a child process. Without -P it would import `yaml.py` of the current folder as PyYAML."""
PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector. It takes a sixth of the time in which torch and transformers are imported."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank; some launchers set WORLD_SIZE without RANK."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def launcher_number(name: str, default: int = 0) -> int:
    """Return the number that a launcher set in an environment variable. Raises: ConfigError for any other text."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigError(
            f"{name}={text[:80]!r} in the environment is no number. A launcher such as torchrun sets it; unset it "
            "where this run has none."
        )
    return int(text)


def is_local_rank() -> bool:
    """Return whether a launcher set LOCAL_RANK too: a pod with its node's RANK alone still has to start its ranks."""
    return is_rank() and "LOCAL_RANK" in os.environ


def is_local_leader() -> bool:
    """Return whether this process is no rank, or the first rank of its machine."""
    return not is_rank() or launcher_number("LOCAL_RANK") == 0


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: Ctrl-C, a scheduler's, a closed terminal's (unless nohup ignores it)."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


def _end_if_forked(process: int, number: int) -> bool:
    """End this process on SIGTERM if it was forked from that of a handler; return whether it was.

    Libraries end their workers by SIGTERM. Other signals reach the whole group: its workers go on while the run does.
    """
    if os.getpid() == process or number != signal.SIGTERM:
        return False
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return True


class StopHandler:
    """Handler of stop signals of a program while no run handles them; it interrupts until the run is over."""

    def __init__(self) -> None:
        self.is_over = False
        self._has_interrupted = False
        self._process = os.getpid()

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt for each SIGINT, and for SIGTERM or SIGHUP only if nothing was interrupted before."""
        if _end_if_forked(self._process, number):
            return
        if not self.is_over and (number == signal.SIGINT or not self._has_interrupted):
            self._has_interrupted = True
            raise KeyboardInterrupt(signal.Signals(number).name)


def handle_stop_signals() -> None:
    """Turn stop signals into KeyboardInterrupt, so that this program sets its exit status. Main thread only."""
    handler = StopHandler()
    for number in stop_signals():
        signal.signal(number, handler)


def restore_handlers(before: Mapping[signal.Signals, Any]) -> None:
    """Restore the handlers of stop signals from before a run. A `StopHandler` then no longer interrupts."""
    for number, handler in before.items():
        if isinstance(handler, StopHandler):
            handler.is_over = True
        signal.signal(number, handler)


class StopSignal:
    """Stop signals of a run: during the loop they are remembered and the run saves; before and after they interrupt."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.step_time_s: float | None = None
        """Seconds of the last step; None before the end of the first one. A user who stops the run is told it."""
        self._deferred = False
        self._is_ending = False
        self._process = os.getpid()

    @contextmanager
    def watching(self) -> Iterator["StopSignal"]:
        """Install the handlers; outside the main thread signals stay with their current handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        try:
            yield self
        finally:
            restore_handlers(before)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Remember a signal instead of interrupting; a second Ctrl-C still interrupts."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def note_last_save(self) -> None:
        """Ignore further signals from now on: the run saves and ends. Only a first Ctrl-C after the save interrupts."""
        self._is_ending = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if _end_if_forked(self._process, number):
            return
        is_first, self.received = self.received is None, self.received or signal.Signals(number).name
        is_ctrl_c = number == signal.SIGINT
        if not is_first and (self._is_ending or not is_ctrl_c):
            return
        if not self._deferred and self._is_ending and not is_ctrl_c:
            return
        if not self._deferred or not is_first:
            raise KeyboardInterrupt(signal.Signals(number).name)
        if is_ctrl_c and not self._is_ending and os.environ.get("RANK", "0") == "0":
            took = "" if self.step_time_s is None else f" (the last step took {self.step_time_s:.1f} s)"
            say_at_once(
                f"the run saves and stops when this step or evaluation is done{took}; Ctrl-C again ends it unsaved"
            )


@contextmanager
def own_stop_signals() -> Iterator[None]:
    """Handle stop signals as the program of this process, and ignore them from the end of the block to its exit.

    Python removes the handlers at exit, and a signal after that would change the exit status. Main thread only.
    """
    handle_stop_signals()
    try:
        yield
    finally:
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Send this process SIGTERM when its parent ends, if the system is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def describe_end(exit_code: int) -> str:
    """Describe how a process ended. `exit_code`: as in `subprocess`, negative for a signal."""
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by signal {-exit_code} ({names.get(-exit_code, 'real-time')})"
    return f"ended with status {exit_code}" + (" before the run was over" if exit_code == 0 else "")


def was_for_memory(exit_code: int, kills_before: int | None) -> bool | None:
    """Return whether the kernel killed a process at its cgroup's memory limit; None if that is unknown.

    `kills_before`: `oom_kills()` from before the process ended.
    """
    if exit_code != -signal.SIGKILL:
        return False
    kills = oom_kills()
    return None if kills is None or kills_before is None else kills > kills_before


def leave(status: int) -> NoReturn:
    """Exit without the teardown of native threads, in which a rank of a finished run may still abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
