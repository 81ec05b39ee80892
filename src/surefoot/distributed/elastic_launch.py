"""Launcher of this machine's ranks through torch elastic: it watches them and reports which one failed and how.

A rank that fails on purpose leaves its reason in a file; one that was killed leaves none, and its exit status counts.
Errors that other ranks raise after losing a peer are a consequence, never the reason.
"""

import fcntl
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from surefoot.distributed.rank_notes import (
    FOLDER,
    STOP,
    RankDeath,
    RankFailure,
    find_last_attempt,
    find_reported_failure,
    has_every_rank_ended,
    list_silent_ranks,
)
from surefoot.distributed.rendezvous import BACKEND, Launch, rendezvous
from surefoot.errors import SurefootError
from surefoot.system import cgroup
from surefoot.system.process import PYTHON, describe_end, restore_handlers, stop_signals, was_for_memory

PREFIX = "surefoot-launch-"
LOCK = "lock"
RANK_PROCESS = "surefoot.launch.rank_process"
ABANDONED_AFTER_S = 60.0
JOIN_WITHIN_S = 600
PASS_ON_EVERY_S = 0.1
"""Shortest time between forwards of the same signal: each takes about a millisecond, and a storm would block it."""
SEEN_WITHIN_S = 1.0
"""Seconds until elastic notices that a rank has ended; it polls ten times a second."""


class Launched(Launch, Protocol):
    """Settings of a launch: those of a run with the same names."""

    @property
    def nproc_per_node(self) -> int: ...
    @property
    def max_restarts(self) -> int: ...


def launch(
    config: Launched,
    job: Mapping[str, Any],
    on_restart: Callable[[RankFailure, int], None],
    *,
    join_within_s: int = JOIN_WITHIN_S,
) -> RankFailure | None:
    """Run `job` (JSON for `launch.rank_process`) on this machine's ranks and wait for them; return None on success.

    `on_restart` is called with the reason of each restart and its number; `join_within_s`: how long machines wait for
    each other.

    Signals are forwarded to the ranks, which save and end. Raises: SurefootError if ranks cannot be started;
    KeyboardInterrupt if they were stopped before they could save.
    """
    _remove_abandoned_folders()
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as name,
        _lock_folder(name),
        _forward_signals(name) as passed,
        rendezvous(config, "test" if "self_test" in job else "train", join_within_s) as handler,
    ):
        oom_kills = cgroup.oom_kills()
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "launcher": os.getpid()}), encoding="utf-8")
        death_handler = _DeathHandler(folder, config.max_restarts, oom_kills, on_restart)
        try:
            with _environment_of_ranks(name, config.nproc_per_node), _sole_log_handler(death_handler):
                elastic_launch(_build_launch_config(config, folder, handler), PYTHON[0])(
                    *PYTHON[1:], "-m", RANK_PROCESS
                )
        except ChildFailedError as error:
            failure = find_reported_failure(folder)
            if failure is None and passed:
                raise KeyboardInterrupt(passed[0]) from error
            silent_ranks = list_silent_ranks(folder)
            have_status = all(rank_failure.exitcode > 0 for rank_failure in error.failures.values())
            if failure is None and not silent_ranks and have_status:  # all ranks lost each other
                failure = find_reported_failure(folder, consequences=True)
            return failure or _explain_silent_failure(error, silent_ranks, oom_kills=oom_kills)
        except SignalException as error:
            raise SurefootError(f"the launcher was stopped by {signal.Signals(error.sigval).name}.") from error
        except (RendezvousError, SurefootError, RuntimeError, ValueError, OSError) as error:
            failure = find_reported_failure(folder, consequences=True)
            if failure is not None:  # the end of the ranks explains more than the failed restart
                return failure
            if isinstance(error, SurefootError):
                raise
            reason = str(error).partition(" See inner exception")[0].rstrip(". ") or type(error).__name__
            raise SurefootError(
                f"the ranks of this machine (nproc_per_node={config.nproc_per_node}) were not started or were stopped: "
                f"{reason}."
            ) from error
        return find_reported_failure(folder)


@contextmanager
def _environment_of_ranks(folder: str, num_ranks: int) -> Iterator[None]:
    """Set the variables that ranks inherit; restore the launcher's own environment afterwards."""
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    inherited = {FOLDER: folder, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    before = {key: os.environ.get(key) for key in (*inherited, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(inherited)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


@contextmanager
def _sole_log_handler(handler: logging.Handler) -> Iterator[None]:
    """Send elastic's errors to a handler alone, which reports each of them once."""
    logger = logging.getLogger("torch.distributed.elastic")
    level, does_propagate = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = does_propagate


@contextmanager
def _lock_folder(folder: str) -> Iterator[None]:
    """Hold a lock in a launch folder, which the system releases however this process ends."""
    with open(Path(folder, LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_abandoned_folders() -> None:
    """Delete folders of launchers that were killed: no process holds the lock of these folders."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), open(lock, "r+") as held:
            if time.time() - lock.stat().st_mtime < ABANDONED_AFTER_S:  # it may be about to be locked
                continue
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)


def _build_launch_config(config: Launched, folder: Path, handler: RendezvousHandler) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=config.nnodes,
        max_nodes=config.nnodes,
        nproc_per_node=config.nproc_per_node,
        run_id=BACKEND,
        rdzv_backend=BACKEND,
        rdzv_configs={"handler": handler},
        max_restarts=config.max_restarts,
        signals_to_handle="SIGQUIT",  # the other signals are forwarded, see below
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
    )


@contextmanager
def _forward_signals(folder: str) -> Iterator[list[str]]:
    """Forward stop signals to the ranks; each stops at the end of its step, and the launcher after them."""

    passed: list[str] = []
    passed_s: dict[int, float] = {}

    def pass_on(number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - passed_s.get(number, -inf) < PASS_ON_EVERY_S:
            return
        passed_s[number] = now_s
        passed.append(signal.Signals(number).name)
        with suppress(OSError):  # on a full disk the ranks with a noted process still receive the signal
            (Path(folder) / STOP).touch()  # for ranks that have not noted their process yet
        if not any(_list_running_ranks(Path(folder))) and not has_every_rank_ended(Path(folder)):
            raise KeyboardInterrupt(signal.Signals(number).name)  # nothing to lose: no rank has started
        _signal_ranks(Path(folder), number)

    if threading.current_thread() is not threading.main_thread():
        yield passed
        return
    before = {number: signal.signal(number, pass_on) for number in stop_signals()}
    try:
        yield passed
    finally:
        restore_handlers(before)


def kill_ranks() -> None:
    """Kill the ranks that this launcher process has started."""
    _signal_ranks(Path(os.environ.get(FOLDER, os.devnull)), signal.SIGKILL)


def _signal_ranks(folder: Path, number: int) -> None:
    for process in _list_running_ranks(folder):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def _list_running_ranks(folder: Path) -> Iterator[psutil.Process]:
    """Yield the running ranks of the last attempt. The process id of an ended rank may be another process's by now."""
    for path in folder.glob(f"pid-*-{find_last_attempt(folder)}"):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError, ValueError):
            process = psutil.Process(int(path.read_text()))
            if process.ppid() == os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _explain_silent_failure(error: ChildFailedError, silent_ranks: list[int], *, oom_kills: int | None) -> RankFailure:
    """Return the failure of a rank that left no reason: killed, crashed or exited. `oom_kills`: the count before."""
    # Ranks that lost it report that; elastic ends them too, and may know only them. Times are whole seconds; of ranks
    # that died in the same second, a kill is the cause and an exit its consequence.
    failures = {rank: failure for rank, failure in error.failures.items() if rank in silent_ranks} or error.failures
    rank, failure = min(failures.items(), key=lambda item: (item[1].timestamp, item[1].exitcode > 0))
    if silent_ranks and rank not in silent_ranks:
        return _describe_death(silent_ranks[0], 0, oom_kills)
    return _describe_death(rank, failure.exitcode, oom_kills)


def _describe_death(rank: int, exit_code: int, oom_kills: int | None) -> RankFailure:
    how = describe_end(exit_code)
    return RankFailure(f"rank {rank} {how}.", death=RankDeath(rank, how, was_for_memory(exit_code, oom_kills)))


class _DeathHandler(logging.Handler):
    """Log handler that learns from elastic which rank failed first, before a restart: only its log has that."""

    def __init__(
        self,
        folder: Path,
        max_restarts: int,
        oom_kills: int | None,
        on_restart: Callable[[RankFailure, int], None],
    ) -> None:
        super().__init__()
        self._folder, self._max_restarts, self._oom_kills = folder, max_restarts, oom_kills
        self._on_restart = on_restart
        self._restarts = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Report the failure in a record of the form `failed (exitcode: %s) local_rank: %s (pid: %s) ...`."""
        if not (str(record.msg).startswith("failed (exitcode") and isinstance(record.args, tuple)):
            return
        self._restarts += 1
        if self._restarts > self._max_restarts:
            return
        exit_code, _, process = record.args[:3]
        ranks = {path.read_text(): int(path.name.split("-")[1]) for path in self._folder.glob("pid-*")}
        failure = find_reported_failure(self._folder)
        if failure is None and str(process) in ranks:
            failure = _describe_death(ranks[str(process)], int(str(exit_code)), self._oom_kills)
            self._oom_kills = cgroup.oom_kills()
        self._on_restart(failure or RankFailure("a rank ended before it had begun"), self._restarts)
