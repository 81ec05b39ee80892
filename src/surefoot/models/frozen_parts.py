"""Parts of a model that full fine-tuning leaves as they are."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from surefoot.config import RunConfig
from surefoot.errors import ModelError
from surefoot.models import vision
from surefoot.models.decoder_layers import class_name, decoder_layers, indexer_names


@dataclass(frozen=True)
class FrozenParts:
    """Parts that settings name."""

    vision: bool = True
    """Whether the vision tower is frozen, with what merges its patches."""
    layers: tuple[int, ...] = ()
    """Numbers of decoder layers."""
    modules: tuple[str, ...] = ()
    """Ends of the names of modules."""


ONLY_VISION = FrozenParts()
"""The parts that are frozen unless settings say otherwise."""


def frozen_parts(config: RunConfig) -> FrozenParts:
    """Return the parts that a config freezes in full fine-tuning."""
    return FrozenParts(config.freeze_vision_tower, tuple(config.freeze_layers), tuple(config.freeze_modules))


def names_frozen(model: PreTrainedModel, parts: FrozenParts) -> set[str]:
    """Return the names of the parameters that full fine-tuning leaves as they are. The model may need no storage.

    They are of the named parts; or they read audio; or their class freezes them, such as the correction biases of the
    routers of ERNIE 4.5, and the loader forgets it; or they are of an indexer, where weight decay alone would change
    them. A weight that two modules share is frozen if either is named. Layers that the model does not have are ignored.
    """
    layers = list(decoder_layers(model))
    owners: list[nn.Module] = [layers[number] for number in parts.layers if number < len(layers)]
    owners += [module for end in parts.modules for module in _modules_named(model, end)]
    chosen = {id(parameter) for owner in owners for parameter in owner.parameters()}
    beside_text = vision.vision_names(model) if parts.vision else vision.audio_names(model)
    indexers = tuple(f"{name}." for name in indexer_names(model))
    return beside_text | {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in chosen or not parameter.requires_grad or name.startswith(indexers)
    }


def _modules_named(model: PreTrainedModel, end: str) -> list[nn.Module]:
    """Return the modules of a name, or whose names end with it after a dot."""
    return [module for name, module in model.named_modules() if f".{name}".endswith(f".{end}")]


def check_frozen_parts(model: PreTrainedModel, parts: FrozenParts) -> None:
    """Raise ModelError, which begins with the setting, for a part that a model does not have, or if all is frozen."""
    count = len(decoder_layers(model))
    if missing := [number for number in parts.layers if number >= count]:
        raise ModelError(
            f"freeze_layers: {class_name(model)} has {count} layers, from 0 to {count - 1}, and no layer {missing[0]}."
        )
    for end in parts.modules:
        if not any(True for module in _modules_named(model, end) for _ in module.parameters()):
            raise ModelError(f"freeze_modules: {end} is no module of {class_name(model)} that has parameters.")
    if len(names_frozen(model, parts)) == len(list(model.named_parameters())):
        setting = "freeze_modules" if parts.modules else "freeze_layers"
        raise ModelError(f"{setting}: nothing of {class_name(model)} is left to train.")
