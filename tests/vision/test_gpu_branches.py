"""Images by the code that runs on a GPU, in bfloat16, without one: see `tests/support/cuda_branches.py`."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.data.collate import MicroBatch, collate
from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models.build import build_model, trainable_parameters
from surefoot.models.frozen_parts import FrozenParts
from surefoot.models.image_waits import GRID
from surefoot.models.lora import LoraSettings
from surefoot.training.step import counts_of
from tests.support.cuda_branches import cuda_branches, two_devices
from tests.support.vision import opened
from tests.support.vision_families import FAMILIES, write_family

GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v", "glm4v_moe")
"""Kinds of models whose processors return the grid of each image."""


def loss_of(folder: Path, dtype: torch.dtype, batch: MicroBatch, is_full: bool, checkpoints: bool) -> float:
    """Return the loss of a micro-batch, after its backward."""
    lora = None if is_full else LoraSettings(rank=4, alpha=8.0, targets=("all",))
    built = build_model(
        folder, lora=lora, device=torch.device("cpu"), dtype=dtype, gradient_checkpointing=checkpoints,
        frozen=FrozenParts(vision=not is_full),
    )  # fmt: skip
    context = torch.autocast("cpu", torch.bfloat16) if built.autocast else nullcontext()
    with context:
        objective = SftObjective(built, 0.0)
    with context:
        loss = objective.loss(batch, BatchTotals(*counts_of([batch]))).total
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_images_on_a_gpu_have_the_loss_of_float32(
    vision: Callable[..., dict[str, Any]], kind: str, is_full: bool, checkpoints: bool
) -> None:
    settings = vision(kind)
    _, samples, reader = opened(settings)
    batch, folder = collate(samples, reader), Path(settings["model"])
    wanted = loss_of(folder, torch.float32, batch, is_full, checkpoints)
    with cuda_branches():
        loss = loss_of(folder, torch.bfloat16, batch, is_full, checkpoints)
    assert loss == pytest.approx(wanted, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("kind", [*GRIDS, "gemma3", "internvl"])
def test_the_host_never_waits_for_images(vision: Callable[..., dict[str, Any]], kind: str, tmp_path: Path) -> None:
    folder = write_family(kind, tmp_path / kind) if kind in FAMILIES else Path(vision(kind)["model"])
    _, samples, reader = opened({**vision(), "model": str(folder), "max_length": 512})
    batch = collate(samples, reader)
    assert batch.vision is not None
    totals = BatchTotals(*counts_of([batch]))
    with cuda_branches():
        lora = LoraSettings(rank=4, alpha=8.0, targets=("all",))
        model = build_model(folder, lora=lora, device=torch.device("cpu"), dtype=torch.bfloat16)
        objective = SftObjective(model, 0.0)
        objective.loss(batch, totals).total.backward()
        wanted = {name: weight.grad.clone() for name, weight in trainable_parameters(model.model).items()}
        model.model.zero_grad()
        grid = batch.vision.tensors.get(GRID)
        moved = [tensor for name, tensor in batch.vision.tensors.items() if name != GRID]
        moved += [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
        moved += [*model.model.parameters(), *model.model.buffers()]
        with two_devices(moved, [grid] if grid is not None else []) as (waits, mixed):
            objective.loss(batch, totals).total.backward()
    assert waits == {}
    assert mixed == {}
    for name, weight in trainable_parameters(model.model).items():
        assert torch.equal(weight.grad, wanted[name])


def test_two_devices_are_told_apart() -> None:
    here, there = torch.arange(3), torch.arange(3)
    with two_devices([there], [here]) as (waits, mixed):
        assert (here + 1).tolist() == [1, 2, 3]
        assert waits == {}
        (there * 2).tolist()
        (there[there > 0] + 1).sum().item()
        there + here
    assert waits == {"tolist": 1, "index": 1, "_local_scalar_dense": 1}
    assert mixed == {"add": 1}
