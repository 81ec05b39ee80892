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
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from surefoot import errors
from surefoot.distributed.rendezvous import BACKEND, Launch, rendezvous
from surefoot.distributed.store import attempt
from surefoot.errors import StoppedOnFinding, SurefootError
from surefoot.findings import Finding
from surefoot.system import cgroup
from surefoot.system.process import PYTHON, describe_end, restore_handlers, stop_signals, was_for_memory

FOLDER = "SUREFOOT_LAUNCH"
"""Environment variable: the folder for the notes between launcher and ranks."""
PREFIX = "surefoot-launch-"
LOCK = "lock"
RANK_PROCESS = "surefoot.launch.rank_process"
STOP = "stop"
ABANDONED_AFTER_S = 60.0
JOIN_WITHIN_S = 600
PASS_ON_EVERY_S = 0.1
"""Shortest time between forwards of the same signal: each takes about a millisecond, and a storm would block it."""
LEAVE_AFTER_S = 10.0
"""Seconds that a rank goes on after another one failed alone or exited."""
SEEN_WITHIN_S = 1.0
"""Seconds until elastic notices that a rank has ended; it polls ten times a second."""
GONE = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Connection refused", "NCCL")
"""Messages of gloo and NCCL that another rank has exited."""


@dataclass(frozen=True)
class RankFailure:
    """Reason why a launched run ended."""

    reason: str
    kind: str = ""
    """Class of the SurefootError; empty for a rank that died or raised something else."""
    death: "RankDeath | None" = None
    """Death of the rank, if it left no reason."""
    finding: Finding | None = None
    """Finding that stopped it."""


@dataclass(frozen=True)
class RankDeath:
    """Death of a rank that could not report its reason."""

    rank: int
    how: str
    for_memory: bool | None
    """Whether the kernel killed it because of its cgroup's limit; None if unknown."""


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
        threads = str(max(1, (os.cpu_count() or 1) // config.nproc_per_node))
        inherited = {FOLDER: name, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        before = {key: os.environ.get(key) for key in (*inherited, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
        os.environ.update(inherited)
        logger = logging.getLogger("torch.distributed.elastic")
        level, does_propagate = logger.level, logger.propagate
        logger.setLevel(logging.ERROR)
        death_handler = _DeathHandler(folder, config.max_restarts, oom_kills, on_restart)
        logger.addHandler(death_handler)
        logger.propagate = False  # its messages are reported below, once
        try:
            elastic_launch(_build_launch_config(config, folder, handler), PYTHON[0])(*PYTHON[1:], "-m", RANK_PROCESS)
        except ChildFailedError as error:
            failure = _find_reported_failure(folder)
            if failure is None and passed:
                raise KeyboardInterrupt(passed[0]) from error
            silent_ranks = _list_silent_ranks(folder)
            if (
                failure is None
                and not silent_ranks
                and all(rank_failure.exitcode > 0 for rank_failure in error.failures.values())
            ):
                failure = _find_reported_failure(
                    folder, consequences=True
                )  # all ranks lost each other: only consequences are left
            return failure or _explain_silent_failure(error, silent_ranks, oom_kills=oom_kills)
        except SignalException as error:
            raise SurefootError(f"the launcher was stopped by {signal.Signals(error.sigval).name}.") from error
        except (RendezvousError, SurefootError, RuntimeError, ValueError, OSError) as error:
            failure = _find_reported_failure(folder, consequences=True)
            if failure is not None:  # the end of the ranks explains more than the failed restart
                return failure
            if isinstance(error, SurefootError):
                raise
            reason = str(error).partition(" See inner exception")[0].rstrip(". ") or type(error).__name__
            raise SurefootError(
                f"the ranks of this machine (nproc_per_node={config.nproc_per_node}) were not started or were stopped: "
                f"{reason}."
            ) from error
        finally:
            logger.removeHandler(death_handler)
            logger.setLevel(level)
            logger.propagate = does_propagate
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value
        return _find_reported_failure(folder)


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
        if not any(_list_running_ranks(Path(folder))) and not _has_every_rank_ended(Path(folder)):
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
    for path in folder.glob(f"pid-*-{_find_last_attempt(folder)}"):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError, ValueError):
            process = psutil.Process(int(path.read_text()))
            if process.ppid() == os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _has_every_rank_ended(folder: Path) -> bool:
    """Return whether each rank of the last attempt has noted its end."""
    last = _find_last_attempt(folder)
    noted, through = (len(list(folder.glob(f"{kind}-*-{last}"))) for kind in ("pid", "through"))
    return 0 < noted == through


def note_process() -> None:
    """Note this rank's process id, and exit with ranks that failed. Raises: KeyboardInterrupt for a stopped run."""
    folder = Path(os.environ[FOLDER])
    (folder / f"pid-{os.environ['RANK']}-{attempt()}").write_text(str(os.getpid()))
    if (folder / STOP).exists():
        raise KeyboardInterrupt("stopped while starting")
    threading.Thread(target=_exit_after_peer_failure, args=(folder,), name="watch", daemon=True).start()


def note_end() -> None:
    """Note in a rank that it has finished, to distinguish it from a rank that exited early."""
    with suppress(OSError):  # the launcher has exited
        Path(os.environ[FOLDER], f"through-{os.environ['RANK']}-{attempt()}").touch()


def was_begun(run_folder: Path) -> bool:
    """Return in a rank whether an earlier attempt of this launch has begun the run folder."""
    begun, job = run_folder / "environment.json", Path(os.environ[FOLDER], "job.json")
    return attempt() > 0 and begun.is_file() and begun.stat().st_mtime_ns >= job.stat().st_mtime_ns


def _exit_after_peer_failure(folder: Path) -> None:
    """End this process some time after another rank failed alone: it may be waiting for it where no signal reaches.

    Do the same if a rank of this machine exited without a note: gloo never reports a peer whose message was cut short.
    """
    lost_s: float | None = None
    while True:
        time.sleep(1.0)
        for note in _read_notes(folder, attempt()):
            if not note["is_agreed"] and time.time_ns() - note["time_ns"] > LEAVE_AFTER_S * 1e9:
                os._exit(0 if is_input_error(note["kind"]) else 1)
        if lost_s is None and any(_has_exited(folder, rank) for rank in _list_silent_ranks(folder)):
            lost_s = time.monotonic()
        if lost_s is not None and time.monotonic() - lost_s > LEAVE_AFTER_S:
            os._exit(1)


def _has_exited(folder: Path, rank: int) -> bool:
    """Return whether the process of a rank of this machine has exited."""
    try:
        os.kill(int((folder / f"pid-{rank}-{attempt()}").read_text()), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # another user's process, or a note being written
        return False
    return False


def is_input_error(kind: str) -> bool:
    """Return whether an error of this class would recur after a restart."""
    cls = getattr(errors, kind, None) if kind else None
    return isinstance(cls, type) and issubclass(cls, errors.InputError)


def note_failure(error: BaseException, *, kind: str, is_agreed: bool) -> bool:
    """Note in a rank why it fails. Return whether that is only a consequence of another rank's end."""
    rank = int(os.environ["RANK"])
    text = str(error) or type(error).__name__
    is_consequence = isinstance(error, KeyboardInterrupt) or (not kind and any(sign in text for sign in GONE))
    note = {
        "time_ns": time.time_ns(),
        "kind": kind,
        "reason": text if kind else f"rank {rank}: {type(error).__name__}: {text}",
        "is_agreed": is_agreed,
        "is_consequence": is_consequence,
        "finding": asdict(error.finding) if isinstance(error, StoppedOnFinding) else None,
    }
    path = Path(os.environ[FOLDER], f"failure-{rank}-{attempt()}.json")
    with suppress(OSError):  # a full disk, or a launcher that has exited: the exit status remains
        path.write_text(json.dumps(note), encoding="utf-8")
    return is_consequence


def _read_notes(folder: Path, number: int) -> list[dict[str, Any]]:
    notes = []
    for path in folder.glob(f"failure-*-{number}.json"):
        with suppress(OSError, ValueError):  # being written, or cut short by a kill
            notes.append(json.loads(path.read_text("utf-8")))
    return notes


def _find_last_attempt(folder: Path) -> int:
    return max((int(path.name.split("-")[2]) for path in folder.glob("pid-*")), default=0)


def _find_reported_failure(folder: Path, *, consequences: bool = False) -> RankFailure | None:
    """Return the first reason that a rank of the last attempt noted; `consequences`: include consequences."""
    reasons = [
        note for note in _read_notes(folder, _find_last_attempt(folder)) if consequences or not note["is_consequence"]
    ]
    if not reasons:
        return None
    first = min(reasons, key=lambda note: note["time_ns"])
    finding = Finding(**first["finding"]) if first["finding"] is not None else None
    return RankFailure(first["reason"], first["kind"], finding=finding)


def _list_silent_ranks(folder: Path) -> list[int]:
    """Return the ranks of the last attempt that began, and noted neither their end nor a failure."""
    last = _find_last_attempt(folder)
    reported = {int(path.name.split("-")[1]) for path in folder.glob(f"failure-*-{last}.json")}
    reported |= {int(path.name.split("-")[1]) for path in folder.glob(f"through-*-{last}")}
    return sorted({int(path.name.split("-")[1]) for path in folder.glob(f"pid-*-{last}")} - reported)


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
        failure = _find_reported_failure(self._folder)
        if failure is None and str(process) in ranks:
            failure = _describe_death(ranks[str(process)], int(str(exit_code)), self._oom_kills)
            self._oom_kills = cgroup.oom_kills()
        self._on_restart(failure or RankFailure("a rank ended before it had begun"), self._restarts)
