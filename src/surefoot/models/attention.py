"""Attention over packed samples, plugged into transformers under the name `surefoot`.

A batch is one row of T tokens that holds consecutive samples; `lengths` gives their lengths. No sample attends to
another, no mask is ever built, and the cost depends on the samples' lengths, not on the pack's.

Independent of packing and of models: it gets `lengths` and `cu_seq_lens_q` through the model's keyword arguments.
"""

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from surefoot.errors import ModelError

IMPLEMENTATION = "surefoot"
SHARES_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's kernel supports grouped keys and values (GQA); up to torch 2.11 they are repeated for it."""


@dataclass(frozen=True)
class _Variant:
    """Settings of attention in a layer."""

    scaling: float | None
    dropout: float
    sliding_window: int | None
    """Number of newest tokens that a token attends to, itself included."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    lengths: list[int],
    prefix_of: tuple[int, ...] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sample; a sample with another one in `prefix_of` attends to all of that too.

    `options`: those that transformers passes: scaling, dropout, sliding_window, cu_seq_lens_q, max_length_q.
    Shapes: query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D]; sum(lengths) == T.
    Raises: ModelError for variants whose numbers would be wrong here (soft-capping, attention sinks).
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name}, which attention over packed samples does not have.")
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    variant = _Variant(options.get("scaling"), options.get("dropout", 0.0), options.get("sliding_window"))
    if prefix_of is not None:
        return _attend_with_shared_prefixes(query, key, value, lengths, prefix_of, variant), None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not variant.dropout:
        ends, longest = options["cu_seq_lens_q"], options["max_length_q"]
        return _attend_in_one_kernel(query, key, value, ends, longest, variant), None
    return _attend_sample_by_sample(query, key, value, lengths, variant), None


def _attend_in_one_kernel(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, variant: _Variant
) -> Tensor:
    """Compute `packed_attention` on CUDA. `ends`: int32 [samples + 1], 0 and the end of each sample."""
    window = (variant.sliding_window - 1, 0) if variant.sliding_window else (-1, 0)
    options: dict[str, Any] = {"enable_gqa": True} if SHARES_HEADS else {}
    if not SHARES_HEADS:
        key, value = (with_heads_of(query, tensor) for tensor in (key, value))
    query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    out = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        ends,
        ends,
        longest,
        longest,
        scale=variant.scaling,
        window_size=window,
        **options,
    )
    assert isinstance(out, Tensor)
    return out[None]


def _attend_sample_by_sample(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], variant: _Variant
) -> Tensor:
    """Compute `packed_attention` anywhere, and with dropout."""
    if query.is_cuda:  # with grouped heads only flash attention, which has no float32, avoids materialising the scores
        key, value = (with_heads_of(query, tensor) for tensor in (key, value))
    sliding_window = variant.sliding_window
    outputs = []
    begin = 0
    for length in lengths:
        span = slice(begin, begin + length)
        mask = None
        if sliding_window and length > sliding_window:
            position = torch.arange(length, device=query.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < sliding_window)
        sample = F.scaled_dot_product_attention(
            query[:, :, span],
            key[:, :, span],
            value[:, :, span],
            attn_mask=mask,
            dropout_p=variant.dropout,
            is_causal=mask is None,
            scale=variant.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(sample.transpose(1, 2))
        begin += length
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_with_shared_prefixes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    prefix_of: tuple[int, ...],
    variant: _Variant,
) -> Tensor:
    """Compute attention for samples that may continue an earlier sample, which is computed once for all of them.

    Samples that continue the same one form a batch of rows, padded to the longest; a sample's own positions count on
    from the end of its prefix. Shapes: as in `packed_attention`.
    """
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
    outputs: dict[int, Tensor] = {}
    for owner in (-1, *dict.fromkeys(prefix for prefix in prefix_of if prefix >= 0)):
        for rows in _group_rows(owner, prefix_of):
            longest = max(lengths[row] for row in rows)
            before = lengths[owner] if owner >= 0 else 0

            def stack_rows(tensor: Tensor, rows: list[int] = rows, longest: int = longest) -> Tensor:
                parts = [F.pad(tensor[:, :, spans[row]], (0, 0, 0, longest - lengths[row])) for row in rows]
                return torch.cat(parts)

            keys, values = stack_rows(key), stack_rows(value)
            if owner >= 0:
                prefix_key, prefix_value = (tensor[:, :, spans[owner]] for tensor in (key, value))
                keys = torch.cat([prefix_key.expand(len(rows), -1, -1, -1), keys], dim=2)
                values = torch.cat([prefix_value.expand(len(rows), -1, -1, -1), values], dim=2)
            at = torch.arange(longest, device=query.device)[:, None] + before
            distance = at - torch.arange(before + longest, device=query.device)
            window = variant.sliding_window
            mask = distance >= 0 if not window else (distance >= 0) & (distance < window)
            attended = F.scaled_dot_product_attention(
                stack_rows(query),
                keys,
                values,
                attn_mask=mask,
                dropout_p=variant.dropout,
                scale=variant.scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            for row, prefix in zip(rows, attended, strict=True):
                outputs[row] = prefix[:, : lengths[row]].transpose(0, 1)
    return torch.cat([outputs[row] for row in range(len(lengths))])[None]


def _group_rows(owner: int, prefix_of: tuple[int, ...]) -> list[list[int]]:
    """Return the samples that continue `owner`, in batches: all in one batch, or each alone if they continue none."""
    rows = [row for row, prefix in enumerate(prefix_of) if prefix == owner]
    return [[row] for row in rows] if owner < 0 else [rows]


def with_heads_of(query: Tensor, key_or_value: Tensor) -> Tensor:
    """Return keys or values repeated to the query's number of heads. Shapes: [1, heads, T, D], [1, kv_heads, T, D]."""
    repeats = query.shape[1] // key_or_value.shape[1]
    return key_or_value if repeats == 1 else key_or_value.repeat_interleave(repeats, dim=1)


def _skip_mask(*_: Any, **__: Any) -> None:
    """Build no mask: `lengths` already contains the information of a mask."""


AttentionInterface.register(IMPLEMENTATION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _skip_mask)
