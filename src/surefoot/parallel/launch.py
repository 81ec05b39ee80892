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

from surefoot.config import RunConfig
from surefoot.errors import SurefootError

FOLDER = "SUREFOOT_LAUNCH"
"""Environment variable: the folder in which launcher and ranks leave each other notes."""
GONE = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Connection refused", "NCCL")
"""What gloo and NCCL say when another rank is gone."""


@dataclass(frozen=True)
class RankFailure:
    """Why a launched run ended."""

    rank: int
    reason: str
    kind: str
    """Class of our error; empty for a rank that died or raised something else."""
    is_agreed: bool
    """Whether all ranks ended with it; then rank 0 has told the run folder."""


def launch(config: RunConfig, job: Mapping[str, Any]) -> RankFailure | None:
    """Run `job` (JSON for `training.worker`) on this machine's ranks and wait for them; None where all went well.

    Signals are passed on to the ranks, which save and end. Raises: SurefootError where ranks cannot be started;
    KeyboardInterrupt where they were stopped before they could save.
    """
    with tempfile.TemporaryDirectory(prefix="surefoot-launch-") as name, _passing_signals(name) as passed:
        killed_before = _oom_kill_count()
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        threads = str(max(1, (os.cpu_count() or 1) // config.nproc_per_node))
        inherited = {FOLDER: name, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        before = {key: os.environ.get(key) for key in inherited}
        os.environ.update(inherited)
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says is said below, once
        try:
            elastic_launch(_launch_config(config), sys.executable)("-m", "surefoot.training.worker")
        except ChildFailedError as error:
            told = _told(folder)
            if told is None and passed:
                raise KeyboardInterrupt(passed[0]) from error
            return told or _died(error, was_oom=_oom_kill_count() > killed_before)
        except SignalException as error:
            raise SurefootError(f"the launcher was stopped by {signal.Signals(error.sigval).name}.") from error
        except (RuntimeError, ValueError, OSError) as error:
            raise SurefootError(f"the ranks could not be started: {error}") from error
        finally:
            for key, value in before.items():
                os.environ.pop(key)
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
        for path in Path(folder).glob("pid-*"):
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
    """In a rank: say which process this is."""
    Path(os.environ[FOLDER], f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))


def note_failure(error: BaseException, *, kind: str, is_agreed: bool) -> bool:
    """In a rank: leave the reason why it fails. Returns whether that is only a consequence of another rank's end."""
    rank = int(os.environ["RANK"])
    text = str(error) or type(error).__name__
    is_consequence = isinstance(error, KeyboardInterrupt) or (not kind and any(sign in text for sign in GONE))
    note = {
        "rank": rank,
        "time_ns": time.time_ns(),
        "kind": kind,
        "reason": text if kind else f"rank {rank}: {type(error).__name__}: {text}",
        "is_agreed": is_agreed,
        "is_consequence": is_consequence,
    }
    path = Path(os.environ[FOLDER], f"failure-{rank}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.json")
    with suppress(OSError):  # a disk that is full, or a launcher that is gone: the exit status still tells
        path.write_text(json.dumps(note), encoding="utf-8")
    return is_consequence


def _told(folder: Path) -> RankFailure | None:
    """The first reason that a rank of the last attempt left."""
    notes = []
    for path in folder.glob("failure-*.json"):
        with suppress(ValueError):  # cut short by a kill
            notes.append((int(path.stem.split("-")[2]), json.loads(path.read_text("utf-8"))))
    last = max((attempt for attempt, _ in notes), default=0)
    reasons = [note for attempt, note in notes if attempt == last and not note["is_consequence"]]
    if not reasons:
        return None
    first = min(reasons, key=lambda note: note["time_ns"])
    return RankFailure(first["rank"], first["reason"], first["kind"], first["is_agreed"])


def _died(error: ChildFailedError, *, was_oom: bool) -> RankFailure:
    """A rank left no reason: it was killed, or crashed."""
    rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
    how = f"ended with status {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"was killed by signal {-failure.exitcode} ({signal.Signals(-failure.exitcode).name})"
    why = ""
    if failure.exitcode == -signal.SIGKILL:
        why = " The kernel killed it because the memory limit of its cgroup was reached." if was_oom else (
            " No memory limit of its cgroup was reached; was it killed by hand, or by the scheduler?")  # fmt: skip
    return RankFailure(rank, f"rank {rank} {how}.{why}", "", is_agreed=False)


def _oom_kill_count() -> int:
    """The kernel's count for this process's cgroup (version 2); 0 where it cannot be read."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        events = Path("/sys/fs/cgroup" + group, "memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines()).get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
