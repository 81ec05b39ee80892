"""A run of several ranks as its caller sees it: started, waited for, and its end written down if no rank could."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from surefoot import errors
from surefoot.config import LoadedConfig
from surefoot.config.resolve import resolve
from surefoot.diagnostics.monitor.event_log import read_history
from surefoot.diagnostics.monitor.evidence_server import read_stacks
from surefoot.diagnostics.rules.rank_death import find_death
from surefoot.distributed.elastic_launch import RankFailure, launch
from surefoot.distributed.parallel_dims import Layout
from surefoot.errors import StoppedOnFinding, SurefootError
from surefoot.findings import Finding
from surefoot.system import cgroup
from surefoot.system.atomic_io import write_json
from surefoot.system.console import say
from surefoot.system.kernel_log import killed_for_memory
from surefoot.training.run_summary import METRICS, FindingLog, RunRecord, RunResult, read_result, steps_done, write_end


def train_launched(loaded: LoadedConfig, *, screen: bool) -> RunResult:
    """Start the ranks of this machine, which get the config as it is here.

    Returns what rank 0 wrote down. Raises: what the ranks agreed on; StoppedOnFinding for a rank that died;
    SurefootError naming the rank that failed.
    """
    folder = loaded.run.run_folder
    size = loaded.run.nproc_per_node * loaded.run.nnodes
    Layout.of(resolve(loaded, size).run, size, loaded.where)  # refused here, before ranks are started
    began_s = time.time()
    restarts: list[Finding] = []
    log = FindingLog.of(loaded.run)

    def on_restart(failure: RankFailure, attempt: int) -> None:
        finding = _finding_of(failure, folder, began_s)
        often = f"{attempt} of {loaded.run.max_restarts} times"
        finding = replace(finding, cause=f"{finding.cause}. All ranks are started again ({often}), from what was saved")
        restarts.append(finding)
        if folder.is_dir():
            log.note(finding)
        if screen:
            say(finding.as_text())

    failure = launch(loaded.run, {**loaded.as_json(), "screen": screen}, on_restart)
    if failure is not None:
        _raise(failure, log, began_s, restarts, screen=screen)
    if restarts:
        write_end(folder, findings=restarts)
    result = read_result(folder)
    if result is None:
        raise SurefootError(
            f"{folder}/summary.json is not there, although all ranks ended well. Do all machines share output_dir?"
        )
    return result


def _finding_of(failure: RankFailure, folder: Path, began_s: float) -> Finding:
    """Why ranks are started again, or were not."""
    if failure.finding is not None:
        return failure.finding
    if failure.death is None:
        return Finding("SF101", failure.reason, {"reason": failure.reason}, "See what it says.")
    history = [entry for entry in read_history(folder).entries if entry.time_s >= began_s]
    death = failure.death
    return find_death(
        death.rank,
        death.how,
        for_memory=death.for_memory,
        has_limit=cgroup.memory_limit_bytes() is not None,
        history=history,
        last_stacks=read_stacks(folder, death.rank),
        killed=killed_for_memory(),
    )


def _raise(
    failure: RankFailure, log: FindingLog, began_s: float, restarts: Sequence[Finding], *, screen: bool
) -> NoReturn:
    """Raises: what the ranks raised. Where they took steps since `began_s` and none could say so, summary.json does."""
    folder = log.run_folder
    result = read_result(folder)
    if failure.finding is not None and folder.is_dir():
        # Of one rank alone, which could not write it down.
        is_new = result is not None and (folder / "summary.json").stat().st_mtime >= began_s
        said = [one.as_text() for one in result.findings] if result is not None and is_new else []
        is_known = failure.finding.as_text() in said
        own = [] if is_known else [failure.finding]
        for finding in own:
            log.note(finding)
            if screen:
                say(finding.as_text())
        write_end(folder, findings=[*restarts, *own], error=failure.reason, since_s=began_s)
        raise StoppedOnFinding(failure.finding)
    metrics = folder / METRICS
    took_steps = metrics.is_file() and metrics.stat().st_mtime >= began_s
    found = [*restarts]
    if failure.death is not None:
        found.append(_finding_of(failure, folder, began_s))
    if not failure.kind and (took_steps or (result is None and folder.is_dir())):
        result = result or RunRecord(folder).result("failed")
        ended = replace(
            result, status="failed", steps=steps_done(folder), artifact=None, error=failure.reason, findings=found
        )
        write_json(folder / "summary.json", ended.as_dict())
        if failure.death is not None:
            log.note(found[-1])
    if failure.death is not None:
        if screen:
            say(found[-1].as_text())
        raise StoppedOnFinding(found[-1])
    if failure.finding is not None:  # before there was a run that could have written it down
        raise StoppedOnFinding(failure.finding)
    kind: type[SurefootError] = getattr(errors, failure.kind) if failure.kind else SurefootError
    raise kind(failure.reason)
