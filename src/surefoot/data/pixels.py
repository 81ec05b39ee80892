"""From images to what a vision tower reads: patches of pixels and the grid they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from surefoot.data.images import Image, ImageSettings, open_image, positions
from surefoot.errors import DataError

KEPT = 16
"""Images whose patches are kept: those of a few prompts that are trained on right after they were answered."""
PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class Vision:
    """What the vision tower reads in one forward. Shapes: pixels float32 [P, D], a row a patch; grid int64 [I, 3]."""

    pixels: Tensor
    grid: Tensor
    """Patches of each image along time, height and width."""
    is_blank: bool = False
    """No image stands in the tokens: the patches are of an empty one."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Vision":
        """The same on `device`."""
        pixels, grid = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.pixels, self.grid))
        return Vision(pixels, grid, self.is_blank)


class PixelReader:
    """Opens images as the processor of a model does."""

    def __init__(self, processor: Qwen2VLImageProcessorPil, settings: ImageSettings) -> None:
        self.settings = settings
        self._processor = processor
        self._kept = lru_cache(KEPT)(self._read)

    def read(self, samples: Sequence[tuple[str, Sequence[Image]]]) -> Vision:
        """The patches of the images of samples, (place, images) of each, in order; of none, those of a blank cell.

        So every forward runs the vision tower: ranks that share it never wait for one whose rows are all text.
        Raises: DataError where an image is gone, broken or changed, with the place of its row.
        """
        merge = self.settings.merge_size
        pixels: list[Tensor] = []
        grid: list[list[int]] = []
        for place, images in samples:
            for image in images:
                try:
                    pixels.append(self._kept(image))
                except DataError as error:
                    raise DataError(f"{place}: {error}") from error
                grid.append([1, image.rows * merge, image.columns * merge])
        if not pixels:
            patch = self._processor.temporal_patch_size * 3 * self.settings.patch_size**2
            return Vision(torch.zeros(merge**2, patch), torch.tensor([[1, merge, merge]]), is_blank=True)
        return Vision(torch.cat(pixels), torch.tensor(grid))

    def places(self, ids: NDArray[np.int32], images: Sequence[Image]) -> Tensor:
        """`positions` of a sample as a tensor: int64 [3, n]."""
        return torch.from_numpy(positions(ids, images, self.settings.token_id))

    def _read(self, image: Image) -> Tensor:
        with open_image(image, self.settings.cell) as picture:
            found = self._processor(images=picture, do_resize=False, return_tensors="pt")
        pixels: Tensor = found["pixel_values"]
        return pixels


def load_processor(folder: Path) -> Qwen2VLImageProcessorPil | None:
    """The image processor of a model's folder; None where there is none. Raises: DataError where it cannot be read."""
    if not (folder / PROCESSOR).is_file():
        return None
    try:
        processor: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder / PROCESSOR}: its image processor cannot be read: {error}") from error
    return processor
