"""Layers and modules that full fine-tuning leaves as they are."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import surefoot
from surefoot.config import load_config
from surefoot.errors import ConfigError, ModelError
from tests.support.runs import SignalAfter, train_with

pytestmark = pytest.mark.slow


@pytest.fixture
def full(settings: dict[str, Any]) -> dict[str, Any]:
    del settings["lora_rank"]
    return {**settings, "tuning": "full", "learning_rate": 1e-2, "max_steps": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_frozen_stays_as_it_is_and_all_else_is_trained(full: dict[str, Any], dtype: str) -> None:
    run = surefoot.train(
        {**full, "dtype": dtype, "freeze_layers": [0], "freeze_modules": "embed_tokens,model.norm"}, screen=False
    ).run_folder
    before, after = (load_file(folder / "model.safetensors") for folder in (Path(full["model"]), run / "model"))
    frozen = {name for name in before if name.startswith(("model.layers.0.", "model.embed_tokens.", "model.norm."))}
    assert len(frozen) > 10
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen


def test_a_run_with_frozen_parts_resumes_from_its_checkpoint(full: dict[str, Any], tmp_path: Path) -> None:
    full |= {"freeze_layers": [1], "max_steps": 4}
    whole = surefoot.train({**full, "output_dir": str(tmp_path / "whole")}, screen=False).run_folder
    train_with(full, SignalAfter(2, signal.SIGTERM))
    resumed = surefoot.train(full, screen=False).run_folder
    weights = [load_file(run / "model" / "model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_plan_counts_what_is_frozen(full: dict[str, Any]) -> None:
    whole, part = (surefoot.plan({**full, **changes}).forecast for changes in ({}, {"freeze_layers": [0]}))
    assert part.sizes.whole.trained + part.sizes.whole.frozen == whole.sizes.whole.trained
    assert part.phases["update"].host["optimizer"] < whole.phases["update"].host["optimizer"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"freeze_layers": [2]}, r"freeze_layers: Qwen2MoeForCausalLM has 2 layers, from 0 to 1, and no layer 2 \(arg"),
        ({"freeze_modules": ["nope"]}, r"freeze_modules: nope is no module .* that has parameters \(argument\)"),
        ({"freeze_modules": ["model", "lm_head"]}, "freeze_modules: nothing of Qwen2MoeForCausalLM is left to train"),
    ],
)
def test_parts_that_cannot_be_frozen_are_refused(full: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        surefoot.train({**full, **changes}, screen=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"freeze_layers": [0]}, "freeze_layers is of full fine-tuning"),
        ({"tuning": "full", "freeze_modules": "lm_head", "router_bias_update_rate": 0.1},
         "router_bias_update_rate=0.1 changes .* also in what freeze_modules leaves unchanged"),
    ],
)  # fmt: skip
def test_settings_that_contradict_it_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, (), {"model": "m", "dataset": "d", "output_dir": "o", **changes})
