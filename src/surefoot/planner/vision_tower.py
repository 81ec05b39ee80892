"""The vision tower of a model on tensors without storage, with the largest images that fit into a micro-batch.

The data set is not read: every sequence is assumed to hold as many images of `max_pixels` as fit.
"""

import math
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image as Pillow
from torch import Tensor, nn
from transformers import AttentionInterface

from surefoot.config import RunConfig
from surefoot.data.conversation import TEXT_BESIDE_IMAGES_TOKENS
from surefoot.data.image_processor import Vision
from surefoot.data.model_processor import (
    GRID,
    MissingPackage,
    ModelProcessor,
    limits_of,
    load_model_processor,
    processor_file,
    vision_class,
)
from surefoot.models.build import BuiltModel, load_config
from surefoot.models.pretrained import meta_model
from surefoot.models.vision import vision_tower
from surefoot.planner.op_costs import ATTEND

ATTENTION = "surefoot_plan_flash"
"""Name of the attention. transformers passes a batch's patches as one sequence, with lengths, to names with "flash"."""

VAR_KEYWORD = Parameter.VAR_KEYWORD
LARGEST_SIDE, SMALLEST_SIDE = 2048, 64
"""Sides of the square images that are tried, in pixels, where only the processor limits their size."""


@dataclass(frozen=True)
class ImageBatch:
    """Number and size of the images of one micro-batch."""

    count: int
    tokens_each: int
    """Number of tokens of one image."""
    patches_each: int = 0
    """Number of patches of one image, for a tower that reads patches of grids."""
    tiles: tuple[int, ...] = ()
    """Shape of one image's pixels for any other tower."""
    is_counted: bool = True
    """Whether the tower's memory and time can be counted: not if it reads more than pixels."""

    def __str__(self) -> str:
        left_out = "" if self.is_counted else " (memory and time of their tower are not counted)"
        return f"{self.count} image{'s' if self.count > 1 else ''} of {self.tokens_each} tokens{left_out}"


def fit_images(run: RunConfig, base: Path, rows: int, length: int) -> ImageBatch | None:
    """Return the most images that fit into `rows` sequences of `length` tokens; None for a run that reads none."""
    config = load_config(base)
    if vision_class(config) is None:
        return None
    vision = config.vision_config
    room = max(1, length - TEXT_BESIDE_IMAGES_TOKENS)
    try:
        processor = load_model_processor(base, config) if processor_file(base) is not None else None
    except MissingPackage:
        return None  # rows with images would be refused
    if processor is not None and not processor.has_cells:
        largest = _measure_largest(processor, run.max_pixels, rows, room)
        return largest if not largest.tiles else replace(largest, is_counted=_reads_pixels_alone(base))
    if not _reads_grids(vision):
        return None
    side = vision.patch_size * vision.spatial_merge_size
    most = room * side**2 if processor is None else limits_of(processor.image_processor)[1]
    most = run.max_pixels or most
    cells = max(1, min(room, most // side**2))
    cells -= cells % _window_cells(vision) if cells > _window_cells(vision) else 0
    return ImageBatch(rows * max(1, room // cells), cells, cells * vision.spatial_merge_size**2)


def _measure_largest(processor: ModelProcessor, max_pixels: int | None, rows: int, room: int) -> ImageBatch:
    """Return the images of a processor that decides itself how large they are: the largest square one that fits."""
    side = min(LARGEST_SIDE, math.isqrt(max_pixels) if max_pixels is not None else LARGEST_SIDE)
    while True:
        with Pillow.new("RGB", (side, side)) as picture:
            tensors, (text,) = processor.process([picture])
        tokens = text.count(processor.feature_token)
        if tokens <= room or side <= SMALLEST_SIDE:
            break
        side //= 2
    count = rows * max(1, room // max(1, tokens))
    shape = tuple(tensors["pixel_values"].shape)
    return ImageBatch(count, tokens, shape[0]) if len(shape) == 2 else ImageBatch(count, tokens, tiles=shape)


def _reads_pixels_alone(base: Path) -> bool:
    """Return whether the tower of a model's folder computes from pixels, without a second required argument."""
    named_tower = vision_tower(meta_model(base))
    assert named_tower is not None
    arguments = signature(named_tower[1].forward).parameters.values()
    needed = [argument for argument in arguments if argument.default is argument.empty and argument.kind != VAR_KEYWORD]
    return len(needed) == 1


def add_images(built: BuiltModel, images: ImageBatch) -> Vision | None:
    """Return the inputs of images without values, and make the model accept them. Call it in the FakeTensorMode.

    None: the tower is not counted.
    """
    if not images.is_counted:
        return None
    model: Any = built.model
    named_tower = vision_tower(model)
    assert named_tower is not None
    vision, tower = model.config.vision_config, named_tower[1]
    vision._attn_implementation = ATTENTION
    if images.tiles:
        count, *shape = images.tiles
        # All tiles are one batch, and nothing cuts them: which of them are padding would depend on their values.
        pixels = torch.empty(images.count * count, *shape)
        pixels = pixels.flatten(0, -4) if pixels.dim() > 4 else pixels

        def tile_features(pixel_values: Tensor, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(pooler_output=[tower(pixel_values).last_hidden_state])

        model.base_model.get_image_features = tile_features
        return Vision({"pixel_values": pixels}, images.count, is_blank=True)
    patches = images.count * images.patches_each
    cells = images.count * images.tokens_each
    window = _window_cells(vision) * vision.spatial_merge_size**2
    lengths: dict[str, Any] = {
        "position_ids": torch.empty(patches, 2, dtype=torch.int64),
        "cu_seqlens": torch.empty(images.count + 1, dtype=torch.int32),
        "max_seqlen": images.patches_each,
        "window_index": torch.empty(cells, dtype=torch.int64),
        "cu_window_seqlens": torch.empty(2, dtype=torch.int32),
        "max_window_seqlen": window if images.patches_each % window == 0 else images.patches_each,
        "interp_indices": torch.empty(patches, 4, dtype=torch.int64),
        "interp_weights": torch.empty(patches, 4),
    }

    def features(pixel_values: Tensor, image_grid_thw: Tensor, **_: Any) -> SimpleNamespace:
        encoded = tower(pixel_values, grid_thw=image_grid_thw, **lengths)
        deepstack = [[feature] for feature in getattr(encoded, "deepstack_features", None) or ()]
        return SimpleNamespace(pooler_output=[encoded.pooler_output], deepstack_features=deepstack)

    model.base_model.get_image_features = features
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.empty(images.count, 3, dtype=torch.int64)
    return Vision({"pixel_values": torch.empty(patches, values), GRID: grid}, images.count, is_blank=True)


def _reads_grids(vision: Any) -> bool:
    """Return whether a tower reads patches of grids, whose neighbours are merged."""
    return all(hasattr(vision, name) for name in ("patch_size", "spatial_merge_size", "temporal_patch_size"))


def _window_cells(vision: Any) -> int:
    """Return the cells of a window of the tower; 1 without windows. Images are assumed to consist of whole windows."""
    side = vision.patch_size * vision.spatial_merge_size
    return max(1, int((getattr(vision, "window_size", side) // side) ** 2))


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, max_length_q: int | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Attend within images, or windows of images, that are all of one length; without a length, within each row."""
    if max_length_q is None:
        return ATTEND(query, key, value, 0.0, False)[0].transpose(1, 2), None
    heads, patches, width = query.shape[1:]

    def split_images(states: Tensor) -> Tensor:
        return states.reshape(heads, patches // max_length_q, max_length_q, width).transpose(0, 1)

    out = ATTEND(split_images(query), split_images(key), split_images(value), 0.0, False)[0]
    return out.transpose(1, 2).reshape(1, patches, heads, width), None


AttentionInterface.register(ATTENTION, _attend)
