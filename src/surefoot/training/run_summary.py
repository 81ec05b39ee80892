"""Summary and findings of a run: summary.json and findings.jsonl. Imports no torch."""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from surefoot.events import DataCounted, Evaluated, Event, FindingMade, RunStarted, StepEnded
from surefoot.findings import Finding
from surefoot.system.atomic_io import write_json
from surefoot.system.json_files import is_count, is_number, keep_lines, read_object, read_objects
from surefoot.training.webhooks import post, write_text_page

if TYPE_CHECKING:
    from surefoot.config import RunConfig

LOGGER = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
LOG = "train.log"
SUMMARY = "summary.json"
COMPLETIONS, EVAL_COMPLETIONS = "completions.jsonl", "eval_completions.jsonl"
SAMPLES = "samples.jsonl"
FINDINGS = "findings.jsonl"
Status = Literal["completed", "interrupted", "failed"]


@dataclass(frozen=True)
class RunResult:
    """Result of a run; the same as summary.json."""

    status: Status
    run_folder: Path
    steps: int
    """Number of optimizer steps done, those of earlier processes included."""
    train_loss: float | None
    """Mean of the steps' losses."""
    tokens_per_second: float | None
    """Tokens per second over the steps of this process."""
    peak_memory_bytes: int
    examples: Mapping[str, int]
    """Rows read, trained, truncated and skipped."""
    examples_are_complete: bool
    """False for a run that ended before all its data were prepared: the other rows were neither read nor counted."""
    artifact: Path | None
    """Adapter or model folder."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation, such as eval_loss, and its step; empty without one."""
    benchmarks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Scores of `surefoot evaluate`: task -> metric -> value."""
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, steps and evaluations: a table for pandas.DataFrame."""
        return [line for _, line in read_objects(self.run_folder / METRICS) if line is not None]

    def write(self) -> None:
        """Write summary.json of the run folder. Raises: StorageError."""
        write_json(self.run_folder / SUMMARY, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        return {
            **vars(self),
            "run_folder": str(self.run_folder),
            "examples": dict(self.examples),
            "evaluation": dict(self.evaluation),
            "benchmarks": {task: dict(metrics) for task, metrics in self.benchmarks.items()},
            "artifact": str(self.artifact) if self.artifact else None,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def read_result(run_folder: Path) -> RunResult | None:
    """Return the content of summary.json of a run folder; None if it is missing or invalid."""
    try:
        summary = {"evaluation": {}, "benchmarks": {}, **read_object(run_folder / SUMMARY)}  # older versions wrote none
        artifact = summary["artifact"]
        if not all(is_right(summary[name]) for name, is_right in _SUMMARY.items()):
            return None
        findings = [Finding.from_dict(values) for values in summary["findings"]]
        values = {**summary, "run_folder": run_folder, "artifact": Path(artifact) if artifact else None}
        return RunResult(**{**values, "findings": findings})
    except (ValueError, KeyError, TypeError):
        return None


def _is_number_or_none(value: object) -> bool:
    return value is None or is_number(value)


def _is_table_of_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


_SUMMARY: Mapping[str, Callable[[Any], bool]] = {
    "status": lambda value: value in ("completed", "interrupted", "failed"),
    "steps": is_count,
    "train_loss": _is_number_or_none,
    "tokens_per_second": _is_number_or_none,
    "peak_memory_bytes": is_count,
    "examples": lambda value: isinstance(value, dict) and all(map(is_count, value.values())),
    "examples_are_complete": lambda value: isinstance(value, bool),
    "artifact": lambda value: _is_text_or_none(value) and "\0" not in (value or ""),
    "evaluation": _is_table_of_numbers,
    "benchmarks": lambda value: isinstance(value, dict) and all(map(_is_table_of_numbers, value.values())),
    "findings": lambda value: isinstance(value, list) and all(isinstance(finding, dict) for finding in value),
    "error": _is_text_or_none,
}
"""Key of summary.json -> check whether a JSON value is valid for it."""


@dataclass(frozen=True)
class FindingLog:
    """Log of the findings of a run, from its ranks and from the processes that watch it."""

    run_folder: Path
    webhook: str | None = None
    """`$NAME` of the environment variable that holds the address."""
    tensorboard: bool = False

    @staticmethod
    def of(config: "RunConfig") -> "FindingLog":
        return FindingLog(config.run_folder, config.webhook, "tensorboard" in config.report_to)

    def note(self, finding: Finding) -> None:
        """Append a finding to findings.jsonl, in one write, and send it on. Failures are logged.

        A full disk, or a webhook that does not answer, ends no run.
        """
        try:
            with open(self.run_folder / FINDINGS, "ab+") as file:
                line = json.dumps({"time_s": time.time(), **finding.as_dict()}) + "\n"
                file.write((b"" if _is_at_line_start(file) else b"\n") + line.encode("ascii"))
        except OSError as error:
            LOGGER.warning("finding %s could not be written down: %s", finding.code, error)
        if self.webhook is not None:
            problem = self._post(self.webhook, finding)
            if problem is not None:
                LOGGER.warning("%s", problem)
        if self.tensorboard:
            step = finding.evidence.get("step")
            try:
                write_text_page(self.run_folder, finding, step if isinstance(step, int) else 0)
            except (OSError, ImportError) as error:
                LOGGER.warning("finding %s could not be written for TensorBoard: %s", finding.code, error)

    def _post(self, webhook: str, finding: Finding) -> str | None:
        """Post a finding to the webhook, and return the problem, if any."""
        address = os.environ.get(webhook.removeprefix("$"))
        if address is None:
            return f"webhook: {webhook} is not set in the environment, so finding {finding.code} is not sent"
        return post(address, self.run_folder, finding)


def _is_at_line_start(file: BinaryIO) -> bool:
    """Return whether text appended to a file begins a line; a kill may have cut the last line short."""
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def drop_findings_before(run_folder: Path, began_s: float) -> None:
    """Drop the findings of findings.jsonl before a time, in seconds since 1970. Raises: StorageError."""
    path = run_folder / FINDINGS

    def is_kept(line: dict[str, Any] | None) -> bool:
        time_s = line.get("time_s") if line is not None else None
        return isinstance(time_s, int | float) and time_s >= began_s

    keep_lines(path, is_kept)
    if path.is_file() and not path.stat().st_size:
        path.unlink()


def write_end(run_folder: Path, *, findings: Sequence[Finding], error: str | None = None, since_s: float = 0.0) -> None:
    """Complete summary.json with findings from outside; with `error` the run has failed, and the file is written anew
    if this run, which began at `since_s` (seconds since 1970), has none."""
    result = read_result(run_folder)
    if result is not None and (run_folder / SUMMARY).stat().st_mtime < since_s:  # of an earlier run
        result = None
    if result is None and error is not None:
        result = replace(RunRecord(run_folder).result("failed"), steps=steps_done(run_folder))
    if result is None:
        return
    result = replace(result, findings=_merge(findings, result.findings))
    if error is not None:
        result = replace(result, status="failed", artifact=None, error=error)
    result.write()


def add_reported_findings(result: RunResult, since_s: float) -> RunResult:
    """Return the result, and write it, with the findings that others wrote since a time in seconds since 1970."""
    reported = [
        Finding.from_dict(line)
        for _, line in read_objects(result.run_folder / FINDINGS)
        if line is not None and is_number(line.get("time_s")) and line["time_s"] >= since_s
    ]
    findings = _merge(result.findings, reported)
    if len(findings) > len(result.findings):
        result = replace(result, findings=findings)
        result.write()
    return result


def _merge(findings: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """Return both lists in order; a cause that is in both once."""
    return list({(finding.code, finding.cause): finding for finding in (*findings, *others)}.values())


def steps_done(run_folder: Path) -> int:
    """Return the step of the last readable line of the metrics; 0 if there is none."""
    steps = 0
    for _, line in read_objects(run_folder / METRICS):
        if line is not None and is_count(line.get("step")):
            steps = line["step"]
    return steps


def is_sample(line: Mapping[str, Any]) -> bool:
    """Return whether a line has all fields of a line of samples.jsonl."""
    parts = line.get("parts")
    are_parts = isinstance(parts, list) and all(
        isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) for part in parts
    )
    return are_parts and {"place", "tokens"} <= line.keys()


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl is an evaluation's: each line of a step has its learning rate."""
    return "learning_rate" not in line


def last_evaluation(run_folder: Path, before_step: int) -> dict[str, float]:
    """Return the newest readable evaluation of metrics.jsonl before a step; empty if there is none."""
    newest: dict[str, float] = {}
    for _, line in read_objects(run_folder / METRICS):
        if line is not None and is_evaluation(line) and all(map(is_number, line.values())):
            newest = line if is_count(line.get("step")) and line["step"] < before_step else newest
    return newest


def completed_earlier(run_folder: Path, step: int) -> RunResult | None:
    """Return the result of a run that was completed after `step` steps, before this process began."""
    earlier = read_result(run_folder)
    if earlier is None or earlier.status != "completed" or earlier.steps != step:
        return None
    if earlier.artifact is None:
        return None
    artifact = run_folder / earlier.artifact.name  # a folder that was copied or moved names the old place
    return replace(earlier, artifact=artifact) if artifact.is_dir() else None


class RunRecord:
    """Observer that can build the summary at any moment; it writes findings to findings.jsonl at once."""

    def __init__(self, run_folder: Path, log: FindingLog | None = None) -> None:
        self._log = log or FindingLog(run_folder)
        self.has_started = False
        self._tokens = 0
        self._time_s = 0.0
        self._result = RunResult(
            status="failed",
            run_folder=run_folder,
            steps=0,
            train_loss=None,
            tokens_per_second=None,
            peak_memory_bytes=0,
            examples={"read": 0, "trained": 0, "truncated": 0, "skipped": 0},
            examples_are_complete=False,
            artifact=None,
        )

    def observe(self, event: Event) -> None:
        result = self._result
        if isinstance(event, DataCounted):
            self._result = replace(result, examples=event.rows, examples_are_complete=event.is_complete)
        elif isinstance(event, RunStarted):
            self.has_started = True
            evaluation = last_evaluation(result.run_folder, event.first_step - event.evaluates_again)
            self._result = replace(result, steps=event.first_step - 1, evaluation=evaluation)
        elif isinstance(event, Evaluated):
            self._result = replace(result, evaluation={"step": event.step, **event.metrics})
        elif isinstance(event, StepEnded):
            self._tokens += round(event.tokens_per_second * event.step_time_s)
            self._time_s += event.step_time_s
            speed = self._tokens / self._time_s if self._time_s else None
            peak = event.peak_memory_bytes
            self._result = replace(result, steps=event.step, tokens_per_second=speed, peak_memory_bytes=peak)
        elif isinstance(event, FindingMade):
            self._result = replace(result, findings=[*result.findings, event.finding])
            self._log.note(event.finding)

    def result(self, status: Status, **details: Any) -> RunResult:
        """Return the summary of the run at this moment, with these further fields of it."""
        return replace(self._result, status=status, **details)

    def finish(self, result: RunResult, *, is_writer: bool) -> RunResult:
        """Return the result at the end of the run, and write it to summary.json if `is_writer`. Raises: StorageError.

        If this start failed before its first step, the result of an earlier start stays.
        """
        before = None if self.has_started else read_result(self._result.run_folder)
        if before is not None and before.status == "failed":
            result = replace(before, error=result.error, findings=[*before.findings, *result.findings])
        if is_writer and (before is None or before.status == "failed"):
            result.write()
        return result
