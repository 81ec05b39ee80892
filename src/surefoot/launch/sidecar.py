"""A supervisor for runs that no one started with one: from Python, under torchrun or SLURM, in another trainer.

It is a process beside the run, started by it, and names what it finds in findings.jsonl and on standard error. It ends
with the run, however that ends, and never ends it. Imports no torch.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from surefoot.diagnostics.monitor.event_log import last_start, read_history
from surefoot.diagnostics.monitor.evidence_server import read_stacks
from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.diagnostics.rules.rank_death import find_death
from surefoot.errors import StorageError
from surefoot.events import Phase
from surefoot.findings import Finding
from surefoot.system import cgroup
from surefoot.system.console import say
from surefoot.system.kernel_log import killed_for_memory
from surefoot.system.process import PYTHON
from surefoot.training.run_summary import FindingLog, write_end

SUPERVISED = "SUREFOOT_SUPERVISED"
"""Environment variable: set where someone watches the run already."""
RANKS_HERE = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
"""Environment variables of torchrun, DeepSpeed, Open MPI, Intel MPI and SLURM: how many ranks this machine has."""
EVERY_S = 1.0
EARLY_S = 120.0
"""How much sooner than the rank that starts the supervisor others may have begun."""
ALONE_GONE_S = 5.0
"""How long a rank may be gone that nobody starts again."""
LAST_WORDS_S = 2.0
"""How long ranks that lost another one may take to say so."""
LEAVE_WITHIN_S = 5.0


@dataclass(frozen=True)
class Watched:
    """What a supervisor beside a run must know of it."""

    log: FindingLog
    num_ranks: int
    num_elsewhere: int
    """Of the ranks, those on other machines."""
    gone_s: float = ALONE_GONE_S
    """How long a rank may be gone."""
    deadlines_s: Mapping[Phase, float] = field(default_factory=dict)
    """By phase: see `Supervisor`."""


@contextmanager
def watched(run: Watched) -> Iterator[None]:
    """Watch the ranks on this machine from another process, if no one does; the caller is a rank or their parent."""
    if SUPERVISED in os.environ:
        yield
        return
    os.environ[SUPERVISED] = str(os.getpid())
    watcher = start(run)
    try:
        yield
    finally:
        os.environ.pop(SUPERVISED, None)
        end(watcher)


def start(run: Watched) -> "subprocess.Popen[bytes]":
    """Start watching; it ends by itself when this process is gone."""
    told = {"run": asdict(run), "began_s": time.time(), "process": os.getpid()}
    watcher = subprocess.Popen(
        [*PYTHON, "-m", "surefoot.launch.sidecar"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert watcher.stdin is not None
    with suppress(BrokenPipeError), watcher.stdin as stream:
        stream.write(json.dumps(told, default=str).encode())
    return watcher


def end(watcher: "subprocess.Popen[bytes]") -> None:
    """The run is over; the supervisor looks once more and ends."""
    watcher.terminate()
    try:
        watcher.wait(LEAVE_WITHIN_S)
    except subprocess.TimeoutExpired:  # a file system that does not answer must not hold the end of a run
        watcher.kill()


def ranks_elsewhere(num_ranks: int) -> int:
    """How many of the ranks are on other machines, in a rank; all but this one where the launcher does not say."""
    here = next((os.environ[name] for name in RANKS_HERE if os.environ.get(name)), "1")
    return num_ranks - (int(here) if here.isdigit() else 1)


def main(told: str) -> None:
    """Look until the run is over or the process that started this one is gone."""
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C and a terminal that closes are for the run
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    said = json.loads(told)
    began_s, log = said["began_s"], said["run"].pop("log")
    run = Watched(FindingLog(Path(log.pop("run_folder")), **log), **said["run"])
    folder = run.log.run_folder
    supervisor = Supervisor(
        folder,
        run.num_ranks,
        began_s,
        num_elsewhere=run.num_elsewhere,
        gone_s=run.gone_s,
        early_s=EARLY_S,
        deadlines_s=run.deadlines_s,
    )
    codes = set()
    try:
        while not is_over.wait(EVERY_S) and os.getppid() == said["process"]:
            for finding in supervisor.look(time.time()):
                codes.add(finding.code)
                _note(run.log, finding)
            supervisor.told()
        dead = None if codes & {"SF101", "SF201"} else _death(supervisor, folder, began_s - EARLY_S)
    except Exception as error:  # noqa: BLE001 - a defect in looking must not look like one of the run
        say(f"the run goes on without a supervisor: {type(error).__name__}: {error}")
        return
    if dead is not None:
        _note(run.log, dead)
        if (folder / "run.yaml").is_file():  # a run of ours
            with suppress(OSError, StorageError):
                write_end(folder, findings=[dead], error=dead.cause, since_s=began_s)


def _death(supervisor: Supervisor, folder: Path, since_s: float) -> Finding | None:
    """The finding for a rank of this machine that is gone and had not said that it is through."""
    if not supervisor.gone():
        return None
    time.sleep(LAST_WORDS_S)
    gone = supervisor.gone()
    history = [entry for entry in read_history(folder).entries if entry.time_s >= since_s]
    last = {rank: last_start(history, rank)[-1] for rank in {entry.rank for entry in history}}
    rank = min(gone, key=lambda number: last[number].time_s)
    found = find_death(
        rank,
        "is gone without a word; whoever started it knows its exit status",
        for_memory=supervisor.was_memory_killed,
        has_limit=cgroup.memory_limit_bytes() is not None,
        history=history,
        last_stacks=read_stacks(folder, rank),
        killed=killed_for_memory(),
    )
    failed = sorted(number for number, entry in last.items() if entry.values.get("failed"))
    if not failed and len(gone) == 1:
        return found
    others = [f"ranks {', '.join(map(str, gone))} are gone"] if len(gone) > 1 else []
    others += [f"rank {number} ended with an error of its own" for number in failed]
    cause = f"{found.cause}. {'; '.join(others)}: one is the cause of the others, look at what each printed last"
    return replace(found, cause=cause, confidence=0.5)


def _note(log: FindingLog, finding: Finding) -> None:
    log.note(finding)
    say(finding.as_text())


if __name__ == "__main__":
    main(sys.stdin.read())
