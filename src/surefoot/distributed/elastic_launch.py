"""Starts the ranks of this machine through torch elastic, watches them, and says which one failed and how.

A rank that fails on purpose leaves its reason in a file; one that was killed leaves none, and its exit status tells.
What other ranks raise when a peer is gone is a consequence, never the reason.
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
"""Environment variable: the folder in which launcher and ranks leave each other notes."""
PREFIX = "surefoot-launch-"
LOCK = "lock"
RANK_PROCESS = "surefoot.launch.rank_process"
STOP = "stop"
ABANDONED_AFTER_S = 60.0
JOIN_WITHIN_S = 600
PASS_ON_EVERY_S = 0.1
"""How often the same signal is passed on at most: it takes about a millisecond, and a storm would stop the launcher."""
LEAVE_AFTER_S = 10.0
"""How long a rank goes on when another one has failed alone, or is gone."""
SEEN_WITHIN_S = 1.0
"""How soon elastic sees that a rank has ended; it looks ten times a second."""
GONE = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Connection refused", "NCCL")
"""What gloo and NCCL say when another rank is gone."""


@dataclass(frozen=True)
class RankFailure:
    """Why a launched run ended."""

    reason: str
    kind: str = ""
    """Class of our error; empty for a rank that died or raised something else."""
    death: "RankDeath | None" = None
    """Where it left no reason."""
    finding: Finding | None = None
    """That it stopped on."""


@dataclass(frozen=True)
class RankDeath:
    """How a rank ended that could not say why."""

    rank: int
    how: str
    for_memory: bool | None
    """Whether the kernel killed it because of its cgroup's limit; None where that cannot be told."""


class Launched(Launch, Protocol):
    """What is launched: a run's settings of that name."""

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
    """Run `job` (JSON for `launch.rank_process`) on this machine's ranks and wait for them; None where all went well.

    `on_restart` hears why the ranks are started again, and for which time; `join_within_s`: how long machines wait for
    each other.

    Signals are passed on to the ranks, which save and end. Raises: SurefootError where ranks cannot be started;
    KeyboardInterrupt where they were stopped before they could save.
    """
    _remove_abandoned_folders()
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as name,
        _in_use(name),
        _passing_signals(name) as passed,
        rendezvous(config, "test" if "self_test" in job else "train", join_within_s) as handler,
    ):
        oom_kills = cgroup.oom_kills()
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "launcher": os.getpid()}), encoding="utf-8")
        threads = str(max(1, (os.cpu_count() or 1) // config.nproc_per_node))
        inherited = {FOLDER: name, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        before = {key: os.environ.get(key) for key in (*inherited, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
        os.environ.update(inherited)
        said = logging.getLogger("torch.distributed.elastic")
        level, propagates = said.level, said.propagate
        said.setLevel(logging.ERROR)
        deaths = _Deaths(folder, config.max_restarts, oom_kills, on_restart)
        said.addHandler(deaths)
        said.propagate = False  # what it says is said below, once
        try:
            elastic_launch(_launch_config(config, folder, handler), PYTHON[0])(*PYTHON[1:], "-m", RANK_PROCESS)
        except ChildFailedError as error:
            told = _told(folder)
            if told is None and passed:
                raise KeyboardInterrupt(passed[0]) from error
            silent = _silent(folder)
            if told is None and not silent and all(failure.exitcode > 0 for failure in error.failures.values()):
                told = _told(folder, consequences=True)  # all lost each other: what they say is all there is
            return told or _died(error, silent, oom_kills=oom_kills)
        except SignalException as error:
            raise SurefootError(f"the launcher was stopped by {signal.Signals(error.sigval).name}.") from error
        except (RendezvousError, SurefootError, RuntimeError, ValueError, OSError) as error:
            reported = _told(folder, consequences=True)
            if reported is not None:  # what ended the ranks says more than why they do not start again
                return reported
            if isinstance(error, SurefootError):
                raise
            reason = str(error).partition(" See inner exception")[0].rstrip(". ") or type(error).__name__
            raise SurefootError(
                f"the ranks of this machine (nproc_per_node={config.nproc_per_node}) were not started or were stopped: "
                f"{reason}."
            ) from error
        finally:
            said.removeHandler(deaths)
            said.setLevel(level)
            said.propagate = propagates
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value
        return _told(folder)


@contextmanager
def _in_use(folder: str) -> Iterator[None]:
    """Hold a lock in a launch folder, which the system gives back however this process ends."""
    with open(Path(folder, LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_abandoned_folders() -> None:
    """Delete what launchers left that were killed: nobody holds the lock of these folders."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), open(lock, "r+") as held:
            if time.time() - lock.stat().st_mtime < ABANDONED_AFTER_S:  # may be about to be locked
                continue
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)


def _launch_config(config: Launched, folder: Path, handler: RendezvousHandler) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=config.nnodes,
        max_nodes=config.nnodes,
        nproc_per_node=config.nproc_per_node,
        run_id=BACKEND,
        rdzv_backend=BACKEND,
        rdzv_configs={"handler": handler},
        max_restarts=config.max_restarts,
        signals_to_handle="SIGQUIT",  # the others are passed on, see below
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
    )


@contextmanager
def _passing_signals(folder: str) -> Iterator[list[str]]:
    """What asks a run to end goes to the ranks; each stops at the end of its step, and the launcher after them."""

    passed: list[str] = []
    passed_s: dict[int, float] = {}

    def pass_on(number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - passed_s.get(number, -inf) < PASS_ON_EVERY_S:
            return
        passed_s[number] = now_s
        passed.append(signal.Signals(number).name)
        with suppress(OSError):  # a full disk: those that have noted their process hear it
            (Path(folder) / STOP).touch()  # for ranks that have not noted their process yet
        if not any(_running_ranks(Path(folder))) and not _have_all_ended(Path(folder)):
            raise KeyboardInterrupt(signal.Signals(number).name)  # nothing to lose: ranks are yet to start
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
    """In the launcher's process: kill the ranks that it has started."""
    _signal_ranks(Path(os.environ.get(FOLDER, os.devnull)), signal.SIGKILL)


def _signal_ranks(folder: Path, number: int) -> None:
    for process in _running_ranks(folder):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def _running_ranks(folder: Path) -> Iterator[psutil.Process]:
    """Yield the ranks of the last attempt that run. The number of one that ended may be another process's by now."""
    for path in folder.glob(f"pid-*-{_last_attempt(folder)}"):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError, ValueError):
            process = psutil.Process(int(path.read_text()))
            if process.ppid() == os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _have_all_ended(folder: Path) -> bool:
    """Return whether each rank of the last attempt has said that it is through."""
    last = _last_attempt(folder)
    noted, through = (len(list(folder.glob(f"{kind}-*-{last}"))) for kind in ("pid", "through"))
    return 0 < noted == through


def note_process() -> None:
    """In a rank: say which process this is, and leave with those that failed. Raises: KeyboardInterrupt if told to."""
    folder = Path(os.environ[FOLDER])
    (folder / f"pid-{os.environ['RANK']}-{attempt()}").write_text(str(os.getpid()))
    if (folder / STOP).exists():
        raise KeyboardInterrupt("stopped while starting")
    threading.Thread(target=_leave_with_the_others, args=(folder,), name="watch", daemon=True).start()


def note_end() -> None:
    """In a rank: say that it is through, so that one that just left is known."""
    with suppress(OSError):  # a launcher that is gone
        Path(os.environ[FOLDER], f"through-{os.environ['RANK']}-{attempt()}").touch()


def was_begun(run_folder: Path) -> bool:
    """In a rank: whether an earlier attempt of this launch has begun the run folder."""
    begun, job = run_folder / "environment.json", Path(os.environ[FOLDER], "job.json")
    return attempt() > 0 and begun.is_file() and begun.stat().st_mtime_ns >= job.stat().st_mtime_ns


def _leave_with_the_others(folder: Path) -> None:
    """End this process some time after another rank failed alone: it may be waiting for it where no signal reaches.

    The same where one of this machine is gone without a word: gloo never tells of a peer whose message was cut short.
    """
    lost_s: float | None = None
    while True:
        time.sleep(1.0)
        for note in _notes(folder, attempt()):
            if not note["is_agreed"] and time.time_ns() - note["time_ns"] > LEAVE_AFTER_S * 1e9:
                os._exit(0 if is_input_error(note["kind"]) else 1)
        if lost_s is None and any(_is_gone(folder, rank) for rank in _silent(folder)):
            lost_s = time.monotonic()
        if lost_s is not None and time.monotonic() - lost_s > LEAVE_AFTER_S:
            os._exit(1)


def _is_gone(folder: Path, rank: int) -> bool:
    """Whether the process of a rank of this machine is no more."""
    try:
        os.kill(int((folder / f"pid-{rank}-{attempt()}").read_text()), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # another's process, a note being written
        return False
    return False


def is_input_error(kind: str) -> bool:
    """Whether an error of this class would only come again after a restart."""
    found = getattr(errors, kind, None) if kind else None
    return isinstance(found, type) and issubclass(found, errors.InputError)


def note_failure(error: BaseException, *, kind: str, is_agreed: bool) -> bool:
    """In a rank: leave the reason why it fails. Returns whether that is only a consequence of another rank's end."""
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
    with suppress(OSError):  # a disk that is full, or a launcher that is gone: the exit status still tells
        path.write_text(json.dumps(note), encoding="utf-8")
    return is_consequence


def _notes(folder: Path, number: int) -> list[dict[str, Any]]:
    notes = []
    for path in folder.glob(f"failure-*-{number}.json"):
        with suppress(OSError, ValueError):  # being written, or cut short by a kill
            notes.append(json.loads(path.read_text("utf-8")))
    return notes


def _last_attempt(folder: Path) -> int:
    return max((int(path.name.split("-")[2]) for path in folder.glob("pid-*")), default=0)


def _told(folder: Path, *, consequences: bool = False) -> RankFailure | None:
    """The first reason that a rank of the last attempt left; of consequences only where asked for."""
    reasons = [note for note in _notes(folder, _last_attempt(folder)) if consequences or not note["is_consequence"]]
    if not reasons:
        return None
    first = min(reasons, key=lambda note: note["time_ns"])
    finding = Finding(**first["finding"]) if first["finding"] is not None else None
    return RankFailure(first["reason"], first["kind"], finding=finding)


def _silent(folder: Path) -> list[int]:
    """The ranks of the last attempt that began, and neither said that they are through nor why they are not."""
    last = _last_attempt(folder)
    said = {int(path.name.split("-")[1]) for path in folder.glob(f"failure-*-{last}.json")}
    said |= {int(path.name.split("-")[1]) for path in folder.glob(f"through-*-{last}")}
    return sorted({int(path.name.split("-")[1]) for path in folder.glob(f"pid-*-{last}")} - said)


def _died(error: ChildFailedError, silent: list[int], *, oom_kills: int | None) -> RankFailure:
    """A rank left no reason: it was killed, or crashed, or just left. `oom_kills`: the kernel's count before."""
    # Those who lost it say so; elastic ends them too, and may know them only. Times are whole seconds; of ranks that
    # died in the same one, a kill is the cause and an exit its consequence.
    failures = {rank: failure for rank, failure in error.failures.items() if rank in silent} or error.failures
    rank, failure = min(failures.items(), key=lambda item: (item[1].timestamp, item[1].exitcode > 0))
    if silent and rank not in silent:
        return _death(silent[0], 0, oom_kills)
    return _death(rank, failure.exitcode, oom_kills)


def _death(rank: int, exit_code: int, oom_kills: int | None) -> RankFailure:
    how = describe_end(exit_code)
    return RankFailure(f"rank {rank} {how}.", death=RankDeath(rank, how, was_for_memory(exit_code, oom_kills)))


class _Deaths(logging.Handler):
    """Hears from elastic which rank failed first, before it starts all of them again: it tells no one else."""

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
        """Of all it logs, the line `failed (exitcode: %s) local_rank: %s (pid: %s) ...`."""
        if not (str(record.msg).startswith("failed (exitcode") and isinstance(record.args, tuple)):
            return
        self._restarts += 1
        if self._restarts > self._max_restarts:
            return
        exit_code, _, process = record.args[:3]
        ranks = {path.read_text(): int(path.name.split("-")[1]) for path in self._folder.glob("pid-*")}
        failure = _told(self._folder)
        if failure is None and str(process) in ranks:
            failure = _death(ranks[str(process)], int(str(exit_code)), self._oom_kills)
            self._oom_kills = cgroup.oom_kills()
        self._on_restart(failure or RankFailure("a rank ended before it had begun"), self._restarts)
