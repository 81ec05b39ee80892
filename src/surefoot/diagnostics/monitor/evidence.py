"""What is known of a run that stands still, as plain values: collected once, kept on disk, diagnosed then or later."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.system.atomic_io import write_text


@dataclass(frozen=True)
class RankEvidence:
    """One rank as it was seen from outside, and what it said itself."""

    rank: int
    process: int
    state: str
    """Of the process, as psutil names it: running, sleeping, disk-sleep, stopped, zombie; gone where there is none."""
    has_ended: bool
    """It said that it is through."""
    phase: str
    """The innermost that it is in; empty between phases."""
    step: int
    quiet_s: float
    """Since it last said anything."""
    cpu_share: float
    """Of one core, in the last seconds of its silence."""
    children: tuple[str, ...] = ()
    """States of the processes it started."""
    waits_for_disk: bool = False
    """Whether one of its threads was in uninterruptible sleep."""
    answered: bool = False
    """Whether its witness thread could run."""
    flight: Any = None
    """The dump of the Flight Recorder."""
    syscall: str = ""
    """The system call its main thread waits in, of those that tell something: futex."""
    stacks: str = ""
    """Of its Python threads."""
    layer: int | None = None
    """Of the decoder, from 0, that it came to last in its forward or backward; None elsewhere."""


@dataclass(frozen=True)
class StallEvidence:
    """A run in which no rank has said anything for longer than it usually takes."""

    time_s: float
    quiet_s: float
    limit_s: float
    """After which silence is late here."""
    ranks: tuple[RankEvidence, ...]
    num_ranks: int
    """Of the run; some may be on other machines."""
    oom_kills: int | None = None
    """Processes of the cgroup that the kernel killed for memory since the start; None where it cannot be read."""


def keep(folder: Path, evidence: StallEvidence) -> Path:
    """Write evidence down; returns the file."""
    first = f"-rank-{evidence.ranks[0].rank:05d}" if evidence.ranks else ""  # each machine writes a file of its own
    path = folder / f"stall-{round(evidence.time_s)}{first}.json"
    write_text(path, json.dumps(asdict(evidence), indent=1))
    return path


def read(path: Path) -> StallEvidence:
    """Raises: ValueError for a file that is no evidence."""
    try:
        values = json.loads(path.read_text("utf-8"))
        ranks = tuple(RankEvidence(**{**rank, "children": tuple(rank["children"])}) for rank in values.pop("ranks"))
        return StallEvidence(ranks=ranks, **values)
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no evidence of a stall: {error}") from error


def answer_to(request: str, path: Path) -> dict[str, Any] | None:
    """What a rank's witness wrote for a request; None where that is an older one's, or none."""
    try:
        answer: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return answer if answer.get("request") == request else None
