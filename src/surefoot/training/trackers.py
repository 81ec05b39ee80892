"""Trackers that receive a run's numbers besides its folder: TensorBoard, W&B, SwanLab, MLflow and trackio."""

import importlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeGuard

from surefoot.config import RunConfig
from surefoot.errors import ConfigError
from surefoot.events import Evaluated, Event, Observer, RunEnded, RunStarted, StepEnded

PROJECT = "surefoot"
"""Project of trackers if the environment names none."""
PROJECTS = {
    "wandb": ("WANDB_PROJECT",),
    "trackio": ("TRACKIO_PROJECT",),
    "swanlab": ("SWANLAB_PROJECT", "SWANLAB_PROJ_NAME"),
}
"""Tracker -> variables that name the project."""
MOST_PARAMETERS, MOST_CHARACTERS = 100, 500
"""Most parameters in one call of MLflow, and characters of a parameter, which its servers take."""


def as_metrics(event: StepEnded | Evaluated) -> dict[str, Any]:
    """Return the numbers of an event, without those that the model does not have."""
    left_out = ("total_steps", "is_last", "metrics")
    own = {name: value for name, value in asdict(event).items() if value is not None and name not in left_out}
    return own | dict(event.metrics)


def has_logged_metrics(event: Event, every: int) -> TypeGuard[StepEnded | Evaluated]:
    """Return whether an event has metrics to log: each evaluation, each step of the interval, and the last step."""
    return isinstance(event, Evaluated) or (isinstance(event, StepEnded) and event.is_logged(every))


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
        elif has_logged_metrics(event, self._every):
            for name, value in _extract_scalars(event).items():
                self._writer.add_scalar(name, value, event.step)
        elif isinstance(event, RunEnded) and self._writer is not None:
            self._writer.close()


class Tracker:
    """Writer for W&B, SwanLab or trackio, which share these three calls."""

    def __init__(self, package: str, run_name: str, logging_steps: int) -> None:
        self._module = _import_package(package, package)
        self._name = run_name
        self._every = logging_steps
        self._has_begun = False

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._has_begun = True
            project = next(filter(None, map(os.environ.get, PROJECTS[self._module.__name__])), PROJECT)
            self._module.init(project=project, name=self._name, config=dict(event.config))
        elif has_logged_metrics(event, self._every):
            self._module.log(_extract_scalars(event), step=event.step)
        elif isinstance(event, RunEnded) and self._has_begun:
            self._module.finish()


class MlflowTracker:
    """Writer for MLflow: settings as parameters, in the experiment of MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run_name: str, logging_steps: int) -> None:
        self._module = _import_package("mlflow", "mlflow")
        self._name = run_name
        self._every = logging_steps
        self._has_begun = False

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._module.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
            self._module.start_run(run_name=self._name)
            self._has_begun = True
            parameters = [(name, str(value)[:MOST_CHARACTERS]) for name, value in event.config.items()]
            for begin in range(0, len(parameters), MOST_PARAMETERS):
                self._module.log_params(dict(parameters[begin : begin + MOST_PARAMETERS]))
        elif has_logged_metrics(event, self._every):
            self._module.log_metrics(_extract_scalars(event), step=event.step)
        elif isinstance(event, RunEnded) and self._has_begun:
            self._module.end_run("FINISHED" if event.summary.get("status") == "completed" else "FAILED")


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


def build_trackers(config: RunConfig) -> list[Observer]:
    """Build the trackers of `report_to`. Raises: ConfigError if a package is missing."""
    name, every = config.run_name or config.run_folder.name, config.logging_steps

    def build(tracker: str) -> Observer:
        if tracker == "tensorboard":
            return TensorBoard(config.run_folder, every)
        return MlflowTracker(name, every) if tracker == "mlflow" else Tracker(tracker, name, every)

    return [build(tracker) for tracker in config.report_to]
