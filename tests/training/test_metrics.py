"""What is shown and kept of the metrics of a run."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from surefoot.events import Evaluated, RunEnded, RunStarted
from surefoot.training.metrics import drop_lines_from
from surefoot.training.run_summary import is_evaluation
from surefoot.training.trackers import MlflowTracker, Tracker


def test_a_resume_that_evaluates_again_drops_an_evaluation_of_any_method(tmp_path: Path) -> None:
    lines = ['{"step": 3, "learning_rate": 0.1, "loss": 2.0}\n', '{"step": 3, "eval_accuracy": 0.75}\n']
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    drop_lines_from(path, 4, is_evaluation)
    assert path.read_text() == lines[0]


@pytest.mark.parametrize(
    ("package", "variable", "project"),
    [
        ("wandb", None, "surefoot"), ("wandb", "WANDB_PROJECT", "mine"), ("trackio", "TRACKIO_PROJECT", "mine"),
        ("swanlab", "SWANLAB_PROJECT", "mine"), ("swanlab", "SWANLAB_PROJ_NAME", "mine"),
    ],
)  # fmt: skip
def test_a_tracker_gets_its_project_from_the_environment(
    package: str, variable: str | None, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, object]] = []
    module = ModuleType(package)
    module.init = lambda **given: calls.append((given["name"], given["project"]))  # type: ignore[attr-defined]
    module.log = lambda values, step: calls.append((f"log {step}", values))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, module)
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT", "SWANLAB_PROJECT", "SWANLAB_PROJ_NAME"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, project)
    tracker = Tracker(package, "first", 1)
    tracker.observe(RunStarted(Path("run"), {}, 4, 1, 1, 1))
    tracker.observe(Evaluated(2, {"eval_loss": 1.5, "margin": 2.0}))
    assert calls == [("first", project), ("log 2", {"eval/loss": 1.5, "eval/margin": 2.0})]


@pytest.mark.parametrize(("status", "ended"), [("completed", "FINISHED"), ("failed", "FAILED")])
def test_mlflow_gets_settings_metrics_and_the_end(
    status: str, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    tracker = MlflowTracker("first", 1)
    config = {f"setting_{number}": "x" * number for number in range(700)}
    tracker.observe(RunStarted(Path("run"), config, 4, 1, 1, 1))
    tracker.observe(Evaluated(2, {"eval_loss": 1.5}))
    tracker.observe(RunEnded({"status": status}))
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert (run.info.run_name, run.info.status, run.data.metrics) == ("first", ended, {"eval/loss": 1.5})
    assert len(run.data.params) == 700
