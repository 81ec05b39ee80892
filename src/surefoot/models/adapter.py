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
INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of PEFT's init_lora_weights under which the base stays as it is. PiSSA, OLoRA and the like change it when the
adapter is made, so that the adapter belongs to weights that nobody has kept."""
OTHER_KINDS = (
    "use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "layer_replication", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config", "fan_in_fan_out",
)  # fmt: skip
"""Settings of PEFT's that make another sum of a pair of matrices than plain LoRA."""


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
    check_kind(config)
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
        key, as_stored = _to_peft(name, torch.empty(shape, device="meta"), wanted)
        if key not in stored:
            raise ModelError(f"init_adapter={folder} has no {key}. Adapt the same modules as it does (target_modules).")
        value = stored.pop(key)
        if value.shape != as_stored.shape:
            raise ModelError(
                f"init_adapter={folder}: {key} has shape {tuple(value.shape)} there, {tuple(as_stored.shape)} here. "
                "Is it the model this adapter was trained on?"
            )
        values[name] = _from_peft(name, value, shape)
    if stored:
        raise ModelError(f"init_adapter={folder} also adapts {sorted(stored)[0]}, which target_modules leaves out.")
    return values


def _from_peft(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    if name.endswith("_proj_lora_B"):
        num_experts, out_features, rank = shape
        return value.reshape(out_features, rank, num_experts).permute(2, 0, 1).contiguous().float()
    return value.reshape(shape).float()


def load_adapter_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a PEFT adapter folder, as stored. Raises: ModelError where there are none."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} holds no object")
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
    for key in stored:
        other = key.replace(".lora_A.", ".lora_B.") if ".lora_A." in key else key.replace(".lora_B.", ".lora_A.")
        if other not in stored:
            raise ModelError(f"{folder}: {key} is one half of a pair; {other} is not there. Nothing was written.")
    for key, a in stored.items():
        name = key.removeprefix(PREFIX)
        if name.endswith(".lora_A.weight"):
            owner, b = name.removesuffix(".lora_A.weight"), stored[key.replace(".lora_A.", ".lora_B.")]
            if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or a.shape[0] % settings.rank:
                raise ModelError(
                    f"{folder}: {key} has shape {tuple(a.shape)} and its other half {tuple(b.shape)}, which are no "
                    f"pair of rank {settings.rank}. Nothing was written."
                )
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

    Raises: ModelError for an adapter of another kind, which would be read wrongly, and for settings that make no sense.
    """
    check_kind(config)
    for name in ("target_modules", "target_parameters", "modules_to_save"):
        named = config.get(name)
        if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
            raise ModelError(f"{CONFIG}: {name}={named!r}; a list of names is needed.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{CONFIG}: r={rank!r}; a whole number above 0 is needed.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ModelError(f"{CONFIG}: lora_alpha={alpha!r}; a number is needed.")
    return LoraSettings(
        rank=rank,
        alpha=alpha,
        rslora=config.get("use_rslora", False),
        targets=(
            *(config.get("target_modules") or ()),
            *(config.get("target_parameters") or ()),
            *(["router"] if config.get("modules_to_save") else []),
        ),
    )


def check_kind(config: Mapping[str, Any]) -> None:
    """Raises: ModelError for an adapter that is no plain LoRA."""
    other = [f"{name}={config[name]!r}" for name in OTHER_KINDS if config.get(name)]
    if config.get("bias", "none") != "none":
        other.append(f"bias={config['bias']!r}")
    if (init := config.get("init_lora_weights", True)) not in INITS:
        other.append(f"init_lora_weights={init!r}, which has changed the base as well (PEFT's conversion undoes that)")
    if config.get("peft_type") != "LORA" or other:
        raise ModelError(
            f"{CONFIG}: only plain LoRA can be read; this is {config.get('peft_type')} with "
            f"{', '.join(other) or 'nothing else'}."
        )
