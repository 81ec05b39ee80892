"""Image reading: from the images of samples to the input of a vision tower, as the model's processor makes it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from surefoot.data.image_workers import ImageSource, ImageWorkers, read_pixels
from surefoot.data.images import Image, ImageSettings, open_image
from surefoot.data.model_processor import BLANK_SIDE, GRID, ModelProcessor
from surefoot.errors import DataError
from surefoot.system.pinned_copy import send

TENSOR_CACHE_BYTES = 256 << 20
"""Size limit of the tensor cache: the images of prompts are used again when their completions are trained."""


@dataclass(frozen=True)
class Vision:
    """Input of the vision tower in one forward: the arguments of the model's `get_image_features`, by name."""

    tensors: Mapping[str, Tensor]
    num_images: int
    is_blank: bool = False
    """Whether the tokens contain no image, so that the tensors are of a blank one."""

    @property
    def num_patches(self) -> int:
        """Rows of pixels: patches where the processor cuts them, else tiles of images."""
        pixels = self.tensors["pixel_values"]
        return pixels.shape[:-1].numel() if pixels.dim() < 4 else pixels.shape[:-3].numel()

    def to(self, device: torch.device) -> "Vision":
        """Return the same input on `device`, without waiting; the grids stay on the host, which reads their numbers."""
        moved = {name: tensor if name == GRID else send(tensor, device) for name, tensor in self.tensors.items()}
        return replace(self, tensors=moved)


class PixelReader:
    """A reader that opens images as the processor of a model does."""

    def __init__(self, processor: ModelProcessor, settings: ImageSettings) -> None:
        self.settings = settings
        self._processor = processor
        self._dtype = torch.float32
        self._cached: OrderedDict[tuple[Image, ...], dict[str, Tensor]] = OrderedDict()
        self._start_workers: Callable[[], ImageWorkers] | None = None
        self._workers: ImageWorkers | None = None
        self._ahead: dict[tuple[Image, ...], Future[dict[str, Tensor]]] = {}

    def use_workers(self, folder: Path, dtype: torch.dtype, count: int) -> None:
        """Read images in `dtype` from now on, in `count` processes, which start with the first image.

        `folder`: that of the model. With 0 processes, `read` does it.
        """
        self._dtype = dtype
        self._cached.clear()
        if count:
            source = ImageSource(str(folder), self.settings, str(dtype).removeprefix("torch."))
            self._start_workers = partial(ImageWorkers, source, count)

    @property
    def has_workers(self) -> bool:
        """Whether images are read by worker processes, started or not."""
        return self._start_workers is not None

    def read_ahead(self, samples: Iterable[Sequence[Image]]) -> None:
        """Let the workers begin to read the images of samples that `read` will ask for. Without workers, do nothing."""
        if self._start_workers is None:
            return
        for images in map(tuple, samples):
            if images and images not in self._cached and images not in self._ahead:
                self._workers = self._workers or self._start_workers()
                self._ahead[images] = self._workers.submit(images)

    def end_workers(self) -> None:
        """End the workers, if there are any."""
        self._start_workers = None
        if self._workers is not None:
            self._workers.end()
            self._workers = None
            self._ahead.clear()

    def read(self, samples: Sequence[tuple[str, Sequence[Image]]]) -> Vision:
        """Return the tensors of all images of `samples`, (place, images) each, in order; without images, a blank one.

        Thus every forward runs the vision tower: ranks that share it never wait for a rank whose rows are all text.
        Raises: DataError if an image is missing, broken or changed, with the place of its row.
        """
        self.read_ahead(images for _, images in samples)
        parts: list[dict[str, Tensor]] = []
        num_images = 0
        for place, images in samples:
            if not images:
                continue
            num_images += len(images)
            try:
                parts.append(self._load_tensors(tuple(images)))
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
        if not parts:
            return Vision(self.blank[0], 1, is_blank=True)
        return Vision({name: _join([part[name] for part in parts]) for name in parts[0]}, num_images)

    def png(self, image: Image, place: str) -> bytes:
        """Return the scaled image as a PNG file, not cut into patches. Raises: DataError, with its row's place."""
        file = BytesIO()
        try:
            with open_image(image, self.settings) as picture:
                picture.save(file, "PNG", compress_level=1)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        return file.getvalue()

    def positions(self, ids: NDArray[np.int32], images: Sequence[Image], place: str) -> Tensor:
        """Return the positions of a sample's tokens: int64 [n], or [3, n] where images have rows and columns.

        Raises: DataError, with the sample's place, for images that no text separates.
        """
        merge = self._processor.merge_size or 1
        grid = torch.tensor([[1, image.rows * merge, image.columns * merge] for image in images]) if images else None
        tokens, token = torch.from_numpy(ids.astype(np.int64)), self.settings.token_id
        if self._processor.merge_size is not None and _count_runs(tokens == token) != len(images):
            raise DataError(
                f"{place}: two of its {len(images)} images follow each other without a token between them, so the "
                "model would number their rows as one image's. Give a chat_template that writes a token around each"
            )
        return self._processor.positions(tokens, grid, token)

    @cached_property
    def blank(self) -> tuple[dict[str, Tensor], int]:
        """The tensors of a blank image, and the number of its tokens."""
        return self._processor.blank(BLANK_SIDE if self.settings.processor is not None else self.settings.cell)

    def _load_tensors(self, images: tuple[Image, ...]) -> dict[str, Tensor]:
        """Return the tensors of a sample's images: read ahead, or from the cache of the most recently used ones."""
        tensors, ahead = self._cached.pop(images, None), self._ahead.pop(images, None)
        if tensors is None and ahead is not None:
            tensors = ahead.result()
        elif tensors is None:
            tensors = read_pixels(images, self._processor, self.settings, self._dtype)
        self._cached[images] = tensors
        while len(self._cached) > 1 and sum(map(_count_bytes, self._cached.values())) > TENSOR_CACHE_BYTES:
            self._cached.popitem(last=False)
        return tensors


def _count_runs(flags: Tensor) -> int:
    """Return the number of runs of true values. Shapes: [n]."""
    return int((flags.int().diff(prepend=torch.zeros(1, dtype=torch.int32)) == 1).sum())


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of several samples as processors do it: other dimensions are filled with zeros at the end."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        missing = [most - size for most, size in zip(shape, tensor.shape[1:], strict=True)]
        padded.append(F.pad(tensor, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else tensor)
    return torch.cat(padded)
