"""Watch loop of every process that watches a run: poll the supervisor and report its findings."""

from collections.abc import Callable
from typing import TypeVar

from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.findings import Finding
from surefoot.system.console import say
from surefoot.training.run_summary import FindingLog

T = TypeVar("T")


class Watcher:
    """Poller of a supervisor that reports its findings. A defect in watching ends the watching, never the run."""

    def __init__(self, supervisor: Supervisor, log: FindingLog) -> None:
        self._supervisor = supervisor
        self._log = log
        self.is_blind = False
        """Whether watching has failed."""
        self.findings: list[Finding] = []

    def poll(self, now_s: float) -> None:
        """Report the findings since the last poll: in findings.jsonl and on standard error."""
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
        """Write a finding to findings.jsonl and show it."""
        self.findings.append(finding)
        self._log.note(finding)
        say(finding.as_text())
