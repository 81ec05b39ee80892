"""Finding, checking, measuring and opening images. No torch is imported here, because data workers use this module.

For most models, the processor of the model scales an image (`surefoot.data.model_processor`). Where images are grids of
cells (`patch_size` x `merge_size` pixels, one token each), an image is scaled here, once, to whole cells between
`min_pixels` and `max_pixels`, so that data workers need no torch. Trainer and engine both receive those pixels.

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from surefoot.data.conversation import BadRow, ImageSource
from surefoot.data.download import download
from surefoot.errors import DataError
from surefoot.system.atomic_io import cache_folder, write_bytes

MAX_BYTES = 64 << 20
"""Size limit of an image file in bytes; a larger file is a mistake."""
MAX_PIXELS = 89_478_485
"""Limit of an image's pixels: Pillow warns of more. Decoding takes up to 24 bytes a pixel, 2 GiB."""
MAX_ASPECT = 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Decoders that files may start. Some other decoders of Pillow run programs, such as Ghostscript for EPS."""


@dataclass(frozen=True)
class ImageSettings:
    """Image settings of a model as plain data: part of the cache key of prepared data."""

    token: str
    """Placeholder of an image in the text of the chat template; with cells, also the token of each cell."""
    token_id: int
    """Token of each vector that the vision tower makes of an image."""
    patch_size: int
    """Side of a patch in pixels; like `merge_size` and `min_pixels`, 0 without cells."""
    merge_size: int
    min_pixels: int
    max_pixels: int
    """Largest number of pixels; 0 if only the processor limits them."""
    folder: str | None = None
    """Folder to which paths in rows are relative; None: that of the data file, or else the working directory."""
    allow_urls: bool = False
    processor: str | None = None
    """Folder of the processor that says which text stands for an image; None if images are grids of cells."""
    processor_sha256: str | None = None
    """Hash of that folder's processor files."""

    @property
    def cell(self) -> int:
        """Side of a cell in pixels."""
        return self.patch_size * self.merge_size

    def cells(self, width: int, height: int) -> tuple[int, int]:
        """Return (rows, columns) of cells that an image is scaled to. Raises: BadRow for too narrow an image."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise BadRow(f"an image of {width} x {height} pixels is more than {MAX_ASPECT} times as long as wide")
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
    """Hash of the file when the row was prepared."""
    stamp: tuple[int, int]
    """Size and mtime of the file at that time."""
    rows: int
    columns: int
    """Size in cells (`rows`, `columns`); one row of tokens for a processor without cells."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


def image_of(values: Mapping[str, Any]) -> Image:
    """Return an image from its JSON values."""
    return Image(**{**values, "stamp": tuple(values["stamp"])})


class BadImage(BadRow):
    """An image that cannot be read now. Files outside of its row may be repaired without changing the row."""

    looked_for: tuple[str, ...] = ()
    """Files that were tried; empty for downloads, which may succeed the next time."""


def find_image(source: ImageSource, folder: Path, settings: ImageSettings) -> Image:
    """Find and measure the image that a row names, in cells. Bytes and downloads are stored in the cache.

    `folder`: that of the row's file. Raises: BadImage if it is missing or broken, BadRow if it is not allowed;
    StorageError.
    """
    image, picture = find_picture(source, folder, settings)
    with picture:
        try:
            rows, columns = settings.cells(*picture.size)
        except BadRow as error:
            raise BadRow(f"{image.path}: {error}") from error
    return replace(image, rows=rows, columns=columns)


def find_picture(source: ImageSource, folder: Path, settings: ImageSettings) -> tuple[Image, Pillow.Image]:
    """Return the image that a row names, not measured yet, and its pixels. See `find_image`."""
    path = _resolve_path(source, folder, settings)
    try:
        content, stamp = _read_regular_file(path)
        picture = _decode(content, str(path))
    except BadImage as error:
        error.looked_for = (str(path),)
        raise
    return Image(str(path), hashlib.sha256(content).hexdigest(), stamp, 0, 0), picture


def has_changed(image: Image) -> bool:
    """Return whether the file has changed since it was prepared, by its size and mtime."""
    return stamp_now(image.path) != tuple(image.stamp)


def stamp_now(path: str) -> tuple[int, int] | None:
    """Return size and mtime of a file; None if it cannot be read."""
    try:
        return _get_stamp(Path(path).stat())
    except OSError:
        return None


def open_image(image: Image, settings: ImageSettings) -> Pillow.Image:
    """Return the pixels for the model: RGB, scaled to whole cells if images have cells.

    Raises: DataError if the file is missing, broken or not the one that was prepared.
    """
    try:
        content, _ = _read_regular_file(Path(image.path))
        if hashlib.sha256(content).hexdigest() != image.sha256:
            raise DataError(
                f"image {image.path} was changed since its row was prepared. Start again: rows whose images have "
                "changed are prepared anew then"
            )
        picture = _decode(content, image.path)
        if settings.processor is not None:
            return limit_pixels(picture, settings)
        with picture:
            size = (image.columns * settings.cell, image.rows * settings.cell)
            return picture.resize(size, Pillow.Resampling.BICUBIC)
    except BadRow as error:
        raise DataError(str(error)) from error


def limit_pixels(picture: Pillow.Image, settings: ImageSettings) -> Pillow.Image:
    """Return a picture scaled down to `max_pixels`, in its own proportions; itself if it is small enough."""
    width, height = picture.size
    if not settings.max_pixels or width * height <= settings.max_pixels:
        return picture
    scale = math.sqrt(settings.max_pixels / (width * height))
    size = max(1, math.floor(width * scale)), max(1, math.floor(height * scale))
    with picture:
        return picture.resize(size, Pillow.Resampling.BICUBIC)


def _resolve_path(source: ImageSource, folder: Path, settings: ImageSettings) -> Path:
    if isinstance(source, bytes):
        return _cache_bytes(source)
    name = source if len(source) <= 200 else f"{source[:200]}..."
    scheme, colon, rest = source.partition(":")
    if colon and scheme.lower() == "data":
        kind, comma, text = rest.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise BadRow(
                f"an image begins {source[:40]!r}; the only data: address that is read is data:image/...;base64,..."
            )
        return _cache_bytes(_decode_base64(text))
    if scheme == "base64" and colon:
        return _cache_bytes(_decode_base64(rest))
    if scheme.lower() in ("http", "https") and rest.startswith("//"):
        return _download_once(source, settings)
    if scheme.lower() == "file" and rest.startswith("//"):
        source = urllib.parse.unquote(rest.removeprefix("//").removeprefix("localhost"))
    elif rest.startswith("//"):
        raise BadRow(f"image {name} is an address, and only http and https addresses are read")
    folders = [Path(settings.folder)] if settings.folder is not None else [folder, Path()]
    try:
        path = Path(source).expanduser()
        tried = [path] if path.is_absolute() else [parent / path for parent in folders]
        existing = next((candidate.resolve() for candidate in tried if candidate.is_file()), None)
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown home, a NUL in it
        raise BadRow(
            f"image {name} is no path ({type(error).__name__}); base64 text must begin with `data:image/png;base64,`"
        ) from error
    if existing is None:
        if any(candidate.is_dir() for candidate in tried):
            raise BadRow(f"image {name} is a folder; name one file")
        if any(candidate.exists() for candidate in tried):
            raise BadRow(f"image {name} is not a regular file. Devices, pipes and sockets are not read")
        looked = " and ".join(dict.fromkeys(str(candidate.absolute())[:300] for candidate in tried))
        missing = BadImage(f"image {name} is missing; looked for {looked}. image_dir says where paths begin")
        missing.looked_for = tuple(str(candidate.absolute()) for candidate in tried)
        raise missing
    return existing


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(f"an image is no base64 text: {error}; it begins {text[:20]!r}") from error


NOT_FETCHED: dict[str, str] = {}
"""Map from address to the reason why its download failed: rows that name the same address try it once."""


def _download_once(address: str, settings: ImageSettings) -> Path:
    """Return the cached file of an address, downloading it if necessary."""
    if not settings.allow_urls:
        raise BadRow(
            f"image {address[:200]} is an address, which is not fetched. Set allow_image_urls: true to allow it"
        )
    target = cache_folder() / "data" / "images" / f"url-{hashlib.sha256(address.encode()).hexdigest()}"
    if address in NOT_FETCHED:
        raise BadImage(NOT_FETCHED[address])
    if not target.is_file():
        try:
            content = _fetch_image(address)
        except BadRow as error:
            NOT_FETCHED[address] = str(error)
            raise
        write_bytes(target, content)
    return target


def _fetch_image(address: str) -> bytes:
    """Return the content of an image file. Raises: BadRow, BadImage; an error page is no image."""
    try:
        content = download(address, most_bytes=MAX_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadImage(f"image {address[:200]} could not be fetched: {error}") from error
    _check_size(len(content), address)
    _decode(content, address[:200]).close()
    return content


def _cache_bytes(content: bytes) -> Path:
    """Store the bytes of a row in the cache under their hash, and return the file."""
    _check_size(len(content), "in the row")
    target = cache_folder() / "data" / "images" / hashlib.sha256(content).hexdigest()
    if not target.is_file():
        write_bytes(target, content)
    return target


def _check_size(num_bytes: int, name: str) -> None:
    if num_bytes > MAX_BYTES:
        raise BadRow(f"image {name} has over {MAX_BYTES >> 20} MiB; larger ones are not read")


def _get_stamp(status: os.stat_result) -> tuple[int, int]:
    """Return size and mtime."""
    return status.st_size, status.st_mtime_ns


def _read_regular_file(path: Path) -> tuple[bytes, tuple[int, int]]:
    """Return the content of a regular file and its stamp. Any other kind of file is closed unread.

    Raises: BadImage; BadRow for a file that is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BadImage(f"image {path} is not a regular file. Devices, pipes and sockets are not read")
            _check_size(status.st_size, str(path))
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadImage(f"image {path} cannot be read: {error.strerror or error}") from error
    _check_size(len(content), str(path))
    return content, _get_stamp(status)


def _convert_to_rgb(picture: Pillow.Image) -> Pillow.Image:
    """Convert to RGB with transparency on white, as model processors do; drawings without background stay visible."""
    if picture.mode.startswith(("I", "F")) or not picture.has_transparency_data:
        return picture.convert("RGB")
    layers = picture.convert("RGBA")
    return Pillow.alpha_composite(Pillow.new("RGBA", layers.size, "white"), layers).convert("RGB")


def _detect_deep_mode(picture: Pillow.Image) -> str | None:
    """Return the mode of a file with more than 8 bits a channel, or None; call it before pixels are read.

    Pillow reports a colour PNG or TIFF of 16 bits a channel as 8 bits: only the decoder's arguments show it.
    """
    if picture.mode.startswith(("I", "F")):
        return picture.mode
    decoder_args = [tile[3] for tile in getattr(picture, "tile", ())]
    modes = [mode for args in decoder_args for mode in (args if isinstance(args, tuple) else (args,))]
    return next((mode for mode in modes if isinstance(mode, str) and mode.endswith((";16B", ";16L", ";16N"))), None)


def _decode(content: bytes, name: str) -> Pillow.Image:
    """Return the picture, upright and in RGB; of an animation, the first frame. Raises: BadImage."""
    if not content:
        raise BadImage(f"image {name} is broken: the file is empty")
    try:
        with _open_header(content, name) as picture:
            mode = _detect_deep_mode(picture)
            if mode is not None:
                raise BadImage(
                    f"image {name} has more than 8 bits a channel ({mode}), which would be cut off. Scale it"
                )
            ImageOps.exif_transpose(picture, in_place=True)
            return _convert_to_rgb(picture)
    except BadImage:
        raise
    except Exception as error:  # decoders read untrusted files and may raise anything
        raise BadImage(f"image {name} is broken: {type(error).__name__}: {str(error)[:200]}") from error


def _open_header(content: bytes, name: str) -> Pillow.Image:
    """Return an image with its header read, but not its pixels. Raises: BadImage, and anything that decoders raise."""
    try:
        picture = Pillow.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        others = "Convert one of another format, such as AVIF or HEIC"
        raise BadImage(f"image {name} is broken: it is none of {', '.join(FORMATS)}. {others}") from error
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:  # only its text has the size
        pixels = re.search(r"\d+", str(error))
        raise _describe_too_large(name, pixels.group() if pixels else "far more") from error
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise _describe_too_large(name, f"{width} x {height}")
    if width * height == 0:
        raise BadImage(f"image {name} is broken: it has {width} x {height} pixels")
    return picture


def _describe_too_large(name: str, pixels: str) -> BadImage:
    return BadImage(
        f"image {name} has {pixels} pixels, and no more than {MAX_PIXELS} are decoded, which takes 2 GiB of memory. "
        "Scale it down"
    )
