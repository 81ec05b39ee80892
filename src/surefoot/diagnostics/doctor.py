"""The command `surefoot doctor`, and the same checks of this machine before a run starts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.config import LoadedConfig
from surefoot.diagnostics.preflight.check import Check
from surefoot.diagnostics.preflight.runner import (
    as_launched,
    as_text,
    changes,
    examine,
    has_answers,
    not_looked_at,
    snapshot_for,
)
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.system.console import say
from surefoot.system.machine import Snapshot, read_snapshot
from surefoot.system.machine_snapshot import GPU_PARTS
from surefoot.system.process import is_local_rank


@dataclass(frozen=True)
class DoctorReport:
    """Checks of this machine and of a run on it."""

    machine: Snapshot
    checks: list[Check]
    against: str | None = None
    """Earlier run or report that the machine is compared with."""
    changes: list[str] | None = None

    @property
    def has_failed(self) -> bool:
        return any(check.status == "failed" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        report = {"machine": self.machine.as_dict(), "checks": [check.as_dict() for check in self.checks]}
        return report if self.changes is None else {**report, "changes": self.changes}

    def as_text(self) -> str:
        """Return the report for a person."""
        text = as_text(self.checks)
        if self.changes is None:
            return text
        return "\n".join([text, f"\nchanged since {self.against}:", *(self.changes or ["nothing"])])


def check_machine(loaded: LoadedConfig | None) -> DoctorReport:
    """Check this machine, and a run on it if a config is given. Raises: InputError."""
    launched = as_launched(loaded) if loaded is not None else None
    machine = snapshot_for(launched, patient=True)
    checks = examine(machine, launched, include_slow=True)
    if loaded is not None:
        from surefoot.diagnostics.preflight import dataset_sample, run_config

        if has_answers(checks):
            checks += [run_config.refusal(loaded), dataset_sample.first_rows(loaded)]
        else:
            checks += [not_looked_at(run_config.NAME), not_looked_at(dataset_sample.NAME)]
    return DoctorReport(machine, checks)


def doctor(loaded: LoadedConfig | None, *, is_deep: bool, against: str | None) -> DoctorReport | int:
    """Check as `check_machine` does; with `is_deep`, or as a rank, test the ranks of the run too.

    `against`: earlier run or report to compare the machine with. Returns only the exit status on a rank or machine
    whose report rank 0 shows. Raises: InputError.
    """
    report = check_machine(loaded)
    if is_deep or is_local_rank():
        from surefoot.diagnostics.selftest.launch import self_test

        self_test_checks, status = self_test(loaded, is_deep=is_deep)
        if self_test_checks is None:
            return status
        report = replace(report, checks=[*report.checks, *self_test_checks])
    if against is None:
        return report
    return replace(report, against=against, changes=_list_changes(Path(against), report.machine))


def _list_changes(against: Path, machine: Snapshot) -> list[str]:
    """Return what changed since the snapshot of a run folder or of a report. Raises: ConfigError."""
    try:
        before = read_snapshot(against / "environment.json" if against.is_dir() else against, machine.host)
        return changes(before, machine)
    except ValueError as error:
        raise ConfigError(f"--against: {error}. Give the output_dir of a run, or what --json printed.") from error


def check_start(loaded: LoadedConfig, *, screen: bool = True) -> list[Finding]:
    """Run the preflight checks of a run and return the findings with which it must not start.

    These findings, warnings and checks without an answer go to standard error unless `screen` is false.
    """
    loaded = as_launched(loaded)
    machine = snapshot_for(loaded)
    checks = examine(machine, loaded)
    faults = [check.finding for check in checks if check.status == "failed" and check.finding is not None]
    silent = [part for part in GPU_PARTS if part in machine.unknown and loaded.run.device != "cpu"]
    lines = []
    if silent:
        lines.append(f"doctor: cannot query the GPUs ({', '.join(silent)}): {machine.unknown[silent[0]]}")
    for check in checks:
        if not check.is_answered:
            lines.append(f"doctor: {check.name}: {check.text}")
        if check.status == "warning" and check.finding is not None:
            lines.append(f"doctor: {check.finding.code} {check.name}: {check.text}")
    lines += [finding.as_text() for finding in faults]
    if faults:
        lines.append("the run was not started; set preflight=false to start it anyway")
    for line in lines if screen else ():
        say(line)
    return faults
