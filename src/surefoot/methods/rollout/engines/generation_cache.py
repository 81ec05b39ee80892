"""The cache of a model's generation: its argument, and the selection of its rows, whatever its layers hold."""

import inspect
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from surefoot.errors import ModelError
from surefoot.models.decoder_layers import class_name

REMEDY = "Set rollout_engine: vllm if vLLM serves this model."
CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")
"""Names of the cache in the forwards of models and in their outputs: of most, of Mamba's, of RWKV's."""
WITHOUT_ATTENTION = {"cache_params", "state"}
"""Names in models without attention. Their mask tells padding, and a token after a prompt is none."""
CACHE_OBJECTS = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, DummyLayer)
"""Classes whose attributes are parts of a cache."""
BATCH_DIMENSIONS = {"indexer_position_ids": 1}
"""Batch dimension of the tensors of a cache, by their attribute, where it is not the first."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the argument of the model's forward that takes its cache.

    Raises: ModelError if it has none.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise ModelError(
        f"rollout_engine: local cannot generate with {class_name(model)}: its forward takes no cache "
        f"({', '.join(CACHE_ARGUMENTS)}). {REMEDY}"
    )


def cache_of(model: PreTrainedModel, output: Mapping[str, Any]) -> Any:
    """Return the cache in the output of a forward. Raises: ModelError if it has none."""
    name = cache_argument(model)
    cache = output.get(name)
    if cache is None:
        raise ModelError(
            f"rollout_engine: local cannot generate with {class_name(model)}: its forward returns no {name} with "
            f"use_cache=True. {REMEDY}"
        )
    return cache


def select_cache_rows(cache: Any, index: Tensor) -> None:
    """Select rows of a cache in place: of every tensor in it. A row may be selected several times.

    The methods of transformers' layers for this are incomplete: recurrent layers have none, and MiniMax's and
    DeepSeek V4's caches leave out a part of their states.
    """
    _select(cache, index, {})


def _select(part: Any, index: Tensor, selected: dict[int, tuple[Tensor, Tensor]]) -> None:
    """`selected`: the tensors so far and their selections, by id, since a cache may hold a tensor twice."""
    if isinstance(part, CACHE_OBJECTS):
        part = vars(part)
    if isinstance(part, MutableMapping):
        items: list[tuple[Any, Any]] = list(part.items())
    elif isinstance(part, (MutableSequence, tuple)):
        items = list(enumerate(part))
    else:
        return
    for key, value in items:
        if not isinstance(value, Tensor):
            _select(value, index, selected)
            continue
        dimension = BATCH_DIMENSIONS.get(key, 0)
        if value.dim() <= dimension or (value.numel() == 0 and value.dim() == 1):
            continue  # a number, or keys that nothing was appended to
        if id(value) not in selected:
            selected[id(value)] = value, torch.index_select(value, dimension, index.to(value.device))
        part[key] = selected[id(value)][1]
