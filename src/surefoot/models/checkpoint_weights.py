"""Weights of a model folder, each read when it is sliced: as they are stored, or dequantised part by part.

Everything that reads weights of a folder goes through `CheckpointWeights`, so that loading, merging, upcycling and
counting see a quantised checkpoint as one in bfloat16.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.models.pretrained import weight_errors
from surefoot.models.quantization.dequantize import DEQUANTIZERS, Dequantizer
from surefoot.models.quantization.released import StoredWeight, find_quantization, find_weights
from surefoot.models.resolve_model import weight_files
from surefoot.models.safetensors_writer import TYPE_NAMES

SINGLE_EXPERT = re.compile(r"(?P<layer>.*\.experts\.)(?P<number>\d+)(?P<leaf>\..+)")
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
"""Types of stored tensors by safetensors' names."""


def _check_types(weights: Iterable[StoredWeight]) -> None:
    """Raise ModelError for a weight of a type that no model of transformers has."""
    for weight in weights:
        for part in weight.parts.values():
            if not weight.is_quantised and part.dtype not in TYPES:
                raise ModelError(
                    f"{part.place} is stored as {part.dtype}, which is no type of a weight. Other programs quantise "
                    "into it: take the model's release, or weights in bfloat16."
                )


def check_single_experts(weights: Mapping[str, StoredWeight]) -> None:
    """Raise ModelError for an expert that lacks a tensor which others have, or has one of another shape.

    transformers joins single experts into stacks, and does not say which of them it could not join. Some models have
    tensors of some experts only (LongCat-Flash), so call this only after it has failed.
    """
    stacks: dict[tuple[str, str], dict[int, StoredWeight]] = {}
    for name, weight in weights.items():
        if (match := SINGLE_EXPERT.fullmatch(name)) is not None:
            stacks.setdefault((match["layer"], match["leaf"]), {})[int(match["number"])] = weight
    numbers: dict[str, set[int]] = {}
    for (layer, _), experts in stacks.items():
        numbers.setdefault(layer, set()).update(experts)
    for (layer, leaf), experts in stacks.items():
        missing = sorted(numbers[layer] - experts.keys())
        if missing:
            raise ModelError(
                f"{next(iter(experts.values())).values.file.parent}: {layer}{missing[0]}{leaf} is missing, and "
                f"{len(experts)} other experts of its layer have it. Is a download cut short? Use a complete folder."
            )
        usual = max(Counter(weight.shape for weight in experts.values()).items(), key=lambda item: item[1])[0]
        odd = next((weight for weight in experts.values() if weight.shape != usual), None)
        if odd is not None:
            raise ModelError(
                f"{odd.values.place} has shape {list(odd.shape)}, and other experts of its layer have {list(usual)}. "
                "The file is damaged, or of another model: fetch it again."
            )


class DequantizedSlice:
    """A quantised weight with the interface of safetensors' slices: slicing reads and dequantises that part."""

    def __init__(
        self, weight: StoredWeight, slices: dict[str, Any], dequantizer: Dequantizer, dtype: torch.dtype
    ) -> None:
        self._weight, self._slices, self._dequantizer, self._dtype = weight, slices, dequantizer, dtype

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def __getitem__(self, index: Any) -> Tensor:
        first, *others = index if isinstance(index, tuple) else (index,)
        assert isinstance(first, slice) or first is ..., index
        rows = range(self._weight.shape[0])[slice(None) if first is ... else first]
        part = self._dequantizer.read(self._weight, self._slices, rows, self._dtype)
        return part[(slice(None), *others)].contiguous() if others else part


class UnreadTensor(Tensor):
    """A tensor on the meta device that stays there: transformers moves tensors of some conversions to host memory,
    which fails for a tensor without values."""

    def to(self, device: Any = None, dtype: Any = None) -> Tensor:  # type: ignore[override]  # noqa: ARG002
        return self.as_subclass(Tensor).to("meta", dtype)


class EmptySlice:
    """A weight without values, with the interface of safetensors' slices."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._tensor = torch.empty(shape, dtype=dtype, device="meta")

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> UnreadTensor:
        return self._tensor[index].as_subclass(UnreadTensor)


class CheckpointWeights:
    """The weights of a folder. Quantised ones are read in `dtype`, others in the type in which they are stored.

    Raises: ModelError for incomplete files, and scales that are missing or of a wrong shape, before any are read.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        self.quantization = find_quantization(folder / "config.json")
        files = weight_files(folder)
        try:
            self.weights = find_weights(files, self.quantization)
        except ValueError as error:
            raise ModelError(f"{error}. Is the folder complete?") from error
        stored: dict[str, Any] = {}
        for path in files:
            with weight_errors(path):
                pointer: Any = safe_open(path, framework="pt", backend="pread")
                names: list[str] = pointer.keys()
                stored |= {name: pointer.get_slice(name) for name in names}
        _check_types(self.weights.values())
        dequantizer = DEQUANTIZERS[self.quantization.method](self.quantization) if self.quantization else None
        self.slices: dict[str, Any] = {}
        """A lazy slice of each weight, by name."""
        for name, weight in self.weights.items():
            slices = {ending: stored[part.name] for ending, part in weight.parts.items()}
            if weight.is_quantised:
                assert dequantizer is not None
                dequantizer.check(weight)
                self.slices[name] = DequantizedSlice(weight, slices, dequantizer, dtype)
            else:
                self.slices[name] = slices[""]

    def get_dtype(self, name: str) -> torch.dtype:
        """Return the type in which a weight is read."""
        weight = self.weights[name]
        return self._dtype if weight.is_quantised else TYPES[weight.parts[""].dtype]

    def slices_without_values(self) -> dict[str, EmptySlice]:
        """Return the shape and type of each weight as a slice that reads nothing, by name."""
        return {name: EmptySlice(weight.shape, self.get_dtype(name)) for name, weight in self.weights.items()}

    def read(self, name: str) -> Tensor:
        """Read a weight."""
        tensor: Tensor = self.slices[name][...]
        return tensor
