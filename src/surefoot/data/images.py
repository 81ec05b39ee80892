"""Images of the data: found, checked, measured and opened. No torch is imported here: workers that prepare data use it.

An image is scaled once, to whole cells of the vision tower (`patch_size` x `merge_size` pixels, one token each) between
`min_pixels` and `max_pixels`. Whoever sees it, trainer or engine, is given those pixels.

Source of the scaling: Qwen2-VL, https://arxiv.org/abs/2409.12191, as transformers' Qwen2VLImageProcessor does it.
"""

import base64
import binascii
import hashlib
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps

from surefoot.data.conversation import BadRow, ImageSource
from surefoot.errors import DataError
from surefoot.storage import cache_folder, write_bytes

MOST_BYTES = 64 << 20
"""Of an image file; a larger one is a mistake."""
MOST_ASPECT = 200
DOWNLOAD_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ImageSettings:
    """How a model sees images, as plain data: part of what prepared data are keyed by."""

    token: str
    """Stands for one cell of an image."""
    token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    folder: str | None = None
    """Where paths in rows begin; None: the folder of their data file, or else where the run was started."""
    allow_urls: bool = False

    @property
    def cell(self) -> int:
        """Pixels of a cell's side."""
        return self.patch_size * self.merge_size

    def cells(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of cells that an image of so many pixels becomes. Raises: BadRow for one too narrow."""
        if max(height, width) > MOST_ASPECT * min(height, width):
            raise BadRow(f"an image of {width} x {height} pixels is more than {MOST_ASPECT} times as long as wide")
        rows, columns = (round(side / self.cell) for side in (height, width))
        if rows * columns * self.cell**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / self.cell)) for side in (height, width))
        elif rows * columns * self.cell**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / self.cell) for side in (height, width))
        return rows, columns


@dataclass(frozen=True)
class Image:
    """An image of a prepared row."""

    path: str
    sha256: str
    """Of its file, as it was when it was prepared."""
    rows: int
    columns: int
    """Of cells."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


def find_image(source: ImageSource, folder: Path, settings: ImageSettings) -> Image:
    """The image that a row names. Bytes and downloads are kept in the cache.

    `folder`: of the row's file. Raises: BadRow where it is missing, broken or not allowed; StorageError.
    """
    path = _path_of(source, folder, settings)
    content = _read(path)
    with _decoded(content, str(path)) as picture:
        rows, columns = settings.cells(*picture.size)
    return Image(str(path), hashlib.sha256(content).hexdigest(), rows, columns)


def open_image(image: Image, cell: int) -> Pillow.Image:
    """The pixels that the model is shown: RGB, scaled to whole cells of `cell` pixels.

    Raises: DataError where the file is gone, broken or another than the one that was prepared.
    """
    try:
        content = _read(Path(image.path))
        if hashlib.sha256(content).hexdigest() != image.sha256:
            raise DataError(
                f"image {image.path} was changed since its row was prepared. Put it back, or give it another name in "
                "its row, and start again"
            )
        with _decoded(content, image.path) as picture:
            return picture.resize((image.columns * cell, image.rows * cell), Pillow.Resampling.BICUBIC)
    except BadRow as error:
        raise DataError(str(error)) from error


def _path_of(source: ImageSource, folder: Path, settings: ImageSettings) -> Path:
    if isinstance(source, bytes):
        return _kept(source)
    if source.startswith("data:"):
        kind, comma, text = source.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise BadRow(f"an image begins {source[:40]!r}; of data: addresses only data:image/...;base64,... is known")
        return _kept(_from_base64(text))
    if source.startswith("base64:"):
        return _kept(_from_base64(source.removeprefix("base64:")))
    if source.startswith(("http://", "https://")):
        return _downloaded(source, settings)
    path = Path(source.removeprefix("file://")).expanduser()
    places = [Path(settings.folder)] if settings.folder is not None else [folder, Path()]
    tried = [path] if path.is_absolute() else [place / path for place in places]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    raise BadRow(f"image {source[:200]} is missing; looked for {' and '.join(str(one)[:300] for one in tried)}")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(f"an image is no base64 text: {error}; it begins {text[:20]!r}") from error


def _downloaded(address: str, settings: ImageSettings) -> Path:
    """The file of an address, fetched once."""
    if not settings.allow_urls:
        raise BadRow(
            f"image {address[:200]} is an address, which is not fetched. Set allow_image_urls: true to allow it"
        )
    name = hashlib.sha256(address.encode()).hexdigest()
    target = cache_folder() / "data" / "images" / f"url-{name}"
    if not target.is_file():
        try:
            with urllib.request.urlopen(address, timeout=DOWNLOAD_TIMEOUT_S) as answer:
                content = answer.read(MOST_BYTES + 1)
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise BadRow(f"image {address[:200]} could not be fetched: {error}") from error
        write_bytes(target, content)
    return target


def _kept(content: bytes) -> Path:
    """Bytes of a row as a file of the cache, under their own hash."""
    target = cache_folder() / "data" / "images" / hashlib.sha256(content).hexdigest()
    if not target.is_file():
        write_bytes(target, content)
    return target


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise BadRow(f"image {path} has {size / 2**20:.0f} MiB; images over {MOST_BYTES >> 20} MiB are not read")
        return path.read_bytes()
    except OSError as error:
        raise BadRow(f"image {path} cannot be read: {error.strerror or error}") from error


def _decoded(content: bytes, name: str) -> Pillow.Image:
    """The whole picture, upright and in RGB. Raises: BadRow."""
    try:
        with Pillow.open(BytesIO(content)) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        reason = f"{error}".replace(repr(BytesIO()), "it").splitlines() or [type(error).__name__]
        raise BadRow(f"image {name} is broken: {reason[0][:200]}") from error


def positions(ids: NDArray[np.int32], images: Sequence[Image], token_id: int) -> NDArray[np.int64]:
    """Where each token of a sample stands for the rotary embedding: time, row and column, [3, n].

    Text counts on along all three. The cells of an image spread over rows and columns from where it begins, and what
    follows goes on behind the longer of the two (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1).
    """
    parts: list[NDArray[np.int64]] = []
    at = position = 0
    for image in images:
        begin = at + int(np.argmax(ids[at:] == token_id))
        parts.append(_counted(position, begin - at))
        position += begin - at
        row, column = np.indices((image.rows, image.columns)).reshape(2, -1)
        parts.append(position + np.stack([np.zeros_like(row), row, column]))
        position += max(image.rows, image.columns)
        at = begin + image.num_tokens
    return np.concatenate([*parts, _counted(position, len(ids) - at)], axis=1)


def _counted(first: int, count: int) -> NDArray[np.int64]:
    return np.tile(np.arange(first, first + count, dtype=np.int64), (3, 1))
