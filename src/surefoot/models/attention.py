"""Attention over packed samples, plugged into transformers under the name `surefoot`.

A batch is one row of T tokens that holds consecutive samples. No sample attends to another, and the cost depends on the
samples' lengths, not on the pack's. Masks that a model describes by a window or a chunk are never built (see
`sample_masks`).

Independent of packing and of models: the samples of the forward in progress come from `sample_layout`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from surefoot.errors import ModelError
from surefoot.models.attention_math import AttentionTerms, as_autocast, attend
from surefoot.models.sample_layout import SampleLayout, current_layout
from surefoot.models.sample_masks import NeedsOwnAttentionError, SampleMask, describe_mask, has_unknown_layers
from surefoot.models.varlen_attention import CAUSAL, Keys, attend_in_one_kernel, has_kernel

IMPLEMENTATION = "surefoot"


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of attention in a layer."""

    terms: AttentionTerms
    mask: SampleMask
    dense_mask: Tensor | None
    """Mask of the whole row, [1, 1 or heads, T, T]: true where a token is seen, or a term of the scores."""

    @property
    def is_plain(self) -> bool:
        """Whether one kernel computes all samples: causal scaled dot products, with a window at most."""
        return self.terms.is_plain and self.dense_mask is None and self.mask.chunk is None and self.mask.blocks is None

    def of_span(self, span: slice) -> "AttentionSettings":
        """Return the settings for the tokens of one sample."""
        dense, bias = self.dense_mask, self.terms.bias
        return replace(
            self,
            mask=self.mask.of_spans([span]),
            dense_mask=dense[:, :, span, span] if dense is not None else None,
            terms=replace(self.terms, bias=bias[:, :, span, span] if bias is not None else None),
        )


def implementation_for(stock: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Return the name of the attention function that a model is trained with."""
    takes_functions = stock._supports_attention_backend or (
        stock._can_set_attn_implementation() and not _chooses_among_classes(stock)
    )
    is_packed = takes_functions and not has_unknown_layers(config.get_text_config())
    return IMPLEMENTATION if is_packed else own_implementation(stock, config)


def _chooses_among_classes(stock: type[PreTrainedModel]) -> bool:
    """Return whether a model has a class of layers for each attention function, so that no other can be given to it.

    transformers looks for functions in the whole file, where the vision tower may take them (GIT).
    """
    return any(name.endswith("ATTENTION_CLASSES") for name in vars(sys.modules[stock.__module__]))


def has_packed_attention(model: PreTrainedModel) -> bool:
    """Return whether a model attends by `packed_attention`. Its own function knows no samples that continue others."""
    return bool(model.config.get_text_config()._attn_implementation == IMPLEMENTATION)


def own_implementation(stock: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Return the name of a model's own attention function, for one that cannot be given another.

    The decoder of a vision-language model may be of another family, which has fewer functions than the whole.
    transformers builds the masks of a packed row for it, at a memory that grows with the square of the row.
    """
    decoder = MODEL_MAPPING.get(type(config.get_text_config()), stock)
    return "sdpa" if stock._supports_sdpa and getattr(decoder, "_supports_sdpa", True) else "eager"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | SampleMask | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sample; a sample that continues another one attends to all of that too.

    `attention_mask`: what `describe_mask` returned, or a tensor that the model computed, [1, 1 or heads, T, T].
    `options`: those that transformers passes: scaling, dropout, sliding_window, softcap, s_aux, position_bias.
    Shapes: query [1, heads, T, D], key [1, kv_heads, T, D], value [1, kv_heads, T, V] -> [1, T, heads, V].
    """
    samples = samples_of_row(module, query, key)
    query, key, value = as_autocast(query, key, value)
    layer = read_settings(attention_mask, options)
    if layer.mask.blocks is not None and len(layer.mask.blocks) != samples.num_tokens:
        raise NeedsOwnAttentionError(f"blocks of {len(layer.mask.blocks)} tokens")
    if layer.is_plain and has_kernel(query, value):
        window = (layer.mask.window - 1, 0) if layer.mask.window else CAUSAL
        keys = None
        if samples.prefix_of is not None:
            key, value = samples.repeat_prefixes(key), samples.repeat_prefixes(value)
            keys = Keys(samples.ends_read, max(samples.lengths_read))
        longest, scaling = max(samples.lengths), layer.terms.scaling
        return attend_in_one_kernel(query, key, value, samples.ends, longest, window, scaling, keys), None
    if samples.prefix_of is not None:
        return _attend_with_shared_prefixes(query, key, value, samples, layer), None
    return attend_sample_by_sample(query, key, value, samples, layer), None


def samples_of_row(module: nn.Module, query: Tensor, key: Tensor) -> SampleLayout:
    """Return the samples of the row whose attention is computed, for queries and keys [1, heads, T, D].

    Raises: ModelError if the model was not told its samples; NeedsOwnAttentionError if it attends to other states.
    """
    samples = current_layout()
    if samples is None:
        raise ModelError(f"{type(module).__name__} was called without the samples of its row (`samples`).")
    if query.shape[2] != samples.num_tokens or key.shape[2] != samples.num_tokens:
        raise NeedsOwnAttentionError(f"{query.shape[2]} queries, {key.shape[2]} keys")
    return samples


def read_settings(attention_mask: Tensor | SampleMask | None, options: dict[str, Any]) -> AttentionSettings:
    """Return the settings of a call of attention, from its mask and options (see `packed_attention`)."""
    terms = AttentionTerms(
        scaling=options.get("scaling"),
        dropout=options.get("dropout") or 0.0,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        bias=options.get("position_bias"),
    )
    if isinstance(attention_mask, SampleMask):
        return AttentionSettings(terms, attention_mask, None)
    return AttentionSettings(terms, SampleMask(window=options.get("sliding_window")), attention_mask)


def attend_sample_by_sample(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    samples: SampleLayout,
    layer: AttentionSettings,
    attend_sample: Callable[..., Tensor] = attend,
) -> Tensor:
    """Compute `packed_attention` anywhere, and with every term that scores may have."""
    outputs = []
    parts = (tensor.split(samples.lengths, dim=2) for tensor in (query, key, value))
    for span, queries, keys, values in zip(samples.spans, *parts, strict=True):
        part = layer.of_span(span)
        mask = part.dense_mask if part.dense_mask is not None else part.mask.allowed(queries.shape[2], query.device)
        attended = attend_sample(queries, keys, values, mask, part.terms)
        outputs.append(attended.transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_with_shared_prefixes(
    query: Tensor, key: Tensor, value: Tensor, samples: SampleLayout, layer: AttentionSettings
) -> Tensor:
    """Compute attention for samples that may continue an earlier sample, which is computed once for all of them.

    A sample's own positions count on from the end of its prefix. Shapes: as in `packed_attention`.
    """
    if layer.dense_mask is not None or layer.terms.bias is not None:
        raise ModelError("a mask or bias over the whole row cannot be used with a prompt shared by its continuations.")
    lengths, prefix_of = samples.lengths, samples.prefix_of
    assert prefix_of is not None
    # Taken apart once: the gradient of a slice is a tensor of the size of the whole.
    queries, keys, values = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    outputs = []
    for row, owner in enumerate(prefix_of):
        if owner < 0:
            allowed = layer.mask.of_spans([samples.spans[row]]).allowed(lengths[row], query.device)
            attended = attend(queries[row], keys[row], values[row], allowed, layer.terms)
        else:
            before, length = lengths[owner], lengths[row]
            whole_key, whole_value = (torch.cat([parts[owner], parts[row]], dim=2) for parts in (keys, values))
            mask = layer.mask.of_spans([samples.spans[owner], samples.spans[row]])
            if before <= length and mask.allowed(before + length, query.device) is None:
                # Causal attention of the whole needs no mask and skips what none sees: faster than the rest of it.
                whole_query = torch.cat([queries[owner], queries[row]], dim=2)
                attended = attend(whole_query, whole_key, whole_value, None, layer.terms)
                attended = attended.split([before, length], dim=2)[1]
            else:
                allowed = mask.allowed_after(before, length, query.device)
                attended = attend(queries[row], whole_key, whole_value, allowed, layer.terms)
        outputs.append(attended.transpose(1, 2))
    return torch.cat(outputs, dim=1)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, describe_mask)
