"""What is shown and kept of the metrics of a run."""

import io
from pathlib import Path

from surefoot.events import Evaluated
from surefoot.training.metrics import Screen, drop_lines_from, is_evaluation


def test_an_evaluation_of_any_method_is_shown() -> None:
    shown = io.StringIO()
    for metrics in ({"eval_accuracy": 0.75, "eval_margin": 2.0}, {"eval_tokens": 9.0, "eval_reward": 0.5}, {}):
        Screen(1, shown).observe(Evaluated(3, metrics))
    assert shown.getvalue().splitlines() == [
        "step 3: eval_accuracy 0.7500", "step 3: eval_reward 0.5000", "step 3: evaluated"
    ]  # fmt: skip


def test_a_resume_that_evaluates_again_drops_an_evaluation_of_any_method(tmp_path: Path) -> None:
    lines = ['{"step": 3, "learning_rate": 0.1, "loss": 2.0}\n', '{"step": 3, "eval_accuracy": 0.75}\n']
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    drop_lines_from(path, 4, is_evaluation)
    assert path.read_text() == lines[0]
