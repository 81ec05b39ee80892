"""Numbers of frozen, trained and expert elements of a model and of its largest layer, as sharding needs them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from surefoot.errors import ModelError
from surefoot.models.build import BuiltModel, load_config
from surefoot.models.decoder_layers import decoder_layers
from surefoot.models.expert_layouts import experts_of, is_fused_experts
from surefoot.models.model_size import pinned_bytes
from surefoot.models.quantization.base import count_weights
from surefoot.models.sample_masks import layer_kinds

FP32_BYTES, HALF_BYTES = 4, 2
FIELDS = (
    "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size moe_intermediate_size "
    "num_experts num_local_experts n_routed_experts num_experts_per_tok"
).split()
"""Config fields that determine a model's size, by transformers' names."""
COUNTS = (*FIELDS, "num_key_value_heads", "head_dim", "shared_expert_intermediate_size", "n_shared_experts")
VISION_FIELDS = ("patch_size", "spatial_merge_size", "temporal_patch_size", "depth", "hidden_size", "num_heads")
"""Fields of a vision_config that must be positive, for the families that have them."""
MAX_LAYERS = 1000
NUM_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_FIELDS = (
    *NUM_EXPERTS_FIELDS, "moe_intermediate_size", "num_experts_per_tok", "shared_expert_intermediate_size",
    "n_shared_experts",
)  # fmt: skip
OTHER_NAMES = {
    "num_hidden_layers": ("num_layers", "layers_block_type", "hybrid_override_pattern"),
    "intermediate_size": ("block_ff_dim",),
}
"""Names of fields in config.json that transformers' classes compute others from."""
WITHOUT_KEYS = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"}
"""Kinds of layers that keep no keys and values of the tokens before."""


@dataclass(frozen=True)
class Elements:
    """Numbers of elements of a part of a model; experts are separate, because they are sharded over other ranks."""

    frozen: int = 0
    trained: int = 0
    expert_frozen: int = 0
    expert_trained: int = 0
    frozen_bytes: int = 0
    """Bytes of the frozen elements, in the format in which they are stored."""
    expert_frozen_bytes: int = 0

    def __add__(self, other: "Elements") -> "Elements":
        return Elements(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Elements") -> "Elements":
        return Elements(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> int:
        return self.frozen + self.trained + self.expert_frozen + self.expert_trained

    @property
    def all_trained(self) -> int:
        return self.trained + self.expert_trained


@dataclass(frozen=True)
class Shape:
    """Shape of a parameter for sharding along its first dimension."""

    rows: int
    row_bytes: int
    is_expert: bool
    is_trained: bool

    def pinned_bytes(self, parts: int) -> int:
        """Return the bytes of one shard in pinned memory."""
        return pinned_bytes(-(-self.rows // parts) * self.row_bytes)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model as it is trained."""

    whole: Elements
    layer: Elements
    """The largest decoder layer."""
    outside: Elements
    """Elements outside the decoder layers: embeddings, the output layer, a vision tower."""
    largest_tensor_bytes: int
    num_layers: int
    num_experts: int
    """Number of experts of the layer with the most; 0 for a dense model."""
    layer_period: int | None
    """Number of layers after which their kinds and shapes repeat; None if they never do."""
    vocabulary: int
    num_heads: int
    """Number of attention heads of a layer; 0 for a model without attention."""
    cache_elements: int
    """Elements of the keys and values of one token, in all layers."""
    tensors: Mapping[Shape, int]
    """Shape -> number of parameters of that shape."""


def count_sizes(built: BuiltModel) -> Sizes:
    """Count the parameters of a model; its tensors need no storage."""
    model = built.model
    expert_modules = [module for module in model.modules() if is_fused_experts(module)]
    expert_parameters = {parameter for module in expert_modules for parameter in module.parameters(recurse=False)}
    layers = list(decoder_layers(model))
    counts = count_weights(model)
    layer_elements = [_count_elements(layer, expert_parameters, counts) for layer in layers]
    whole = _count_elements(model, expert_parameters, counts)
    text = model.config.get_text_config()
    return Sizes(
        whole=whole,
        layer=max(layer_elements, key=lambda elements: elements.total),
        outside=whole - sum(layer_elements, Elements()),
        largest_tensor_bytes=max(parameter.nbytes for parameter in model.parameters()),
        num_layers=len(layers),
        num_experts=max((experts_of(module) for module in expert_modules), default=0),
        layer_period=_find_period(layers, layer_kinds(text)),
        vocabulary=int(text.vocab_size),
        num_heads=int(getattr(text, "num_attention_heads", None) or 0),
        tensors=Counter(
            Shape(rows, parameter.nbytes // rows, parameter in expert_parameters, parameter.requires_grad)
            for parameter in model.parameters()
            if (rows := parameter.shape[0] if parameter.dim() else 1)
        ),
        cache_elements=_count_cached_layers(text, len(layers)) * _count_cached_elements(text),
    )


def _find_period(layers: Sequence[nn.Module], kinds: Sequence[str]) -> int | None:
    """Return `Sizes.layer_period` of a decoder's layers and their kinds; empty `kinds` mean that all are of one."""
    shapes = [
        tuple((name, parameter.shape, parameter.requires_grad) for name, parameter in layer.named_parameters())
        for layer in layers
    ]
    described = list(zip(shapes, kinds or [""] * len(layers), strict=False))
    return next((period for period in range(1, len(described)) if described[period:] == described[:-period]), None)


def _count_cached_layers(text: PreTrainedConfig, num_layers: int) -> int:
    """Return the number of layers that keep something of every token; recurrent ones keep a state of constant size."""
    kinds = layer_kinds(text)
    return sum(kind not in WITHOUT_KEYS for kind in kinds) if kinds else num_layers


def _count_cached_elements(text: PreTrainedConfig) -> int:
    """Return the elements of the keys and values of one token in a layer; 0 for a model without attention."""
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0
    width = text.to_dict().get("head_dim") or text.hidden_size // heads  # as attributes, some differ by layer
    return _count_latent_elements(text) or 2 * int(_read_kv_heads(text) or heads) * int(width)


def _read_kv_heads(text: PreTrainedConfig) -> int | None:
    """Return the heads of keys and values in most layers; None without any. Gemma 4 has fewer in some layers."""
    try:
        return getattr(text, "num_key_value_heads", None)
    except RuntimeError:  # it is an attribute of each layer, and has no value for all
        heads: int | None = text.to_dict().get("num_key_value_heads")
        return heads


def _count_latent_elements(text: PreTrainedConfig) -> int:
    """Return the cached elements of a token per layer with multi-head latent attention; 0 without it."""
    rank, rotary = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return rank + rotary if isinstance(rank, int) and isinstance(rotary, int) else 0


def _count_elements(module: nn.Module, expert_parameters: set[nn.Parameter], weights: Mapping[Tensor, int]) -> Elements:
    counts: Counter[tuple[bool, bool]] = Counter()
    frozen_bytes: Counter[bool] = Counter()
    for parameter in module.parameters():
        is_expert = parameter in expert_parameters
        counts[is_expert, parameter.requires_grad] += weights[parameter]
        if not parameter.requires_grad:
            frozen_bytes[is_expert] += parameter.nbytes
    return Elements(
        frozen=counts[False, False],
        trained=counts[False, True],
        expert_frozen=counts[True, False],
        expert_trained=counts[True, True],
        frozen_bytes=frozen_bytes[False],
        expert_frozen_bytes=frozen_bytes[True],
    )


def check_fields(base: Path) -> None:
    """Raise ModelError if config.json lacks a size or has an impossible one, because a default would be a guess."""
    path = base / "config.json"
    config_json = json.loads(path.read_text("utf-8"))
    text = config_json.get("text_config", config_json)
    for field, value in text.items():
        # A dense model of a MoE family may have 0 experts, and latent attention needs no head_dim.
        least = 0 if field in EXPERT_FIELDS or (field == "head_dim" and "kv_lora_rank" in text) else 1
        if field in COUNTS and isinstance(value, int) and value < least:
            raise ModelError(f"{path}: {field}={value} is not a valid size. Correct it.")
    config = load_config(base).get_text_config()
    num_experts = next(
        (getattr(config, name) for name in NUM_EXPERTS_FIELDS if isinstance(getattr(config, name, None), int)), 0
    )
    kinds = layer_kinds(config)
    if "mlp" in kinds and "moe" not in kinds:  # of layers with names for both, none has experts
        num_experts = 0
    required = [name for name in FIELDS if getattr(config, name, None) and (num_experts or name not in EXPERT_FIELDS)]
    for field in required:
        attribute_map = getattr(config, "attribute_map", {})  # aliases of fields; families map in either direction
        family_name = attribute_map.get(field, field)
        names = {field, family_name, *OTHER_NAMES.get(field, ())} | {
            name for name, target in attribute_map.items() if target in (field, family_name)
        }
        if text is config_json and not names & config_json.keys():  # nested configs omit defaults
            raise ModelError(f"{path}: has no {family_name}, and without it the model's size is unknown. Add it.")
    _check_vision(path, config_json, load_config(base))
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ModelError(f"{path}: num_hidden_layers={layers} is more than the plan supports, {MAX_LAYERS}.")
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    kv_heads = _read_kv_heads(config)
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}. Correct one."
        )
    is_even = not isinstance(heads, int) or not isinstance(width, int) or width % heads == 0
    if not is_even and not {"head_dim", "qk_nope_head_dim"} & text.keys():
        raise ModelError(f"{path}: hidden_size={width} is not a multiple of num_attention_heads={heads}. Correct one.")
    activation = getattr(config, "hidden_act", None)
    if isinstance(activation, str) and activation not in ACT2FN:
        raise ModelError(f"{path}: hidden_act={activation} is not an activation of transformers. Correct it.")


def _check_vision(path: Path, config_json: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise ModelError if config.json does not describe a vision tower, or describes an impossible one."""
    tower = getattr(config, "vision_config", None)
    if tower is None:
        return
    if not isinstance(config_json.get("vision_config"), dict):
        raise ModelError(f"{path}: has no vision_config, and without it the model's size is unknown. Add it.")
    for field in VISION_FIELDS:
        value = getattr(tower, field, None)
        if isinstance(value, int) and value < 1:
            raise ModelError(f"{path}: {field}={value} of vision_config is not a valid size. Correct it.")
