"""Weights that two modules share are counted once."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import surefoot


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_are_those_of_transformers(is_tied: bool, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50_000, "max_position_embeddings": 512,
        "tie_word_embeddings": is_tied,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    settings = {"model": str(tmp_path), "dataset": "rows.jsonl", "output_dir": str(tmp_path / "run"), "tuning": "full"}
    plan = surefoot.plan(settings, max_steps=1, device="h100")
    assert plan.as_dict()["parameters"] == sum(parameter.numel() for parameter in model.parameters())
