"""Modules that are trained in full beside LoRA train on any topology as on one process, also in bfloat16."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.runs import settings_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "2-zero0": {"zero_stage": 0},
    "2-zero2": {"zero_stage": 2},
    "2-zero3": {"zero_stage": 3},
    "2-ep2": {"zero_stage": 3, "expert_parallel_size": 2},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("two weights", ["embed_tokens", "lm_head", "norm"]),
        ("one weight", ["embed_tokens", "norm"]),
        ("one weight, stored twice", ["lm_head", "norm"]),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_they_train_on_two_ranks_as_on_one(
    tmp_path: Path,
    parallel_model: Callable[[str], Path],
    parallel_data: Path,
    run_on: Callable[[int, Sequence[dict[str, Any]]], None],
    dtype: str,
    tolerance: float,
    kind: str,
    modules: list[str],
) -> None:
    base, head = parallel_model("qwen2_moe"), "lm_head"
    if kind != "two weights":
        base = shutil.copytree(base, tmp_path / "base")
        config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
        (base / "config.json").write_text(json.dumps(config))
        stored = load_file(base / "model.safetensors")
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
        if kind == "one weight":
            del stored["lm_head.weight"]
        save_file(stored, base / "model.safetensors", {"format": "pt"})
        head = "model.embed_tokens"

    def job(name: str, **changes: Any) -> dict[str, Any]:
        whole = {"modules_to_save": modules, "target_modules": ["all", "router"]}
        return settings_of(base, parallel_data, tmp_path / name, dtype=dtype, max_steps=3, **whole, **changes)

    run_on(1, [job("1")])
    run_on(2, [job(name, **changes) for name, changes in LAYOUTS.items()])
    losses, weights = {}, {}
    for name in ("1", *LAYOUTS):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
        weights[name] = load_file(tmp_path / name / "adapter/adapter_model.safetensors")
    before = load_file(base / "model.safetensors")
    whole = {name for name in weights["1"] if "lora_" not in name}
    assert {"embed_tokens", "lm_head", "norm", "gate"} <= {name.split(".")[-2] for name in whole}
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(losses["1"], rel=tolerance)
        assert weights[name].keys() == weights["1"].keys()
        for key in weights["1"] if dtype == "float32" else ():
            torch.testing.assert_close(weights[name][key], weights["1"][key], rtol=0, atol=1e-4, msg=key)
        for key in whole:
            start = before[key.removeprefix("base_model.model.").replace("lm_head", head)].float()
            moved, wanted = (weights[one][key].float() - start for one in (name, "1"))
            assert wanted.abs().max() > 0, key
            similarity = torch.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0)
            assert similarity > 0.9, f"{name} {key}: rows of every rank move it"
