"""The correction biases of routers are the same on any topology, and go on from a checkpoint of another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import settings_of

RATE = 0.01
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2-zero3": (2, {"zero_stage": 3}),
    "2-ep2": (2, {"expert_parallel_size": 2}),
}


@pytest.mark.matrix
def test_biases_do_not_depend_on_the_ranks(
    tmp_path: Path, parallel_model: Any, parallel_data: Path, run_on: Any
) -> None:
    def job(name: str, **changes: Any) -> dict[str, Any]:
        changes = {"tuning": "full", "router_bias_update_rate": RATE, "max_steps": 4, "save_steps": 3, **changes}
        return settings_of(parallel_model("deepseek_v3"), parallel_data, tmp_path / name, **changes)

    third = str(tmp_path / "1/checkpoints/step-00000003")
    run_on(1, [job("1", **LAYOUTS["1"][1])])
    resumed = job("resumed", zero_stage=3, resume_from_checkpoint=third)
    run_on(2, [*(job(name, **changes) for name, (ranks, changes) in LAYOUTS.items() if ranks == 2), resumed])

    found = {}
    for name in (*LAYOUTS, "resumed"):
        tensors: dict[str, torch.Tensor] = {}
        for path in (tmp_path / name / "model").glob("*.safetensors"):
            tensors |= load_file(path)
        found[name] = {key: value for key, value in tensors.items() if key.endswith("e_score_correction_bias")}
    assert len(found["1"]) == 2
    assert max(bias.abs().max() for bias in found["1"].values()) > 0
    for name, biases in found.items():
        assert all(torch.equal(biases[key], value) for key, value in found["1"].items()), name
