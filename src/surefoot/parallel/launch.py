"""Starts the ranks of this machine through torch elastic, watches them, and says which one failed and how.

A rank that fails on purpose leaves its reason in a file; one that was killed leaves none, and its exit status tells.
What other ranks raise when a peer is gone is a consequence, never the reason.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from surefoot import errors
from surefoot.config import RunConfig
from surefoot.errors import SurefootError

FOLDER = "SUREFOOT_LAUNCH"
"""Environment variable: the folder in which launcher and ranks leave each other notes."""
STOP = "stop"
LEAVE_AFTER_S = 10.0
"""How long a rank goes on when another one has failed alone."""
GONE = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Connection refused", "NCCL")
"""What gloo and NCCL say when another rank is gone."""


@dataclass(frozen=True)
class RankFailure:
    """Why a launched run ended."""

    reason: str
    kind: str = ""
    """Class of our error; empty for a rank that died or raised something else."""


def launch(config: RunConfig, job: Mapping[str, Any]) -> RankFailure | None:
    """Run `job` (JSON for `training.worker`) on this machine's ranks and wait for them; None where all went well.

    Signals are passed on to the ranks, which save and end. Raises: SurefootError where ranks cannot be started;
    KeyboardInterrupt where they were stopped before they could save.
    """
    with tempfile.TemporaryDirectory(prefix="surefoot-launch-") as name, _passing_signals(name) as passed:
        oom_kills = _oom_kill_count()
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        threads = str(max(1, (os.cpu_count() or 1) // config.nproc_per_node))
        inherited = {FOLDER: name, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        before = {key: os.environ.get(key) for key in (*inherited, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
        os.environ.update(inherited)
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says is said below, once
        try:
            elastic_launch(_launch_config(config), sys.executable)("-m", "surefoot.training.worker")
        except ChildFailedError as error:
            told = _told(folder)
            if told is None and passed:
                raise KeyboardInterrupt(passed[0]) from error
            if told is None and all(failure.exitcode > 0 for failure in error.failures.values()):
                told = _told(folder, consequences=True)  # all lost each other: what they say is all there is
            return told or _died(error, oom_kills=oom_kills)
        except SignalException as error:
            raise SurefootError(f"the launcher was stopped by {signal.Signals(error.sigval).name}.") from error
        except (RuntimeError, ValueError, OSError) as error:
            raise SurefootError(
                f"the {config.nproc_per_node} ranks of this machine could not be started: {error}. Is rdzv_endpoint "
                "reachable and its port free, and nnodes right?"
            ) from error
        finally:
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value
        return _told(folder)


def _launch_config(config: RunConfig) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=config.nnodes,
        max_nodes=config.nnodes,
        nproc_per_node=config.nproc_per_node,
        run_id="surefoot" if config.nnodes > 1 else uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=config.rdzv_endpoint or "localhost:0",
        max_restarts=config.max_restarts,
        signals_to_handle="SIGQUIT",  # the others are passed on, see below
        local_addr="localhost" if config.nnodes == 1 else None,
    )


@contextmanager
def _passing_signals(folder: str) -> Iterator[list[str]]:
    """SIGINT and SIGTERM go to the ranks; each stops at the end of its step, and the launcher after them."""

    passed: list[str] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        passed.append(signal.Signals(number).name)
        (Path(folder) / STOP).touch()  # for ranks that have not noted their process yet
        started = list(Path(folder).glob("pid-*"))
        if not started:  # nothing to lose: still waiting for other machines, or for ranks to start
            raise KeyboardInterrupt(signal.Signals(number).name)
        for path in started:
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), number)

    if threading.current_thread() is not threading.main_thread():
        yield passed
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def note_process() -> None:
    """In a rank: say which process this is, and leave with those that failed. Raises: KeyboardInterrupt if told to."""
    folder = Path(os.environ[FOLDER])
    (folder / f"pid-{os.environ['RANK']}-{_attempt()}").write_text(str(os.getpid()))
    if (folder / STOP).exists():
        raise KeyboardInterrupt("stopped while starting")
    threading.Thread(target=_leave_with_the_others, args=(folder,), name="watch", daemon=True).start()


def was_begun(run_folder: Path) -> bool:
    """In a rank: whether an earlier attempt of this launch has begun the run folder."""
    begun, job = run_folder / "environment.json", Path(os.environ[FOLDER], "job.json")
    return _attempt() > 0 and begun.is_file() and begun.stat().st_mtime_ns >= job.stat().st_mtime_ns


def _attempt() -> int:
    """How often the ranks were started again before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _leave_with_the_others(folder: Path) -> None:
    """End this process some time after another rank failed alone: it may be waiting for it where no signal reaches."""
    while True:
        time.sleep(1.0)
        for note in _notes(folder, _attempt()):
            if not note["is_agreed"] and time.time_ns() - note["time_ns"] > LEAVE_AFTER_S * 1e9:
                os._exit(0 if is_input_error(note["kind"]) else 1)


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
    }
    path = Path(os.environ[FOLDER], f"failure-{rank}-{_attempt()}.json")
    with suppress(OSError):  # a disk that is full, or a launcher that is gone: the exit status still tells
        path.write_text(json.dumps(note), encoding="utf-8")
    return is_consequence


def _notes(folder: Path, attempt: int) -> list[dict[str, Any]]:
    notes = []
    for path in folder.glob(f"failure-*-{attempt}.json"):
        with suppress(OSError, ValueError):  # being written, or cut short by a kill
            notes.append(json.loads(path.read_text("utf-8")))
    return notes


def _told(folder: Path, *, consequences: bool = False) -> RankFailure | None:
    """The first reason that a rank of the last attempt left; of consequences only where asked for."""
    last = max((int(path.name.split("-")[2]) for path in folder.glob("pid-*")), default=0)
    reasons = [note for note in _notes(folder, last) if consequences or not note["is_consequence"]]
    if not reasons:
        return None
    first = min(reasons, key=lambda note: note["time_ns"])
    return RankFailure(first["reason"], first["kind"])


def _died(error: ChildFailedError, *, oom_kills: int | None) -> RankFailure:
    """A rank left no reason: it was killed, or crashed. `oom_kills`: the kernel's count before."""
    # Times are whole seconds; of ranks that died in the same one, a kill is the cause and an exit its consequence.
    rank, failure = min(error.failures.items(), key=lambda item: (item[1].timestamp, item[1].exitcode > 0))
    how = f"ended with status {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"was killed by signal {-failure.exitcode} ({signal.Signals(-failure.exitcode).name})"
    why = ""
    if failure.exitcode == -signal.SIGKILL:
        now = _oom_kill_count()
        if now is None or oom_kills is None:
            why = " Whether for memory cannot be told here: the kernel's count of its cgroup is not readable."
        elif now > oom_kills:
            why = " The kernel killed it because the memory limit of its cgroup was reached."
        else:
            why = " No memory limit of its cgroup was reached; was it killed by hand, or by the scheduler?"
    return RankFailure(f"rank {rank} {how}.{why}")


def _oom_kill_count() -> int | None:
    """The kernel's count for this process's cgroup (version 2); None where it cannot be read."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        events = Path("/sys/fs/cgroup" + group, "memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines()).get("oom_kill", 0))
    except (OSError, ValueError):
        return None
