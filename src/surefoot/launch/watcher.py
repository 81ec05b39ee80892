"""The watch loop of every process that watches a run: poll the supervisor, report what it finds, explain a death."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from surefoot.diagnostics.monitor.event_log import Entry, read_history
from surefoot.diagnostics.monitor.evidence_server import read_stacks
from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.diagnostics.rules.rank_death import find_death
from surefoot.findings import Finding
from surefoot.system import cgroup
from surefoot.system.console import say
from surefoot.system.kernel_log import killed_for_memory
from surefoot.training.run_summary import FindingLog

T = TypeVar("T")


class Watcher:
    """Polls a supervisor and reports its findings. A defect in watching ends the watching, never the run."""

    def __init__(self, supervisor: Supervisor, log: FindingLog) -> None:
        self._supervisor = supervisor
        self._log = log
        self.is_blind = False
        """Whether watching has failed."""
        self.findings: list[Finding] = []

    def poll(self, now_s: float) -> None:
        """Report what was found since the last poll: in findings.jsonl and on standard error."""
        nothing: list[Finding] = []
        for finding in self.guard(lambda: self._supervisor.poll(now_s), nothing):
            self.report(finding)
        self._supervisor.mark_reported()

    def guard(self, look: Callable[[], T], otherwise: T) -> T:
        """Return what `look` returns; `otherwise` if watching has failed, now or before."""
        if self.is_blind:
            return otherwise
        try:
            return look()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not look like a failure of the run
            self.is_blind = True
            say(f"watching failed, and the run continues unwatched: {type(error).__name__}: {error}")
            return otherwise

    def report(self, finding: Finding) -> None:
        """Write a finding down and show it."""
        self.findings.append(finding)
        self._log.note(finding)
        say(finding.as_text())


def history_since(run_folder: Path, since_s: float) -> list[Entry]:
    """Return what the ranks of a run recorded since a time, in seconds since 1970."""
    return [entry for entry in read_history(run_folder).entries if entry.time_s >= since_s]


def explain_death(
    run_folder: Path, rank: int | None, how: str, *, for_memory: bool | None, history: Sequence[Entry]
) -> Finding:
    """Return the finding for a rank that ended as `how` says, with the evidence in its run folder and the kernel log.

    `rank`: None for the launcher of the ranks. `for_memory`, `history`: see `find_death`.
    """
    return find_death(
        rank,
        how,
        for_memory=for_memory,
        has_limit=cgroup.memory_limit_bytes() is not None,
        history=history,
        last_stacks=read_stacks(run_folder, rank) if rank is not None else "",
        killed=killed_for_memory(),
    )
