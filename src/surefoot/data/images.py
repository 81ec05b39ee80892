"""Images of the data: found, checked, measured and opened. No torch is imported here: workers that prepare data use it.

An image is scaled once, to whole cells of the vision tower (`patch_size` x `merge_size` pixels, one token each) between
`min_pixels` and `max_pixels`. Whoever sees it, trainer or engine, is given those pixels.

Source of the scaling: Qwen2-VL, https://arxiv.org/abs/2409.12191, as transformers' Qwen2VLImageProcessor does it.
"""

import base64
import binascii
import hashlib
import http.client
import math
import os
import re
import stat
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from surefoot.data.conversation import BadRow, ImageSource
from surefoot.data.download import download
from surefoot.errors import DataError
from surefoot.system.atomic_io import cache_folder, write_bytes

MOST_BYTES = 64 << 20
"""Size of the largest image file; a larger one is a mistake."""
MOST_PIXELS = 89_478_485
"""Pixels of the largest image: Pillow warns of more. Decoding takes up to 24 bytes a pixel, 2 GiB."""
MOST_ASPECT = 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Decoders that files may start. Some of Pillow's others run programs: Ghostscript for EPS."""


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
    stamp: tuple[int, int]
    """And its size and time of change then."""
    rows: int
    columns: int
    """Of cells."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


def image_of(values: Mapping[str, Any]) -> Image:
    """An image that was written as JSON."""
    return Image(**{**values, "stamp": tuple(values["stamp"])})


class BadImage(BadRow):
    """An image that cannot be read as it is now: what lies outside of its row may be put right without changing it."""

    looked_for: tuple[str, ...] = ()
    """The files that were tried; none for what is fetched, which may come the next time."""


def find_image(source: ImageSource, folder: Path, settings: ImageSettings) -> Image:
    """The image that a row names. Bytes and downloads are kept in the cache.

    `folder`: of the row's file. Raises: BadImage where it is missing or broken, BadRow where it is not allowed;
    StorageError.
    """
    path = _path_of(source, folder, settings)
    try:
        content, stamp = _read(path)
        picture = _decoded(content, str(path))
    except BadImage as error:
        error.looked_for = (str(path),)
        raise
    with picture:
        rows, columns = settings.cells(*picture.size)
    return Image(str(path), hashlib.sha256(content).hexdigest(), stamp, rows, columns)


def has_changed(image: Image) -> bool:
    """Whether the file is not the one that was prepared, by its size and time of change."""
    return stamp_now(image.path) != tuple(image.stamp)


def stamp_now(path: str) -> tuple[int, int] | None:
    """Size and time of change of a file; None where it cannot be read."""
    try:
        return _stamp_of(Path(path).stat())
    except OSError:
        return None


def open_image(image: Image, cell: int) -> Pillow.Image:
    """The pixels that the model is shown: RGB, scaled to whole cells of `cell` pixels.

    Raises: DataError where the file is gone, broken or another than the one that was prepared.
    """
    try:
        content, _ = _read(Path(image.path))
        if hashlib.sha256(content).hexdigest() != image.sha256:
            raise DataError(
                f"image {image.path} was changed since its row was prepared. Start again: rows whose images have "
                "changed are prepared anew then"
            )
        with _decoded(content, image.path) as picture:
            return picture.resize((image.columns * cell, image.rows * cell), Pillow.Resampling.BICUBIC)
    except BadRow as error:
        raise DataError(str(error)) from error


def _path_of(source: ImageSource, folder: Path, settings: ImageSettings) -> Path:
    if isinstance(source, bytes):
        return _kept(source)
    said = source if len(source) <= 200 else f"{source[:200]}..."
    scheme, colon, rest = source.partition(":")
    if colon and scheme.lower() == "data":
        kind, comma, text = rest.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise BadRow(f"an image begins {source[:40]!r}; of data: addresses only data:image/...;base64,... is known")
        return _kept(_from_base64(text))
    if scheme == "base64" and colon:
        return _kept(_from_base64(rest))
    if scheme.lower() in ("http", "https") and rest.startswith("//"):
        return _downloaded(source, settings)
    if scheme.lower() == "file" and rest.startswith("//"):
        source = urllib.parse.unquote(rest.removeprefix("//").removeprefix("localhost"))
    elif rest.startswith("//"):
        raise BadRow(f"image {said} is an address of a kind that is not read; of these https is")
    places = [Path(settings.folder)] if settings.folder is not None else [folder, Path()]
    try:
        path = Path(source).expanduser()
        tried = [path] if path.is_absolute() else [place / path for place in places]
        found = next((candidate.resolve() for candidate in tried if candidate.is_file()), None)
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, no such home, a NUL in it
        raise BadRow(
            f"image {said} is no path ({type(error).__name__}); before base64 `data:image/png;base64,` must stand"
        ) from error
    if found is None:
        if any(candidate.is_dir() for candidate in tried):
            raise BadRow(f"image {said} is a folder; name one file")
        if any(candidate.exists() for candidate in tried):
            raise BadRow(f"image {said} is not a regular file. Devices, pipes and sockets are not read")
        looked = " and ".join(dict.fromkeys(str(one.absolute())[:300] for one in tried))
        missing = BadImage(f"image {said} is missing; looked for {looked}. image_dir says where paths begin")
        missing.looked_for = tuple(str(one.absolute()) for one in tried)
        raise missing
    return found


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(f"an image is no base64 text: {error}; it begins {text[:20]!r}") from error


NOT_FETCHED: dict[str, str] = {}
"""Address -> why this process got no image from it. Many rows may name one address, which is asked once."""


def _downloaded(address: str, settings: ImageSettings) -> Path:
    """The file of an address, fetched once."""
    if not settings.allow_urls:
        raise BadRow(
            f"image {address[:200]} is an address, which is not fetched. Set allow_image_urls: true to allow it"
        )
    target = cache_folder() / "data" / "images" / f"url-{hashlib.sha256(address.encode()).hexdigest()}"
    if address in NOT_FETCHED:
        raise BadImage(NOT_FETCHED[address])
    if not target.is_file():
        try:
            content = _fetch(address)
        except BadRow as error:
            NOT_FETCHED[address] = str(error)
            raise
        write_bytes(target, content)
    return target


def _fetch(address: str) -> bytes:
    """Return an image file. Raises: BadRow, BadImage; an error page is no image."""
    try:
        content = download(address, most_bytes=MOST_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadImage(f"image {address[:200]} could not be fetched: {error}") from error
    _check_size(len(content), address)
    _decoded(content, address[:200]).close()
    return content


def _kept(content: bytes) -> Path:
    """Bytes of a row as a file of the cache, under their own hash."""
    _check_size(len(content), "in the row")
    target = cache_folder() / "data" / "images" / hashlib.sha256(content).hexdigest()
    if not target.is_file():
        write_bytes(target, content)
    return target


def _check_size(num_bytes: int, name: str) -> None:
    if num_bytes > MOST_BYTES:
        raise BadRow(f"image {name} has over {MOST_BYTES >> 20} MiB; larger ones are not read")


def _stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return size and time of change."""
    return status.st_size, status.st_mtime_ns


def _read(path: Path) -> tuple[bytes, tuple[int, int]]:
    """Return the content of a regular file and its stamp. Whatever else a path leads to is closed unread.

    Raises: BadImage; BadRow for one that is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for who writes into it
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BadImage(f"image {path} is not a regular file. Devices, pipes and sockets are not read")
            _check_size(status.st_size, str(path))
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadImage(f"image {path} cannot be read: {error.strerror or error}") from error
    _check_size(len(content), str(path))
    return content, _stamp_of(status)


def _in_rgb(picture: Pillow.Image) -> Pillow.Image:
    """What is transparent lies on white, as processors of models have it; what is drawn on nothing would be lost."""
    if picture.mode.startswith(("I", "F")) or not picture.has_transparency_data:
        return picture.convert("RGB")
    layers = picture.convert("RGBA")
    return Pillow.alpha_composite(Pillow.new("RGBA", layers.size, "white"), layers).convert("RGB")


def _deep_mode(picture: Pillow.Image) -> str | None:
    """How the file holds more than 8 bits a channel, where it does; pixels must not have been read yet.

    A PNG or TIFF of 16 bits a channel in colour is given as one of 8: only the decoder's arguments tell.
    """
    if picture.mode.startswith(("I", "F")):
        return picture.mode
    given = [tile[3] for tile in getattr(picture, "tile", ())]
    told = [one for each in given for one in (each if isinstance(each, tuple) else (each,))]
    return next((one for one in told if isinstance(one, str) and one.endswith((";16B", ";16L", ";16N"))), None)


def _decoded(content: bytes, name: str) -> Pillow.Image:
    """Return the picture, upright and in RGB; of an animation, the first frame. Raises: BadImage."""
    if not content:
        raise BadImage(f"image {name} is broken: the file is empty")
    try:
        with _opened(content, name) as picture:
            mode = _deep_mode(picture)
            if mode is not None:
                raise BadImage(
                    f"image {name} has more than 8 bits a channel ({mode}), which would be cut off. Scale it"
                )
            ImageOps.exif_transpose(picture, in_place=True)
            return _in_rgb(picture)
    except BadImage:
        raise
    except Exception as error:  # a decoder is a program that reads what anyone may have written
        raise BadImage(f"image {name} is broken: {type(error).__name__}: {str(error)[:200]}") from error


def _opened(content: bytes, name: str) -> Pillow.Image:
    """Return an image whose header was read and whose pixels were not. Raises: BadImage; what decoders raise."""
    try:
        picture = Pillow.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadImage(f"image {name} is broken: it is none of {', '.join(FORMATS)}") from error
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:  # only its text has the size
        pixels = re.search(r"\d+", str(error))
        raise _too_large(name, pixels.group() if pixels else "far more") from error
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise _too_large(name, f"{width} x {height}")
    if width * height == 0:
        raise BadImage(f"image {name} is broken: it has {width} x {height} pixels")
    return picture


def _too_large(name: str, pixels: str) -> BadImage:
    return BadImage(
        f"image {name} has {pixels} pixels, and no more than {MOST_PIXELS} are decoded, which takes 2 GiB of memory. "
        "Scale it down"
    )


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
