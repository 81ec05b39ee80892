"""The evidence of a stalled run, as plain values: collected once, kept on disk, diagnosed at once or later."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.events import FORMER_PHASES
from surefoot.system.atomic_io import write_text


@dataclass(frozen=True)
class RankEvidence:
    """The state of one rank: as observed from outside, and as the rank reported it."""

    rank: int
    process: int
    state: str
    """State of the process, as psutil names it: running, sleeping, disk-sleep, stopped, zombie; else `gone`."""
    has_ended: bool
    """Whether the rank reported its end."""
    phase: str
    """Innermost phase of the rank; empty between phases."""
    step: int
    quiet_s: float
    """Seconds since its last event."""
    cpu_share: float
    """Share of one core that it used in the last seconds of its silence."""
    children: tuple[str, ...] = ()
    """States of its child processes, such as loader workers."""
    waits_for_disk: bool = False
    """Whether one of its threads was in uninterruptible sleep."""
    answered: bool = False
    """Whether its evidence server answered."""
    flight: Any = None
    """Dump of the Flight Recorder."""
    syscall: str = ""
    """`futex` if its main thread waits for a lock; else empty."""
    stacks: str = ""
    """Stacks of its Python threads."""
    layer: int | None = None
    """Decoder layer, from 0, that its forward or backward entered last; None elsewhere."""


@dataclass(frozen=True)
class StallEvidence:
    """The evidence of a run in which no rank has recorded an event for longer than usual."""

    time_s: float
    quiet_s: float
    limit_s: float
    """Seconds of silence after which this run counts as stalled."""
    ranks: tuple[RankEvidence, ...]
    num_ranks: int
    """Number of ranks of the run; some may be on other machines."""
    oom_kills: int | None = None
    """Number of processes of the cgroup that the kernel killed for memory since the start; None if unreadable."""


def write_evidence(folder: Path, evidence: StallEvidence) -> Path:
    """Write evidence to a file of the folder; return the file."""
    first = f"-rank-{evidence.ranks[0].rank:05d}" if evidence.ranks else ""  # each machine writes its own file
    path = folder / f"stall-{round(evidence.time_s)}{first}.json"
    write_text(path, json.dumps(asdict(evidence), indent=1))
    return path


def read_evidence(path: Path) -> StallEvidence:
    """Read evidence from a file. Raises: ValueError for a file that is no evidence."""
    try:
        values = json.loads(path.read_text("utf-8"))
        ranks = tuple(
            RankEvidence(
                **{
                    **rank,
                    "children": tuple(rank["children"]),
                    "phase": FORMER_PHASES.get(rank["phase"], rank["phase"]),
                }
            )
            for rank in values.pop("ranks")
        )
        return StallEvidence(ranks=ranks, **values)
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no evidence of a stall: {error}") from error
