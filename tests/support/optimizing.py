"""Parameters of every kind, their gradients, and the config of an optimizer."""

import zlib

import torch
from torch import Tensor, nn

from surefoot.config import DatasetItem
from surefoot.methods.sft.settings import SftConfig

STEPS = 4
SHAPES = {
    "model.layers.0.mlp.up_proj.weight": (7, 512),  # uneven over two ranks
    "model.layers.0.mlp.down_proj.weight": (256, 24),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 16, 256),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (4, 16),
    "model.layers.0.input_layernorm.weight": (12,),
    "model.embed_tokens.weight": (20, 64),
}


def config_of(optim: str) -> SftConfig:
    return SftConfig(
        model="m", dataset=[DatasetItem(path="d")], output_dir="o", learning_rate=0.01, weight_decay=0.1, optim=optim
    )


def _draw(kind: str, scale: float) -> dict[str, Tensor]:
    return {
        name: scale * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode())))
        for name, shape in SHAPES.items()
    }


def parameters_of() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value) for name, value in _draw("value", 0.3).items()}


def gradients_of(step: int) -> dict[str, Tensor]:
    return _draw(f"gradient {step}", 0.1)
