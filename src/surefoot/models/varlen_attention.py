"""Attention within the parts of a row in one kernel: FlashAttention-2, as torch has it.

Independent of what the parts are: samples of a pack, or images.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from surefoot.models.attention_math import with_heads_of

CAUSAL = (-1, 0)
"""Window of the kernel in which a token sees all before it."""
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""Largest head size of the kernel, and what head sizes must be a multiple of."""
SHARES_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's kernel supports grouped keys and values (GQA); up to torch 2.11 they are repeated for it."""


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether one kernel can compute plain attention within all parts of a row: FlashAttention-2."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and max(query.shape[-1], value.shape[-1]) <= LARGEST_HEAD
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


@cache
def aligns_ends(device: torch.device) -> bool:
    """Return whether the kernel on a GPU lets the last query of a part see up to its last key, if keys are more.

    Then a completion may read a copy of its prompt's keys before its own. Documented for FlashAttention-2, and tried
    here once, with and without a window. The host waits for the device.
    """
    query = torch.zeros(1, 1, 2, HEAD_MULTIPLE, dtype=torch.bfloat16, device=device)
    value = torch.arange(1.0, 5.0, dtype=torch.bfloat16, device=device)[:, None].expand(1, 1, 4, HEAD_MULTIPLE)
    ends, ends_read = (torch.tensor([0, count], dtype=torch.int32, device=device) for count in (2, 4))
    means = [
        attend_in_one_kernel(query, value, value, ends, 2, window, None, Keys(ends_read, 4))[0, :, 0, 0].tolist()
        for window in (CAUSAL, (1, 0))
    ]
    return means == [[2.0, 2.5], [2.5, 3.5]]


class Keys(NamedTuple):
    """Keys and values of parts that have more of them than queries."""

    ends: Tensor
    """0 and the end of each part, int32 [parts + 1]."""
    longest: int
    """Number of keys of the part that has most."""


def attend_in_one_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    window: tuple[int, int],
    scaling: float | None,
    keys: Keys | None = None,
) -> Tensor:
    """Compute attention within the parts of a row, where `has_kernel` says so.

    `ends`: 0 and the end of each part, int32 [parts + 1]; `longest`: length of the longest; `window`: how many tokens
    are seen before and after each, -1 for all; `keys`: set if a part has other keys than queries, whose last ones
    belong together (`aligns_ends`). Shapes: [1, heads, T, D or V] -> [1, T, heads, V].
    """
    ends_read, longest_read = keys or (ends, longest)
    options: dict[str, Any] = {"enable_gqa": True} if SHARES_HEADS else {}
    if not SHARES_HEADS:
        key, value = (with_heads_of(query, tensor) for tensor in (key, value))
    scale, width = scaling or query.shape[-1] ** -0.5, value.shape[-1]
    size = max(query.shape[-1], width)
    size += -size % HEAD_MULTIPLE  # the kernel takes one head size; added zeros change neither scores nor outputs
    query, key, value = (_widen(tensor, size) for tensor in (query, key, value))
    query_THD, key_THD, value_THD = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    out = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        ends,
        ends_read,
        longest,
        longest_read,
        scale=scale,
        window_size=window,
        **options,
    )
    assert isinstance(out, Tensor)
    return out[None, ..., :width]


def _widen(tensor: Tensor, size: int) -> Tensor:
    """Return heads [1, heads, T, D] with zeros up to a head size."""
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))
