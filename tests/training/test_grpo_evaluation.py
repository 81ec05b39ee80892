"""Rewards on held-out prompts, while a run of GRPO goes on."""

import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.diagnostics.monitor.event_log import read_history
from surefoot.diagnostics.report.run_history import read_run_history
from surefoot.errors import ConfigError, DataError, StoppedOnFinding
from surefoot.events import Event, PhaseBegan
from tests.support.data import write_jsonl
from tests.support.grpo import EagerEngine, broken, lines, prompt_rows, reward_file
from tests.support.runs import SignalAfter, assert_same_run, train_with

pytestmark = pytest.mark.slow


@pytest.fixture
def evaluated(grpo: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A run that goes through five held-out prompts after every second step: more than a step has."""
    held_out = write_jsonl(tmp_path / "held-out.jsonl", prompt_rows(40)[35:])
    return {**grpo, "eval_dataset": str(held_out), "eval_steps": 2}


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run) if "eval_reward" in line]


def steps(run: Path) -> list[dict[str, Any]]:
    times = ("tokens_per_second", "step_time_s", "peak_memory_bytes")
    return [{name: line[name] for name in line if name not in times} for line in lines(run) if "loss" in line]


def test_held_out_prompts_are_answered_and_judged(evaluated: dict[str, Any], tmp_path: Path) -> None:
    surefoot.train(evaluated, screen=False)
    metrics, completions = evaluations(tmp_path / "run"), lines(tmp_path / "run", "eval_completions.jsonl")
    assert [line["step"] for line in metrics] == [2, 4]
    for line in metrics:
        of_step = [one for one in completions if one["step"] == line["step"]]
        assert len({one["place"] for one in of_step}) == 5
        assert len(of_step) == 5 * 4
        assert all(one["place"].startswith("held-out.jsonl:") and one["advantage"] is None for one in of_step)
        assert {one["policy_version"] for one in of_step} == {line["step"]}
        assert line["eval_reward"] == pytest.approx(sum(one["reward"] for one in of_step) / 20)
        assert line["eval_completion_length"] == pytest.approx(sum(one["tokens"] for one in of_step) / 20)
        assert line["eval_reward/regex"] == line["eval_reward"]
        assert line["eval_rewards_failed"] == 0
    assert [set(row) for row in read_run_history(tmp_path / "run").evaluations] == [{"step", "eval_reward"}] * 2


@pytest.mark.long
def test_an_evaluation_changes_nothing_and_draws_the_same_each_time(evaluated: dict[str, Any], tmp_path: Path) -> None:
    still = {**evaluated, "learning_rate": 1e-12, "output_dir": str(tmp_path / "still")}
    surefoot.train(still, screen=False)
    made = lines(tmp_path / "still", "eval_completions.jsonl")
    assert [one["completion"] for one in made[:20]] == [one["completion"] for one in made[20:]]
    surefoot.train(evaluated, screen=False)
    without = {name: value for name, value in evaluated.items() if not name.startswith("eval_")}
    surefoot.train({**without, "output_dir": str(tmp_path / "without")}, screen=False)
    assert steps(tmp_path / "run") == steps(tmp_path / "without")
    assert lines(tmp_path / "run", "completions.jsonl") == lines(tmp_path / "without", "completions.jsonl")


@pytest.mark.long
def test_an_interrupted_run_has_the_evaluations_of_a_whole_one(evaluated: dict[str, Any], tmp_path: Path) -> None:
    evaluated |= {"save_steps": 1, "save_total_limit": None, "num_iterations": 2}
    train_with({**evaluated, "output_dir": str(tmp_path / "whole")}, SignalAfter(99, signal.SIGTERM))
    assert train_with(evaluated, SignalAfter(3, signal.SIGTERM)).status == "interrupted"
    assert train_with(evaluated, SignalAfter(99, signal.SIGTERM)).status == "completed"
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    for name in ("completions.jsonl", "eval_completions.jsonl"):
        assert lines(tmp_path / "whole", name) == lines(tmp_path / "run", name)


def test_rows_are_held_out_of_the_dataset(grpo: dict[str, Any], tmp_path: Path) -> None:
    surefoot.train(grpo, eval_fraction=0.3, max_steps=8, screen=False)
    trained = {one["place"] for one in lines(tmp_path / "run", "completions.jsonl")}
    held_out = {one["place"] for one in lines(tmp_path / "run", "eval_completions.jsonl")}
    assert len(evaluations(tmp_path / "run")) == 1, "at the end"
    assert held_out
    assert not held_out & trained
    assert len(held_out | trained) == 12


@pytest.mark.parametrize("judged", ["some", "none"])
def test_rewards_that_fail_on_held_out_prompts_are_a_finding(
    evaluated: dict[str, Any], tmp_path: Path, judged: str
) -> None:
    condition = "== 35" if judged == "some" else ">= 35"
    body = (
        f"    if columns['tag'][0][0] {condition}:\n        raise ValueError('no judge')\n"
        "    return [float(len(one[0]['content'])) for one in completions]"
    )
    evaluated |= {"reward_funcs": [reward_file(tmp_path, body)], "max_steps": 2}
    result = surefoot.train(evaluated, screen=False)
    (found,) = result.findings
    assert found.code == "SF802"
    assert "ValueError: no judge" in str(found.evidence)
    (line,) = [line for line in lines(tmp_path / "run") if "eval_rewards_failed" in line]
    assert line["eval_rewards_failed"] == (4 if judged == "some" else 20)
    assert ("eval_reward" in line) == (judged == "some")
    (entry,) = [one for one in read_history(tmp_path / "run").entries if one.kind == "evaluated"]
    told = entry.values["measured"]
    assert told == pytest.approx(line["eval_reward"]) if judged == "some" else math.isnan(told)
    assert all("eval_rewards_failed" in line or line["rewards_failed"] == 0 for line in lines(tmp_path / "run"))


def test_held_out_rows_without_an_answer_are_told_before_the_model_is_loaded(
    evaluated: dict[str, Any], tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "held-out.jsonl", [{"prompt": "Count to 7", "tag": [7]}])
    with pytest.raises(ConfigError, match="exact_match: .*held-out .*solution, answer"):
        surefoot.train(evaluated, reward_funcs=["exact_match"], screen=False)


def test_a_held_out_prompt_that_is_too_long_is_named_by_row(evaluated: dict[str, Any], tmp_path: Path) -> None:
    long = {"prompt": "Count to " + "7" * 2000, "answer": "7"}
    write_jsonl(tmp_path / "held-out.jsonl", [*prompt_rows(1), long])
    with pytest.raises(DataError, match=r"held-out.jsonl:2.*tokens"):
        surefoot.train(evaluated, max_length=4096, screen=False)


def test_completions_that_were_asked_for_ahead_are_not_lost_to_an_evaluation(
    evaluated: dict[str, Any], ahead: Callable[..., Any], tmp_path: Path
) -> None:
    held_out = {name: value for name, value in evaluated.items() if name.startswith("eval_")}
    surefoot.train(ahead(**held_out), screen=False)
    surefoot.train(ahead(output_dir=str(tmp_path / "without")), screen=False)
    assert len(evaluations(tmp_path / "run")) == 2
    assert steps(tmp_path / "run") == steps(tmp_path / "without")
    assert lines(tmp_path / "run", "completions.jsonl") == lines(tmp_path / "without", "completions.jsonl")
    versions = [one["policy_version"] for one in lines(tmp_path / "run", "eval_completions.jsonl")]
    assert versions == [2] * 20 + [4] * 20, "of the newest weights, although others are under way"


class BusyEngine(EagerEngine):
    """One that would lose completions which are under way when it gets other weights, as a server may."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.under_way: set[int] = set()

    def submit(self, requests: Any, sampling: Any, policy_version: int) -> Any:
        wait, number = super().submit(requests, sampling, policy_version), len(self.versions)
        self.under_way.add(number)

        def made(seconds: float) -> Any:
            self.under_way.discard(number)
            return wait(seconds)

        return made

    def publish(self, policy_version: int) -> None:
        assert not self.under_way, policy_version


def test_what_is_under_way_is_waited_for_before_an_evaluation(
    evaluated: dict[str, Any], ahead: Callable[..., Any], tmp_path: Path
) -> None:
    held_out = {name: value for name, value in evaluated.items() if name.startswith("eval_")}
    surefoot.train(ahead(BusyEngine, **held_out), screen=False)
    assert len(evaluations(tmp_path / "run")) == 2


class DiesInEvaluation(EagerEngine):
    """One that answers steps alone."""

    def submit(self, requests: Any, sampling: Any, policy_version: int) -> Any:
        if any(request.seed[1] >= 1 << 32 for request in requests):
            raise broken()
        return super().submit(requests, sampling, policy_version)


def test_an_engine_that_dies_in_an_evaluation_loses_no_step(
    evaluated: dict[str, Any], ahead: Callable[..., Any], tmp_path: Path
) -> None:
    held_out = {name: value for name, value in evaluated.items() if name.startswith("eval_")}
    with pytest.raises(StoppedOnFinding, match="a completion is missing"):
        surefoot.train(ahead(DiesInEvaluation, save_steps=0, **held_out), screen=False)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]


class SignalInEvaluation:
    """Sends SIGTERM when the first evaluation begins."""

    def observe(self, event: Event) -> None:
        if isinstance(event, PhaseBegan) and event.phase == "evaluate":
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_does_not_wait_for_an_evaluation(evaluated: dict[str, Any], tmp_path: Path) -> None:
    assert train_with(evaluated, SignalInEvaluation()).status == "interrupted"
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]
    assert not (tmp_path / "run/eval_completions.jsonl").exists()
    assert train_with(evaluated, SignalAfter(99, signal.SIGTERM)).status == "completed"
    assert [line["step"] for line in evaluations(tmp_path / "run")] == [2, 4], "the first is made up for"


def test_the_last_evaluation_is_made_up_for(evaluated: dict[str, Any], tmp_path: Path) -> None:
    evaluated = {**evaluated, "eval_steps": None, "save_steps": 0}
    assert train_with(evaluated, SignalInEvaluation()).status == "interrupted"
    assert not evaluations(tmp_path / "run")
    assert train_with(evaluated, SignalAfter(99, signal.SIGTERM)).status == "completed"
    assert [line["step"] for line in evaluations(tmp_path / "run")] == [4]
    assert len(steps(tmp_path / "run")) == 4, "no step was trained again"


def test_completions_of_an_evaluation_after_the_checkpoint_are_made_again_once(
    evaluated: dict[str, Any], tmp_path: Path
) -> None:
    """What a run that was killed wrote after its last checkpoint goes when another goes on from that."""
    evaluated |= {"save_steps": 1, "save_total_limit": None}
    train_with(evaluated, SignalAfter(99, signal.SIGTERM))
    for name in ("step-00000003", "step-00000004"):  # as a kill before they were written would leave it
        shutil.rmtree(tmp_path / "run/checkpoints" / name)
    shutil.rmtree(tmp_path / "run/adapter")
    (tmp_path / "run/summary.json").unlink()
    before = lines(tmp_path / "run", "eval_completions.jsonl")
    assert train_with(evaluated, SignalAfter(99, signal.SIGTERM)).status == "completed"
    assert lines(tmp_path / "run", "eval_completions.jsonl") == before
    assert len(evaluations(tmp_path / "run")) == 2


def test_a_function_that_fails_in_evaluations_and_in_training_is_told_of_both(
    evaluated: dict[str, Any], tmp_path: Path
) -> None:
    body = (
        "    tag = columns['tag'][0][0]\n    if tag >= 35 or (tag >= 4 and tag % 2):\n"
        "        raise ValueError('no judge')\n    return [float(len(one[0]['content'])) for one in completions]"
    )
    evaluated |= {"reward_funcs": [reward_file(tmp_path, body)], "eval_steps": 1, "shuffle": False}
    findings = surefoot.train(evaluated, screen=False).findings
    assert [(finding.code, finding.evidence["step"]) for finding in findings] == [("SF802", 1), ("SF802", 3)]
    assert re.search("20 of 20 .*evaluation .*step 1; .*its means", findings[0].cause)
    assert re.search("4 of 8 .*step 3; .*the loss", findings[1].cause)


@pytest.mark.long
def test_an_evaluation_that_was_made_up_for_stands_there_once(evaluated: dict[str, Any], tmp_path: Path) -> None:
    """Its checkpoint says for good that it is due: where a longer run goes on from that, it is made once more."""
    evaluated = {**evaluated, "eval_steps": None, "save_steps": 2, "lr_scheduler_type": "constant"}
    assert train_with(evaluated, SignalInEvaluation()).status == "interrupted"
    assert train_with(evaluated, SignalAfter(99, signal.SIGTERM)).status == "completed"
    once = lines(tmp_path / "run", "eval_completions.jsonl")
    longer = {**evaluated, "max_steps": 6}
    assert train_with(longer, SignalAfter(99, signal.SIGTERM)).status == "completed"
    assert [line["step"] for line in evaluations(tmp_path / "run")] == [4, 6]
    assert [one["step"] for one in lines(tmp_path / "run", "eval_completions.jsonl")] == [4] * len(once) + [6] * len(
        once
    )
    assert [line["step"] for line in steps(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
