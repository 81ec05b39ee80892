"""Vision towers attend within images as transformers' own function does, in few calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from surefoot.models import vision
from surefoot.models.image_attention import IMPLEMENTATION, image_attention
from tests.support.cuda_branches import cuda_branches
from tests.support.vision import KINDS, make_vision_model, vision_tokenizer

GRIDS = torch.tensor([[1, 4, 8], [1, 12, 16], [1, 4, 8], [1, 8, 4], [1, 12, 12]])
"""Frames, height and width of images, in patches."""


@contextmanager
def counted_calls() -> Iterator[list[tuple[int, ...]]]:
    """Count the calls of torch's attention: the shapes of their queries."""
    shapes: list[tuple[int, ...]] = []
    attend = F.scaled_dot_product_attention

    def count(query: Tensor, *args: Any, **options: Any) -> Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", count)
        yield shapes


def features_and_gradients(model: PreTrainedModel, pixels: Tensor) -> list[Tensor]:
    features = model.base_model.get_image_features(pixels, GRIDS, return_dict=True)
    rows = torch.cat(list(features.pooler_output))
    tower = vision.vision_tower(model)
    assert tower is not None
    weights = [parameter for parameter in tower[1].parameters() if parameter.requires_grad]
    return [rows.detach(), *torch.autograd.grad(rows.square().sum(), weights, allow_unused=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_towers_attend_within_images_in_few_calls(kind: str) -> None:
    model = make_vision_model(kind, vision_tokenizer()).eval()
    tower = vision.vision_tower(model)
    assert tower is not None
    settings = model.config.vision_config
    size = settings.in_channels * settings.temporal_patch_size * settings.patch_size**2
    pixels = torch.randn(int(GRIDS.prod(1).sum()), size, generator=torch.Generator().manual_seed(0))
    with counted_calls() as stock_calls:
        wanted = features_and_gradients(model, pixels)
    vision.plug_in(model)
    assert settings._attn_implementation == IMPLEMENTATION
    with counted_calls() as calls:
        found = features_and_gradients(model, pixels)
    with counted_calls() as kernel_calls, cuda_branches(), torch.autocast("cpu", torch.bfloat16):
        features = features_and_gradients(model, pixels)[0]
    assert len(kernel_calls) == len(stock_calls), "one for each segment, by the stand-in for the kernel"
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert float((features - wanted[0]).norm() / wanted[0].norm()) < 0.03
    lengths = len({int(grid.prod()) for grid in GRIDS})
    if kind == "qwen2_5_vl":  # two blocks of three attend within windows
        windows = sum(-(-h // 4) * -(-w // 4) for _, h, w in GRIDS.tolist())
        assert (len(stock_calls), len(calls)) == (2 * windows + len(GRIDS), 2 + lengths)
    else:
        assert (len(stock_calls), len(calls)) == (3 * len(GRIDS), 3 * lengths)


def test_keys_that_heads_share_are_repeated_where_no_kernel_does_that() -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 10, 13], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 13, 8) for heads in (4, 2, 2))
    options: dict[str, Any] = {"cu_seq_lens_q": ends, "max_length_q": 7}
    found, _ = image_attention(nn.Module(), query, key, value, None, **options)
    with cuda_branches():
        by_kernel, _ = image_attention(nn.Module(), *(x.bfloat16() for x in (query, key, value)), None, **options)
    for begin, end in pairwise(ends.tolist()):
        parts = (tensor[:, :, begin:end] for tensor in (query, key, value))
        wanted = F.scaled_dot_product_attention(*parts, enable_gqa=True).transpose(1, 2)  # type: ignore[misc]
        torch.testing.assert_close(found[:, begin:end], wanted, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(by_kernel[:, begin:end].float(), wanted, atol=0.05, rtol=0.05)


def test_a_tower_keeps_its_attention_when_the_decoder_is_given_another() -> None:
    model = make_vision_model("qwen3_vl", vision_tokenizer())
    vision.plug_in(model)
    with vision.attention(model, "eager"):
        assert model.config.text_config._attn_implementation == "eager"
        assert model.config.vision_config._attn_implementation == IMPLEMENTATION
    assert model.config.vision_config._attn_implementation == IMPLEMENTATION
