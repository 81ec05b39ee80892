"""Watch loop of every process that watches a run, and the start of the process that it watches or that watches it."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.errors import StorageError
from surefoot.events import Phase
from surefoot.findings import Finding
from surefoot.system.console import say
from surefoot.system.process import PYTHON
from surefoot.training.run_summary import FindingLog, write_end

T = TypeVar("T")
POLL_S = 1.0
ALONE_GONE_S = 5.0
"""Seconds that a rank may be missing when no process restarts ranks."""


@dataclass(frozen=True)
class WatchSpec:
    """Facts that a watcher must know about the run."""

    log: FindingLog
    num_ranks: int
    num_elsewhere: int
    """Number of ranks on other machines."""
    gone_s: float = ALONE_GONE_S
    """Seconds that a rank may be missing."""
    deadlines_s: Mapping[Phase, float] = field(default_factory=dict)
    """Deadline of each phase in seconds: see `Supervisor`."""


class Watcher:
    """Poller of a supervisor that reports its findings. A defect in watching ends the watching, never the run."""

    def __init__(self, spec: WatchSpec, began_s: float, *, early_s: float = 0.0) -> None:
        """Watch the run that began at `began_s`. `early_s`: see `Supervisor`."""
        self._log, self._began_s = spec.log, began_s
        self.supervisor = Supervisor(
            spec.log.run_folder,
            spec.num_ranks,
            began_s,
            num_elsewhere=spec.num_elsewhere,
            gone_s=spec.gone_s,
            early_s=early_s,
            deadlines_s=spec.deadlines_s,
        )
        self.is_blind = False
        """Whether watching has failed."""
        self.findings: list[Finding] = []

    def poll(self, now_s: float) -> None:
        """Report the findings since the last poll: in findings.jsonl and on standard error."""
        for finding in self.guard(lambda: self.supervisor.poll(now_s)) or []:
            self.report(finding)
        self.supervisor.mark_reported()

    def guard(self, look: Callable[[], T]) -> T | None:
        """Return what `look` returns; None if watching has failed, now or before."""
        if self.is_blind:
            return None
        try:
            return look()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not look like a failure of the run
            self.is_blind = True
            say(f"watching failed, and the run continues unwatched: {type(error).__name__}: {error}")
            return None

    def report(self, finding: Finding) -> None:
        """Write a finding to findings.jsonl and show it."""
        self.findings.append(finding)
        self._log.note(finding)
        say(finding.as_text())

    def report_death(self, finding: Finding, earlier: Sequence[Finding] = ()) -> None:
        """Report the finding that ended the run, also in summary.json; on a full disk it is still shown.

        `earlier`: findings of the run that summary.json lists as well.
        """
        self.report(finding)
        with suppress(OSError, StorageError):
            write_end(self._log.run_folder, findings=[*earlier, finding], error=finding.cause, since_s=self._began_s)


def add_restart(finding: Finding, restart: int, max_restarts: int) -> Finding:
    """Return the finding for a death with the number of the restart that follows it."""
    count = f"restart {restart} of {max_restarts}"
    return replace(finding, cause=f"{finding.cause}. The run restarts from its newest checkpoint ({count})")


def start_module(module: str, request: Mapping[str, Any], **options: Any) -> "subprocess.Popen[bytes]":
    """Start `python -m MODULE` with options of Popen, and send it a request as JSON on its standard input."""
    process = subprocess.Popen([*PYTHON, "-m", module], stdin=subprocess.PIPE, **options)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stream:
        stream.write(json.dumps(request, default=str).encode())
    return process


def was_written_since(path: Path, time_s: float) -> bool:
    """Return whether a file exists and was written after a time, in seconds since 1970."""
    return path.is_file() and path.stat().st_mtime >= time_s
