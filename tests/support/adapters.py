"""Adapters that are trained for a few steps."""

from pathlib import Path

import torch

from surefoot.models.adapter import write_adapter
from surefoot.models.build import BuiltModel, build_model, trainable_parameters
from surefoot.models.lora import LoraSettings, adaptable_names

TARGETS = {
    "mixtral": ("attention", "experts", "router"),
    "qwen2_moe": ("all",),
    "qwen3_moe": ("experts.down_proj", "q_proj"),
}


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.randint(3, 500, (2, 12))).logits
    return result


def save(built: BuiltModel, settings: LoraSettings, folder: Path, base: Path) -> Path:
    folder.mkdir()
    parameters = {name: p.data for name, p in trainable_parameters(built.model).items()}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    write_adapter(folder, shapes, parameters.items(), settings, str(base), adaptable_names(built.model))
    return folder


def trained_model(
    folder: Path, kind: str, rslora: bool = False, targets: tuple[str, ...] | None = None
) -> tuple[BuiltModel, LoraSettings]:
    """A built model whose trainable parameters are far from their initial values."""
    settings = LoraSettings(rank=4, alpha=8, rslora=rslora, targets=targets or TARGETS.get(kind, ("all",)))
    built = build_model(folder, lora=settings, device=torch.device("cpu"), dtype=torch.float32)
    torch.manual_seed(11)
    for parameter in trainable_parameters(built.model).values():
        parameter.data += torch.randn_like(parameter) * 0.2
    return built, settings
