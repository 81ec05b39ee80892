"""Models of tests whose frozen weights are stored in a format."""

import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models.build import BuiltModel
from surefoot.models.dtensor_blocks import gather_full, load_full
from surefoot.models.lora import LoraSettings, is_lora
from surefoot.models.quantization.base import WeightFormat
from surefoot.models.quantization.formats import Int8Format, Nf4Format
from tests.support.batches import LENGTHS, batch

FORMATS: dict[str, WeightFormat] = {
    "int8": Int8Format(),
    "nf4": Nf4Format(8, is_double=False),
    "nf4, double": Nf4Format(8, is_double=True),
}
"""Formats by name, with blocks that divide the widths of the tests' models."""


def stored_in(name: str) -> LoraSettings:
    """Return LoRA beside weights in a format. Experts are adapted where there are some; dense MLPs are only stored."""
    return LoraSettings(rank=4, alpha=8, targets=("attention", "experts"), weight_format=FORMATS[name])


def is_stored(name: str) -> bool:
    """Whether a weight of the tests' models, by its name in the files, is one that is stored."""
    is_weight = ".layers." in name and "norm" not in name and not name.endswith("bias")
    return is_weight and not name.endswith((".gate.weight", "shared_expert_gate.weight"))


def write_as_read(folder: Path, target: Path, weight_format: WeightFormat) -> Path:
    """Write a copy of a model whose weights are what is read back of the stored ones: what it computes with."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            values = load_file(path)
            read = {
                name: weight_format.read(weight_format.store(value), value.dtype) if is_stored(name) else value
                for name, value in values.items()
            }
            save_file(read, target / path.name, metadata={"format": "pt"})
        else:
            (target / path.name).write_bytes(path.read_bytes())
    return target


def set_lora(built: BuiltModel) -> None:
    """Give LoRA other values than its first ones, with which it changes nothing. Equal on any topology."""
    for name, parameter in built.model.named_parameters():
        if is_lora(name):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            load_full(parameter, 0.1 * torch.randn(parameter.shape, generator=generator))


def loss_and_gradients(built: BuiltModel) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a fixed batch and the full gradient of each LoRA parameter. Collective."""
    torch.manual_seed(1)
    tokens = sum(LENGTHS)
    set_lora(built)
    loss = SftObjective(built, 0.0).loss(batch(), BatchTotals(tokens, tokens - 2, float(tokens - 2))).total
    loss.backward()
    gradients = {name: p.grad for name, p in built.model.named_parameters() if is_lora(name) and p.grad is not None}
    return loss.item(), {name: gather_full(gradient) for name, gradient in gradients.items()}
