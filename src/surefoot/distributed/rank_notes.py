"""Notes that the ranks of this machine leave for their launcher: their processes, their ends and their failures.

They are files in a folder of the launch, each with the rank and the attempt in its name. A rank that exits without a
note was killed, or crashed; the other ranks of the machine see that too, and end.
"""

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot import errors
from surefoot.distributed.store import attempt
from surefoot.errors import StoppedOnFinding
from surefoot.findings import Finding

FOLDER = "SUREFOOT_LAUNCH"
"""Environment variable: the folder for the notes between launcher and ranks."""
STOP = "stop"
"""Name of the note of a launcher that was told to stop."""
LEAVE_AFTER_S = 10.0
"""Seconds that a rank goes on after another one failed alone or exited."""
GONE = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Connection refused", "NCCL")
"""Messages of gloo and NCCL that another rank has exited."""


@dataclass(frozen=True)
class RankDeath:
    """Death of a rank that could not report its reason."""

    rank: int
    how: str
    for_memory: bool | None
    """Whether the kernel killed it because of its cgroup's limit; None if unknown."""


@dataclass(frozen=True)
class RankFailure:
    """Reason why a launched run ended."""

    reason: str
    kind: str = ""
    """Class of the SurefootError; empty for a rank that died or raised something else."""
    death: RankDeath | None = None
    """Death of the rank, if it left no reason."""
    finding: Finding | None = None
    """Finding that stopped it."""


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
        if lost_s is None and any(_has_exited(folder, rank) for rank in list_silent_ranks(folder)):
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


def find_reported_failure(folder: Path, *, consequences: bool = False) -> RankFailure | None:
    """Return the first reason that a rank of the last attempt noted; `consequences`: include consequences."""
    reasons = [
        note for note in _read_notes(folder, find_last_attempt(folder)) if consequences or not note["is_consequence"]
    ]
    if not reasons:
        return None
    first = min(reasons, key=lambda note: note["time_ns"])
    finding = Finding(**first["finding"]) if first["finding"] is not None else None
    return RankFailure(first["reason"], first["kind"], finding=finding)


def list_silent_ranks(folder: Path) -> list[int]:
    """Return the ranks of the last attempt that began, and noted neither their end nor a failure."""
    last = find_last_attempt(folder)
    reported = {int(path.name.split("-")[1]) for path in folder.glob(f"failure-*-{last}.json")}
    reported |= {int(path.name.split("-")[1]) for path in folder.glob(f"through-*-{last}")}
    return sorted({int(path.name.split("-")[1]) for path in folder.glob(f"pid-*-{last}")} - reported)


def has_every_rank_ended(folder: Path) -> bool:
    """Return whether each rank of the last attempt has noted its end."""
    last = find_last_attempt(folder)
    noted, through = (len(list(folder.glob(f"{kind}-*-{last}"))) for kind in ("pid", "through"))
    return 0 < noted == through


def find_last_attempt(folder: Path) -> int:
    return max((int(path.name.split("-")[2]) for path in folder.glob("pid-*")), default=0)


def _read_notes(folder: Path, number: int) -> list[dict[str, Any]]:
    notes = []
    for path in folder.glob(f"failure-*-{number}.json"):
        with suppress(OSError, ValueError):  # being written, or cut short by a kill
            notes.append(json.loads(path.read_text("utf-8")))
    return notes
