"""From images to what a vision tower reads: patches of pixels and the grid they come from."""

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

from surefoot.data.images import Image, ImageSettings, open_image, positions
from surefoot.errors import DataError
from surefoot.system.json_files import read_object

KEPT_BYTES = 256 << 20
"""Of patches that are kept: images of prompts that are trained on right after they were answered."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""transformers 5 writes the second where a whole processor is saved."""


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
        self._kept: OrderedDict[Image, Tensor] = OrderedDict()

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
                    pixels.append(self._patches(image))
                except DataError as error:
                    raise DataError(f"{place}: {error}") from error
                grid.append([1, image.rows * merge, image.columns * merge])
        if not pixels:
            patch = self._processor.temporal_patch_size * 3 * self.settings.patch_size**2
            return Vision(torch.zeros(merge**2, patch), torch.tensor([[1, merge, merge]]), is_blank=True)
        return Vision(torch.cat(pixels), torch.tensor(grid))

    def png(self, image: Image, place: str) -> bytes:
        """The pixels of an image as a file, not cut into patches yet. Raises: DataError, with its row's place."""
        file = BytesIO()
        try:
            with open_image(image, self.settings.cell) as picture:
                picture.save(file, "PNG", compress_level=1)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        return file.getvalue()

    def places(self, ids: NDArray[np.int32], images: Sequence[Image]) -> Tensor:
        """`positions` of a sample as a tensor: int64 [3, n]."""
        return torch.from_numpy(positions(ids, images, self.settings.token_id))

    def _patches(self, image: Image) -> Tensor:
        """Of one image; those asked for last are kept."""
        found = self._kept.pop(image, None)
        self._kept[image] = found if found is not None else self._read(image)
        while len(self._kept) > 1 and sum(patches.nbytes for patches in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return self._kept[image]

    def _read(self, image: Image) -> Tensor:
        with open_image(image, self.settings.cell) as picture:
            found = self._processor(images=picture, do_resize=False, return_tensors="pt")
        pixels: Tensor = found["pixel_values"]
        return pixels


def load_processor(folder: Path) -> Qwen2VLImageProcessorPil | None:
    """The image processor of a model's folder; None where there is none. Raises: DataError where it cannot be read."""
    present = next((folder / name for name in PROCESSORS if (folder / name).is_file()), None)
    if present is None:
        return None
    try:
        read_object(present)
        processor: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_pretrained(str(folder))
    except Exception as error:  # each of its fields is checked in another way, or not at all
        raise DataError(f"{present}: its image processor cannot be read: {error}") from error
    return processor


def limits_of(processor: Qwen2VLImageProcessorPil, folder: Path) -> tuple[int, int]:
    """(least, most) pixels of an image, under either of their names. Raises: DataError where there are none."""
    size = processor.size
    found = (size.shortest_edge or size.min_pixels, size.longest_edge or size.max_pixels)
    if None in found:
        raise DataError(
            f"{folder}: its image processor has size {size}, which says no least and largest number of pixels "
            "(shortest_edge, longest_edge). Correct it, or take the model's own"
        )
    least, most = found
    return int(least), int(most)
