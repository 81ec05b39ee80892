"""Masks of samples: the tokens that each token sees, as a model's mask functions describe them.

transformers describes a mask by functions of two positions and builds a tensor from them. Here causal, windowed and
chunked masks stay a description, from which attention over packed samples works without a tensor; every other mask is
built. Some models have their windows and chunks nowhere else. The tokens of an image may see each other in both
directions: such blocks stay a description, too, of which attention builds the part of one sample at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_overlay,
)

READ_BY_ATTENTION = {
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "moe", "hybrid",
    "hybrid_sliding", "sparse", "dense", "mlp", "mamba", "attention", "recurrent",
}  # fmt: skip
"""Kinds of layers in which nothing but the attention function reads the mask, and samples that mix do so from their
first tokens on. Others (sparse indexers, compressed keys) compute with it, or begin to mix after many tokens."""
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Names under which configs list the kind of each layer."""


class NeedsOwnAttentionError(Exception):
    """A model cannot be given attention over packed samples: it computes with a mask that is only described here, or
    attends to other states than those of its row."""


@dataclass(frozen=True, eq=False)
class SampleMask:
    """Which tokens a token sees in its own sample: itself and those before, within a window or a chunk."""

    window: int | None = None
    """Number of newest tokens that are seen, the token itself included."""
    chunk: int | None = None
    """Length of the chunks into which a sample is cut; tokens see their own chunk."""
    blocks: Tensor | None = None
    """Number of each token's block, or -1: int64 [T]. Tokens of a block also see those of it that come later."""
    are_blocks_windowed: bool = False
    """Whether tokens of a block see only those of it that are in the window."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NeedsOwnAttentionError(name)

    def __getitem__(self, index: Any) -> "SampleMask":
        """Return the mask itself for all of its rows: Gemma 4 cuts it to those of the tokens that are wanted."""
        if isinstance(index, tuple) and all(part in (slice(None), slice(0, None)) for part in index):
            return self
        raise NeedsOwnAttentionError(str(index))

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        raise NeedsOwnAttentionError(str(func))

    def of_spans(self, spans: Sequence[slice]) -> "SampleMask":
        """Return the mask of one sample, which reads these tokens of the row."""
        if self.blocks is None:
            return self
        return replace(self, blocks=torch.cat([self.blocks[span] for span in spans]))

    def allowed(self, length: int, device: torch.device) -> Tensor | None:
        """Return which tokens are seen in a sample, bool [length, length]; None for plain causal attention."""
        is_windowed = self.window is not None and length > self.window
        is_chunked = self.chunk is not None and length > self.chunk
        is_plain = not is_windowed and not is_chunked and self.blocks is None
        return None if is_plain else self.allowed_after(0, length, device)

    def allowed_after(self, before: int, length: int, device: torch.device) -> Tensor:
        """Return which tokens are seen by the tokens after the first `before`: bool [length, before + length]."""
        keys = torch.arange(before + length, device=device)
        at = keys[before:, None]
        blocks = self.blocks if self.blocks is not None else torch.full_like(keys, -1)
        is_same_block = (blocks[before:, None] == blocks) & (blocks >= 0)
        allowed = at >= keys
        if self.are_blocks_windowed:
            allowed |= is_same_block
        if self.window:
            allowed &= at - keys < self.window
        if self.chunk:
            allowed &= at // self.chunk == keys // self.chunk
        return allowed if self.are_blocks_windowed else allowed | is_same_block


def layer_kinds(text_config: Any) -> list[str]:
    """Return the kind of each layer of a decoder; empty if its config lists none."""
    return next((list(kinds) for name in LAYER_KINDS if (kinds := getattr(text_config, name, None))), [])


def has_unknown_layers(text_config: Any) -> bool:
    """Return whether a decoder has layers of which a short probe cannot tell whether they mix samples."""
    return not READ_BY_ATTENTION.issuperset(layer_kinds(text_config))


def describe_mask(
    *_: Any, mask_function: Callable[..., Any], config: Any = None, local_size: int | None = None, **options: Any
) -> SampleMask | Tensor:
    """Return a description of a mask if it is causal, windowed or chunked, also with blocks, else the mask itself.

    transformers calls it where a model creates a mask. Shapes of a built mask: bool [1, 1, T, T].
    """
    names = [name for name, _ in _parts_of(mask_function)]
    parts = dict(_parts_of(mask_function))
    window = getclosurevars(parts[_WINDOWED]).nonlocals["sliding_window"] if _WINDOWED in parts else None
    if KNOWN.issuperset(names):
        return _describe(window, local_size if _CHUNKED in parts else None)
    others = sorted(name for name in names if name not in KNOWN)
    if others == sorted((_BLOCKS, _UNION)) and _CHUNKED not in parts:  # a token before, or one of the same block
        blocks = getclosurevars(parts[_BLOCKS]).nonlocals["block_sequence_ids"]
        return SampleMask(window, None, blocks[0], _WINDOWED not in dict(_parts_of(parts[_UNION])))
    options = {**options, "allow_is_causal_skip": False, "local_size": local_size}
    return sdpa_mask(mask_function=mask_function, config=config, **options)  # type: ignore[no-any-return]


@cache
def _describe(window: int | None, chunk: int | None) -> SampleMask:
    """Return the same object for the same mask, which compiled layers need not look into again."""
    return SampleMask(window, chunk)


def _parts_of(function: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the names and functions of positions that a mask function is composed of, itself included."""
    yield _name(function), function
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part) and not isinstance(part, Tensor):
                yield from _parts_of(part)


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


_EMPTY = torch.empty(0)
_WINDOWED = _name(sliding_window_overlay(1))
_CHUNKED = _name(chunked_overlay(1, _EMPTY))
_BLOCKS = _name(blockwise_overlay(_EMPTY))
_UNION = _name(or_masks())
KNOWN = {
    _WINDOWED,
    _CHUNKED,
    _name(causal_mask_function),
    _name(and_masks()),
    _name(packed_sequence_mask_function(_EMPTY)),
    _name(remap_positions_for_packed_sequence(causal_mask_function, _EMPTY)),
}
"""Names of the functions that compose causal, windowed and chunked masks, of packed rows or not."""
