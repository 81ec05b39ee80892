"""The vision tower of a model on tensors without storage: the largest images that a micro-batch has room for.

Rows are not looked at, so it is assumed that every sequence is as full of images of `max_pixels` as it can be.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from surefoot.config import RunConfig
from surefoot.data.build_dataset import VISION_MODEL_TYPES
from surefoot.data.conversation import TEXT_BESIDE_IMAGES_TOKENS
from surefoot.data.image_processor import Vision, limits_of, load_processor
from surefoot.models.build import BuiltModel, load_config
from surefoot.models.vision import vision_tower
from surefoot.planner.trace import ATTEND

ATTENTION = "surefoot_plan_flash"
"""transformers hands the whole of a batch's patches to what has this word in its name, and their lengths."""


@dataclass(frozen=True)
class Pictures:
    """Of one micro-batch."""

    count: int
    cells_each: int
    """Tokens of one image."""
    patches_each: int

    def __str__(self) -> str:
        return f"{self.count} image{'s' if self.count > 1 else ''} of {self.cells_each} tokens"


def pictures_of(run: RunConfig, base: Path, rows: int, length: int) -> Pictures | None:
    """The most images that `rows` sequences of `length` tokens can hold; None for a model that reads none."""
    config = load_config(base)
    if config.model_type not in VISION_MODEL_TYPES:
        return None
    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    room = max(1, length - TEXT_BESIDE_IMAGES_TOKENS)
    processor = load_processor(base)
    most = run.max_pixels or (limits_of(processor, base)[1] if processor is not None else room * side**2)
    cells = max(1, min(room, most // side**2))
    cells -= cells % _window_cells(vision) if cells > _window_cells(vision) else 0
    return Pictures(rows * max(1, room // cells), cells, cells * vision.spatial_merge_size**2)


def show(built: BuiltModel, pictures: Pictures) -> Vision:
    """Let the model see pictures without values when it is given what is returned. In its FakeTensorMode."""
    model: Any = built.model
    found = vision_tower(model)
    assert found is not None
    vision, tower = model.config.vision_config, found[1]
    vision._attn_implementation = ATTENTION
    patches = pictures.count * pictures.patches_each
    cells = pictures.count * pictures.cells_each
    window = _window_cells(vision) * vision.spatial_merge_size**2
    lengths: dict[str, Any] = {
        "position_ids": torch.empty(patches, 2, dtype=torch.int64),
        "cu_seqlens": torch.empty(pictures.count + 1, dtype=torch.int32),
        "max_seqlen": pictures.patches_each,
        "window_index": torch.empty(cells, dtype=torch.int64),
        "cu_window_seqlens": torch.empty(2, dtype=torch.int32),
        "max_window_seqlen": window if pictures.patches_each % window == 0 else pictures.patches_each,
        "interp_indices": torch.empty(patches, 4, dtype=torch.int64),
        "interp_weights": torch.empty(patches, 4),
    }

    def features(pixels: Tensor, **_: Any) -> SimpleNamespace:
        seen = tower(pixels, grid_thw=None, **lengths)
        deeper = [[one] for one in getattr(seen, "deepstack_features", None) or ()]
        return SimpleNamespace(pooler_output=[seen.pooler_output], deepstack_features=deeper)

    model.base_model.get_image_features = features
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.empty(pictures.count, 3, dtype=torch.int64)
    return Vision(torch.empty(patches, values), grid, is_blank=True)


def _window_cells(vision: Any) -> int:
    """Of a window of the tower, of which images are taken to be made; one where it has none."""
    side = vision.patch_size * vision.spatial_merge_size
    return int((getattr(vision, "window_size", side) // side) ** 2)


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, max_length_q: int, **__: Any
) -> tuple[Tensor, None]:
    """Of images, or windows of them, that are all of one length."""
    heads, patches, width = query.shape[1:]

    def apart(one: Tensor) -> Tensor:
        return one.reshape(heads, patches // max_length_q, max_length_q, width).transpose(0, 1)

    out = ATTEND(apart(query), apart(key), apart(value), 0.0, False)[0]
    return out.transpose(1, 2).reshape(1, patches, heads, width), None


AttentionInterface.register(ATTENTION, _attend)
