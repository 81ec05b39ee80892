"""A run without storage holds what a run with storage holds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from surefoot.data.loader import MicroBatch
from surefoot.models.build import build_model, build_without_storage
from surefoot.models.lora import LoraSettings
from surefoot.plan.trace import ATTENTION, Trace, _Live, shaped_batch, trace_step
from surefoot.training.sft import SftObjective
from surefoot.training.step import Totals

Folders = Callable[[str], Path]
LENGTHS = [96, 160]
LORA = LoraSettings(4, 8, targets=("all",))


def traced(
    folder: Path, lora: LoraSettings | None, *, is_checkpointed: bool = False, layers: int | None = None,
    twice: bool = False,
) -> Trace:  # fmt: skip
    with FakeTensorMode():
        built = build_without_storage(
            folder, lora=lora, dtype=torch.float32, gradient_checkpointing=is_checkpointed, attention=ATTENTION,
            layers=layers,
        )  # fmt: skip
        batch = shaped_batch(LENGTHS, sum(LENGTHS) - 2)
        return trace_step(built, batch, aux_loss_coef=0.0, is_on_gpu=False, twice=twice)


def batch() -> MicroBatch:
    tokens = sum(LENGTHS)
    return MicroBatch(
        ids=torch.randint(0, 40, (1, tokens)),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        lengths=LENGTHS,
        cu_seq_lens=torch.tensor([0, LENGTHS[0], tokens], dtype=torch.int32),
        predict_at=torch.arange(tokens - 2),
        targets=torch.randint(0, 40, (tokens - 2,)),
        weights=None,
        places=(),
    )


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2_moe"])
def test_the_peak_is_that_of_real_tensors(
    kind: str, lora: LoraSettings | None, is_checkpointed: bool, model_folder: Folders
) -> None:
    folder = model_folder(kind)
    told = traced(folder, lora, is_checkpointed=is_checkpointed)
    built = build_model(
        folder, lora=lora, device=torch.device("cpu"), dtype=torch.float32, gradient_checkpointing=is_checkpointed
    )
    objective = SftObjective(built, 0.0)
    real = batch()
    totals = Totals(real.num_tokens, real.num_trained, float(real.num_trained))
    live = _Live([*built.model.parameters(), *built.model.buffers(), real.ids, real.position_ids, real.predict_at])
    for parameter in built.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(live.keep_gradient)
    with live:
        objective.loss(real, totals).total.backward()
    assert told.peak + told.gradients_at_peak == pytest.approx(live.peak + live.gradients_at_peak, rel=0.02)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_equal_layers_lie_on_a_line(lora: LoraSettings | None, model_folder: Folders, tmp_path: Path) -> None:
    config = json.loads((model_folder("mixtral") / "config.json").read_text())
    folder = tmp_path
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    whole = traced(folder, lora)
    told = traced(folder, lora, layers=2).with_layers(traced(folder, lora, layers=4), 2, 4, 7)
    assert told.peak + told.gradients_at_peak == pytest.approx(whole.peak + whole.gradients_at_peak, rel=0.02)
    assert told.flops == whole.flops


def test_products_are_counted(model_folder: Folders) -> None:
    """Six times the weights that multiply, for each token, and attention; in full training."""
    folder = model_folder("llama")
    told = traced(folder, None)
    with FakeTensorMode():
        model = build_without_storage(
            folder, lora=None, dtype=torch.float32, gradient_checkpointing=False, attention=ATTENTION
        ).model
        weights = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2)
        attention = sum(length**2 for length in LENGTHS) * model.config.hidden_size * model.config.num_hidden_layers
    least = 6 * weights * sum(LENGTHS) + 6 * attention
    assert told.flops == pytest.approx(least, rel=0.1)


def test_gradients_that_accumulate_are_there_from_the_second_forward_on(model_folder: Folders) -> None:
    folder = model_folder("llama")
    once, twice = traced(folder, None), traced(folder, None, twice=True)
    assert twice.peak + twice.gradients_at_peak > once.peak + once.gradients_at_peak
    assert once.flops == twice.flops
