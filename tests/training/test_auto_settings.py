"""Values that `auto` takes are printed, written, and kept by a run that is resumed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot import train
from surefoot.config import load_config
from surefoot.errors import ModelError
from surefoot.models.model_size import Weights
from surefoot.training import auto_settings
from surefoot.training.learning_rate import RECIPES, WITHOUT_RECIPE, choose_learning_rate

STEPS: dict[str, Any] = {"learning_rate": "auto", "save_steps": 1, "lr_scheduler_type": "constant", "max_steps": 1}


def written(result: Any) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((result.run_folder / "run.yaml").read_text(encoding="utf-8"))
    return config


def test_choices_are_written_and_printed(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config = written(train(settings, **STEPS))
    assert config["learning_rate"] == WITHOUT_RECIPE
    assert config["gradient_checkpointing"] is False
    assert f"learning_rate: {WITHOUT_RECIPE:g}" in capsys.readouterr().err


@pytest.mark.long
def test_sequences_at_a_time_change_no_number(settings: dict[str, Any], tmp_path: Path) -> None:
    results = [
        train(
            settings,
            **STEPS,
            global_batch_size=8,
            per_device_train_batch_size=rows,
            output_dir=str(tmp_path / str(rows)),
        )
        for rows in ("auto", 2)
    ]
    assert written(results[0])["per_device_train_batch_size"] == 8
    assert results[0].train_loss == pytest.approx(results[1].train_loss, rel=1e-6)


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_a_run_that_is_resumed_keeps_its_choices(settings: dict[str, Any], checkpointing: bool | str) -> None:
    """The memory that is free may be another, and the numbers would change with the sequences at a time."""
    given = {"learning_rate": 3e-3, "per_device_train_batch_size": 2, "gradient_checkpointing": checkpointing}
    train(settings, **{**STEPS, **given}, global_batch_size=8)
    auto = dict.fromkeys(given, "auto")
    again = train(settings, **{**STEPS, **auto, "max_steps": 2}, global_batch_size=8)
    assert again.steps == 2
    assert {name: written(again)[name] for name in given} == given


@pytest.mark.matrix
def test_under_torchrun_the_ranks_that_there_are_are_planned_for(settings: dict[str, Any], tmp_path: Path) -> None:
    """The config need not name them, and expert parallelism needs two."""
    values = {**settings, "zero_stage": 3, "expert_parallel_size": 2, "health": False, "max_steps": 1}
    values |= {"per_device_train_batch_size": "auto", "global_batch_size": 8}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "surefoot", "train"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "run.yaml")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    config = yaml.safe_load((Path(settings["output_dir"]) / "run.yaml").read_text(encoding="utf-8"))
    assert config["per_device_train_batch_size"] == 4, "a step has four for each rank"


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_the_rate_is_that_of_recipes(tuning: str, method: str, settings: dict[str, Any], grpo: dict[str, Any]) -> None:
    given = grpo if method == "grpo" else settings
    given = {name: value for name, value in given.items() if not name.startswith(("lora_", "target_"))}
    run = load_config(None, [], {**given, "tuning": tuning}).run
    rates = [choose_learning_rate(run, round(size)) for size in (1e8, 8e9, 72e9)]
    assert rates == sorted(rates, reverse=True)
    expected = {("lora", "sft"): 2e-4, ("full", "sft"): 1e-5, ("lora", "grpo"): 2e-5, ("full", "grpo"): 1e-6}
    assert rates[1] == pytest.approx(expected[tuning, method])
    for recipe in RECIPES[tuning]:
        assert recipe.lowest <= recipe.usual <= recipe.highest


def test_the_rate_depends_on_the_size_of_the_model(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(auto_settings, "weights_of", lambda _: Weights(72_000_000_000, 144_000_000_000))
    assert written(train(settings, **STEPS))["learning_rate"] == 1e-4

    def truncated(_: Path) -> Weights:
        raise ValueError("model.safetensors is incomplete")

    monkeypatch.setattr(auto_settings, "weights_of", truncated)
    with pytest.raises(ModelError, match="incomplete"):
        train(settings, **STEPS, output_dir=str(tmp_path / "truncated"))
