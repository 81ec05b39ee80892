"""Embeddings that are the output layer, too, are one parameter on every topology."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.models import SIZES
from tests.support.runs import settings_of

pytestmark = pytest.mark.matrix
ODD_VOCABULARY = 511
"""It does not divide by the ranks: the shards of the embeddings are padded, and FSDP pads a copy."""


def test_a_tied_model_trains_in_full_on_sharding_ranks_as_on_one(
    tmp_path: Path,
    parallel_data: Path,
    tokenizer: PreTrainedTokenizerFast,
    run_on: Callable[[int, Sequence[dict[str, Any]]], None],
) -> None:
    base = tmp_path / "tied"
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": ODD_VOCABULARY, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(base)
    tokenizer.save_pretrained(base)

    def job(name: str, **changes: Any) -> dict[str, Any]:
        return settings_of(base, parallel_data, tmp_path / name, tuning="full", max_steps=3, **changes)

    run_on(1, [job("1")])
    run_on(2, [job("2", zero_stage=2), job("3", zero_stage=3)])
    losses, weights = {}, {}
    for name in ("1", "2", "3"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
        weights[name] = load_file(tmp_path / name / "model" / "model.safetensors")
    for name in ("2", "3"):
        assert losses[name] == pytest.approx(losses["1"], rel=1e-6)
        assert weights[name].keys() == weights["1"].keys()
        for key, value in weights["1"].items():
            torch.testing.assert_close(weights[name][key], value, rtol=0, atol=5e-6, msg=key)
