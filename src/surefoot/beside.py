"""A supervisor for runs that no one started with one: from Python, under torchrun or SLURM, in another trainer.

It is a process beside the run, started by it, and names what it finds in findings.jsonl and on standard error. It ends
with the run, however that ends, and never ends it. Imports no torch.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surefoot.errors import StorageError
from surefoot.findings import Finding
from surefoot.health.diagnose.death import find_death
from surefoot.health.recorder import Entry, last_start, read_history
from surefoot.health.supervisor import Supervisor
from surefoot.health.witness import read_stacks
from surefoot.training.record import note_finding, write_end

SUPERVISED = "SUREFOOT_SUPERVISED"
"""Environment variable: set where someone watches the run already."""
EVERY_S = 1.0
GONE_S = 5.0
"""How long a rank may be gone: nobody starts it again without its peers."""
LAST_WORDS_S = 2.0
"""How long ranks that lost another one may take to end."""


@contextmanager
def watched(run_folder: Path, *, num_ranks: int, num_elsewhere: int) -> Iterator[None]:
    """Watch the ranks on this machine from another process, if no one does; the caller is one of them, or their parent.

    `num_ranks` of the run, of which `num_elsewhere` are on other machines.
    """
    if SUPERVISED in os.environ:
        yield
        return
    os.environ[SUPERVISED] = str(os.getpid())
    watcher = start(run_folder, num_ranks=num_ranks, num_elsewhere=num_elsewhere)
    try:
        yield
    finally:
        os.environ.pop(SUPERVISED, None)
        end(watcher)


def start(run_folder: Path, *, num_ranks: int, num_elsewhere: int) -> "subprocess.Popen[bytes]":
    """Start watching; it ends by itself when this process is gone."""
    told = {
        "run_folder": str(run_folder), "num_ranks": num_ranks, "num_elsewhere": num_elsewhere, "began_s": time.time(),
        "process": os.getpid(),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot.beside", json.dumps(told)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def end(watcher: "subprocess.Popen[bytes]") -> None:
    """The run is over."""
    watcher.terminate()
    watcher.wait()


def main(told: str) -> None:
    """Look until the process that is watched is gone, and say so if it had not said that it is through."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run
    said = json.loads(told)
    folder, began_s = Path(said["run_folder"]), said["began_s"]
    supervisor = Supervisor(folder, said["num_ranks"], began_s, num_elsewhere=said["num_elsewhere"], gone_s=GONE_S)
    while os.getppid() == said["process"]:
        for finding in supervisor.look(time.time()):
            _note(folder, finding)
        time.sleep(EVERY_S)
    time.sleep(LAST_WORDS_S)
    history = [entry for entry in read_history(folder).entries if entry.time_s >= began_s]
    dead = _first_that_is_gone(history)
    if dead is not None:
        how = "is gone without a word; whoever started it knows its exit status"
        stacks = read_stacks(folder, dead)
        found = find_death(dead, how, for_memory=supervisor.was_memory_killed, history=history, last_stacks=stacks)
        _note(folder, found)
        with suppress(OSError, StorageError):
            write_end(folder, findings=[found], error=found.cause, since_s=began_s)


def _first_that_is_gone(history: list[Entry]) -> int | None:
    """The rank that fell silent first, of those that did not say that they are through."""
    last = [last_start(history, rank)[-1] for rank in {entry.rank for entry in history}]
    silent = [entry for entry in last if entry.kind != "run ended"]
    return min(silent, key=lambda entry: entry.time_s).rank if silent else None


def _note(folder: Path, finding: Finding) -> None:
    with suppress(OSError):  # a full disk, or a terminal that is gone: the run must not end because of it
        note_finding(folder, finding)
    with suppress(OSError):
        print(finding.as_text(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
