"""Training on several ranks: start them, wait for them, and write the run's end if no rank could."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from surefoot import errors
from surefoot.config import LoadedConfig
from surefoot.config.resolve import resolve
from surefoot.diagnostics.monitor.explain import explain_death, history_since
from surefoot.distributed.elastic_launch import RankFailure, launch
from surefoot.distributed.parallel_dims import Layout
from surefoot.errors import StoppedOnFinding, SurefootError
from surefoot.findings import Finding
from surefoot.system.console import say
from surefoot.training.run_summary import METRICS, FindingLog, RunRecord, RunResult, read_result, steps_done, write_end


def train_launched(loaded: LoadedConfig, *, screen: bool) -> RunResult:
    """Start the ranks of this machine with this config; return the result that rank 0 wrote.

    Raises: what the ranks agreed on; StoppedOnFinding for a rank that died; SurefootError naming the rank that failed.
    """
    folder = loaded.run.run_folder
    size = loaded.run.nproc_per_node * loaded.run.nnodes
    Layout.of(resolve(loaded, size).run, size, loaded.where)  # refused here, before ranks are started
    began_s = time.time()
    restarts: list[Finding] = []
    log = FindingLog.of(loaded.run)

    def on_restart(failure: RankFailure, attempt: int) -> None:
        finding = _build_finding(failure, folder, began_s)
        count = f"restart {attempt} of {loaded.run.max_restarts}"
        finding = replace(finding, cause=f"{finding.cause}. All ranks restart from the last checkpoint ({count})")
        restarts.append(finding)
        if folder.is_dir():
            log.note(finding)
        if screen:
            say(finding.as_text())

    failure = launch(loaded.run, {**loaded.as_json(), "screen": screen}, on_restart)
    if failure is not None:
        _raise_failure(failure, log, began_s, restarts, screen=screen)
    if restarts:
        write_end(folder, findings=restarts)
    result = read_result(folder)
    if result is None:
        raise SurefootError(
            f"{folder}/summary.json is missing although all ranks ended well. Do all machines share output_dir?"
        )
    return result


def _build_finding(failure: RankFailure, folder: Path, began_s: float) -> Finding:
    """Return the finding for the failure of a rank."""
    if failure.finding is not None:
        return failure.finding
    if failure.death is None:
        return Finding("SF101", failure.reason, {"reason": failure.reason}, "See what it says.")
    death, history = failure.death, history_since(folder, began_s)
    return explain_death(folder, death.rank, death.how, for_memory=death.for_memory, history=history)


def _raise_failure(
    failure: RankFailure, log: FindingLog, began_s: float, restarts: Sequence[Finding], *, screen: bool
) -> NoReturn:
    """Raise what the ranks raised; first write summary.json if they took steps since `began_s` and could not."""
    folder = log.run_folder
    result = read_result(folder)
    if failure.finding is not None and folder.is_dir():
        # Raised by one rank alone, which may not have been able to report it.
        is_new = result is not None and (folder / "summary.json").stat().st_mtime >= began_s
        reported = [finding.as_text() for finding in result.findings] if result is not None and is_new else []
        unreported = [] if failure.finding.as_text() in reported else [failure.finding]
        for finding in unreported:
            log.note(finding)
            if screen:
                say(finding.as_text())
        write_end(folder, findings=[*restarts, *unreported], error=failure.reason, since_s=began_s)
        raise StoppedOnFinding(failure.finding)
    metrics = folder / METRICS
    took_steps = metrics.is_file() and metrics.stat().st_mtime >= began_s
    findings = [*restarts]
    if failure.death is not None:
        findings.append(_build_finding(failure, folder, began_s))
    if not failure.kind and (took_steps or (result is None and folder.is_dir())):
        result = result or RunRecord(folder).result("failed")
        ended = replace(
            result, status="failed", steps=steps_done(folder), artifact=None, error=failure.reason, findings=findings
        )
        ended.write()
        if failure.death is not None:
            log.note(findings[-1])
    if failure.death is not None:
        if screen:
            say(findings[-1].as_text())
        raise StoppedOnFinding(findings[-1])
    if failure.finding is not None:  # before there was a run folder
        raise StoppedOnFinding(failure.finding)
    kind: type[SurefootError] = getattr(errors, failure.kind) if failure.kind else SurefootError
    raise kind(failure.reason)
