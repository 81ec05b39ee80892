"""Completions that are made while others are trained on: of which weights they are, and that none is lost."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import StoppedOnFinding
from surefoot.events import CompletionsMade
from surefoot.methods.rollout.engines.local import LocalEngine
from surefoot.methods.rollout.types import Completion, Wait
from surefoot.training.checkpoint import list_checkpoints
from tests.support.grpo import EagerEngine, broken, lines
from tests.support.runs import SignalAfter, assert_same_run, train_with

pytestmark = pytest.mark.slow


class LateEngine(EagerEngine):
    """One whose completions are never there soon."""

    def submit(self, *arguments: Any) -> Wait:
        made, waited_s = self.generate(*arguments), 0.0

        def wait(seconds: float) -> list[Completion] | None:
            nonlocal waited_s
            waited_s += seconds
            return made if waited_s > 10 else None

        return wait


class BrokenEngine(EagerEngine):
    """One that has died by the time of the third rollout."""

    def submit(self, requests: Any, sampling: Any, policy_version: int) -> Wait:
        made = super().submit(requests, sampling, policy_version)

        def fail(_seconds: float) -> list[Completion]:
            raise broken()

        return fail if policy_version == 1 else made


class UnreachableEngine(EagerEngine):
    """One that has died when it is asked for that."""

    def publish(self, policy_version: int) -> None:
        if policy_version == 1:
            raise broken()


def test_the_next_completions_are_of_the_weights_before(ahead: Callable[..., Any], tmp_path: Path) -> None:
    EagerEngine.versions.clear()
    surefoot.train(ahead(), screen=False)
    assert EagerEngine.versions == [0, 0, 1, 2]  # and none for a step that will not come
    metrics = lines(tmp_path / "run")
    assert [line["policy_version"] for line in metrics] == [0, 0, 1, 2]
    assert [line["staleness"] for line in metrics] == [0, 1, 1, 1]
    assert [line["importance_ratio"] for line in metrics[:1]] == pytest.approx([1], abs=1e-5)
    assert all(abs(line["importance_ratio"] - 1) > 1e-4 for line in metrics[1:])
    assert metrics[0]["logprob_difference"] < 1e-5
    assert all(line["logprob_difference"] > 1e-3 for line in metrics[1:])
    samples = lines(tmp_path / "run", "completions.jsonl")
    assert [one["policy_version"] for one in samples[::8]] == [0, 0, 1, 2]


def test_ends_that_are_no_tokens_of_the_model_are_left_out(ahead: Callable[..., Any], tmp_path: Path) -> None:
    settings = ahead(max_steps=1)
    shutil.copytree(settings["model"], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [5, 151645]}')
    EagerEngine.ends.clear()
    surefoot.train(settings, model=str(tmp_path / "model"), screen=False)
    (ends,) = EagerEngine.ends
    assert 5 in ends
    assert 151645 not in ends  # a server would refuse the request


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "max_staleness": 2},
        pytest.param({}, marks=pytest.mark.matrix),
        pytest.param({"dynamic_sampling": True}, marks=pytest.mark.matrix),
    ],
)
def test_completions_that_were_made_ahead_are_kept(
    ahead: Callable[..., Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = ahead(max_steps=6, save_steps=2, save_total_limit=None, **changes)
    train_with({**settings, "output_dir": str(tmp_path / "whole")}, SignalAfter(99, signal.SIGTERM))
    assert max(line["staleness"] for line in lines(tmp_path / "whole")) == (3 if "num_iterations" in changes else 1)
    for step in (1, 2, 3):
        cut = {**settings, "output_dir": str(tmp_path / f"cut-{step}")}
        assert train_with(cut, SignalAfter(step, signal.SIGTERM)).status == "interrupted"
        assert train_with(cut, SignalAfter(99, signal.SIGTERM)).status == "completed"
        assert_same_run(tmp_path / "whole", tmp_path / f"cut-{step}")
        assert lines(tmp_path / "whole", "completions.jsonl") == lines(tmp_path / f"cut-{step}", "completions.jsonl")


class SignalInRollout:
    """Sends SIGTERM when the completions of a step are made, before it is trained on them."""

    def __init__(self, step: int) -> None:
        self.step = step

    def observe(self, event: Any) -> None:
        if isinstance(event, CompletionsMade) and event.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.long
def test_a_signal_in_a_rollout_loses_nothing_that_was_made(ahead: Callable[..., Any], tmp_path: Path) -> None:
    settings = ahead(save_steps=0)
    train_with({**settings, "output_dir": str(tmp_path / "whole")}, SignalAfter(99, signal.SIGTERM))
    assert train_with(settings, SignalInRollout(3)).status == "interrupted"
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002"]
    assert train_with(settings, SignalAfter(99, signal.SIGTERM)).status == "completed"
    whole = lines(tmp_path / "whole")
    for name in ("staleness", "reward", "loss"):
        assert [line[name] for line in lines(tmp_path / "run")] == [line[name] for line in whole]


@pytest.mark.parametrize("save_steps", [0, 2])
def test_a_run_that_is_told_to_stop_does_not_wait_for_completions(
    ahead: Callable[..., Any], tmp_path: Path, save_steps: int
) -> None:
    settings = ahead(LateEngine, save_steps=save_steps)
    assert train_with(settings, SignalAfter(2, signal.SIGTERM)).status == "interrupted"
    (saved,) = list_checkpoints(tmp_path / "run")
    assert json.loads((saved / "state.json").read_text())["pending"] == []
    assert train_with(settings, SignalAfter(99, signal.SIGTERM)).status == "completed"
    assert [line["staleness"] for line in lines(tmp_path / "run")] == [0, 1, 0, 1]  # asked for anew


@pytest.mark.parametrize("engine", [BrokenEngine, UnreachableEngine])
def test_an_engine_that_dies_ahead_loses_no_step(
    ahead: Callable[..., Any], tmp_path: Path, engine: type[LocalEngine]
) -> None:
    with pytest.raises(StoppedOnFinding, match="a completion is missing"):
        surefoot.train(ahead(engine), screen=False)
    assert len(lines(tmp_path / "run")) == 2
    (saved,) = list_checkpoints(tmp_path / "run")
    assert saved.name == "step-00000002"
    surefoot.train(ahead(EagerEngine), screen=False)
    assert [line["policy_version"] for line in lines(tmp_path / "run")] == [0, 0, 2, 2]
