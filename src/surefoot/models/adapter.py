"""PEFT's adapter files, written from our LoRA parameters and read back into them.

Layouts. A linear layer's pair is stored as it is. PEFT keeps the experts of one stack in two matrices, lora_A
[E * r, in] with the expert as the slow index and lora_B [out, r * E] with the expert as the fast one; ours are
[E, r, in] and [E, out, r]. Where both stacks of a module are adapted, PEFT nests them: `base_layer` holds gate_up.
Routers trained in full are stored whole, as PEFT's `modules_to_save`.
"""

import json
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.models.experts import PROJECTIONS
from surefoot.models.lora import LoraSettings, is_lora
from surefoot.models.weights import tensor_file

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def write_adapter(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    values: Iterable[tuple[str, Tensor]],
    settings: LoraSettings,
    base_model: str,
    adaptable: Collection[str],
    in_tower: Collection[str] = frozenset(),
) -> None:
    """Write trained parameters as a PEFT adapter into an existing empty folder.

    `shapes`: of all parameters, by our names. `values` come in the same order; none is kept. `adaptable`: every linear
    module and expert stack of the model, to find the shortest target names that mean just the adapted ones; `in_tower`:
    those of a vision tower, which are written in full, as `lora.find_targets` reads them.
    """
    empty = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    with tensor_file(folder / WEIGHTS, dict(_to_peft(name, spec, shapes) for name, spec in empty.items())) as file:
        for name, value in values:
            file.write(*_to_peft(name, value.detach().float(), shapes))
    (folder / CONFIG).write_text(
        json.dumps(_peft_config(shapes, settings, base_model, adaptable, in_tower), indent=2) + "\n"
    )


def _to_peft(name: str, value: Tensor, names: Container[str]) -> tuple[str, Tensor]:
    """PEFT's name and layout of one parameter; `names` are all that are trained, for the nesting."""
    owner, _, leaf = name.rpartition(".")
    if not is_lora(name):
        return f"{PREFIX}{name}", value
    part = leaf[-1]
    if leaf in ("lora_A", "lora_B"):
        return f"{PREFIX}{owner}.lora_{part}.weight", value
    is_nested = leaf.startswith("gate_up_proj") and f"{owner}.down_proj_lora_A" in names
    key = f"{PREFIX}{owner}.{'base_layer.' if is_nested else ''}lora_{part}.weight"
    if part == "A":
        return key, value.reshape(-1, value.shape[-1])  # [E, r, in] -> [E * r, in]
    return key, value.permute(1, 2, 0).reshape(value.shape[1], -1)  # [E, out, r] -> [out, r * E]


def _peft_config(
    parameters: Collection[str],
    settings: LoraSettings,
    base_model: str,
    adaptable: Collection[str],
    in_tower: Collection[str],
) -> dict[str, Any]:
    linears = {name.removesuffix(".lora_A") for name in parameters if name.endswith(".lora_A")}
    stacks = {name.removesuffix("_lora_A") for name in parameters if name.endswith("_proj_lora_A")}
    routers = {name.removesuffix(".weight") for name in parameters if not is_lora(name)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(_shortest(linears, adaptable, 1, in_tower)),
        "target_parameters": sorted(_shortest(stacks, adaptable, 3), key=_stack_order) or None,
        "modules_to_save": sorted({".".join(name.split(".")[-2:]) for name in routers}) or None,
    }


def _shortest(
    adapted: set[str], adaptable: Collection[str], parts: int, in_full: Collection[str] = frozenset()
) -> set[str]:
    """The last `parts` of each name, where these mean the adapted ones and no others; else the full names.

    Those of `in_full` are given in full in any case.
    """

    def ending(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    endings = {ending(name) for name in adapted if name not in in_full}
    meant = {name for name in adaptable if ending(name) in endings}
    return endings | (adapted & set(in_full)) if meant <= adapted else adapted


def _stack_order(name: str) -> tuple[str, int]:
    owner, _, leaf = name.rpartition(".")
    return owner, PROJECTIONS.index(leaf)


def read_adapter(folder: Path, wanted: Mapping[str, torch.Size], settings: LoraSettings) -> dict[str, Tensor]:
    """Read a PEFT adapter into our names and shapes.

    `wanted`: the trainable parameters of the model, by name. Every one must be in the file and nothing else.
    Raises: ModelError where the folder is no adapter, or its settings, names or shapes differ.
    """
    config, stored = load_adapter_files(folder)
    theirs = {
        "lora_rank": config.get("r"),
        "lora_alpha": config.get("lora_alpha"),
        "use_rslora": config.get("use_rslora", False),
    }
    ours = {"lora_rank": settings.rank, "lora_alpha": settings.alpha, "use_rslora": settings.rslora}
    different = [
        f"{name}={ours[name]} but the adapter has {theirs[name]}" for name in ours if ours[name] != theirs[name]
    ]
    if different:
        raise ModelError(f"init_adapter={folder}: {'; '.join(different)}. Set the same values.")
    values = {}
    for name, shape in wanted.items():
        key, _ = _to_peft(name, torch.empty(shape, device="meta"), wanted)
        if key not in stored:
            raise ModelError(f"init_adapter={folder} has no {key}. Adapt the same modules as it does (target_modules).")
        values[name] = _from_peft(name, stored.pop(key), shape, folder)
    if stored:
        raise ModelError(f"init_adapter={folder} also adapts {sorted(stored)[0]}, which target_modules leaves out.")
    return values


def _from_peft(name: str, value: Tensor, shape: torch.Size, folder: Path) -> Tensor:
    if value.numel() != shape.numel():
        raise ModelError(f"init_adapter={folder}: {name} has shape {tuple(value.shape)} there, {tuple(shape)} here.")
    if name.endswith("_proj_lora_B"):
        num_experts, out_features, rank = shape
        return value.reshape(out_features, rank, num_experts).permute(2, 0, 1).contiguous().float()
    return value.reshape(shape).float()


def load_adapter_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a PEFT adapter folder, as stored."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        return config, load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{folder} is no PEFT adapter: it needs a readable {CONFIG} and {WEIGHTS} ({error})."
        ) from error


@dataclass(frozen=True)
class LowRank:
    """One weight's low-rank pair. Shapes: a [r, in], b [out, r]; of a stack of experts a [E, r, in], b [E, out, r]."""

    a: Tensor
    b: Tensor

    @property
    def numel(self) -> int:
        """Elements of the weight it belongs to."""
        return self.a.numel() // self.a.shape[-2] * self.b.shape[-2]


@dataclass(frozen=True)
class AdapterContents:
    """An adapter by the names of the model's parameters."""

    settings: LoraSettings
    low_rank: dict[str, LowRank]
    whole: dict[str, Tensor]
    """Parameters that were trained in full."""


def read_contents(folder: Path) -> AdapterContents:
    """Read a PEFT adapter without its model.

    Raises: ModelError where it is no plain LoRA adapter.
    """
    config, stored = load_adapter_files(folder)
    settings = settings_of(config)
    stacks = config.get("target_parameters") or ()
    low_rank, whole = {}, {}
    for key, a in stored.items():
        name = key.removeprefix(PREFIX)
        if name.endswith(".lora_A.weight"):
            owner, b = name.removesuffix(".lora_A.weight"), stored[key.replace(".lora_A.", ".lora_B.")]
            module = owner.removesuffix(".base_layer")
            adapted = [leaf for leaf in PROJECTIONS if any(f".{module}.{leaf}".endswith(f".{name}") for name in stacks)]
            if adapted:  # the outermost wrapper holds the last stack, what it wraps the first
                leaf = adapted[0] if owner.endswith(".base_layer") else adapted[-1]
                a = a.view(-1, settings.rank, a.shape[1])
                b = b.view(b.shape[0], settings.rank, -1).permute(2, 0, 1)
                low_rank[f"{module}.{leaf}"] = LowRank(a, b)
            else:
                low_rank[f"{owner}.weight"] = LowRank(a, b)
        elif not name.endswith(".lora_B.weight"):
            whole[name] = a
    return AdapterContents(settings, low_rank, whole)


def settings_of(config: Mapping[str, Any]) -> LoraSettings:
    """Our settings for an adapter's config.

    Raises: ModelError for an adapter of another kind, which would be read wrongly.
    """
    if isinstance(config.get("target_modules"), str):
        raise ModelError(
            f"target_modules={config['target_modules']!r} in {CONFIG} is a pattern; a list of names is needed."
        )
    other = [name for name in ("use_dora", "rank_pattern", "alpha_pattern", "lora_bias") if config.get(name)]
    if config.get("peft_type") != "LORA" or other:
        raise ModelError(
            f"{CONFIG}: only plain LoRA can be read; this is {config.get('peft_type')} with {other or 'nothing else'}."
        )
    return LoraSettings(
        rank=config["r"],
        alpha=config["lora_alpha"],
        rslora=config.get("use_rslora", False),
        targets=(
            *(config.get("target_modules") or ()),
            *(config.get("target_parameters") or ()),
            *(["router"] if config.get("modules_to_save") else []),
        ),
    )
