"""Merge an adapter into its base model and write a plain HF folder, one tensor in memory at a time.

The merged files have the base's names, shapes, types and layout: each base file's header is copied and its tensors
follow, merged where the adapter says so. Which base tensor belongs to which parameter is asked of transformers' own
conversion mapping, so hub names per expert and fused names both work.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from surefoot.errors import ModelError
from surefoot.models.adapter import PREFIX, load_adapter_files
from surefoot.models.build import meta_model
from surefoot.models.experts import PROJECTIONS, is_fused_experts
from surefoot.storage import new_folder

EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")


def merge_adapter(base: Path, adapter: Path, target: Path) -> Path:
    """Write `base` with `adapter` merged in to the new folder `target`.

    Raises: ModelError where a part of the adapter finds no place in the base, so that no fine-tuning is lost unsaid.
    """
    if target.exists():
        raise ModelError(f"{target} exists already; it was not touched. Give a new folder.")
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{base} has no *.safetensors weights to merge into.")
    deltas = _Deltas(adapter)
    place = _places(base)
    with new_folder(target) as temporary:
        for path in files:
            _merge_file(path, temporary / path.name, deltas, place)
        deltas.check_all_used(base)
        for path in sorted(base.iterdir()):
            if path.is_file() and path.suffix not in (".safetensors", ".bin", ".gguf"):
                shutil.copy2(path, temporary / path.name)
    return target


class _Deltas:
    """What the adapter adds to each parameter of the model, and what of it has been used."""

    def __init__(self, folder: Path) -> None:
        config, tensors = load_adapter_files(folder)
        rank, alpha = config["r"], config["lora_alpha"]
        for name in ("alpha_pattern", "rank_pattern"):
            if config.get(name):
                raise ModelError(f"{folder}: {name} (other ranks for some modules) cannot be merged.")
        if config.get("use_dora"):
            raise ModelError(f"{folder}: DoRA adapters cannot be merged.")
        self._scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        self._rank = rank
        self._folder = folder
        self._tensors = {key.removeprefix(PREFIX): value for key, value in tensors.items()}
        self._stacks = {name.rpartition(".")[2] for name in config.get("target_parameters") or ()}
        self._unused = {key for key in self._tensors if not key.endswith(".lora_B.weight")}
        self._parts_used: dict[str, set[tuple[int, tuple[int, int] | None]]] = {}

    def _key(self, parameter: str) -> str:
        """The adapter's name stem for a parameter of the model (`...q_proj.weight`, `...experts.down_proj`)."""
        owner, _, leaf = parameter.rpartition(".")
        if leaf in PROJECTIONS and owner.endswith(".experts"):
            if leaf not in self._stacks:
                return f"{owner}.(not adapted)"
            is_nested = leaf == "gate_up_proj" and "down_proj" in self._stacks
            return f"{owner}.base_layer" if is_nested else owner
        return owner if leaf == "weight" else f"{owner}.(not adapted)"

    def apply(self, parameter: str, value: Tensor, expert: int | None, rows: tuple[int, int] | None) -> Tensor:
        """`value` with the adapter's part added: of one expert (or all, None), of some output rows (or all, None)."""
        if parameter in self._tensors:  # trained in full
            self._unused.discard(parameter)
            return self._tensors[parameter].to(value.dtype)
        stem = self._key(parameter)
        a, b = (self._tensors.get(f"{stem}.lora_{part}.weight") for part in "AB")
        if a is None or b is None:
            return value
        if stem.endswith((".experts", ".experts.base_layer")):
            num_experts = a.shape[0] // self._rank
            a = a.view(num_experts, self._rank, -1)
            b = b.view(b.shape[0], self._rank, num_experts).permute(2, 0, 1)
            if expert is not None:
                self._use(f"{stem}.lora_A.weight", (expert, rows), num_experts * (2 if rows else 1))
                a, b = a[expert], b[expert]
            else:
                self._unused.discard(f"{stem}.lora_A.weight")
        else:
            self._unused.discard(f"{stem}.lora_A.weight")
        if rows is not None:
            b = b[..., rows[0] : rows[1], :]
        delta = self._scaling * (b.float() @ a.float())
        if delta.shape != value.shape:
            raise ModelError(
                f"{self._folder}: {stem} has shape {tuple(delta.shape)}, the base's {parameter} {tuple(value.shape)}."
            )
        merged: Tensor = (value.float() + delta).to(value.dtype)
        return merged

    def _use(self, key: str, part: tuple[int, tuple[int, int] | None], parts: int) -> None:
        """Count one expert's share of a stack; the stack is used when all of them are."""
        seen = self._parts_used.setdefault(key, set())
        seen.add(part)
        if len(seen) == parts:
            self._unused.discard(key)

    def check_all_used(self, base: Path) -> None:
        if self._unused:
            raise ModelError(
                f"{self._folder}: {len(self._unused)} parts of the adapter found no weight in {base}, the first is "
                f"{sorted(self._unused)[0]}. Nothing was written. Is it the base this adapter was trained on?"
            )


Place = Callable[[str], tuple[str, int | None, int | None]]


def _places(base: Path) -> Place:
    """A function from a stored name to (parameter of the model, expert, which half of gate_up)."""
    model = meta_model(base)
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()
    experts = {name for name, module in model.named_modules() if is_fused_experts(module)}

    def place(stored: str) -> tuple[str, int | None, int | None]:
        parameter, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, state)
        number = EXPERT_NUMBER.search(stored)
        if pattern is None or number is None:
            if parameter.rpartition(".")[0] in experts and state[parameter].dim() == 3 and pattern is not None:
                raise ModelError(f"{base}: {stored} is stored in a layout that cannot be merged yet ({pattern}).")
            return parameter, None, None
        converter = next(c for c in converters if pattern in c.source_patterns)
        if not all(isinstance(operation, MergeModulelist | Concatenate) for operation in converter.operations):
            raise ModelError(f"{base}: {stored} is stored in a layout that cannot be merged yet ({pattern}).")
        half = converter.source_patterns.index(pattern) if len(converter.source_patterns) == 2 else None
        return parameter, int(number[1]), half

    return place


def _merge_file(source: Path, target: Path, deltas: _Deltas, place: Place) -> None:
    """Copy one safetensors file, merging tensor by tensor. The header (names, types, offsets) stays as it is."""
    with open(source, "rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    with open(target, "wb") as out, safe_open(source, framework="pt") as tensors:
        out.write(size + header)
        for name in sorted(entries, key=lambda n: entries[n]["data_offsets"][0]):
            value: Tensor = tensors.get_tensor(name)
            parameter, expert, half = place(name)
            rows = None if half is None else (half * value.shape[0], (half + 1) * value.shape[0])
            merged = deltas.apply(parameter, value, expert, rows)
            out.write(merged.contiguous().view(torch.uint8).numpy().tobytes() if merged.numel() else b"")


def linear_names(model: nn.Module) -> Iterator[str]:
    """Every linear module of a model, by name."""
    return (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
