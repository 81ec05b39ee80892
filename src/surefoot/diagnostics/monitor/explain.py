"""`surefoot explain RUN`: diagnosis of a run from its folder alone, while it runs or after it died."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import psutil

from surefoot.config.documents import parse_yaml, read_text
from surefoot.diagnostics.monitor.event_log import Entry, History, last_start, open_phases, read_history
from surefoot.diagnostics.monitor.evidence import read_evidence
from surefoot.diagnostics.monitor.evidence_server import read_stacks
from surefoot.diagnostics.monitor.gpus import read_snapshots, take_snapshot
from surefoot.diagnostics.monitor.rank_trends import find_in_history
from surefoot.diagnostics.rules.accelerators import find_last_errors
from surefoot.diagnostics.rules.rank_death import MachineAtDeath, find_death
from surefoot.diagnostics.rules.stall import find_stall
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.system import cgroup
from surefoot.system.json_files import DamagedFile, read_object, read_objects
from surefoot.system.kernel_log import gpu_errors, killed_for_memory, recent_messages, troubles

GONE_AFTER_S = 30.0
"""Seconds of silence after which a process that does not run counts as gone: a restart has new processes by then."""
ENDED = "has ended"
UNRECORDED = "nothing was recorded of this run, because it has health: false (run.yaml)"
MAX_NAMED = 20
"""Number of damaged lines of findings.jsonl that are listed individually."""


@dataclass(frozen=True)
class RankNow:
    """The state of one rank at its newest event."""

    rank: int
    start: int
    process: int
    step: int
    doing: str
    silent_s: float


@dataclass(frozen=True)
class Explanation:
    """The diagnosis of a run's folder."""

    run_folder: Path
    status: str
    """Status in summary.json. If it is missing or older than the newest events: `killed` if ranks of this machine are
    gone together with their supervisor, `running` if all of them run, else `unknown`."""
    ranks: list[RankNow]
    findings: list[Finding]
    """Findings that were written during the run, and findings that its evidence gives now."""
    missing: list[str]
    """Evidence that cannot be read."""
    error: str | None = None
    """Error of the run in summary.json."""
    earlier: frozenset[tuple[str, str]] = frozenset()
    """(code, cause) of findings that were written in an earlier start of this run."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "run_folder": str(self.run_folder),
            "status": self.status,
            "error": self.error,
            "ranks": [vars(rank) for rank in self.ranks],
            "findings": [
                {**finding.as_dict(), "is_of_earlier_start": self.is_earlier(finding)} for finding in self.findings
            ],
            "missing": self.missing,
        }

    def is_earlier(self, finding: Finding) -> bool:
        """Return whether a finding was written in an earlier start of this run."""
        return (finding.code, finding.cause) in self.earlier

    def as_text(self) -> str:
        """Return the explanation as text for a person."""
        lines = [f"{self.run_folder}: {self.status}", *([f"  error: {self.error}"] if self.error else [])]
        lines += [
            f"  rank {rank.rank} (process {rank.process}): {rank.doing}, step {rank.step}, "
            f"last event {rank.silent_s:.0f} s ago"
            for rank in self.ranks
        ]
        lines += [
            finding.as_text() + ("\n  when: in an earlier start of this run" if self.is_earlier(finding) else "")
            for finding in self.findings
        ] or ["no findings"]
        lines += [f"missing: {evidence}" for evidence in self.missing]
        return "\n".join(lines)


def explain(run_folder: Path, history: History | None = None) -> Explanation:
    """Read a run folder and diagnose it again. `history`: its events, if they were read already.

    Raises: ConfigError for a folder that holds no run.
    """
    if not (run_folder / "events").is_dir() and not (run_folder / "summary.json").is_file():
        if _is_unrecorded(run_folder):
            raise ConfigError(f"{run_folder}: {UNRECORDED}, and it has not ended yet.")
        raise ConfigError(
            f"{run_folder} holds no run: it has neither events/ nor summary.json. Give the output_dir of a run."
        )
    history = history or read_history(run_folder)
    entries, missing = history.entries, list(history.unreadable)
    ranks = _list_current_ranks(entries)
    written, unreadable = _read_findings(run_folder / "findings.jsonl")
    began_s = min((last_start(entries, rank.rank)[0].time_s for rank in ranks), default=-inf)
    is_earlier = {(finding.code, finding.cause): time_s < began_s for time_s, finding in written}
    findings = [finding for _, finding in written]
    # A finding of an earlier start may apply again.
    this_start = [finding for finding in findings if not is_earlier[finding.code, finding.cause]]
    written_keys = {(finding.code, finding.evidence.get("rank")) for finding in this_start}
    for finding in find_in_history(entries):
        if (finding.code, finding.evidence.get("rank")) not in written_keys:
            findings.append(finding)
            is_earlier[finding.code, finding.cause] = False
    missing += [UNRECORDED] * _is_unrecorded(run_folder) + unreadable
    evidence_files = [finding.evidence.get("evidence") for _, finding in written]
    for path in sorted((run_folder / "evidence").glob("stall-*.json")):
        if str(path.relative_to(run_folder)) in evidence_files:
            continue
        try:
            findings.append(find_stall(read_evidence(path)))
        except ValueError as error:
            missing.append(str(error))
    status = _read_status(run_folder, entries, ranks)
    run_error = _read_summary(run_folder).get("error") if status == "failed" else None
    if status == "unknown":
        unfinished = [rank for rank in ranks if rank.doing != ENDED]
        present = [rank for rank in unfinished if (rank.rank, rank.start) not in history.away]
        gone = [rank for rank in present if rank.silent_s > GONE_AFTER_S and not _is_running(rank)]
        if present and all(map(_is_running, present)):
            status = "running"
        if gone:
            status = "killed"
            findings.append(_diagnose_killed(run_folder, gone, history))
        away = [str(rank.rank) for rank in unfinished if rank not in present]
        if away:
            missing.append(f"whether ranks {', '.join(away)} still run: they are of another machine, ask there")
    return Explanation(
        run_folder,
        status,
        ranks,
        list({(finding.code, finding.cause): finding for finding in findings}.values()),
        missing,
        None if run_error is None else str(run_error),
        frozenset(key for key, is_of_earlier_start in is_earlier.items() if is_of_earlier_start),
    )


def _is_unrecorded(run_folder: Path) -> bool:
    """Return whether a run has no events because its config says so."""
    if (run_folder / "events").is_dir() or not (run_folder / "run.yaml").is_file():
        return False
    try:
        saved = parse_yaml(read_text(run_folder / "run.yaml"), "run.yaml")
    except ConfigError:  # a damaged one is of no use here
        return False
    return isinstance(saved, dict) and saved.get("health") is False


def _is_running(rank: RankNow) -> bool:
    """Return whether the process of a rank runs on this machine; a younger process of the same number is another."""
    try:
        process = psutil.Process(rank.process)
        heard_s = time.time() - rank.silent_s
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= heard_s
    except psutil.NoSuchProcess:
        return False


def history_since(run_folder: Path, since_s: float) -> list[Entry]:
    """Return what the ranks of a run recorded since a time, in seconds since 1970."""
    return [entry for entry in read_history(run_folder).entries if entry.time_s >= since_s]


def explain_death(
    run_folder: Path, rank: int | None, how: str, *, for_memory: bool | None, history: Sequence[Entry]
) -> Finding:
    """Return the finding for a rank that ended as `how` says, with the evidence in its run folder and the kernel log.

    `rank`: None for the launcher of the ranks. `for_memory`, `history`: see `find_death`.
    """
    messages, processes = recent_messages(), {entry.process for entry in history}
    began_s = min((entry.time_s for entry in history), default=inf)
    samples = [snapshot for snapshot in read_snapshots(run_folder) if snapshot.time_s >= began_s]
    first, last = (samples[0], take_snapshot()) if samples else (None, None)
    return find_death(
        rank,
        how,
        for_memory=for_memory,
        history=history,
        last_stacks=read_stacks(run_folder, rank) if rank is not None else "",
        machine=MachineAtDeath(
            has_memory_limit=cgroup.memory_limit_bytes() is not None,
            killed=killed_for_memory(messages),
            gpu_errors=find_last_errors(gpu_errors(messages), processes, first, last),
            kernel_messages=troubles(messages, processes),
        ),
    )


def _diagnose_killed(run_folder: Path, gone: Sequence[RankNow], history: History) -> Finding:
    """Return the finding for ranks whose end nobody recorded, about the one of them with the newest event."""
    last = min(gone, key=lambda rank: rank.silent_s)
    how = "is gone together with whoever watched it (a machine or container that was stopped, or SIGKILL to all)"
    finding = explain_death(run_folder, last.rank, how, for_memory=None, history=history.entries)
    extra = {"ranks_gone": ", ".join(str(rank.rank) for rank in gone), "silent_s": round(last.silent_s)}
    return replace(finding, evidence={**finding.evidence, **extra})


def _read_status(run_folder: Path, entries: Sequence[Entry], ranks: Sequence[RankNow]) -> str:
    path = run_folder / "summary.json"
    has_ended = all(rank.doing == ENDED for rank in ranks)
    if not path.exists():  # of another trainer, or of a run that was killed
        if not ranks or not has_ended:
            return "unknown"
        ends = [last_start(entries, rank.rank)[-1] for rank in ranks]
        return "failed" if any(entry.values["failed"] for entry in ends) else "completed"
    last_s = max((entry.time_s for entry in entries if entry.kind != "run ended"), default=0.0)
    try:
        if path.stat().st_mtime < last_s and not has_ended:  # of an earlier start
            return "unknown"
    except OSError:
        return "unknown"
    return str(_read_summary(run_folder).get("status", "unknown"))


def _read_summary(run_folder: Path) -> dict[str, Any]:
    """Return the content of summary.json; empty if it is missing or damaged."""
    try:
        return read_object(run_folder / "summary.json")
    except DamagedFile:
        return {}


def _read_findings(path: Path) -> tuple[list[tuple[float, Finding]], list[str]]:
    """Return (each finding of findings.jsonl with the time at which it was written, its unreadable lines)."""
    findings, unreadable = [], []
    for number, (_, line) in enumerate(read_objects(path), 1):
        try:
            if line is None:
                raise ValueError("no object")
            findings.append((float(line.get("time_s", inf)), Finding.from_dict(line)))
        except (ValueError, TypeError, OverflowError):
            unreadable.append(number)
    named = [f"{path.name}:{number} is no finding that this version knows" for number in unreadable[:MAX_NAMED]]
    more = len(unreadable) - MAX_NAMED
    return findings, named + [f"{path.name}: {more} more lines like these"] * (more > 0)


def _list_current_ranks(entries: Sequence[Entry]) -> list[RankNow]:
    """Return the state of each rank's newest process."""
    ranks, now_s = [], time.time()
    for number in sorted({entry.rank for entry in entries}):
        events = last_start(entries, number)
        phases, newest = open_phases(events), events[-1]
        doing = ENDED if newest.kind == "run ended" else f"in {phases[-1]}" if phases else "between phases"
        step = max(entry.step for entry in events)
        ranks.append(RankNow(number, newest.start, newest.process, step, doing, now_s - newest.time_s))
    return ranks
