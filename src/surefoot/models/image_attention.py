"""Attention within images, plugged into transformers under the name `surefoot_flash`.

A vision tower computes all images of a batch as one row of patches, in which each segment, an image or a window of one,
attends to itself alone. transformers hands the ends of the segments to functions with "flash" in their name, and calls
others once for each segment. Here one kernel computes all of them, or one call all that are equally long.
"""

import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from surefoot.models.attention_math import as_autocast, with_heads_of
from surefoot.models.varlen_attention import attend_in_one_kernel, has_kernel

IMPLEMENTATION = "surefoot_flash"
EVERYTHING = (-1, -1)
"""Window of the kernel in which the tokens of a segment see each other."""


def hands_over_segments(stock: type[PreTrainedModel]) -> bool:
    """Return whether the vision tower in a model's file tells flash attention where segments end."""
    return hasattr(sys.modules[stock.__module__], "get_vision_attention_seqlens") and stock._supports_sdpa


@torch.compiler.disable  # type: ignore[untyped-decorator]
def image_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each segment, without a mask; without segments do what `sdpa`, transformers' own, does.

    `cu_seq_lens_q`: 0 and the end of each segment, int32 [segments + 1]. Shapes: query [1, heads, T, D], key and value
    [1, kv_heads, T, D] -> [1, T, heads, D].
    """
    if cu_seq_lens_q is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out, None
    query, key, value = as_autocast(query, key, value)
    dropout = options.get("dropout") or 0.0
    if has_kernel(query, value) and not dropout:
        longest = int(options["max_length_q"])
        return attend_in_one_kernel(query, key, value, cu_seq_lens_q, longest, EVERYTHING, scaling), None
    key, value = (with_heads_of(query, tensor) for tensor in (key, value))
    attended = _attend_by_length(query[0], key[0], value[0], cu_seq_lens_q, dropout_p=dropout, scale=scaling)
    return attended.transpose(0, 1)[None], None


def _attend_by_length(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, **options: Any) -> Tensor:
    """Compute attention within segments, those of one length at a time. Shapes: [heads, T, D] -> [heads, T, D].

    The host waits for the device.
    """
    begins_of: dict[int, list[int]] = {}
    for begin, end in pairwise(ends.tolist()):
        begins_of.setdefault(end - begin, []).append(begin)
    tokens = [
        (torch.tensor(begins)[:, None] + torch.arange(length)).to(query.device)  # [segments, length]
        for length, begins in begins_of.items()
    ]
    # Heads and segments are both independent of each other: the function may take either for the other.
    attended = [
        F.scaled_dot_product_attention(query[:, rows], key[:, rows], value[:, rows], **options).flatten(1, 2)
        for rows in tokens
    ]
    if len(attended) == 1:  # in the order of the row
        return attended[0]
    return torch.cat(attended, dim=1)[:, torch.cat([rows.flatten() for rows in tokens]).argsort()]


AttentionInterface.register(IMPLEMENTATION, image_attention)
