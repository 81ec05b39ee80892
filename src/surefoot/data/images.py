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
import time
import urllib.parse
import urllib.request
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
from surefoot.errors import DataError
from surefoot.storage import cache_folder, write_bytes

MOST_BYTES = 64 << 20
"""Of an image file; a larger one is a mistake."""
MOST_ASPECT = 200
ANSWER_S, DOWNLOAD_S = 30.0, 120.0
"""Deadlines of a download: until something comes, and of all of it."""


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
        stamp = _stamp_of(path)
        content = _read(path)
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
        return _stamp_of(Path(path))
    except BadImage:
        return None


def open_image(image: Image, cell: int) -> Pillow.Image:
    """The pixels that the model is shown: RGB, scaled to whole cells of `cell` pixels.

    Raises: DataError where the file is gone, broken or another than the one that was prepared.
    """
    try:
        content = _read(Path(image.path))
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


def _downloaded(address: str, settings: ImageSettings) -> Path:
    """The file of an address, fetched once."""
    if not settings.allow_urls:
        raise BadRow(
            f"image {address[:200]} is an address, which is not fetched. Set allow_image_urls: true to allow it"
        )
    target = cache_folder() / "data" / "images" / f"url-{hashlib.sha256(address.encode()).hexdigest()}"
    if not target.is_file():
        try:
            content = _fetched(address)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise BadImage(f"image {address[:200]} could not be fetched: {error}") from error
        _check_size(len(content), address)
        _decoded(content, address[:200]).close()  # an error page is not kept
        write_bytes(target, content)
    return target


def _fetched(address: str) -> bytes:
    """At most one byte more than an image may have. Raises: TimeoutError where all of it takes too long."""
    deadline = time.monotonic() + DOWNLOAD_S
    pieces: list[bytes] = []
    with urllib.request.urlopen(address, timeout=ANSWER_S) as answer:
        while sum(map(len, pieces)) <= MOST_BYTES and (piece := answer.read1(1 << 16)):
            pieces.append(piece)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not complete after {DOWNLOAD_S:.0f} s")
    return b"".join(pieces)


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


def _stamp_of(path: Path) -> tuple[int, int]:
    """Size and time of change."""
    try:
        about = path.stat()
    except OSError as error:
        raise BadImage(f"image {path} cannot be read: {error.strerror or error}") from error
    return about.st_size, about.st_mtime_ns


def _read(path: Path) -> bytes:
    _check_size(_stamp_of(path)[0], str(path))
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadImage(f"image {path} cannot be read: {error.strerror or error}") from error


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
    """The whole picture, upright and in RGB. Raises: BadImage."""
    if not content:
        raise BadImage(f"image {name} is broken: the file is empty")
    try:
        with Pillow.open(BytesIO(content)) as picture:
            mode = _deep_mode(picture)
            upright = _in_rgb(ImageOps.exif_transpose(picture))
    except UnidentifiedImageError as error:
        raise BadImage(f"image {name} is broken: it is in no format that Pillow knows") from error
    except Exception as error:  # a decoder is a program that reads what anyone may have written
        raise BadImage(f"image {name} is broken: {type(error).__name__}: {str(error)[:200]}") from error
    if mode is not None:
        raise BadImage(f"image {name} has more than 8 bits a channel ({mode}), which would be cut off. Scale it")
    return upright


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
