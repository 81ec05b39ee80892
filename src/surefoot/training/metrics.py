"""Observers that record a run's numbers: metrics.jsonl, completions, TensorBoard, W&B and trackio."""

import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from surefoot.config import RunConfig
from surefoot.errors import ConfigError
from surefoot.events import (
    CompletionsMade,
    Evaluated,
    Event,
    Observer,
    RunEnded,
    RunStarted,
    StepEnded,
)
from surefoot.system.atomic_io import raise_storage_error
from surefoot.system.json_files import is_count, keep_lines
from surefoot.training.run_summary import COMPLETIONS, EVAL_COMPLETIONS, LOG, METRICS, is_evaluation
from surefoot.training.screen import LogFile, Screen

LOGGER = logging.getLogger(__name__)


def as_metrics(event: StepEnded | Evaluated) -> dict[str, Any]:
    """Return the numbers of an event, without those that the model does not have."""
    left_out = ("total_steps", "is_last", "metrics")
    own = {name: value for name, value in asdict(event).items() if value is not None and name not in left_out}
    return own | dict(event.metrics)


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
        elif _has_logged_metrics(event, self._every):
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


def _has_logged_metrics(event: Event, every: int) -> TypeGuard[StepEnded | Evaluated]:
    """Return whether an event has metrics to log: each evaluation, each step of the interval, and the last step."""
    return isinstance(event, Evaluated) or (isinstance(event, StepEnded) and event.is_logged(every))


@dataclass(frozen=True)
class CallbackObserver:
    """Observer that gives each event to a function of the user."""

    function: Callable[[Event], object]

    def observe(self, event: Event) -> None:
        self.function(event)


class TensorBoard:
    """Writer of scalars under `<run folder>/tensorboard`."""

    def __init__(self, run_folder: Path, logging_steps: int) -> None:
        _import_package("tensorboard", "tensorboard")
        self._folder = run_folder / "tensorboard"
        self._writer: Any = None
        """Writer that is opened once the run begins: until then the folder may hold another run, which is deleted."""
        self._every = logging_steps

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        elif _has_logged_metrics(event, self._every):
            for name, value in _extract_scalars(event).items():
                self._writer.add_scalar(name, value, event.step)
        elif isinstance(event, RunEnded) and self._writer is not None:
            self._writer.close()


class Tracker:
    """Writer for W&B or trackio, which share these three calls."""

    def __init__(self, package: str, run_folder: Path, logging_steps: int) -> None:
        self._module = _import_package(package, package)
        self._name = run_folder.name
        self._every = logging_steps
        self._has_begun = False

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._has_begun = True
            project = os.environ.get(f"{self._module.__name__.upper()}_PROJECT", "surefoot")
            self._module.init(project=project, name=self._name, config=dict(event.config))
        elif _has_logged_metrics(event, self._every):
            self._module.log(_extract_scalars(event), step=event.step)
        elif isinstance(event, RunEnded) and self._has_begun:
            self._module.finish()


def _extract_scalars(event: StepEnded | Evaluated) -> dict[str, float]:
    """Return the numbers of an event by the names that other trainers give them: train/loss, eval/loss."""
    scalars = {}
    for name, value in as_metrics(event).items():
        if name == "expert_load":
            scalars["train/expert_load_max"] = max(value)
        elif name.startswith("eval_"):
            scalars[f"eval/{name.removeprefix('eval_')}"] = float(value)
        elif name != "step":
            scalars[f"{'eval' if isinstance(event, Evaluated) else 'train'}/{name}"] = float(value)
    return scalars


def _import_package(package: str, setting: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"report_to: {setting} needs the package {package}: pip install {package}") from error


def build_observers(config: RunConfig, *, screen: bool) -> list[Observer]:
    """Build the observers that a config requests. Raises: ConfigError if a package is missing."""
    run_folder, logging_steps = config.run_folder, config.logging_steps
    observers: list[Observer] = [
        MetricsFile(run_folder / METRICS, logging_steps),
        CompletionsFile(run_folder / COMPLETIONS, run_folder / EVAL_COMPLETIONS),
    ]
    observers.append(LogFile(run_folder / LOG, logging_steps))
    if screen:
        observers.append(Screen(logging_steps, verbosity=config.verbosity))
    for name in config.report_to:
        observers.append(
            TensorBoard(run_folder, logging_steps)
            if name == "tensorboard"
            else Tracker(name, run_folder, logging_steps)
        )
    return observers
