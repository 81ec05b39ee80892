"""Image processing: from images to the input of a vision tower, patches of pixels and their grid."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from surefoot.data.images import Image, ImageSettings, open_image, rotary_positions
from surefoot.errors import DataError
from surefoot.system.json_files import read_object

PATCH_CACHE_BYTES = 256 << 20
"""Size limit of the patch cache: the images of prompts are used again when their completions are trained."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Names of processor files; transformers 5 writes the second if it saves a whole processor."""


@dataclass(frozen=True)
class Vision:
    """Input of the vision tower in one forward. Shapes: pixels float32 [P, D], a row a patch; grid int64 [I, 3]."""

    pixels: Tensor
    grid: Tensor
    """Patches of each image along time, height and width."""
    is_blank: bool = False
    """Whether the tokens contain no image, so that the patches are of a blank one."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Vision":
        """Return the same input on `device`."""
        pixels, grid = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.pixels, self.grid))
        return Vision(pixels, grid, self.is_blank)


class PixelReader:
    """A reader that opens images as the processor of a model does."""

    def __init__(self, processor: Qwen2VLImageProcessorPil, settings: ImageSettings) -> None:
        self.settings = settings
        self._processor = processor
        self._cached_patches: OrderedDict[Image, Tensor] = OrderedDict()

    def read(self, samples: Sequence[tuple[str, Sequence[Image]]]) -> Vision:
        """Return the patches of all images of `samples`, (place, images) each, in order; without images, a blank cell.

        Thus every forward runs the vision tower: ranks that share it never wait for a rank whose rows are all text.
        Raises: DataError if an image is missing, broken or changed, with the place of its row.
        """
        merge = self.settings.merge_size
        pixels: list[Tensor] = []
        grid: list[list[int]] = []
        for place, images in samples:
            for image in images:
                try:
                    pixels.append(self._load_patches(image))
                except DataError as error:
                    raise DataError(f"{place}: {error}") from error
                grid.append([1, image.rows * merge, image.columns * merge])
        if not pixels:
            patch = self._processor.temporal_patch_size * 3 * self.settings.patch_size**2
            return Vision(torch.zeros(merge**2, patch), torch.tensor([[1, merge, merge]]), is_blank=True)
        return Vision(torch.cat(pixels), torch.tensor(grid))

    def png(self, image: Image, place: str) -> bytes:
        """Return the scaled image as a PNG file, not cut into patches. Raises: DataError, with its row's place."""
        file = BytesIO()
        try:
            with open_image(image, self.settings.cell) as picture:
                picture.save(file, "PNG", compress_level=1)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        return file.getvalue()

    def positions(self, ids: NDArray[np.int32], images: Sequence[Image]) -> Tensor:
        """Return `rotary_positions` of a sample as a tensor: int64 [3, n]."""
        return torch.from_numpy(rotary_positions(ids, images, self.settings.token_id))

    def _load_patches(self, image: Image) -> Tensor:
        """Return the patches of one image, from the cache of the most recently used ones if possible."""
        patches = self._cached_patches.pop(image, None)
        if patches is None:
            with open_image(image, self.settings.cell) as picture:
                patches = self._processor(images=picture, do_resize=False, return_tensors="pt")["pixel_values"]
        self._cached_patches[image] = patches
        while (
            len(self._cached_patches) > 1
            and sum(cached.nbytes for cached in self._cached_patches.values()) > PATCH_CACHE_BYTES
        ):
            self._cached_patches.popitem(last=False)
        return patches


def load_processor(folder: Path) -> Qwen2VLImageProcessorPil | None:
    """Load the image processor of a model's folder; None if it has none. Raises: DataError if it cannot be read."""
    present = next((folder / name for name in PROCESSORS if (folder / name).is_file()), None)
    if present is None:
        return None
    try:
        read_object(present)
        processor: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_pretrained(str(folder))
    except Exception as error:  # its fields are checked in many ways, or not at all
        raise DataError(f"{present}: its image processor cannot be read: {error}") from error
    return processor


def limits_of(processor: Qwen2VLImageProcessorPil, folder: Path) -> tuple[int, int]:
    """Return (least, most) pixels of an image, under either pair of names. Raises: DataError if they are missing."""
    size = processor.size
    limits = (size.shortest_edge or size.min_pixels, size.longest_edge or size.max_pixels)
    if None in limits:
        raise DataError(
            f"{folder}: its image processor has size {size}, which says no least and largest number of pixels "
            "(shortest_edge, longest_edge). Correct it, or take the model's own"
        )
    least, most = limits
    return int(least), int(most)
