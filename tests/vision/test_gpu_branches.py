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
from surefoot.models.build import build_model
from surefoot.models.lora import LoraSettings
from surefoot.training.step import counts_of
from tests.support.cuda_branches import cuda_branches
from tests.support.vision import opened


def loss_of(folder: Path, dtype: torch.dtype, batch: MicroBatch, is_full: bool, checkpoints: bool) -> float:
    """Return the loss of a micro-batch, after its backward."""
    lora = None if is_full else LoraSettings(rank=4, alpha=8.0, targets=("all",))
    built = build_model(
        folder, lora=lora, device=torch.device("cpu"), dtype=dtype, gradient_checkpointing=checkpoints,
        freeze_vision=not is_full,
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
