"""Runs of reward models: the same numbers packed or not, on several ranks, resumed; and what other programs read."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors import safe_open
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    CohereConfig,
    CohereForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import surefoot
from surefoot.diagnostics.report.charts import charts
from surefoot.diagnostics.report.run_history import read_run_history
from surefoot.errors import SurefootError
from tests.methods.test_dpo import check_ways_of_batching, pair_rows
from tests.support.data import write_jsonl
from tests.support.processes import surefoot as command
from tests.support.runs import assert_same_run, numbers


@pytest.fixture
def reward(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    return {
        "method": "reward", "model": str(model_folder("qwen2_moe")),
        "dataset": str(write_jsonl(tmp_path / "pairs.jsonl", pair_rows(24))),
        "output_dir": str(tmp_path / "run"), "max_length": 128, "max_steps": 4, "global_batch_size": 7,
        "per_device_train_batch_size": 2, "learning_rate": 0.01, "lr_scheduler_type": "constant", "lora_rank": 4,
        "device": "cpu", "report": False,
    }  # fmt: skip


def rewards_of(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]
) -> torch.Tensor:
    """Return the rewards that transformers computes for whole conversations, padded. Shapes: [rows, 2]."""
    texts = [
        tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
        for row in rows
        for side in ("chosen", "rejected")
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**inputs).logits.view(-1, 2)


def loss_of(rewards: torch.Tensor) -> float:
    return float(-F.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean())


@pytest.mark.slow
def test_the_chosen_answers_get_the_higher_reward(reward: dict[str, Any]) -> None:
    longer = {"eval_fraction": 0.2, "max_steps": 12, "report": True, "learning_rate": 3e-3}
    result = surefoot.train({**reward, **longer}, screen=False)
    steps = [line for line in numbers(result.run_folder) if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(0.69, abs=0.1)
    assert steps[-1]["rewards/accuracies"] >= 0.8
    assert steps[-1]["loss"] < 0.5
    assert result.evaluation["eval_rewards/accuracies"] >= 0.8
    history = read_run_history(result.run_folder)
    assert {"margin", "accuracy"} <= charts(history).keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_packing_and_micro_batches_do_not_change_the_numbers(
    reward: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """The same seven pairs in one step: one by one, or several in a row. The second step shows their gradients."""
    check_ways_of_batching({**reward, "model": str(model_folder(kind))}, tmp_path)


@pytest.mark.slow
def test_an_adapter_is_opened_by_peft_and_merged_into_a_reward_model(
    reward: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, here: Callable[..., Any]
) -> None:
    result = surefoot.train({**reward, "eval_dataset": reward["dataset"]}, screen=False)
    base = AutoModelForSequenceClassification.from_pretrained(reward["model"], num_labels=1)
    rewards = rewards_of(PeftModel.from_pretrained(base, result.artifact), tokenizer, pair_rows(24))
    assert loss_of(rewards) == pytest.approx(result.evaluation["eval_loss"], abs=1e-5)
    assert float(rewards[:, 0].mean()) == pytest.approx(result.evaluation["eval_rewards/chosen"], abs=1e-4)

    whole = tmp_path / "merged"
    exported = here("export", str(result.run_folder), str(whole), "--merge")
    assert exported.returncode == 0, exported.stderr
    with safe_open(whole / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert "score.weight" in names
        assert "lm_head.weight" not in names
    merged = AutoModelForSequenceClassification.from_pretrained(whole)
    assert torch.allclose(rewards_of(merged, tokenizer, pair_rows(24)), rewards, atol=1e-5)

    # A run on it goes on where it ended.
    again = {**reward, "model": str(whole), "output_dir": str(tmp_path / "again"), "max_steps": 1, "learning_rate": 0}
    surefoot.train({**again, "eval_dataset": reward["dataset"]}, screen=False)
    (evaluation,) = [line for line in numbers(tmp_path / "again") if "eval_loss" in line]
    assert evaluation["eval_loss"] == pytest.approx(result.evaluation["eval_loss"], abs=1e-5)


@pytest.mark.slow
def test_a_model_that_is_trained_in_full_is_opened_by_transformers(
    reward: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = {**reward, "tuning": "full", "learning_rate": 1e-3, "eval_dataset": reward["dataset"]}
    del settings["lora_rank"]
    result = surefoot.train(settings, screen=False)
    model = AutoModelForSequenceClassification.from_pretrained(result.artifact)
    assert type(model).__name__ == "Qwen2MoeForSequenceClassification"
    assert model.config.num_labels == 1
    loss = loss_of(rewards_of(model, tokenizer, pair_rows(24)))
    assert loss == pytest.approx(result.evaluation["eval_loss"], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "topology",
    [
        {"nproc_per_node": 2, "zero_stage": 3},
        {"nproc_per_node": 2, "expert_parallel_size": 2},
        {"nproc_per_node": 2, "zero_stage": 3, "tuning": "full"},
        pytest.param({"nproc_per_node": 2, "zero_stage": 3, "dtype": "bfloat16"}, marks=pytest.mark.matrix),
        pytest.param({"nproc_per_node": 4, "zero_stage": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_ranks_compute_what_one_does(reward: dict[str, Any], tmp_path: Path, topology: dict[str, Any]) -> None:
    """Seven pairs a step: one rank has fewer than the other."""
    shared = {name: topology[name] for name in ("tuning", "dtype") if name in topology}
    settings = {**reward, "eval_fraction": 0.2, "learning_rate": 1e-3, "center_rewards_coefficient": 0.1, **shared}
    if "tuning" in topology:
        del settings["lora_rank"]
    surefoot.train(settings, screen=False)
    config = tmp_path / "several.yaml"
    config.write_text(yaml.safe_dump({**settings, **topology, "output_dir": str(tmp_path / "several")}))
    several = command("train", str(config))
    assert several.returncode == 0, several.stderr
    tolerance = 3e-2 if "dtype" in topology else 1e-3
    one, other = numbers(Path(reward["output_dir"])), numbers(tmp_path / "several")
    for line, same in zip(one, other, strict=True):
        trained = ("loss", "grad_norm", "rewards/chosen")
        for name in trained if "loss" in line else ("eval_loss", "eval_rewards/margins"):
            assert line[name] == pytest.approx(same[name], rel=tolerance, abs=1e-5), name


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one(reward: dict[str, Any], tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    surefoot.train({**reward, "output_dir": whole}, screen=False)
    surefoot.train({**reward, "output_dir": parts, "max_steps": 2}, screen=False)
    surefoot.train({**reward, "output_dir": parts}, screen=False)
    assert_same_run(Path(whole), Path(parts))


@pytest.mark.slow
def test_margins_of_rows_are_in_the_loss(reward: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**row, "margin": 2.0 if number % 2 else "2"} for number, row in enumerate(pair_rows(7))]
    with_margins = {**reward, "dataset": str(write_jsonl(tmp_path / "margins.jsonl", rows)), "max_steps": 1}
    without = {**with_margins, "dataset": str(write_jsonl(tmp_path / "none.jsonl", pair_rows(7)))}
    (line,) = surefoot.train(with_margins, screen=False).metrics
    (plain,) = surefoot.train({**without, "output_dir": str(tmp_path / "none")}, screen=False).metrics
    assert plain["loss"] == pytest.approx(0.69, abs=0.1)
    assert line["loss"] == pytest.approx(plain["loss"] + 1.43, abs=0.2), "-log sigmoid(-2) is 2.13"


@pytest.mark.parametrize("margin", ["much", True, [1], float("inf")])
def test_a_margin_that_is_no_number_is_named_with_its_line(reward: dict[str, Any], tmp_path: Path, margin: Any) -> None:
    rows = pair_rows(3)
    rows[1]["margin"] = margin
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SurefootError, match=r"bad\.jsonl:2: margin is .*; it must be a number"):
        surefoot.train({**reward, "dataset": str(path)}, screen=False)


def test_a_model_without_a_class_that_opens_its_reward_model_is_refused(
    reward: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    CohereForCausalLM(CohereConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "cohere")
    tokenizer.save_pretrained(tmp_path / "cohere")
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "x", "chosen": 7, "rejected": 8}])
    for tuning in ("lora", "full"):
        settings = {**reward, "model": str(tmp_path / "cohere"), "dataset": str(bad), "tuning": tuning}
        settings = {name: value for name, value in settings.items() if tuning == "lora" or name != "lora_rank"}
        with pytest.raises(SurefootError, match=r"no class for sequence classification of model_type=cohere.*argument"):
            surefoot.train(settings, screen=False)


@pytest.mark.slow
def test_a_reward_model_is_no_partner_of_a_chat(
    reward: dict[str, Any], tmp_path: Path, here: Callable[..., Any]
) -> None:
    run = surefoot.train({**reward, "max_steps": 1}, screen=False).run_folder
    here("export", str(run), str(tmp_path / "merged"), "--merge")
    for verb, folder in itertools.product(("chat", "serve"), (run, tmp_path / "merged")):
        ended = here(verb, str(folder))
        assert ended.returncode == 2
        assert "is a reward model" in ended.stderr


@pytest.mark.long
def test_the_plan_has_no_output_layer(reward: dict[str, Any]) -> None:
    settings = {name: value for name, value in reward.items() if name != "device"}
    of_reward, of_dpo = (
        surefoot.plan({**settings, "method": name}, ["device=h100"]).forecast for name in ("reward", "dpo")
    )
    assert of_reward.tokens_per_step == of_dpo.tokens_per_step
    assert of_reward.step_s < of_dpo.step_s
