"""The description of a mask says what transformers' own mask says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.masking_utils import (
    blockwise_overlay,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    sliding_window_overlay,
)

from surefoot.models import attention
from surefoot.models.attention import packed_attention
from surefoot.models.sample_layout import SampleLayout, samples_are
from surefoot.models.sample_masks import NeedsOwnAttentionError, SampleMask

LENGTHS = [11, 9]
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, 0, 0, -1, 1, 1, 1, 2, 2, 2, 2, 2, 2, -1, -1, -1]])
"""Blocks that are longer than the window; one begins each sample's end or beginning."""
WINDOW = 3


def full(blocks: torch.Tensor, **arguments: Any) -> Any:
    return create_causal_mask(**arguments, block_sequence_ids=blocks)


def windowed_blocks(blocks: torch.Tensor, **arguments: Any) -> Any:
    """The windowed layers of Gemma 3 and 4."""
    union, window = blockwise_overlay(blocks), sliding_window_overlay(WINDOW)
    return create_causal_mask(**arguments, or_mask_function=union, and_mask_function=window)


def blocks_beyond_the_window(blocks: torch.Tensor, **arguments: Any) -> Any:
    return create_sliding_window_causal_mask(**arguments, block_sequence_ids=blocks)


def without_blocks(**arguments: Any) -> Any:
    del arguments["blocks"]
    return create_sliding_window_causal_mask(**arguments)


def chunked(**arguments: Any) -> Any:
    del arguments["blocks"]
    return create_chunked_causal_mask(**arguments)


def arguments_for(implementation: str, lengths: list[int], blocks: torch.Tensor) -> dict[str, Any]:
    config = Gemma3TextConfig(sliding_window=WINDOW)
    config.attention_chunk_size = 4
    config._attn_implementation = implementation
    return {
        "config": config,
        "inputs_embeds": torch.zeros(1, sum(lengths), 4),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "blocks": blocks,
    }


@pytest.mark.parametrize("create", [full, windowed_blocks, blocks_beyond_the_window, without_blocks, chunked])
def test_each_sample_of_a_row_sees_what_it_sees_alone_in_transformers(create: Callable[..., Any]) -> None:
    described = create(**arguments_for(attention.IMPLEMENTATION, LENGTHS, BLOCKS))
    assert isinstance(described, SampleMask)
    for span, length in zip(SampleLayout.of(LENGTHS).spans, LENGTHS, strict=True):
        theirs = create(**arguments_for("eager", [length], BLOCKS[:, span]))[0, 0] == 0
        found = described.of_spans([span]).allowed(length, torch.device("cpu"))
        assert found is not None
        assert torch.equal(found, theirs)


def test_blocks_of_another_row_are_refused() -> None:
    described = full(**arguments_for(attention.IMPLEMENTATION, LENGTHS, BLOCKS))
    states = torch.zeros(1, 1, 9, 4)
    with samples_are(SampleLayout.of([9])), pytest.raises(NeedsOwnAttentionError):
        packed_attention(torch.nn.Identity(), states, states, states, described)
