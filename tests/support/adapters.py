"""Adapters that are trained for a few steps."""

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from surefoot.models.adapter import get_tensor, tensors_beside, write_adapter
from surefoot.models.build import BuiltModel, build_model, trainable_parameters
from surefoot.models.export import merge_adapter
from surefoot.models.lora import LoraSettings

TARGETS = {
    "mixtral": ("attention", "experts", "router"),
    "qwen2_moe": ("all",),
    "qwen3_moe": ("experts.down_proj", "q_proj"),
}


def logits_of(model: torch.nn.Module, vocab_size: int = 500) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.randint(3, vocab_size, (2, 12))).logits
    return result


def save(built: BuiltModel, settings: LoraSettings, folder: Path, base: Path) -> Path:
    folder.mkdir()
    tensors = {name: p.data for name, p in trainable_parameters(built.model).items()}
    tensors |= {name: get_tensor(built.model, name) for name in tensors_beside(built.model, tensors)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_adapter(folder, shapes, tensors.items(), settings, str(base), built.model)
    return folder


def check_peft_and_merge(base: Path, adapter: Path, wanted: torch.Tensor, merged: Path) -> None:
    """Check that PEFT, and transformers after a merge into the folder `merged`, give the wanted logits."""
    with_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logits_of(with_peft), wanted, atol=1e-4, rtol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(merge_adapter(base, adapter, merged))
    torch.testing.assert_close(logits_of(model), wanted, atol=1e-4, rtol=1e-4)


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
