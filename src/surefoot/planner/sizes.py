"""How many elements of a model are frozen, trained, experts', of the largest layer: what sharding is reckoned with."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from surefoot.diagnostics.preflight.model_size import pinned_bytes
from surefoot.errors import ModelError
from surefoot.models.build import BuiltModel, load_config
from surefoot.models.experts import experts_of, is_fused_experts

FP32_BYTES, HALF_BYTES = 4, 2
FIELDS = (
    "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size moe_intermediate_size "
    "num_experts num_local_experts n_routed_experts num_experts_per_tok"
).split()
"""Of a config, that its size depends on; by transformers' names for them."""
COUNTS = (*FIELDS, "num_key_value_heads", "head_dim", "shared_expert_intermediate_size", "n_shared_experts")
OF_VISION = ("patch_size", "spatial_merge_size", "temporal_patch_size", "depth", "hidden_size", "num_heads")
"""Of a vision_config, under which families have them."""
MOST_LAYERS = 1000
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
OF_EXPERTS = (
    *EXPERTS, "moe_intermediate_size", "num_experts_per_tok", "shared_expert_intermediate_size", "n_shared_experts",
)  # fmt: skip


@dataclass(frozen=True)
class Elements:
    """Of some part of a model; experts apart, because they are cut over other ranks."""

    frozen: int = 0
    trained: int = 0
    expert_frozen: int = 0
    expert_trained: int = 0

    def __add__(self, other: "Elements") -> "Elements":
        return Elements(
            self.frozen + other.frozen,
            self.trained + other.trained,
            self.expert_frozen + other.expert_frozen,
            self.expert_trained + other.expert_trained,
        )

    @property
    def total(self) -> int:
        return self.frozen + self.trained + self.expert_frozen + self.expert_trained

    @property
    def all_trained(self) -> int:
        return self.trained + self.expert_trained


@dataclass(frozen=True)
class Shape:
    """Of a parameter, as far as it is cut along its first dimension."""

    rows: int
    row_elements: int
    is_expert: bool
    is_trained: bool

    def pinned_bytes(self, parts: int, each_bytes: int) -> int:
        """Of one part in pinned memory."""
        return pinned_bytes(-(-self.rows // parts) * self.row_elements * each_bytes)


@dataclass(frozen=True)
class Sizes:
    """Of one model as it is trained."""

    whole: Elements
    layer: Elements
    """The largest decoder layer."""
    outside: Elements
    """All that is in no decoder layer: embeddings, the output layer, a vision tower."""
    frozen_bytes_each: int
    largest_tensor_bytes: int
    num_layers: int
    num_experts: int
    """Of the layer with the most; 0 for a dense model."""
    layers_are_equal: bool
    vocabulary: int
    num_heads: int
    """Of attention, in a layer."""
    cache_elements: int
    """Keys and values of one token, in all layers."""
    tensors: Mapping["Shape", int]
    """How many there are of each."""


def sizes_of(built: BuiltModel) -> Sizes:
    """Count the parameters of a model, which needs no storage."""
    model = built.model
    expert_modules = [module for module in model.modules() if is_fused_experts(module)]
    of_experts = {parameter for module in expert_modules for parameter in module.parameters(recurse=False)}
    layers = list(model.get_decoder().layers)
    counted = [_count(layer, of_experts) for layer in layers]
    whole = _count(model, of_experts)
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    inside = sum(counted, Elements())
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return Sizes(
        whole=whole,
        layer=max(counted, key=lambda one: one.total),
        outside=Elements(*(a - b for a, b in zip(_values(whole), _values(inside), strict=True))),
        frozen_bytes_each=frozen[0].element_size() if frozen else FP32_BYTES,
        largest_tensor_bytes=max(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        num_layers=len(layers),
        num_experts=max((experts_of(module) for module in expert_modules), default=0),
        layers_are_equal=len({_shapes(layer) for layer in layers}) == 1,
        vocabulary=int(text.vocab_size),
        num_heads=int(text.num_attention_heads),
        tensors=Counter(
            Shape(rows, one.numel() // rows, one in of_experts, one.requires_grad)
            for one in model.parameters()
            if (rows := one.shape[0] if one.dim() else 1)
        ),
        cache_elements=len(layers) * (_latent(text) or 2 * int(heads or text.num_attention_heads) * int(width)),
    )


def _latent(text: PreTrainedConfig) -> int:
    """What a layer keeps of a token where keys and values are made of one latent vector; 0 where they are not."""
    rank, rotary = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return rank + rotary if isinstance(rank, int) and isinstance(rotary, int) else 0


def _values(elements: Elements) -> tuple[int, ...]:
    return (elements.frozen, elements.trained, elements.expert_frozen, elements.expert_trained)


def _count(module: nn.Module, of_experts: set[nn.Parameter]) -> Elements:
    counts = {(is_expert, is_trained): 0 for is_expert in (False, True) for is_trained in (False, True)}
    for parameter in module.parameters():
        counts[parameter in of_experts, parameter.requires_grad] += parameter.numel()
    return Elements(counts[False, False], counts[False, True], counts[True, False], counts[True, True])


def _shapes(layer: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def check_fields(base: Path) -> None:
    """Raises: ModelError for a size that config.json does not say or cannot mean, where a default would be a guess."""
    path = base / "config.json"
    said = json.loads(path.read_text("utf-8"))
    text = said.get("text_config", said)
    for field, value in text.items():
        # A dense model of a family with experts has none, and heads that are made of a latent vector need no width.
        least = 0 if field in OF_EXPERTS or (field == "head_dim" and "kv_lora_rank" in text) else 1
        if field in COUNTS and isinstance(value, int) and value < least:
            raise ModelError(f"{path}: {field}={value} is no size. Correct it.")
    config = load_config(base).get_text_config()
    most = next((getattr(config, name) for name in EXPERTS if isinstance(getattr(config, name, None), int)), 0)
    needed = [name for name in FIELDS if getattr(config, name, None) and (most or name not in OF_EXPERTS)]
    for field in needed:
        alike = getattr(config, "attribute_map", {})  # other names of fields, in whichever direction a family has them
        own = alike.get(field, field)
        names = {field, own} | {name for name, meant in alike.items() if meant in (field, own)}
        if text is said and not names & said.keys():  # nested ones leave defaults out
            raise ModelError(f"{path}: has no {own}, and without it the model's size is not known. Add it.")
    _check_vision(path, said, load_config(base))
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ModelError(f"{path}: num_hidden_layers={layers} is more than plans are made for, {MOST_LAYERS}.")
    chosen = getattr(config, "num_experts_per_tok", None)
    if most and chosen == 0:
        raise ModelError(f"{path}: num_experts_per_tok=0, and a token must go to one expert at least. Correct it.")
    if isinstance(chosen, int) and most and chosen > most:
        raise ModelError(f"{path}: num_experts_per_tok={chosen} is more than the {most} experts there are. Correct it.")
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    shared = getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ModelError(
            f"{path}: num_attention_heads={heads} is no multiple of num_key_value_heads={shared}. Correct one."
        )
    is_even = not isinstance(heads, int) or not isinstance(width, int) or width % heads == 0
    if not is_even and not {"head_dim", "qk_nope_head_dim"} & text.keys():
        raise ModelError(f"{path}: hidden_size={width} is no multiple of num_attention_heads={heads}. Correct one.")
    activation = getattr(config, "hidden_act", None)
    if isinstance(activation, str) and activation not in ACT2FN:
        raise ModelError(f"{path}: hidden_act={activation} is no activation that transformers knows. Correct it.")


def _check_vision(path: Path, said: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raises: ModelError for a vision tower that config.json does not describe, or not as one that can be."""
    tower = getattr(config, "vision_config", None)
    if tower is None:
        return
    if not isinstance(said.get("vision_config"), dict):
        raise ModelError(f"{path}: has no vision_config, and without it the model's size is not known. Add it.")
    for field in OF_VISION:
        value = getattr(tower, field, None)
        if isinstance(value, int) and value < 1:
            raise ModelError(f"{path}: {field}={value} of vision_config is no size. Correct it.")
