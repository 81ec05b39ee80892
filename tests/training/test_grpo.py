"""Runs of GRPO from prompts to an adapter: what they write, how they go on, and what stops them."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import surefoot
from surefoot.config import changed_fields, load_config
from surefoot.data.inspect import as_text
from surefoot.errors import ConfigError, DataError, StoppedOnFinding, SurefootError
from surefoot.events import Event, FindingMade, PhaseBegan
from surefoot.methods.grpo.reward_checks import EngineDriftDetector, NoSignalDetector
from surefoot.methods.rollout.engines.local import LocalEngine
from surefoot.methods.training_data import describe
from surefoot.training.checkpoint import list_checkpoints
from surefoot.training.trainer import train
from tests.models.architectures import tiny_model
from tests.support.data import write_jsonl
from tests.support.grpo import VOWELS, lines, reward_file
from tests.support.processes import surefoot as command
from tests.support.runs import SignalAfter, assert_same_run, train_with

pytestmark = pytest.mark.slow


def test_a_run_writes_metrics_and_completions(grpo: dict[str, Any], tmp_path: Path) -> None:
    result = surefoot.train(grpo, beta=0.1, screen=False)
    assert result.status == "completed"
    metrics, completions = lines(tmp_path / "run"), lines(tmp_path / "run", "completions.jsonl")
    wanted = (
        "reward reward_std completion_length entropy kl clip_ratio policy_version importance_ratio staleness".split()
    )
    assert all(name in line for line in metrics for name in (*wanted, "loss", "grad_norm", "tokens"))
    assert [line["policy_version"] for line in metrics] == [0, 1, 2, 3]
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["kl"] > 1e-5
    assert all(line["importance_ratio"] == pytest.approx(1, abs=1e-5) for line in metrics)
    assert len(completions) == 4 * 8
    for step, line in enumerate(metrics, 1):
        of_step = [one for one in completions if one["step"] == step]
        assert line["reward"] == pytest.approx(sum(one["reward"] for one in of_step) / 8)
        assert line["completion_length"] == pytest.approx(sum(one["tokens"] for one in of_step) / 8)
        for one in of_step:
            assert one["reward"] == float(re.search("[aeiou]", one["completion"]) is not None)
        for group in (of_step[:4], of_step[4:]):
            assert len({one["place"] for one in group}) == 1
            assert sum(one["advantage"] for one in group) == pytest.approx(0, abs=1e-6)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_rewards_get_the_columns_of_the_row(grpo: dict[str, Any], tmp_path: Path) -> None:
    body = (
        "    assert columns['prompts'][0] == [{'role': 'user', 'content': f\"Count to {columns['answer'][0]}\"}]\n"
        "    assert columns['tag'][0] == [int(columns['answer'][0])]\n"
        "    assert len(columns['completion_ids'][0]) <= 6\n"
        "    return [float(len(one[0]['content'])) for one in completions]"
    )
    surefoot.train(grpo, reward_funcs=[reward_file(tmp_path, body)], max_steps=1, screen=False)
    assert lines(tmp_path / "run")[0]["rewards_failed"] == 0


@pytest.mark.long
def test_an_interrupted_run_ends_like_a_whole_one(grpo: dict[str, Any], tmp_path: Path) -> None:
    """Also between the steps on one set of completions."""
    settings = {**grpo, "num_iterations": 3, "beta": 0.1, "max_steps": 7, "save_steps": 2, "save_total_limit": None}
    whole = {**settings, "output_dir": str(tmp_path / "whole")}
    train_with(whole, None or SignalAfter(99, signal.SIGTERM))
    for step in (2, 3, 5):
        cut = {**settings, "output_dir": str(tmp_path / f"cut-{step}")}
        assert train_with(cut, SignalAfter(step, signal.SIGTERM)).status == "interrupted"
        assert train_with(cut, SignalAfter(99, signal.SIGTERM)).status == "completed"
        assert_same_run(tmp_path / "whole", tmp_path / f"cut-{step}")
        assert lines(tmp_path / "whole", "completions.jsonl") == lines(tmp_path / f"cut-{step}", "completions.jsonl")
    assert [line["staleness"] for line in lines(tmp_path / "whole")] == [0, 1, 2, 0, 1, 2, 0]
    assert len(lines(tmp_path / "whole", "completions.jsonl")) == 3 * 8


def test_the_first_of_several_steps_on_completions_is_on_policy(grpo: dict[str, Any], tmp_path: Path) -> None:
    surefoot.train(grpo, num_iterations=2, learning_rate=0.1, screen=False)
    ratios = [line["ratio"] for line in lines(tmp_path / "run")]
    assert ratios[::2] == pytest.approx([1, 1], abs=1e-5)
    assert all(abs(ratio - 1) > 1e-3 for ratio in ratios[1::2])


@pytest.mark.long
@pytest.mark.parametrize("kept", ["rollout", "first"])
def test_routing_is_replayed_in_all_steps_and_after_a_resume(
    grpo: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, kept: str
) -> None:
    routers = {"target_modules": ["all", "router"], "learning_rate": 0.3}  # so that they change their minds
    grpo |= {"model": str(model_folder("qwen2_moe")), "num_iterations": 3, "max_steps": 6, **routers}
    grpo["routing_replay"] = kept
    surefoot.train(grpo, output_dir=str(tmp_path / "whole"), screen=False)
    whole = lines(tmp_path / "whole")
    agreement = [line["routing_agreement"] for line in whole]
    assert agreement[0] == agreement[3] == 1
    assert all(0.1 < agreement[step] < 0.99 for step in (1, 2, 4, 5))
    assert whole[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert train_with(grpo, SignalAfter(2, signal.SIGTERM)).status == "interrupted"
    assert train_with(grpo, SignalAfter(99, signal.SIGTERM)).status == "completed"
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_setting_that_an_older_version_did_not_have_is_no_change(grpo: dict[str, Any]) -> None:
    config = load_config(None, (), grpo).run
    saved = {name: value for name, value in config.model_dump(mode="json").items() if name != "max_staleness"}
    assert changed_fields(saved, config) == []
    assert changed_fields(saved, config.model_copy(update={"max_staleness": 1})) == ["max_staleness: 0 -> 1"]


def test_a_missing_reward_is_told_before_data_are_prepared(grpo: dict[str, Any]) -> None:
    bad = write_jsonl(Path(grpo["dataset"]).with_name("bad.jsonl"), [{"prompt": 7}])
    with pytest.raises(ConfigError, match="nowhere.py"):
        surefoot.train(grpo, dataset=str(bad), reward_funcs=["nowhere.py:mine"], screen=False)


def test_rows_without_an_answer_are_told_before_the_model_is_loaded(grpo: dict[str, Any], tmp_path: Path) -> None:
    settings = {**grpo, "reward_funcs": [{"func": "exact_match", "args": {"answer_column": "right"}}]}
    with pytest.raises(ConfigError, match="exact_match: .*right.*answer, prompt, tag"):
        surefoot.train(settings, screen=False)
    assert not list(tmp_path.glob("run/completions.jsonl"))


def test_a_dense_model_has_no_routing_to_replay(grpo: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="routing_replay=rollout, .*routers"):
        surefoot.train(grpo, routing_replay="rollout", screen=False)


@pytest.mark.long
def test_a_run_that_is_done_counts_epochs_by_prompts(grpo: dict[str, Any], tmp_path: Path) -> None:
    settings = {name: value for name, value in grpo.items() if name != "max_steps"}
    surefoot.train(settings, num_iterations=2, num_train_epochs=1, screen=False)
    metrics = lines(tmp_path / "run")
    assert [line["epoch"] for line in metrics] == pytest.approx([step / 12 for step in range(1, 13)])
    places = [one["place"] for one in lines(tmp_path / "run", "completions.jsonl")]
    assert len(set(places)) == 12
    assert len(places) == 12 * 4


@pytest.mark.long
def test_groups_without_spread_are_replaced_by_the_next_prompts(grpo: dict[str, Any], tmp_path: Path) -> None:
    body = (
        "    even = int(columns['answer'][0]) % 2 == 0\n"
        "    return [0.0 if even else float(index) for index in range(len(completions))]"
    )
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, body)], "dynamic_sampling": True, "max_steps": 2}
    surefoot.train(settings, screen=False)
    completions = lines(tmp_path / "run", "completions.jsonl")
    assert all(int(one["prompt"][0]["content"].split()[-1]) % 2 for one in completions)
    metrics = lines(tmp_path / "run")
    assert all(line["groups_without_spread"] == 0 for line in metrics)
    assert sum(line["groups_replaced"] for line in metrics) > 0

    body = "    return [1.0] * len(completions)"
    settings = {**settings, "reward_funcs": [reward_file(tmp_path, body)], "output_dir": str(tmp_path / "flat")}
    surefoot.train(settings, dynamic_sampling_tries=2, max_steps=1, screen=False)
    (line,) = lines(tmp_path / "flat")
    assert (line["groups_without_spread"], line["groups_replaced"], line["grad_norm"]) == (2, 4, 0)


def test_a_reward_that_fails_on_some_is_a_finding_and_masks_them(grpo: dict[str, Any], tmp_path: Path) -> None:
    body = (
        "    if any('a' in one[0]['content'] for one in completions):\n        raise ValueError('an a')\n"
        "    return [float(len(one[0]['content'])) for one in completions]"
    )
    found: list[Any] = []

    class Listens:
        def observe(self, event: Any) -> None:
            found.extend([event.finding] if isinstance(event, FindingMade) else [])

    loaded = load_config(None, (), {**grpo, "reward_funcs": [reward_file(tmp_path, body)]})
    result = train(loaded, [Listens()], screen=False)
    assert [finding.code for finding in found] == ["SF802"]
    assert "mine: ValueError: an a" in found[0].evidence["first"]
    assert found[0].code in [one["code"] for one in result.as_dict()["findings"]]
    for one in lines(tmp_path / "run", "completions.jsonl"):
        assert ("failures" in one) == ("a" in one["completion"])
        assert (one["reward"] is None) == (one["advantage"] is None) == ("a" in one["completion"])
    assert sum(line["rewards_failed"] for line in lines(tmp_path / "run")) > 0


def test_a_reward_of_one_number_for_each_group_is_a_finding_that_says_so(grpo: dict[str, Any], tmp_path: Path) -> None:
    body = "    return [1.0] if columns['tag'][0] == [3] else [0.5] * len(completions)"
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, body)], "max_steps": 6}
    result = surefoot.train(settings, screen=False)
    (finding,) = [one for one in result.as_dict()["findings"] if one["code"] == "SF802"]
    assert re.match("mine: .*1 rewards .*4 completions", finding["evidence"]["first"])
    rewards = [one["reward"] for one in lines(tmp_path / "run", "completions.jsonl")]
    assert rewards.count(None) == 4
    assert rewards.count(0.5) == 44


@pytest.mark.parametrize("why", ["cut", "length"])
def test_groups_that_teach_nothing_else_are_replaced(grpo: dict[str, Any], tmp_path: Path, why: str) -> None:
    """All their completions are left out; or they differ in the penalty for their length alone."""
    given = {"cut": "float(index)", "length": "1.0"}[why]
    body = f"    return [{given} for index in range(len(completions))]"
    cut = {"mask_truncated_completions": True, "max_completion_length": 1}
    changes = cut if why == "cut" else {"soft_overlong_length": 6}
    settings = {**grpo, **changes, "reward_funcs": [reward_file(tmp_path, body)], "dynamic_sampling": True}
    surefoot.train(settings, dynamic_sampling_tries=2, max_steps=1, screen=False)
    (line,) = lines(tmp_path / "run")
    assert line["groups_replaced"] == 4
    if why == "cut":  # nothing was trained, so nothing was measured
        assert {one["finish"] for one in lines(tmp_path / "run", "completions.jsonl")} == {"length"}
        assert line["grad_norm"] == 0
        assert not {"entropy", "ratio", "importance_ratio", "clip_ratio", "kl"} & set(line)


def test_what_fails_in_groups_that_are_replaced_is_told_too(grpo: dict[str, Any], tmp_path: Path) -> None:
    body = (
        "    if columns['tag'][0][0] % 3:\n        raise RuntimeError('the judge is down')\n"
        "    return [float(number) for number in range(len(completions))]"
    )
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, body)], "dynamic_sampling": True}
    result = surefoot.train(settings, screen=False, dynamic_sampling_tries=8, max_steps=2)
    (finding,) = result.as_dict()["findings"]
    assert finding["code"] == "SF802"
    assert "the judge is down" in finding["evidence"]["first"]
    metrics = lines(tmp_path / "run")
    assert sum(line["rewards_failed"] for line in metrics) == 4 * sum(line["groups_replaced"] for line in metrics) > 0


def test_rollouts_of_which_all_is_left_out_of_the_loss_are_a_finding(grpo: dict[str, Any], tmp_path: Path) -> None:
    settings = {**grpo, "mask_truncated_completions": True, "max_completion_length": 1, "learning_rate": 0.0}
    result = surefoot.train(settings, screen=False, max_steps=10)
    assert sum(line["truncated_share"] for line in lines(tmp_path / "run")) == 10, "the model says no end so soon"
    assert sum(line["trained_tokens"] for line in lines(tmp_path / "run")) == 0
    (finding,) = result.as_dict()["findings"]
    assert finding["code"] == "SF804"
    assert "mask_truncated_completions" in finding["cause"]
    assert finding["evidence"]["truncated_share"] == 1


def test_rewards_and_what_is_trained_are_those_of_the_settings(grpo: dict[str, Any], tmp_path: Path) -> None:
    """By hand, from what each completion is told to be."""
    size = reward_file(tmp_path, "    return [float(len(one[0]['content'])) for one in completions]")
    settings = {
        **grpo, "reward_funcs": [{"func": size, "weight": 0.5}, {**VOWELS, "weight": -2.0}], "scale_rewards": "none",
        "soft_overlong_length": 4, "mask_truncated_completions": True, "stop": ["e"], "learning_rate": 0.0,
        "max_steps": 3, "max_completion_length": 8,
    }  # fmt: skip
    surefoot.train(settings, screen=False)
    made = lines(tmp_path / "run", "completions.jsonl")
    for one in made:
        penalty = -min(max(one["tokens"] - 4, 0) / 4, 1.0)
        assert one["rewards"]["mine"] == len(one["completion"])
        assert one["reward"] == pytest.approx(0.5 * one["rewards"]["mine"] - 2 * one["rewards"]["regex"] + penalty)
        assert ("e" in one["completion"]) <= (one["finish"] != "length"), "a text that ends a completion"
    for first in range(0, len(made), 4):
        group = made[first : first + 4]
        mean = sum(one["reward"] for one in group) / 4
        assert [one["advantage"] for one in group] == pytest.approx([one["reward"] - mean for one in group])
    trained = 0
    for line, first in zip(lines(tmp_path / "run"), range(0, len(made), 8), strict=True):
        of_step = made[first : first + 8]
        ended = [one for one in of_step if one["finish"] != "length"]
        trained += sum(one["tokens"] for one in ended)
        assert line["trained_tokens"] == trained > 0
        assert line["truncated_share"] == 1 - len(ended) / 8 > 0
        assert line["reward"] == pytest.approx(sum(one["reward"] for one in of_step) / 8)


def test_top_k_of_one_draws_the_same_again(grpo: dict[str, Any], tmp_path: Path) -> None:
    surefoot.train(grpo, screen=False, top_k=1, max_steps=1)
    made = lines(tmp_path / "run", "completions.jsonl")
    assert all(len({one["completion"] for one in made[first : first + 4]}) == 1 for first in (0, 4))


def test_a_reward_has_the_deadline_of_the_settings(grpo: dict[str, Any], tmp_path: Path) -> None:
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, "    time.sleep(30)")], "reward_timeout_s": 0.2}
    with pytest.raises(StoppedOnFinding) as stopped:
        surefoot.train(settings, screen=False)
    assert re.match(r"mine: .*\b0\.2 s\b", stopped.value.finding.evidence["first"])


@pytest.mark.matrix
def test_completions_that_cannot_be_written_end_all_ranks(grpo: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run/completions.jsonl"
    body = f"    import os\n    os.makedirs({str(file)!r}, exist_ok=True)\n    return [1.0 for _ in completions]"
    grpo["reward_funcs"] = [reward_file(tmp_path, body)]  # a folder can no more be written to than a full disk
    (tmp_path / "run.json").write_text(json.dumps({**grpo, "nproc_per_node": 2}))
    done = command("train", str(tmp_path / "run.json"), timeout_s=60)
    assert done.returncode == 1, done.stderr
    assert re.search(r"completions\.jsonl: .*Is a directory", done.stderr)
    assert "SF1" not in done.stderr, "no rank waits for the other"


def test_a_step_without_any_reward_stops_the_run(grpo: dict[str, Any], tmp_path: Path) -> None:
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, "    return [None] * len(completions)")]}
    with pytest.raises(StoppedOnFinding) as stopped:
        surefoot.train(settings, screen=False)
    assert stopped.value.finding.code == "SF803"
    assert "None" in stopped.value.finding.cause
    assert stopped.value.finding.evidence["first"] == "none failed"
    assert len(lines(tmp_path / "run", "completions.jsonl")) == 8  # what was generated can be looked at


@pytest.mark.long
def test_a_run_that_goes_on_with_other_rewards_says_so(
    grpo: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = "mine.py: changed since step 1"
    body = "    return [float(len(one)) for one in completions]"
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, body)], "lr_scheduler_type": "constant"}
    surefoot.train(settings, warmup_ratio=0.0, max_steps=1)
    surefoot.train(settings, warmup_ratio=0.0, max_steps=2)
    assert changed not in capsys.readouterr().err
    reward_file(tmp_path, body.replace("float", "-float"))
    surefoot.train(settings, warmup_ratio=0.0, max_steps=3)
    assert changed.replace("step 1", "step 2") in capsys.readouterr().err


def test_a_function_without_a_weight_only_watches(grpo: dict[str, Any], tmp_path: Path) -> None:
    broken = {"func": reward_file(tmp_path, "    raise OSError('no answer')"), "weight": 0.0}
    result = surefoot.train({**grpo, "reward_funcs": [VOWELS, broken], "max_steps": 1}, screen=False)
    (finding,) = [one for one in result.as_dict()["findings"] if one["code"] == "SF802"]
    assert "no weight" in finding["cause"]
    assert all(one["reward"] == one["rewards"]["regex"] for one in lines(tmp_path / "run", "completions.jsonl"))

    judge = reward_file(tmp_path, "    return [None] * len(completions)")
    settings = {**grpo, "reward_funcs": [judge, {**VOWELS, "weight": 0.0}], "output_dir": str(tmp_path / "other")}
    with pytest.raises(StoppedOnFinding) as stopped:
        surefoot.train(settings, screen=False)
    assert (stopped.value.finding.code, stopped.value.finding.evidence["step"]) == ("SF803", 1)
    settings = {**grpo, "reward_funcs": [{**VOWELS, "weight": 0.0}]}
    with pytest.raises(ConfigError, match="reward_funcs .*weight 0"):
        surefoot.train(settings, screen=False)


def test_a_finding_keeps_what_was_learned(grpo: dict[str, Any], tmp_path: Path) -> None:
    body = (
        "    import pathlib\n"
        "    calls = pathlib.Path(__file__).with_suffix('.calls')\n"
        "    calls.write_text(calls.read_text() + 'x' if calls.exists() else 'x')\n"
        "    return [None if len(calls.read_text()) > 4 else float(i) for i in range(len(completions))]"
    )
    with pytest.raises(StoppedOnFinding):
        surefoot.train(grpo, reward_funcs=[reward_file(tmp_path, body)], screen=False)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002"]


def test_a_stop_signal_does_not_wait_for_another_rollout(grpo: dict[str, Any], tmp_path: Path) -> None:
    train_with({**grpo, "max_steps": 9}, SignalAfter(2, signal.SIGTERM))
    assert {one["step"] for one in lines(tmp_path / "run", "completions.jsonl")} == {1, 2}


def test_the_length_of_a_run_need_not_be_known(grpo: dict[str, Any], tmp_path: Path) -> None:
    settings = {name: value for name, value in grpo.items() if name != "max_steps"}
    surefoot.train(
        settings, num_iterations=2, num_train_epochs=1, dynamic_sampling=True, warmup_ratio=0.3, screen=False
    )
    rates = [line["learning_rate"] for line in lines(tmp_path / "run")]
    assert all(one > 0 for one in rates)
    assert len(set(rates)) == len(rates)


def test_a_step_that_trains_nothing_has_no_expert_load(
    grpo: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(model_folder("qwen2_moe"))
    changes = {"max_steps": 2, "mask_truncated_completions": True, "max_completion_length": 1}
    surefoot.train(grpo, model=model, **changes, screen=False)
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()
    for line in lines(tmp_path / "run"):
        assert line["trained_tokens"] == 0
        assert "expert_load" not in line


def test_completions_that_differ_in_their_length_alone_teach_that(grpo: dict[str, Any], tmp_path: Path) -> None:
    same = reward_file(tmp_path, "    return [0.5] * len(completions)")
    settings = {**grpo, "reward_funcs": [same], "soft_overlong_length": 6, "stop": ["e"]}
    result = surefoot.train(settings, max_steps=12, screen=False)
    assert any(line["grad_norm"] > 0 for line in lines(tmp_path / "run"))
    assert not result.findings


def test_rewards_that_tell_nothing_apart_are_a_finding(grpo: dict[str, Any], tmp_path: Path) -> None:
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, "    return [0.5] * len(completions)")]}
    result = surefoot.train(settings, max_steps=12, screen=False)
    assert [finding["code"] for finding in result.as_dict()["findings"]] == ["SF804"]


def test_completions_of_older_weights_are_watched_too() -> None:
    def after(difference: float, staleness: float) -> bool:
        drift = EngineDriftDetector(0.1)
        measured = {"logprob_difference": difference, "staleness": staleness}
        return [drift.add(step, measured) is not None for step in range(4)] == [False, False, True, True]

    assert after(0.2, 0.0)
    assert not after(0.2, 1.0), "one step of training may do that"
    assert after(3.0, 1.0)
    drift = EngineDriftDetector(0.1)
    fresh, stale = {"logprob_difference": 0.2}, {"logprob_difference": 0.2, "staleness": 1.0}
    found = [drift.add(step, measured) for step, measured in enumerate((fresh, stale, fresh, stale, fresh))]
    assert [one is not None for one in found] == [False, False, False, False, True], "num_iterations: 2"


def test_rewards_of_answers_that_are_cut_are_told_from_those_of_whole_ones() -> None:
    def cause(share: float) -> str:
        flat, found = NoSignalDetector(), []
        for step in range(12):
            found += flat.add(
                step, has_learning_signal=False, is_truncated=False, truncated_share=share, rewards=[0.0, 0.0]
            )
        (finding,) = found
        assert ("max_completion_length" in finding.fix) == ("max_completion_length" in finding.cause)
        assert finding.evidence["truncated_share"] == share
        return finding.cause

    assert re.search("95% .*max_completion_length$", cause(0.95))
    assert "max_completion_length" not in cause(0.5)


def test_a_completion_longer_than_the_context_is_refused_by_row(grpo: dict[str, Any]) -> None:
    message = r"12 rows .*context less max_completion_length \(256 - 250\)=6: .* Lower max_compl"
    with pytest.raises(DataError, match=message):
        surefoot.train(grpo, max_completion_length=250, screen=False)
    with pytest.raises(ConfigError, match="max_completion_length=256 leaves .* 256 tokens"):
        surefoot.train(grpo, max_completion_length=256, screen=False)
    with pytest.raises(DataError, match="max_prompt_length=8"):
        surefoot.train(grpo, max_prompt_length=8, screen=False)


def test_positions_that_were_scaled_are_counted(grpo: dict[str, Any], tmp_path: Path) -> None:
    """As Qwen's configs say it for long texts: YaRN beside the number of before."""
    shutil.copytree(grpo["model"], tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    config |= {"max_position_embeddings": 64, "rope_parameters": yarn}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    settings = {**grpo, "model": str(tmp_path / "model"), "max_completion_length": 64, "max_steps": 1}
    assert surefoot.train(settings, screen=False).status == "completed"
    with pytest.raises(DataError, match=r"\(256 - 250\)=6"):
        surefoot.train(settings, max_completion_length=250, screen=False, overwrite_output_dir=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward_funcs": []}, "method=grpo .*reward_funcs"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights .*2 .*1 reward_funcs"),
        ({"global_batch_size": 10}, "global_batch_size=10 .*num_generations=4"),
        ({"global_batch_size": None}, "3 sequences .*num_generations=4"),
        ({"beta": 0.1, "tuning": "full"}, "beta=0.1 .*tuning=full"),
        ({"beta": 0.1, "target_modules": ["attention", "router"]}, "beta=0.1 .*router .*target_modules"),
        ({"importance_floor": 0.5, "importance_correction": "none"}, "importance_floor=0.5 .*correction=none"),
        # A lag that the engine rules out is not weighed against anything else.
        (
            {"max_staleness": 1, "num_iterations": 2, "importance_correction": "none"},
            "^max_staleness=1 .*rollout_engine=local",
        ),
        ({"max_staleness": 1}, "max_staleness=1 .*rollout_engine=local"),
        ({"max_staleness": 1, "num_iterations": 2, "rollout_engine": "vllm"}, "max_staleness=1 .*num_iterations=2"),
        (
            {"max_staleness": 1, "vllm_sleep": True, "rollout_engine": "vllm", "device": "auto"},
            "vllm_sleep .*max_staleness=1",
        ),
        ({"vllm_sleep": True, "rollout_engine": "vllm"}, "vllm_sleep .*device=cpu"),
        ({"routing_replay": "rollout", "rollout_engine": "vllm"}, "routing_replay .*device=cpu"),
        (
            {"rollout_engine": "vllm", "nnodes": 2, "rdzv_endpoint": "node1:29500"},
            "rollout_engine=vllm .*nnodes=2",
        ),
        ({"vllm_devices": "0"}, "^vllm_devices: .*rollout_engine"),
        (
            {"max_staleness": 1, "importance_correction": "none", "rollout_engine": "vllm"},
            "max_staleness=1 .*importance_correction=none",
        ),
        ({"target_modules": ["all", "vision"], "rollout_engine": "vllm"}, "rollout_engine=vllm .*vision .*target"),
        ({"routing_replay": "first"}, "routing_replay=first .*num_iterations=1"),
        ({"packing": True}, "packing=True .*method: grpo"),
        ({"soft_overlong_length": 7}, "soft_overlong_length=7 .*max_completion_length=6"),
        ({"stop": ""}, "^stop .*empty"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"truncation": "right"}, "truncation=right"),
        ({"rollout_engine": "vllm", "vllm_server": "https://x:1"}, "vllm_server=https://x:1 .*http://"),
        ({"rollout_engine": "vllm", "vllm_server": "http://127.0.0.1:99999"}, "vllm_server=.*:99999 "),
        ({"rollout_engine": "vllm", "vllm_server": "http://gpu1:80/v1/"}, "Drop /v1: vllm_server: http://gpu1:80 "),
        ({"rollout_engine": "vllm", "top_p": 0.9, "temperature": 0.9}, "rollout_engine=vllm .*top_p .*temperature=0.9"),
        ({"rollout_engine": "vllm", "target_modules": ["router"]}, "rollout_engine=vllm .*router .*target"),
        ({"method": "sft"}, "reward_funcs.* method: grpo"),
        ({"reward_funcs": [{"func": "regex", "pattern": "x"}]}, r"reward_funcs\[0\].pattern: "),
        ({"reward_funcs": ["vowels"]}, "'vowels' .*exact_match"),
    ],
)
def test_settings_that_make_no_run_are_refused(grpo: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        surefoot.train({**grpo, **changes}, screen=False)


@pytest.mark.long
def test_bad_input_on_the_command_line_ends_with_status_2(
    grpo: dict[str, Any], tmp_path: Path, here: Callable[..., Any]
) -> None:
    (tmp_path / "run.yaml").write_text(
        f"model: {grpo['model']}\nmethod: grpo\ndataset: prompts.jsonl\noutput_dir: out\n"
        f"num_generations: 4\nglobal_batch_size: 8\nreward_funcs: [absent.py:mine]\nmax_completion_length: 9\n"
    )
    done = here("train", str(tmp_path / "run.yaml"))
    assert done.returncode == 2
    assert re.search(rf"reward_funcs: {tmp_path}/absent\.py .*\(run\.yaml:7\)\.", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_completions_longer_than_the_context_end_a_run_with_status_2(
    grpo: dict[str, Any], tmp_path: Path, here: Callable[..., Any]
) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(grpo))
    done = here("train", str(tmp_path / "run.yaml"), "max_completion_length=250")
    assert done.returncode == 2
    assert re.search(r"^error: 12 of 12 rows .*\(256 - 250\)=6: .*\(run\.yaml:\d+\)\.$", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run/completions.jsonl").exists()


def test_prompts_can_be_looked_at(grpo: dict[str, Any]) -> None:
    said = describe(load_config(None, (), grpo), show=1)
    text = as_text(said, color=False)
    assert "of prompts" in text
    assert text.endswith("<|im_start|>user\nCount to 0<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.matrix
def test_a_slow_reward_is_no_stall(grpo: dict[str, Any], tmp_path: Path) -> None:
    """It has a deadline of its own; the supervisor, which takes 12 s of doing nothing for a stall, leaves it alone."""
    body = "    time.sleep(16)\n    return [float(i) for i in range(len(completions))]"
    (tmp_path / "run.yaml").write_text(
        json.dumps({**grpo, "reward_funcs": [reward_file(tmp_path, body)], "global_batch_size": 4, "max_steps": 1})
    )
    done = command("train", str(tmp_path / "run.yaml"), env={"SUREFOOT_SUPERVISED": ""})
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run/findings.jsonl").exists() or not lines(tmp_path / "run", "findings.jsonl")


@pytest.mark.long
def test_a_run_that_comes_to_no_step_says_nothing_of_a_page(
    grpo: dict[str, Any], tmp_path: Path, here: Callable[..., Any]
) -> None:
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, "    return [None] * len(completions)")], "report": True}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    done = here("train", str(tmp_path / "run.yaml"))
    assert done.returncode == 3
    assert "SF803" in done.stderr
    assert "report.html" not in done.stderr


def test_a_prompt_leaves_room_for_its_completion_in_a_table_of_positions(
    grpo: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """RoBERTa's table has a place for padding, so that it has fewer positions than its config.json says."""
    tiny_model("roberta", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "roberta")
    tokenizer.save_pretrained(tmp_path / "roberta")
    changes = {"model": str(tmp_path / "roberta"), "target_modules": "all", "max_completion_length": 60}
    with pytest.raises(DataError, match=r"\(63 - 60\)=3"):
        surefoot.train({**grpo, **changes}, screen=False)


def write_vllm(folder: Path) -> str:
    """Write a command that keeps its options and variables beside it and ends with status 7; return its path."""
    script = folder / "vllm"
    script.write_text('#!/bin/sh\necho "$*" > "$0.options"\nenv > "$0.variables"\nexit 7\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("changes", "options", "variables"),
    [
        (
            {},
            ["--enable-lora", "--max-lora-rank 8", "--logprobs-mode processed_logprobs", "--generation-config vllm"],
            ["LORA_UPDATING=1"],
        ),
        ({"tuning": "full", "lora_rank": None}, [], ["DEV_MODE=1"]),
        ({"top_k": 20}, ["--logprobs-mode raw_logprobs"], []),
        (
            {"top_k": 20, "temperature": 0.9, "importance_correction": "none"},
            ["--logprobs-mode processed_logprobs"],
            [],
        ),
        ({"max_staleness": 1, "vllm_args": ["--seed", "7"]}, ["--seed 42 .*--seed 7$"], ["LORA_UPDATING=1"]),
    ],
)
def test_a_server_is_started_with_what_the_run_asks_of_it(
    grpo: dict[str, Any], tmp_path: Path, changes: dict[str, Any], options: list[str], variables: list[str]
) -> None:
    given = {**grpo, "rollout_engine": "vllm", "vllm_command": write_vllm(tmp_path), **changes}
    with pytest.raises(StoppedOnFinding, match="status 7") as stopped:
        surefoot.train({name: value for name, value in given.items() if value is not None}, screen=False)
    assert stopped.value.finding.code == "SF801"
    said, environment = (tmp_path / f"vllm.{name}" for name in ("options", "variables"))
    assert re.match(rf"serve {grpo['model']} --host 127.0.0.1 --port \d+ ", said.read_text())
    assert all(re.search(option, said.read_text().strip()) for option in options)
    assert ("--enable-lora" in said.read_text()) == (changes.get("tuning") != "full")
    assert "--enable-mixed-moe-lora-format" not in said.read_text(), "this model has no experts"
    assert all(variable in environment.read_text() for variable in variables)
    assert ("VLLM_SERVER_DEV_MODE" in environment.read_text()) == ("DEV_MODE=1" in variables)
    assert ("RESERVED_CPU=0" in environment.read_text()) == ("max_staleness" not in changes)


def test_a_server_is_told_that_adapters_have_experts(
    grpo: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(model_folder("qwen2_moe"))
    changes = {"model": model, "rollout_engine": "vllm", "vllm_command": write_vllm(tmp_path)}
    with pytest.raises(StoppedOnFinding):
        surefoot.train({**grpo, **changes}, screen=False)
    assert "--enable-mixed-moe-lora-format" in (tmp_path / "vllm.options").read_text()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["rollout", "reward"])
def test_a_stop_signal_ends_a_rollout(
    grpo: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    slow = "    time.sleep(60)" if phase == "reward" else "    return [float(len(text)) for text in completions]"
    settings = {**grpo, "reward_funcs": [reward_file(tmp_path, slow)], "reward_timeout_s": 120.0}
    if phase == "rollout":
        settings |= {"max_completion_length": 190, "max_prompt_length": 60}
        own = LocalEngine._predict
        monkeypatch.setattr(LocalEngine, "_predict", lambda *a, **inputs: time.sleep(0.2) or own(*a, **inputs))

    class ParsedRun:
        def observe(self, event: Event) -> None:
            if isinstance(event, PhaseBegan) and event.phase == phase:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    began = time.monotonic()
    result = train(load_config(None, (), settings), [ParsedRun()], screen=False)
    assert (result.status, result.steps) == ("interrupted", 0)
    assert time.monotonic() - began < 25


def test_completions_after_the_checkpoint_are_written_anew(grpo: dict[str, Any], tmp_path: Path) -> None:
    """Those of steps that are taken again do not stand there twice, and half a line of a killed run goes."""
    settings = {**grpo, "save_steps": 1, "save_total_limit": None}
    surefoot.train(settings, screen=False)
    run = tmp_path / "run"
    whole = (run / "completions.jsonl").read_text()
    for newer in list_checkpoints(run)[2:]:
        shutil.rmtree(newer)
    shutil.rmtree(run / "adapter")
    (run / "summary.json").unlink()
    (run / "completions.jsonl").write_text(whole + '{"step": 5, "comp')
    surefoot.train(settings, screen=False)
    assert (run / "completions.jsonl").read_text() == whole


def test_a_server_that_did_not_start_leaves_a_folder_that_the_next_start_takes(grpo: dict[str, Any]) -> None:
    for server in ("/bin/false", "no-such-command"):
        with pytest.raises(SurefootError, match="SF801|no-such-command"):
            surefoot.train(grpo, rollout_engine="vllm", vllm_command=server, max_steps=1)
        assert (Path(grpo["output_dir"]) / "engine").is_dir()
    assert surefoot.train(grpo, max_steps=1).status == "completed"


@pytest.mark.long
def test_a_divergence_in_the_reward_is_the_same_on_two_ranks_and_after_a_resume(
    grpo: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**grpo, "beta": 0.3, "kl_in_reward": True, "advantage_estimator": "rloo", "scale_rewards": "none",
                "num_iterations": 2, "max_steps": 5, "save_steps": 2, "save_total_limit": None}  # fmt: skip
    whole = {**settings, "output_dir": str(tmp_path / "whole")}
    surefoot.train(whole, screen=False)
    assert lines(tmp_path / "whole")[-1]["kl"] > 0
    cut = {**settings, "output_dir": str(tmp_path / "cut")}
    assert train_with(cut, SignalAfter(3, signal.SIGTERM)).status == "interrupted"
    surefoot.train(cut, screen=False)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "run.json").write_text(json.dumps({**cut, "nproc_per_node": 2, "output_dir": str(tmp_path / "two")}))
    two = command("train", str(tmp_path / "run.json"))
    assert two.returncode == 0, two.stderr
    for one, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "two"), strict=True):
        assert other["reward"] == one["reward"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3, abs=1e-5)
