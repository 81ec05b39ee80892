"""How processes start and end: with their parent, and what whoever started one can say of its end."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from surefoot.errors import ConfigError
from surefoot.system.cgroup import oom_kills

PYTHON = (sys.executable, "-P")
"""Command of Python for a process of ours. Without -P it would take `yaml.py` in the current folder for PyYAML."""
PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def is_rank() -> bool:
    """Whether our launcher, torchrun or SLURM says that this process is a rank; some set only how many there are."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def launcher_number(name: str, default: int = 0) -> int:
    """Return a number that a launcher gives in an environment variable. Raises: ConfigError for anything else."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigError(
            f"{name}={text[:80]!r} in the environment is no number. A launcher such as torchrun sets it; unset it "
            "where this run has none."
        )
    return int(text)


def is_local_rank() -> bool:
    """Whether it says which of its machine's, too: pods that are told their own number alone start ranks yet."""
    return is_rank() and "LOCAL_RANK" in os.environ


def stop_signals() -> list[signal.Signals]:
    """That ask a run to save and end: Ctrl-C, a scheduler, a terminal that closes. The last unless nohup ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


class StopHandler:
    """A program's handler of stop signals, while no run handles them: they interrupt, and no longer after the run."""

    def __init__(self) -> None:
        self.is_over = False
        self._has_interrupted = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt; of SIGTERM and SIGHUP only for the first."""
        if not self.is_over and (number == signal.SIGINT or not self._has_interrupted):
            self._has_interrupted = True
            raise KeyboardInterrupt(signal.Signals(number).name)


def handle_stop_signals() -> None:
    """Let this program end by itself, with a status of its own, whatever asks it to stop. In its main thread."""
    handler = StopHandler()
    for number in stop_signals():
        signal.signal(number, handler)


def restore_handlers(before: Mapping[signal.Signals, Any]) -> None:
    """Give stop signals back to who handled them before a run. A program that only ran it has nothing left to stop."""
    for number, handler in before.items():
        if isinstance(handler, StopHandler):
            handler.is_over = True
        signal.signal(number, handler)


@contextmanager
def own_stop_signals() -> Iterator[None]:
    """Handle stop signals as the program of this process, and ignore them from the end of the block to its exit.

    Python's own exit takes the handlers away, and a signal then would change the exit status. In the main thread.
    """
    handle_stop_signals()
    try:
        yield
    finally:
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Let this process get SIGTERM when the one that started it is gone, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def describe_end(exit_code: int) -> str:
    """How a process ended, as `subprocess` counts: negative for a signal."""
    if exit_code < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"was killed by signal {-exit_code} ({known.get(-exit_code, 'real-time')})"
    return f"ended with status {exit_code}" + (" before the run was over" if exit_code == 0 else "")


def was_for_memory(exit_code: int, kills_before: int | None) -> bool | None:
    """Whether the kernel ended it for its cgroup's limit; None where that cannot be told. `kills_before`: its count."""
    if exit_code != -signal.SIGKILL:
        return False
    now = oom_kills()
    return None if now is None or kills_before is None else now > kills_before


def leave(status: int) -> NoReturn:
    """End this process without the teardown of native threads, in which a rank of a finished run may still abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
