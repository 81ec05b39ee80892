"""Attention of one sample, or of rows of equal length, with every term that scores may have.

Sinks: a learned score per head that takes part in the softmax and has no value (gpt-oss). With l the log of the sum of
the exponentials of a row's scores and s the sink, its output is that of ordinary attention times sigmoid(l - s); with
that output and log(e^l + e^s) in place of l, the backward of flash attention gives the gradients with the sink.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class AttentionTerms:
    """The terms that a model adds to the scores of its attention."""

    scaling: float | None = None
    """Factor of the scores; None for 1 / sqrt(D)."""
    dropout: float = 0.0
    softcap: float | None = None
    """Bound of the scores, which become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """Score of the sink of each head, [heads]."""
    bias: Tensor | None = None
    """Term of the scores, [1, 1 or heads, n, m]."""

    @property
    def is_plain(self) -> bool:
        """Whether scaled dot products are all there is."""
        return not self.dropout and self.softcap is None and self.sinks is None and self.bias is None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: AttentionTerms) -> Tensor:
    """Return the attention of rows of n tokens over m keys, causal if there is no mask.

    `mask`: true where a key is seen, or a term of the scores; its shape broadcasts to [rows, heads, n, m].
    Shapes: query [rows, heads, n, D], key [rows, kv_heads, m, D], value [rows, kv_heads, m, V] -> [rows, heads, n, V].
    """
    has_sinks_only = terms.sinks is not None and terms.softcap is None and terms.bias is None and not terms.dropout
    if has_sinks_only and query.device.type == "cpu":
        return _attend_with_sinks(query, key, value, mask, terms)
    if terms.softcap is not None or terms.sinks is not None:
        return attend_by_definition(query, key, value, mask, terms)
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] > 1:
        # Its backward in bfloat16 takes twice as long as in float32. A token that is generated has none.
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        terms = replace(terms, bias=terms.bias.float() if terms.bias is not None else None)
        return attend(query.float(), key.float(), value.float(), mask, terms).to(query.dtype)
    if terms.bias is not None:
        mask = _add_mask(terms.bias, mask, query, key)
    if query.is_cuda:  # with grouped heads only flash attention, which has no float32, avoids materialising the scores
        key, value = (with_heads_of(query, tensor) for tensor in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=terms.dropout,
        is_causal=mask is None,
        scale=terms.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def leave_out_cudnn() -> None:
    """Let torch attend by its other kernels from now on, in the whole process.

    cuDNN makes a plan for each shape that is new, which a completion has with each token; and its results are known to
    be wrong in places (pytorch/pytorch#193893, #196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of one device in the type of autocast, if it is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def with_heads_of(query: Tensor, key_or_value: Tensor) -> Tensor:
    """Return keys or values repeated to the query's number of heads: [rows, kv_heads, m, D] -> [rows, heads, m, D]."""
    repeats = query.shape[1] // key_or_value.shape[1]
    return key_or_value if repeats == 1 else key_or_value.repeat_interleave(repeats, dim=1)


def _add_mask(scores: Tensor, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return scores with minus infinity where nothing is seen, or with the mask's term."""
    if mask is None:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask


def attend_by_definition(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: AttentionTerms
) -> Tensor:
    """Compute `attend` from its scores [rows, heads, n, m], which exist in full."""
    key, value = (with_heads_of(query, tensor) for tensor in (key, value))
    scaling = terms.scaling if terms.scaling is not None else query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if terms.bias is not None:
        scores = scores + terms.bias
    scores = _add_mask(scores, mask, query, key)
    if terms.sinks is not None:
        sinks = terms.sinks.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    weights = F.dropout(weights.to(value.dtype), terms.dropout)
    return weights @ value


def _attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: AttentionTerms) -> Tensor:
    """Compute `attend` with sinks by flash attention, without scores in memory."""
    key, value = (with_heads_of(query, tensor) for tensor in (key, value))
    scaling = terms.scaling if terms.scaling is not None else query.shape[-1] ** -0.5
    width = value.shape[-1]
    # Flash attention takes one head size; zeros change nothing.
    query, key, value = (_widen(tensor, max(width, query.shape[-1])) for tensor in (query, key, value))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    if mask is not None and mask.dim() == 2:
        mask = mask[None, None]
    out = _SinkAttention.apply(query, key, value, terms.sinks, mask, scaling)  # type: ignore[no-untyped-call]
    return out[..., :width]  # type: ignore[no-any-return]


def _widen(tensor: Tensor, width: int) -> Tensor:
    """Return a tensor with zeros behind its last dimension, which is then `width`."""
    return F.pad(tensor, (0, width - tensor.shape[-1]))


class _SinkAttention(torch.autograd.Function):
    """Flash attention on the CPU whose softmax has one more score per head. Shapes: [rows, heads, n or m, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        options = {"attn_mask": mask, "scale": scaling}
        plain, log_sum = _flash(query, key, value, 0.0, mask is None, **options)
        score = sinks.float()[None, :, None]
        log_total = torch.logaddexp(log_sum, score)
        out: Tensor = plain * torch.exp(log_sum - log_total)[..., None].to(plain.dtype)
        ctx.save_for_backward(query, key, value, out, log_total, sinks)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_total, sinks = ctx.saved_tensors
        is_causal = ctx.options["attn_mask"] is None
        d_query, d_key, d_value = _flash_backward(
            d_out, query, key, value, out, log_total, 0.0, is_causal, **ctx.options
        )
        product = (d_out.float() * out.float()).sum(-1)
        weight = torch.exp(sinks.float()[None, :, None] - log_total)  # of the sink, in each row's softmax
        d_sinks = -(product * weight).sum((0, 2)).to(sinks.dtype)
        return d_query, d_key, d_value, d_sinks, None, None
