"""Runs of KTO and of ORPO: they learn, and are the same packed or not, on one rank or several, and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import surefoot
from surefoot.diagnostics.report.charts import charts
from surefoot.diagnostics.report.run_history import read_run_history
from tests.methods.test_dpo import pair_rows
from tests.support.data import write_jsonl
from tests.support.kills import kill_and_resume
from tests.support.processes import surefoot as command
from tests.support.runs import assert_same_run, numbers

COMPARED = ("loss", "grad_norm", "rewards/chosen", "logps/chosen", "rewards/rejected", "kl")


def labelled_rows(count: int) -> list[dict[str, Any]]:
    """Answers of varied lengths; the short ones are desired."""
    return [
        {"messages": [*row["prompt"], *row["rejected" if number % 3 else "chosen"]], "label": not number % 3}
        for number, row in enumerate(pair_rows(count))
    ]


def desired_rows(count: int) -> list[dict[str, Any]]:
    """Answers that all are desired: the divergence soon is above zero."""
    return [{**row, "label": True} for row in labelled_rows(count)]


@pytest.fixture
def kto(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    return {
        "method": "kto", "model": str(model_folder("qwen2_moe")),
        "dataset": str(write_jsonl(tmp_path / "labelled.jsonl", labelled_rows(24))),
        "output_dir": str(tmp_path / "run"), "max_length": 128, "max_steps": 4, "global_batch_size": 7,
        "per_device_train_batch_size": 2, "learning_rate": 0.01, "lr_scheduler_type": "constant", "lora_rank": 4,
        "device": "cpu", "report": False,
    }  # fmt: skip


def trained(folder: Path) -> list[list[float]]:
    return [[line[name] for name in COMPARED if name in line] for line in numbers(folder) if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", pytest.param("apo_zero_unpaired", marks=pytest.mark.long)])
def test_the_first_loss_is_a_half_and_desired_answers_become_likelier(kto: dict[str, Any], loss: str) -> None:
    changes = {"eval_fraction": 0.2, "max_steps": 12, "report": True, "loss_type": loss}
    result = surefoot.train({**kto, **changes}, screen=False)
    steps = [line for line in numbers(result.run_folder) if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-4), "the model is its own reference at first"
    assert steps[-1]["loss"] < 0.49
    assert steps[-1]["rewards/margins"] > 0.1
    assert ("kl" in steps[-1]) == (loss == "kto")
    assert result.evaluation["eval_loss"] < 0.5
    assert result.evaluation["eval_rewards/margins"] > 0
    history = read_run_history(result.run_folder)
    assert "margin" in charts(history)
    assert [[kind for _, kind in sample["parts"]] for sample in history.samples] == [[False, True, False]] * 4


@pytest.mark.long
def test_packing_and_micro_batches_do_not_change_the_numbers(kto: dict[str, Any], tmp_path: Path) -> None:
    data = str(write_jsonl(tmp_path / "seven.jsonl", desired_rows(7)))
    ways: dict[str, dict[str, Any]] = {
        "one": {"per_device_train_batch_size": 1},
        "seven": {"per_device_train_batch_size": 7},
        "packed": {"packing": True, "max_length": 512, "global_batch_size": 1},
    }
    for name, changes in ways.items():
        settings = {**kto, "dataset": data, "max_steps": 3, **changes, "output_dir": str(tmp_path / name)}
        surefoot.train(settings, screen=False)
    one = trained(tmp_path / "one")
    assert one[-1][-1] > 0, "there must be a divergence for this test to mean anything"
    for name in ("seven", "packed"):
        for line, same in zip(one, trained(tmp_path / name), strict=True):
            assert line == pytest.approx(same, rel=1e-3, abs=1e-5), name


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
@pytest.mark.parametrize(
    "changes", [{}, {"tuning": "full", "lora_rank": 8, "learning_rate": 1e-3}], ids=["lora", "full"]
)
def test_ranks_compute_what_one_does(
    kto: dict[str, Any], tmp_path: Path, topology: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Seven answers a step: one rank has fewer than the other."""
    data = str(write_jsonl(tmp_path / "desired.jsonl", desired_rows(24)))
    settings = {**kto, "dataset": data, "eval_fraction": 0.2, **changes}
    surefoot.train(settings, screen=False)
    config = tmp_path / "several.yaml"
    config.write_text(yaml.safe_dump({**settings, **topology, "output_dir": str(tmp_path / "several")}))
    several = command("train", str(config))
    assert several.returncode == 0, several.stderr
    for line, same in zip(trained(tmp_path / "run"), trained(tmp_path / "several"), strict=True):
        assert line == pytest.approx(same, rel=1e-3, abs=1e-5)
    assert any(line[-1] > 0 for line in trained(tmp_path / "run"))
    last, other = (numbers(tmp_path / name)[-1] for name in ("run", "several"))
    assert last["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-4)
    assert last["eval_kl"] == pytest.approx(other["eval_kl"], rel=1e-3, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("method", ["kto", "orpo"])
def test_a_resumed_run_is_the_uninterrupted_one(kto: dict[str, Any], tmp_path: Path, method: str) -> None:
    if method == "orpo":
        data = str(write_jsonl(tmp_path / "pairs.jsonl", pair_rows(24)))
        kto = {**kto, "method": "orpo", "dataset": data, "train_on": "all"}
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    surefoot.train({**kto, "output_dir": whole}, screen=False)
    surefoot.train({**kto, "output_dir": parts, "max_steps": 2}, screen=False)
    surefoot.train({**kto, "output_dir": parts}, screen=False)
    assert_same_run(Path(whole), Path(parts))


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "kto", "orpo"])
def test_kill_9_at_five_moments_then_resume_bit_for_bit(kto: dict[str, Any], tmp_path: Path, method: str) -> None:
    """A save at every step, so that many of the kills fall into one; the reference is stored before the first."""
    changes: dict[str, Any] = {"method": method, "max_steps": 40, "save_steps": 1, "save_total_limit": 2}
    if method != "kto":
        changes["dataset"] = str(write_jsonl(tmp_path / "pairs.jsonl", pair_rows(24)))
    if method != "orpo":
        changes["precompute_ref_log_probs"] = True
    settings = {**kto, **changes, "global_batch_size": 4}
    whole = surefoot.train({**settings, "output_dir": str(tmp_path / "whole")}, screen=False)
    resumed = kill_and_resume(settings, tmp_path, (1, 8, 15, 22, 30))
    assert_same_run(whole.run_folder, resumed)


@pytest.mark.slow
def test_orpo_makes_chosen_answers_likelier_without_a_reference(kto: dict[str, Any], tmp_path: Path) -> None:
    data = str(write_jsonl(tmp_path / "pairs.jsonl", pair_rows(24)))
    changes = {"method": "orpo", "dataset": data, "tuning": "full", "lora_rank": 8, "max_steps": 12}
    result = surefoot.train({**kto, **changes, "learning_rate": 3e-3, "eval_fraction": 0.2}, screen=False)
    steps = [line for line in numbers(result.run_folder) if "loss" in line]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["logps/chosen"] > steps[0]["logps/chosen"]
    assert steps[0]["rewards/chosen"] == pytest.approx(0.1 * steps[0]["logps/chosen"])
    assert "eval_rewards/accuracies" in result.evaluation


@pytest.mark.long
def test_the_plan_counts_the_answers(kto: dict[str, Any]) -> None:
    settings = {name: value for name, value in kto.items() if name != "device"}
    planned = {
        method: surefoot.plan({**settings, "method": method}, ["device=h100"]).forecast for method in ("kto", "sft")
    }
    assert planned["kto"].tokens_per_step == planned["sft"].tokens_per_step
    assert planned["kto"].step_s > 1.1 * planned["sft"].step_s
