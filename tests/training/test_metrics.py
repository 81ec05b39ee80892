"""What is shown and kept of the metrics of a run."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from surefoot.events import Evaluated, RunStarted
from surefoot.training.metrics import Tracker, drop_lines_from
from surefoot.training.run_summary import is_evaluation


def test_a_resume_that_evaluates_again_drops_an_evaluation_of_any_method(tmp_path: Path) -> None:
    lines = ['{"step": 3, "learning_rate": 0.1, "loss": 2.0}\n', '{"step": 3, "eval_accuracy": 0.75}\n']
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    drop_lines_from(path, 4, is_evaluation)
    assert path.read_text() == lines[0]


@pytest.mark.parametrize(("variable", "project"), [(None, "surefoot"), ("mine", "mine")])
def test_a_tracker_gets_its_project_from_the_environment(
    variable: str | None, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, object]] = []
    package = ModuleType("wandb")
    package.init = lambda **given: calls.append(("init", given["project"]))  # type: ignore[attr-defined]
    package.log = lambda values, step: calls.append((f"log {step}", values))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    if variable is not None:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    else:
        monkeypatch.delenv("WANDB_PROJECT", raising=False)
    tracker = Tracker("wandb", Path("run"), 1)
    tracker.observe(RunStarted(Path("run"), {}, 4, 1, 1, 1))
    tracker.observe(Evaluated(2, {"eval_loss": 1.5, "margin": 2.0}))
    assert calls == [("init", project), ("log 2", {"eval/loss": 1.5, "eval/margin": 2.0})]
