"""Micro-batches by the code that runs on a GPU, in bfloat16: their losses, and that the host never waits for a device.

Without a GPU, by stand-ins for its kernels with their checks (`tests/support/cuda_branches.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.config import load_config
from surefoot.config.schema import Checkpointing
from surefoot.data.collate import MicroBatch, collate
from surefoot.data.dataset import Sample
from surefoot.methods.base import BatchTotals, Objective
from surefoot.methods.grpo.batch import Trajectory, collate_completions
from surefoot.methods.grpo.loss import GrpoObjective
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.sft.method import SftObjective
from surefoot.methods.token_loss import TokenLoss
from surefoot.models.build import BuiltModel, build_model
from surefoot.models.isolation import isolate_samples
from surefoot.models.lora import LoraSettings
from surefoot.training.step import counts_of
from tests.models.architectures import tiny_model
from tests.support.cuda_branches import AMPERE, HOPPER, count_waits, cuda_branches

CPU = torch.device("cpu")
Make = Callable[[str], Path]


def sft_batch(vocabulary: int = 200) -> MicroBatch:
    """Samples with weights of two sizes; many tokens, because in bfloat16 some choose other experts."""
    draw = np.random.default_rng(0)
    samples = [
        Sample(draw.integers(5, vocabulary, n).astype(np.int32), np.full(n, weight, np.float32), place="x")
        for n, weight in ((13, 1.0), (140, 0.5), (24, 1.0), (90, 1.0), (200, 1.0))
    ]
    return collate(samples)


def grpo_batch(*, share_prompts: bool) -> MicroBatch:
    trajectories = [
        Trajectory([5, 6, 7, 8], [9, 10, 11 + n, 12], [-6.0] * 4, 0.5 - n, 0.25, f"x:{n}") for n in range(4)
    ]
    return collate_completions(trajectories, share_prompts=share_prompts)


def grpo_config(folder: Path, **settings: Any) -> GrpoConfig:
    base = {"method": "grpo", "model": str(folder), "dataset": "x", "output_dir": "y", "reward_funcs": ["format"]}
    config = load_config(None, (), {**base, "device": "cpu", "num_generations": 4, **settings}).run
    assert isinstance(config, GrpoConfig)
    return config


def build(folder: Path, dtype: torch.dtype, *, is_full: bool, checkpoints: Checkpointing) -> BuiltModel:
    lora = None if is_full else LoraSettings(rank=4, alpha=8.0, targets=("all",))
    return build_model(folder, lora=lora, device=CPU, dtype=dtype, gradient_checkpointing=checkpoints)


def run(
    built: BuiltModel, make: Callable[[], Objective], batches: Sequence[MicroBatch]
) -> tuple[float, dict[str, int]]:
    """Return the loss of a step, and the waits of its forwards and backwards by name."""
    context = torch.autocast("cpu", torch.bfloat16) if built.autocast else nullcontext()
    with context:
        objective = make()
    totals = BatchTotals(*counts_of(batches))
    losses = []
    with count_waits() as waits:
        with context:
            batches = objective.begin_step(batches)
        for batch in batches:
            with context:
                terms = objective.loss(batch, totals)
            terms.total.backward()
            losses.append(terms.total.detach())
    return float(torch.stack(losses).sum()), {name: count for name, count in waits.items() if count}


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(
    ("kind", "checkpoints", "capability"),
    [
        ("llama", False, HOPPER),
        ("llama", True, HOPPER),
        ("qwen2_moe", False, HOPPER),
        ("qwen2_moe", True, HOPPER),
        ("qwen2_moe", "selective", HOPPER),
        ("qwen2_moe", "selective", AMPERE),
    ],
)
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_step_on_a_gpu_has_the_loss_of_float32_and_never_waits(
    model_folder: Make,
    capability: tuple[int, int],
    method: str,
    kind: str,
    is_full: bool,
    checkpoints: Checkpointing,
) -> None:
    folder, is_moe = model_folder(kind), kind == "qwen2_moe"

    def make(built: BuiltModel) -> Objective:
        if method == "sft":
            return SftObjective(built, 0.01 if is_moe else 0.0)
        replay = {"routing_replay": "first"} if is_moe else {}
        beta = {} if is_full else {"beta": 0.1}  # the reference is the model without its adapter
        return GrpoObjective(built, grpo_config(folder, num_iterations=2, **beta, **replay))

    batches = [sft_batch()] if method == "sft" else [grpo_batch(share_prompts=share) for share in (False, True)]
    exact = build(folder, torch.float32, is_full=is_full, checkpoints=checkpoints)
    wanted, _ = run(exact, lambda: make(exact), batches)
    batches = [sft_batch()] if method == "sft" else [grpo_batch(share_prompts=share) for share in (False, True)]
    with cuda_branches(capability):
        built = build(folder, torch.bfloat16, is_full=is_full, checkpoints=checkpoints)
        loss, waits = run(built, lambda: make(built), batches)
    assert waits == {}
    assert loss == pytest.approx(wanted, rel=1e-3, abs=1e-3)


def test_what_waits_for_a_device_is_counted() -> None:
    values = torch.arange(4)
    with count_waits() as waits:
        values[values > 1].sum().item()
        values.repeat_interleave(values).tolist()
        values.repeat_interleave(values, output_size=6)
    assert waits == {"index": 1, "_local_scalar_dense": 1, "repeat_interleave": 1, "tolist": 1}


def test_weighted_losses_of_a_model_that_caps_its_logits_are_summed_in_float32() -> None:
    model = tiny_model("gemma2")
    isolate_samples(model, torch.float32, is_sharded=False)
    loss, batch = TokenLoss(model), sft_batch(model.config.vocab_size)
    assert loss.holds_all_logits
    with torch.no_grad():
        wanted = loss(batch)
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(batch)
    torch.testing.assert_close(found, wanted, rtol=3e-4, atol=0)
