"""Merge an adapter into its base model and write a plain HF folder, one tensor in memory at a time.

The merged files have the base's names, shapes, types and layout: each base file's header is copied and its tensors
follow, merged where the adapter says so. Which base tensor belongs to which parameter is asked of transformers' own
conversion mapping, so hub names per expert and fused names both work.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from surefoot.errors import ModelError
from surefoot.models.adapter import read_contents
from surefoot.models.build import meta_model
from surefoot.models.sources import weight_files
from surefoot.storage import new_folder

EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")


def merge_adapter(base: Path, adapter: Path, target: Path) -> Path:
    """Write `base` with `adapter` merged in to the new folder `target`.

    Raises: ModelError where a part of the adapter finds no place in the base, so that no fine-tuning is lost unsaid.
    """
    if target.exists():
        raise ModelError(f"{target} exists already; it was not touched. Give a new folder.")
    files = weight_files(base)
    if not files:
        raise ModelError(f"{base} has no *.safetensors weights to merge into.")
    merger = _Merger(adapter)
    place = _places(base)
    with new_folder(target) as temporary:
        for path in files:
            _merge_file(path, temporary / path.name, merger, place)
        merger.check_complete(base)
        for path in sorted(base.iterdir()):
            if path.is_file() and path.suffix not in (".safetensors", ".bin", ".gguf"):
                shutil.copy2(path, temporary / path.name)
    return target


class _Merger:
    """Adds an adapter to the weights it belongs to, piece by piece, and knows what has not found its weight yet."""

    def __init__(self, adapter: Path) -> None:
        self._folder = adapter
        self._content = read_contents(adapter)
        self._left = {name: pair.numel for name, pair in self._content.low_rank.items()}
        """Elements of each adapted weight that have not been merged."""
        self._left |= {name: value.numel() for name, value in self._content.whole.items()}

    def merge(self, parameter: str, value: Tensor, expert: int | None, rows: slice) -> Tensor:
        """`value` with its part of the adapter: of one expert (or of all, None), and of some output rows."""
        whole = self._content.whole.get(parameter)
        pair = self._content.low_rank.get(parameter)
        if whole is None and pair is None:
            return value
        if whole is not None:
            update = whole
        else:
            assert pair is not None
            a, b = (pair.a, pair.b) if expert is None else (pair.a[expert], pair.b[expert])
            update = self._content.settings.scaling * (b[..., rows, :].float() @ a.float())
        if update.shape != value.shape:
            raise ModelError(
                f"{self._folder}: its part for {parameter} has shape {tuple(update.shape)}, the base's weight "
                f"{tuple(value.shape)}. Nothing was written. Is it the base this adapter was trained on?"
            )
        self._left[parameter] -= value.numel()
        merged: Tensor = update if whole is not None else value.float() + update
        return merged.to(value.dtype)

    def check_complete(self, base: Path) -> None:
        """Raise ModelError if any part of the adapter found no weight."""
        lost = sorted(name for name, count in self._left.items() if count)
        if lost:
            raise ModelError(
                f"{self._folder}: {len(lost)} parts of the adapter found no weight in {base}, the first is {lost[0]}. "
                "Nothing was written. Is it the base this adapter was trained on?"
            )


Place = Callable[[str], tuple[str, int | None, int]]


def _places(base: Path) -> Place:
    """A function from a stored name to (parameter of the model, expert, which piece of that expert's rows)."""
    model = meta_model(base)
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()

    def place(stored: str) -> tuple[str, int | None, int]:
        parameter, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, state)
        if pattern is None:
            return parameter, None, 0
        converter = next(c for c in converters if pattern in c.source_patterns)
        number = EXPERT_NUMBER.search(stored)
        if number is None or not all(isinstance(step, MergeModulelist | Concatenate) for step in converter.operations):
            raise ModelError(f"{base}: {stored} is stored in a layout that cannot be merged yet ({pattern}).")
        return parameter, int(number[1]), converter.source_patterns.index(pattern)

    return place


def _merge_file(source: Path, target: Path, merger: _Merger, place: Place) -> None:
    """Copy one safetensors file, merging tensor by tensor. The header (names, types, offsets) stays as it is."""
    with open(source, "rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    with open(target, "wb") as out, safe_open(source, framework="pt") as tensors:
        out.write(size + header)
        for name in sorted(entries, key=lambda n: entries[n]["data_offsets"][0]):
            value: Tensor = tensors.get_tensor(name)
            parameter, expert, piece = place(name)
            rows = slice(None) if expert is None else slice(piece * value.shape[0], (piece + 1) * value.shape[0])
            merged = merger.merge(parameter, value, expert, rows)
            out.write(merged.reshape(-1).contiguous().view(torch.uint8).numpy().data)
