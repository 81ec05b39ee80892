"""Observers of a run: those that write its numbers into its folder, and all others that a config asks for."""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from surefoot.config import RunConfig
from surefoot.events import (
    CompletionsMade,
    Event,
    Observer,
    RunEnded,
    RunStarted,
    SamplesTrained,
)
from surefoot.system.atomic_io import raise_storage_error, write_text
from surefoot.system.json_files import is_count, keep_lines
from surefoot.training.run_summary import COMPLETIONS, EVAL_COMPLETIONS, LOG, METRICS, SAMPLES, is_evaluation
from surefoot.training.screen import LogFile, Screen
from surefoot.training.trackers import as_metrics, build_trackers, has_logged_metrics

LOGGER = logging.getLogger(__name__)


class MetricsFile:
    """Writer of one line per logged step to metrics.jsonl; a resumed run first drops lines beyond its checkpoint."""

    def __init__(self, path: Path, logging_steps: int) -> None:
        self._path = path
        self._every = logging_steps
        self._file: TextIO | None = None

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            drop_lines_from(self._path, event.first_step, is_evaluation if event.evaluates_again else None)
            with raise_storage_error(self._path):
                self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed at the end of the run
        elif has_logged_metrics(event, self._every):
            assert self._file is not None
            with raise_storage_error(self._path):
                self._file.write(json.dumps(as_metrics(event)) + "\n")
                self._file.flush()
        elif isinstance(event, RunEnded) and self._file is not None:
            with suppress(OSError):  # write errors were reported before
                self._file.close()
            self._file = None


class CompletionsFile:
    """Writer of one line per completion to completions.jsonl, or to that of evaluations.

    A resumed run first drops lines beyond its checkpoint.
    """

    def __init__(self, path: Path, of_evaluations: Path) -> None:
        self._path = path
        self._of_evaluations = of_evaluations

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            drop_lines_from(self._path, event.first_step)
            drop_lines_from(self._of_evaluations, event.first_step - event.evaluates_again)
        elif isinstance(event, CompletionsMade):
            path = self._of_evaluations if event.is_evaluation else self._path
            about = {"step": event.step, "policy_version": event.policy_version}
            # A lone surrogate, which JSON data may hold, is written as JSON would escape it.
            with raise_storage_error(path), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(json.dumps({**about, **sample}, ensure_ascii=False) + "\n" for sample in event.samples)


class SamplesFile:
    """Writer of one line per sample of the first step to samples.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def observe(self, event: Event) -> None:
        if isinstance(event, SamplesTrained):
            write_text(self._path, "".join(json.dumps({"step": event.step, **line}) + "\n" for line in event.samples))


def drop_lines_from(
    path: Path, first_step: int, goes_before: Callable[[Mapping[str, Any]], bool] | None = None
) -> None:
    """Keep the lines of a file before a step, but drop lines of the step before it that `goes_before` selects.

    Lines that hold no object with a `step` are dropped with a warning, except the last, which a kill may have cut.
    Raises: StorageError.
    """
    are_damaged: list[bool] = []

    def is_kept(line: Mapping[str, Any] | None) -> bool:
        step = line.get("step") if line is not None else None
        are_damaged.append(not is_count(step))
        if step is None or line is None or are_damaged[-1]:
            return False
        is_last_step = step == first_step - 1
        return bool(step < first_step) and not (goes_before is not None and is_last_step and goes_before(line))

    with raise_storage_error(path):
        keep_lines(path, is_kept)
    num_damaged = sum(are_damaged[:-1])
    if num_damaged:
        LOGGER.warning("%s: %d lines could not be read and are left out", path, num_damaged)


@dataclass(frozen=True)
class CallbackObserver:
    """Observer that gives each event to a function of the user."""

    function: Callable[[Event], object]

    def observe(self, event: Event) -> None:
        self.function(event)


def build_observers(config: RunConfig, *, screen: bool) -> list[Observer]:
    """Build the observers that a config requests. Raises: ConfigError if a package is missing."""
    run_folder, logging_steps = config.run_folder, config.logging_steps
    observers: list[Observer] = [
        MetricsFile(run_folder / METRICS, logging_steps),
        CompletionsFile(run_folder / COMPLETIONS, run_folder / EVAL_COMPLETIONS),
        SamplesFile(run_folder / SAMPLES),
    ]
    observers.append(LogFile(run_folder / LOG, logging_steps))
    if screen:
        observers.append(Screen(logging_steps, verbosity=config.verbosity))
    return [*observers, *build_trackers(config)]
