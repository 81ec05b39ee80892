"""Launch of a self-test, or participation in one that a launcher started, and the checks of its results."""

import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.config import LoadedConfig
from surefoot.config.resolve import device_type
from surefoot.data.sampler import Position
from surefoot.diagnostics.preflight.check import Check, NotApplicable, Result, fail, ok, run_check
from surefoot.diagnostics.preflight.runner import examine
from surefoot.diagnostics.selftest.results import Report, checks_of, read_report
from surefoot.diagnostics.selftest.stages import LEAVE_WITHIN_S, Task, longest_s, stages_of, try_out
from surefoot.distributed.elastic_launch import kill_ranks, launch
from surefoot.errors import StoppedOnFinding, SurefootError
from surefoot.methods.training_data import open_data
from surefoot.models.build import load_tokenizer
from surefoot.models.resolve_model import resolve_model
from surefoot.system.machine import snapshot_of
from surefoot.system.process import is_local_rank

REPORT, STATUS = "self-test.json", "status"
JOIN_WITHIN_S = 120
"""Seconds that machines wait for each other."""
STAY_S = LEAVE_WITHIN_S + 5.0
"""Seconds that ranks may stay after the test is over."""
RANKS_ON_A_CPU = 2
"""Number of ranks on a CPU without a run."""
PREPARED_WITHIN_S, READ_FOR_S = 60.0, 2.0
"""Longest time to prepare the first data of a run, and time for which they are read."""


@dataclass(frozen=True)
class World:
    """Processes of a self-test, with the fields that the launcher reads."""

    nproc_per_node: int
    nnodes: int
    rdzv_endpoint: str | None
    run_folder: Path
    max_restarts: int = 0


def self_test(loaded: LoadedConfig | None, *, is_deep: bool) -> tuple[list[Check] | None, int]:
    """Run the self-test with the ranks of a run; without a run, one for each GPU, or two on the CPU.

    Without `is_deep` the ranks only compare their machines. Under a launcher this process is one of the ranks
    and must end by `process.leave`.
    Returns (the checks, None if rank 0 is on another machine and shows them; the exit status).
    """
    try:
        device = device_type(loaded) if loaded is not None else "cuda" if torch.cuda.is_available() else "cpu"
    except SurefootError as error:
        return _add_exit_status([_fail_test(str(error))])
    run = loaded.run if loaded is not None else None
    with tempfile.TemporaryDirectory(prefix="surefoot-self-test-") as name:
        path, status_path = Path(name, REPORT), Path(name, STATUS)
        if run is not None:
            ranks = World(run.nproc_per_node, run.nnodes, run.rdzv_endpoint, run.run_folder)
        else:
            ranks = World(torch.cuda.device_count() or RANKS_ON_A_CPU, 1, None, Path(name))
        output_dir = str(run.run_folder) if run is not None else None
        task = Task(device, output_dir, ranks.rdzv_endpoint, report=str(path), is_deep=is_deep)
        if is_local_rank():
            own_report, status = try_out(task)
            if own_report is None:
                return None, status
            return _add_exit_status(_collect_checks(own_report, loaded, is_deep=is_deep))
        problem, ended = "", threading.Event()
        stages = stages_of(ranks.nproc_per_node * ranks.nnodes, is_deep=is_deep)
        most_s = JOIN_WITHIN_S + longest_s(stages)
        threading.Thread(target=_end_late_ranks, args=(path, status_path, most_s, ended), daemon=True).start()
        try:
            failure = launch(ranks, {"self_test": asdict(task)}, lambda *_: None, join_within_s=JOIN_WITHIN_S)
            problem = failure.reason if failure is not None else ""
        except SurefootError as error:
            problem = str(error)
        finally:
            ended.set()
        if status_path.is_file() and not problem and not path.is_file():
            return None, int(status_path.read_text())
        report = read_report(path) if path.is_file() else Report(ranks.nproc_per_node * ranks.nnodes, "")
    if problem and not report.stopped_in:
        report.stopped_in = next((stage.name for stage in stages if stage.name not in report.by_stage), stages[-1].name)
    return _add_exit_status(_collect_checks(report, loaded, is_deep=is_deep, problem=problem))


def _end_late_ranks(report: Path, status: Path, most_s: float, ended: threading.Event) -> None:
    """Kill the ranks of this machine that stay when the test is over: a stopped process cannot exit by itself."""
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline and not ended.wait(1.0):
        if status.is_file() or (report.is_file() and read_report(report).is_over):
            deadline = min(deadline, time.monotonic() + STAY_S)
    if not ended.is_set():
        kill_ranks()


def _add_exit_status(checks: list[Check]) -> tuple[list[Check], int]:
    return checks, StoppedOnFinding.exit_status if any(check.status == "failed" for check in checks) else 0


def _fail_test(problem: str, **evidence: Any) -> Check:
    return run_check("self-test", lambda: fail("SF742", problem, is_fatal=True, **evidence))


def _collect_checks(report: Report, loaded: LoadedConfig | None, *, is_deep: bool, problem: str = "") -> list[Check]:
    checks = [*_check_other_machines(report, loaded), *checks_of(report)]
    if problem and not (report.errors or report.silent):
        checks = [*checks[:-1], _fail_test(problem, stage=report.stopped_in)]
    if is_deep and loaded is not None:
        checks.append(check_dataloader(loaded))
    return checks


def _check_other_machines(report: Report, loaded: LoadedConfig | None) -> Sequence[Check]:
    """Return the findings on machines other than that of rank 0, whose own checks are shown anyway."""
    findings: list[Check] = []
    for rank, machine in report.of("machine").items():
        if rank > 0 and machine["local_rank"] == 0:
            checks = examine(snapshot_of(machine), loaded)
            host = f"{machine['host']}, rank {rank}"
            findings += [replace(check, name=f"{check.name} ({host})") for check in checks if check.finding is not None]
    return findings


def check_dataloader(loaded: LoadedConfig) -> Check:
    """Prepare the first data of a run, which stay in the cache, and time reading steps as rank 0 would."""
    return run_check("loader alone", _measure_dataloader, loaded)


def _measure_dataloader(loaded: LoadedConfig) -> Result:
    try:
        base = resolve_model(loaded.run.model, loaded.where("model"), weights=False)
        data = open_data(loaded, base, load_tokenizer(base, loaded.run.chat_template), lambda _event: None)
    except SurefootError as error:
        return fail("SF736", str(error), error=str(error))
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        data.stop()

    timer = threading.Timer(PREPARED_WITHIN_S, stop)
    timer.daemon = True
    timer.start()
    try:
        data.prepare(Position())
        step, _ = data.batches(Position())
        timer.cancel()
        began_s, tokens, steps = time.perf_counter(), 0, 0
        while (took_s := time.perf_counter() - began_s) < READ_FOR_S:
            step, batches = data.batches(step.next_position)
            tokens += sum(batch.ids.shape[-1] for batch in batches)
            steps += 1
    except SurefootError as error:
        if is_late.is_set():
            reason = f"the first data are not prepared within {PREPARED_WITHIN_S:g} s: `surefoot data`"
            raise NotApplicable(reason) from error
        return fail("SF736", str(error), error=str(error))
    finally:
        timer.cancel()
        data.stop()
    return ok(f"{tokens / took_s:,.0f} tokens/s, a step in {took_s / max(1, steps) * 1000:.1f} ms")


def run_rank(payload: dict[str, Any]) -> None:
    """Run one rank that `launch` started. All but rank 0 write the exit status, for a launcher without a report."""
    task = Task(**payload)
    report, status = try_out(task)
    if report is None:
        Path(task.report).with_name(STATUS).write_text(str(status))
