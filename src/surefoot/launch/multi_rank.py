"""Training on several ranks: start them, wait for them, and write the run's end if no rank could."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from surefoot import errors
from surefoot.config import LoadedConfig
from surefoot.config.resolve import resolve
from surefoot.diagnostics.monitor.explain import explain_death, history_since
from surefoot.distributed.elastic_launch import launch
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.rank_notes import RankFailure
from surefoot.errors import ConfigError, StoppedOnFinding, SurefootError
from surefoot.findings import Finding
from surefoot.launch.watcher import add_restart, was_written_since
from surefoot.system.console import say
from surefoot.training.run_summary import METRICS, SUMMARY, FindingLog, RunResult, read_result, write_end

MOST_RANKS_PER_CORE = 16


def train_launched(loaded: LoadedConfig, *, screen: bool) -> RunResult:
    """Start the ranks of this machine with this config; return the result that rank 0 wrote.

    Raises: what the ranks agreed on; StoppedOnFinding for a rank that died; SurefootError naming the rank that failed.
    """
    folder = loaded.run.run_folder
    size = loaded.run.nproc_per_node * loaded.run.nnodes
    run = resolve(loaded, size).run  # refused here, before ranks are started
    Layout.of(run, size, loaded.where)
    cores = len(os.sched_getaffinity(0))
    if run.device == "cpu" and run.nproc_per_node > MOST_RANKS_PER_CORE * cores:
        raise ConfigError(
            f"nproc_per_node={run.nproc_per_node} on a machine with {cores} CPU cores: the ranks would fill its memory "
            f"with copies of Python and torch, and wait for each other. Give at most {MOST_RANKS_PER_CORE * cores} "
            f"({loaded.where('nproc_per_node')})."
        )
    began_s = time.time()
    restarts: list[Finding] = []
    log = FindingLog.of(loaded.run)

    def on_restart(failure: RankFailure, attempt: int) -> None:
        finding = add_restart(_build_finding(failure, folder, began_s), attempt, loaded.run.max_restarts)
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
        return Finding("SF101", failure.reason, {"reason": failure.reason})
    death, history = failure.death, history_since(folder, began_s)
    return explain_death(folder, death.rank, death.how, for_memory=death.for_memory, history=history)


def _raise_failure(
    failure: RankFailure, log: FindingLog, began_s: float, restarts: Sequence[Finding], *, screen: bool
) -> NoReturn:
    """Raise what the ranks raised; first write summary.json if they took steps since `began_s` and could not."""
    folder, kind = log.run_folder, failure.kind
    result = read_result(folder)
    if failure.finding is not None:
        can_write = folder.is_dir()
    else:
        took_steps = was_written_since(folder / METRICS, began_s)
        can_write = not kind and (took_steps or (result is None and folder.is_dir()))
    has_finding = failure.finding is not None or failure.death is not None
    findings = [_build_finding(failure, folder, began_s)] if has_finding else []
    # A finding that one rank raised alone may not have been reported by it.
    is_new = result is not None and was_written_since(folder / SUMMARY, began_s)
    reported = [finding.as_text() for finding in result.findings] if result is not None and is_new else []
    unreported = [finding for finding in findings if finding.as_text() not in reported]
    for finding in unreported:
        if can_write:
            log.note(finding)
        if screen and (can_write or failure.death is not None):
            say(finding.as_text())
    if can_write:
        write_end(folder, findings=[*restarts, *unreported], error=failure.reason, since_s=began_s)
    if findings:
        raise StoppedOnFinding(findings[0])
    error: type[SurefootError] = getattr(errors, kind) if kind else SurefootError
    raise error(failure.reason)
