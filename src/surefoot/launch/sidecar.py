"""Supervisor process beside runs without one: runs from Python, under torchrun or SLURM, and of other trainers.

The run starts it. It reports its findings in findings.jsonl and on standard error, ends when the run ends, however
that happens, and never ends the run. Imports no torch.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from surefoot.diagnostics.monitor.event_log import last_start
from surefoot.diagnostics.monitor.explain import explain_death, history_since
from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.findings import Finding
from surefoot.launch.watcher import POLL_S, Watcher, WatchSpec, start_module
from surefoot.training.run_summary import FindingLog

SUPERVISED = "SUREFOOT_SUPERVISED"
"""Environment variable that is set if a process watches the run already."""
LOCAL_WORLD_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
"""Variables of torchrun, DeepSpeed, Open MPI, Intel MPI and SLURM with the number of ranks on this machine."""
EARLY_S = 120.0
"""Seconds by which other ranks may have started earlier than the rank that starts the sidecar."""
LAST_WORDS_S = 2.0
"""Seconds that ranks that lost a peer may take to report that."""
LEAVE_WITHIN_S = 5.0


def is_supervised() -> bool:
    """Return whether a process watches this run and writes its report."""
    return SUPERVISED in os.environ


@contextmanager
def watched(spec: WatchSpec) -> Iterator[None]:
    """Watch the ranks of this machine from a sidecar unless a process does already; call it in a rank or its parent."""
    if is_supervised():
        yield
        return
    os.environ[SUPERVISED] = str(os.getpid())
    sidecar = start(spec)
    try:
        yield
    finally:
        os.environ.pop(SUPERVISED, None)
        end(sidecar)


def start(spec: WatchSpec) -> "subprocess.Popen[bytes]":
    """Start a sidecar, which ends by itself when this process ends."""
    request = {"spec": asdict(spec), "began_s": time.time(), "process": os.getpid()}
    return start_module("surefoot.launch.sidecar", request, stdout=subprocess.DEVNULL)


def end(sidecar: "subprocess.Popen[bytes]") -> None:
    """Tell a sidecar that the run has ended; it polls once more and ends."""
    sidecar.terminate()
    try:
        sidecar.wait(LEAVE_WITHIN_S)
    except subprocess.TimeoutExpired:  # a file system that does not answer must not delay the end of a run
        sidecar.kill()


def ranks_elsewhere(num_ranks: int) -> int:
    """Return how many ranks are on other machines; all but this one if the launcher does not report it."""
    text = next((os.environ[name] for name in LOCAL_WORLD_SIZES if os.environ.get(name)), "1")
    return num_ranks - (int(text) if text.isdigit() else 1)


def main(text: str) -> None:
    """Watch until the run ends or the process that started this one has exited."""
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C and a closed terminal are for the run
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    request = json.loads(text)
    log = request["spec"].pop("log")
    folder = Path(log.pop("run_folder"))
    watcher = Watcher(WatchSpec(FindingLog(folder, **log), **request["spec"]), request["began_s"], early_s=EARLY_S)
    while not is_over.wait(POLL_S) and os.getppid() == request["process"] and not watcher.is_blind:
        watcher.poll(time.time())
    if {finding.code for finding in watcher.findings} & {"SF101", "SF201"}:
        return  # a death that the supervisor found explains the end
    since_s = request["began_s"] - EARLY_S
    death = watcher.guard(lambda: _explain_gone_ranks(watcher.supervisor, folder, since_s))
    if death is None:
        return
    if (folder / "run.yaml").is_file():
        watcher.report_death(death)
    else:  # a run of another trainer, which has no summary.json
        watcher.report(death)


def _explain_gone_ranks(supervisor: Supervisor, folder: Path, since_s: float) -> Finding | None:
    """Return the finding for a rank of this machine that exited without reporting its end."""
    if not supervisor.gone():
        return None
    time.sleep(LAST_WORDS_S)
    gone = supervisor.gone()
    history = history_since(folder, since_s)
    last = {rank: last_start(history, rank)[-1] for rank in {entry.rank for entry in history}}
    rank = min(gone, key=lambda number: last[number].time_s)
    how = "exited without reporting an error; the program that started it knows its exit status"
    finding = explain_death(folder, rank, how, for_memory=supervisor.was_memory_killed, history=history)
    failed = sorted(number for number, entry in last.items() if entry.values.get("failed"))
    if not failed and len(gone) == 1:
        return finding
    others = [f"ranks {', '.join(map(str, gone))} exited"] if len(gone) > 1 else []
    others += [f"rank {number} ended with an error of its own" for number in failed]
    cause = f"{finding.cause}. {'; '.join(others)}: one end caused the others, so compare the last output of each"
    return replace(finding, cause=cause, confidence=0.5)


if __name__ == "__main__":
    main(sys.stdin.read())
