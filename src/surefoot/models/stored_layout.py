"""Layout of the weight files of a base model: to which parameters a stored tensor belongs, and updates in its layout.

transformers' own conversion mapping says both, so hub names per expert, fused names and every other layout that
transformers loads are known here.
"""

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from surefoot.errors import ModelError
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.pretrained import meta_model


@dataclass(frozen=True)
class Place:
    """The place of a stored tensor in the model."""

    stored: str
    """Its name in the file."""
    parameters: tuple[str, ...]
    """Parameters that it holds, or is a part of."""
    converter: WeightConverter | None = None
    """The conversion between stored tensors and parameters; None if only names differ."""
    source: int = 0
    """Index of its pattern among those of the converter."""
    number: int | None = None
    """Its number in a list of modules that are stored one by one, such as experts."""

    @property
    def expert(self) -> int | None:
        """The index along the first dimension of the parameters; None for a tensor that holds all of it."""
        first = self.converter.operations[0] if self.converter is not None else None
        return self.number if isinstance(first, MergeModulelist) and first.dim == 0 else None


class StoredLayout:
    """The layout of a base model's files."""

    def __init__(self, base: Path, *, has_score: bool = False) -> None:
        """`has_score`: whether the parameters are those of the reward model that is built on it."""
        self._base = base
        self.model = meta_model(base, has_score=has_score)
        self._tensors = self.model.state_dict()
        transforms = get_model_conversion_mapping(self.model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]

    def find_place(self, stored: str) -> Place:
        """Return where a stored tensor of this name belongs."""
        prefix = self.model.base_model_prefix
        first, pattern = rename_source_key(stored, self._renamings, self._converters, prefix, self._tensors)
        if pattern is None:
            return Place(stored, (first,))
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        targets = converter.target_patterns
        parameters = (first, *(first.replace(targets[0], target, 1) for target in targets[1:]))
        numbered = re.search(pattern.replace("*.", r"(?P<number>\d+)\."), apply_renamings(stored, self._renamings))
        number = int(numbered["number"]) if numbered and "number" in numbered.groupdict() else None
        return Place(stored, parameters, converter, converter.source_patterns.index(pattern), number)

    def get_shape(self, parameter: str) -> torch.Size:
        """Return the shape of a parameter; an empty one if the model has no such parameter."""
        return self._tensors[parameter].shape if parameter in self._tensors else torch.Size()

    def convert_to_stored(self, place: Place, updates: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """Return updates of the parameters of a place as an update of its stored tensor, which has this shape.

        `updates`: one for each parameter, or for the place's expert in it.
        Raises: ModelError for a layout that transformers cannot convert back.
        """
        if place.converter is None:
            return updates[place.parameters[0]]
        reverse = place.converter.reverse_transform()
        is_alone = place.expert is not None
        values = (updates[name][None] if is_alone else updates[name] for name in place.parameters)
        tensors = {pattern: [value] for pattern, value in zip(reverse.source_patterns, values, strict=True)}
        for operation in reverse.operations:
            if isinstance(operation, Transpose) and operation.check_dims:  # stored as in the model by some versions
                if shape == next(iter(tensors.values()))[0].shape:
                    continue
                operation = Transpose(operation.dim0, operation.dim1)
            tensors = operation.convert(
                tensors,
                source_patterns=reverse.source_patterns,
                target_patterns=reverse.target_patterns,
                full_layer_name=place.parameters[0],
                model=self.model,
                config=self.model.config,
            )
        number = 0 if is_alone else place.number
        converted: Any = tensors.get(reverse.target_patterns[place.source].replace("*", str(number)))
        converted = converted[0] if isinstance(converted, list) else converted
        if converted is None or converted.shape != shape:
            raise ModelError(f"{self._base}: {place.stored} is stored in a layout that cannot be merged yet.")
        update: Tensor = converted
        return update

    def read(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """Read the tensors that have these names in the model."""
        tensors: dict[str, Tensor] = {}
        converters: dict[tuple[str, ...], WeightConverter] = {}
        weights = CheckpointWeights(self._base) if wanted else None
        for stored in sorted(weights.weights if weights is not None else (), key=dot_natural_key):
            place = self.find_place(stored)
            if weights is None or set(place.parameters).isdisjoint(wanted):
                continue
            tensor = weights.read(stored)
            if place.converter is None:
                tensors[place.parameters[0]] = tensor
            else:
                converter = converters.setdefault(place.parameters, deepcopy(place.converter))
                pattern = converter.source_patterns[place.source]
                converter.add_tensor(place.parameters[0], stored, pattern, tensor)
        for parameters, converter in converters.items():
            converted = converter.convert(parameters[0], model=self.model, config=self.model.config)
            tensors |= {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
        return {name: tensor for name, tensor in tensors.items() if name in wanted}
