"""Modules that are trained in full beside LoRA train on any topology as on one process, also in bfloat16."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import settings_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "2-zero0": {"zero_stage": 0},
    "2-zero2": {"zero_stage": 2},
    "2-zero3": {"zero_stage": 3},
    "2-ep2": {"zero_stage": 3, "expert_parallel_size": 2},
}


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_they_train_on_two_ranks_as_on_one(
    tmp_path: Path,
    parallel_model: Callable[[str], Path],
    parallel_data: Path,
    run_on: Callable[[int, Sequence[dict[str, Any]]], None],
    dtype: str,
    tolerance: float,
) -> None:
    def job(name: str, **changes: Any) -> dict[str, Any]:
        whole = {"modules_to_save": ["embed_tokens", "lm_head", "norm"], "target_modules": ["all", "router"]}
        return settings_of(
            parallel_model("qwen2_moe"), parallel_data, tmp_path / name, dtype=dtype, max_steps=3, **whole, **changes
        )

    run_on(1, [job("1")])
    run_on(2, [job(name, **changes) for name, changes in LAYOUTS.items()])
    losses, weights = {}, {}
    for name in ("1", *LAYOUTS):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
        weights[name] = load_file(tmp_path / name / "adapter/adapter_model.safetensors")
    whole = {name for name in weights["1"] if "lora_" not in name}
    assert {"embed_tokens", "lm_head", "norm", "gate"} <= {name.split(".")[-2] for name in whole}
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(losses["1"], rel=tolerance)
        assert weights[name].keys() == weights["1"].keys()
        for key in weights["1"] if dtype == "float32" else ():
            torch.testing.assert_close(weights[name][key], weights["1"][key], rtol=0, atol=1e-4, msg=key)
