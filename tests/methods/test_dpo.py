"""Runs of DPO: the same numbers packed or not, on one rank or several, and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import surefoot
from surefoot.diagnostics.report.charts import charts
from surefoot.diagnostics.report.run_history import read_run_history
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import surefoot as command
from tests.support.runs import assert_same_run, numbers


def pair_rows(count: int) -> list[dict[str, Any]]:
    """Pairs of answers of varied lengths to the same question; the shorter one is chosen."""
    rows = []
    for number, row in enumerate(counting_rows(count)):
        question, answer = row["messages"]
        words = answer["content"].split()
        rows.append({
            "prompt": [question],
            "chosen": [{**answer, "content": " ".join(words[: 1 + number % 3])}],
            "rejected": [{**answer, "content": " ".join([*words, *reversed(words)])}],
        })  # fmt: skip
    return rows


def check_ways_of_batching(settings: dict[str, Any], tmp_path: Path) -> None:
    """Assert that seven pairs give the same losses and gradients one by one, together and packed."""
    data = str(write_jsonl(tmp_path / "seven.jsonl", pair_rows(7)))
    base = {**settings, "dataset": data, "max_steps": 2}
    ways: dict[str, dict[str, Any]] = {
        "one": {"per_device_train_batch_size": 1},
        "seven": {"per_device_train_batch_size": 7},
        "packed": {"packing": True, "max_length": 512, "global_batch_size": 1},
    }
    found = {}
    for name, changes in ways.items():
        surefoot.train({**base, **changes, "output_dir": str(tmp_path / name)}, screen=False)
        found[name] = [(line["loss"], line["grad_norm"]) for line in numbers(tmp_path / name) if "loss" in line]
    assert found["one"] == [pytest.approx(pair, rel=1e-4) for pair in found["seven"]]
    assert found["one"] == [pytest.approx(pair, rel=1e-4) for pair in found["packed"]]


@pytest.fixture
def dpo(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    return {
        "method": "dpo", "model": str(model_folder("qwen2_moe")),
        "dataset": str(write_jsonl(tmp_path / "pairs.jsonl", pair_rows(24))),
        "output_dir": str(tmp_path / "run"), "max_length": 128, "max_steps": 4, "global_batch_size": 7,
        "per_device_train_batch_size": 2, "learning_rate": 0.01, "lr_scheduler_type": "constant", "lora_rank": 4,
        "device": "cpu", "report": False,
    }  # fmt: skip


@pytest.mark.slow
def test_the_first_loss_is_ln_2_and_the_chosen_answers_become_likelier(dpo: dict[str, Any]) -> None:
    result = surefoot.train({**dpo, "eval_fraction": 0.2, "max_steps": 12, "report": True}, screen=False)
    steps = [line for line in numbers(result.run_folder) if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-4), "the model is its own reference at first"
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["rewards/margins"] > 0.1
    assert steps[-1]["rewards/accuracies"] >= 0.8
    assert steps[-1]["loss"] < 0.65
    assert result.evaluation["eval_loss"] < 0.69
    assert result.evaluation["eval_rewards/margins"] > 0
    history = read_run_history(result.run_folder)
    assert [row["margin"] for row in history.preferences if row["of"] == "training"][-1] > 0.1
    assert [row["step"] for row in history.preferences if row["of"] == "held out"] == [12]
    assert {"margin", "accuracy"} <= charts(history).keys()
    assert [[kind for _, kind in sample["parts"]] for sample in history.samples] == [
        [False, True, False, True, False]
    ] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_moe"])
def test_packing_and_micro_batches_do_not_change_the_numbers(
    dpo: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """The same seven pairs in one step: one by one, or several in a row. The second step shows their gradients."""
    check_ways_of_batching({**dpo, "model": str(model_folder(kind))}, tmp_path)


@pytest.mark.long
def test_the_loss_is_that_of_the_definition(dpo: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """With transformers and PEFT: an adapter, and the model without it as the reference."""
    result = surefoot.train({**dpo, "eval_dataset": dpo["dataset"], "beta": 0.3}, screen=False)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(dpo["model"]), result.artifact)

    def logprob(row: dict[str, Any], side: str) -> torch.Tensor:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        ids, end = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, "<|im_end|>"))
        ids = [*ids, *tokenizer(row[side][0]["content"], add_special_tokens=False)["input_ids"], *end]
        begin = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        losses = F.cross_entropy(model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="none")
        return -losses[begin - 1 :].sum()

    deltas = []
    with torch.no_grad():
        for row in pair_rows(24):
            policy = [logprob(row, side) for side in ("chosen", "rejected")]
            with model.disable_adapter():
                reference = [logprob(row, side) for side in ("chosen", "rejected")]
            deltas.append(policy[0] - reference[0] - policy[1] + reference[1])
    expected = -F.logsigmoid(0.3 * torch.stack(deltas)).mean()
    assert result.evaluation["eval_loss"] == pytest.approx(float(expected), abs=2e-5)
    assert result.evaluation["eval_rewards/margins"] == pytest.approx(0.3 * float(torch.stack(deltas).mean()), abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "topology",
    [
        {"nproc_per_node": 2, "zero_stage": 3},
        {"nproc_per_node": 2, "expert_parallel_size": 2},
        pytest.param({"nproc_per_node": 4, "zero_stage": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_ranks_compute_what_one_does(dpo: dict[str, Any], tmp_path: Path, topology: dict[str, Any]) -> None:
    """Seven pairs a step: one rank has fewer than the other."""
    settings = {**dpo, "eval_fraction": 0.2, "sft_weight": 0.5}
    surefoot.train(settings, screen=False)
    config = tmp_path / "several.yaml"
    config.write_text(yaml.safe_dump({**settings, **topology, "output_dir": str(tmp_path / "several")}))
    several = command("train", str(config))
    assert several.returncode == 0, several.stderr
    one, other = numbers(Path(dpo["output_dir"])), numbers(tmp_path / "several")
    for line, same in zip(one, other, strict=True):
        trained = ("loss", "grad_norm", "rewards/margins", "logps/rejected")
        for name in trained if "loss" in line else ("eval_loss", "eval_rewards/margins"):
            assert line[name] == pytest.approx(same[name], rel=1e-3, abs=1e-5), name


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one(dpo: dict[str, Any], tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    surefoot.train({**dpo, "output_dir": whole}, screen=False)
    surefoot.train({**dpo, "output_dir": parts, "max_steps": 2}, screen=False)
    surefoot.train({**dpo, "output_dir": parts}, screen=False)
    assert_same_run(Path(whole), Path(parts))


@pytest.mark.slow
def test_dropout_of_the_model_does_not_part_it_from_its_reference(
    dpo: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=128, attn_pdrop=0.3)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    settings = {**dpo, "model": str(tmp_path / "gpt2"), "max_steps": 1}
    (line,) = surefoot.train(settings, screen=False).metrics
    assert line["loss"] == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.slow
def test_the_reward_of_simpo_is_the_mean_log_probability(dpo: dict[str, Any]) -> None:
    (line,) = surefoot.train({**dpo, "loss_type": "simpo", "beta": 2.0, "max_steps": 1}, screen=False).metrics
    assert abs(line["rewards/margins"]) < 3, "answers of 2 and 20 tokens have log-probabilities far apart"
    assert line["rewards/chosen"] == pytest.approx(2 * line["logps/chosen"])


@pytest.mark.long
def test_the_plan_counts_both_answers_and_the_reference(dpo: dict[str, Any]) -> None:
    settings = {name: value for name, value in dpo.items() if name != "device"}
    changes: tuple[dict[str, Any], ...] = ({}, {"loss_type": "simpo"}, {"method": "sft"})
    with_reference, without, of_sft = (
        surefoot.plan({**settings, **each}, ["device=h100"]).forecast for each in changes
    )
    assert with_reference.tokens_per_step == 2 * of_sft.tokens_per_step
    assert with_reference.step_s > 1.2 * without.step_s > 1.2 * of_sft.step_s
