"""Weights of a model folder, each read when it is sliced: as they are stored, or dequantised part by part.

Everything that reads weights of a folder goes through `CheckpointWeights`, so that loading, merging, upcycling and
counting see a quantised checkpoint as one in bfloat16.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.models.pretrained import meta_model, weight_errors
from surefoot.models.quantization.dequantize import DEQUANTIZERS, Dequantizer
from surefoot.models.quantization.released import StoredWeight, find_quantization, find_weights
from surefoot.models.resolve_model import weight_files
from surefoot.models.safetensors_writer import TYPE_NAMES

TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
"""Types of stored tensors by safetensors' names."""
MOST_MISSING = 2.0
"""Ratio of a model's elements to those its files hold, above which nothing is allocated."""


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


class CheckpointWeights:
    """The weights of a folder. Quantised ones are read in `dtype`, others in the type in which they are stored.

    Raises: ModelError for incomplete files, and scales that are missing or of a wrong shape, before any are read.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        self.quantization = find_quantization(folder / "config.json")
        files = weight_files(folder)
        stored: dict[str, Any] = {}
        for path in files:
            with weight_errors(path):
                pointer: Any = safe_open(path, framework="pt", backend="pread")
                names: list[str] = pointer.keys()
                stored |= {name: pointer.get_slice(name) for name in names}
        with weight_errors(folder):
            self.weights = find_weights(files, self.quantization)
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

    def read(self, name: str) -> Tensor:
        """Read a weight."""
        tensor: Tensor = self.slices[name][...]
        return tensor

    def count_elements(self) -> int:
        return sum(torch.Size(weight.shape).numel() for weight in self.weights.values())


def check_weights_fill(folder: Path) -> None:
    """Raise ModelError, before memory is allocated, for files that are not exactly the weights of config.json's model.

    They may be far too few, or include an adapter, which transformers would load, too.
    """
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} holds an adapter (adapter_config.json) beside a model's config.json, and transformers would "
            "load both as one. Give the folder of the base model, and the adapter as init_adapter or --adapter."
        )
    described = sum(parameter.numel() for parameter in meta_model(folder).parameters())
    stored = CheckpointWeights(folder).count_elements()
    if described > MOST_MISSING * stored:
        raise ModelError(
            f"{folder}: config.json describes a model of {described} parameters, and the weight files hold {stored}. "
            "Is the folder complete, its config.json its own?"
        )
