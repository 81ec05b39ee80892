"""Which images a row has, and where in its messages they stand: every way in which users write that down.

Knows nothing of files: an image's source is what the row says of it, a path, an address or its bytes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.data.conversation import IMAGE, BadRow, ImageSource, Message, shown

IMAGE_COLUMNS = ("images", "image")
IMAGE_PARTS = ("image", "image_url", "input_image")
PLACEHOLDER = "<image>"
SOURCES = ("image", "image_url", "path", "url", "base64", "bytes", "value")
"""Keys of a part, or of an object in an image column, under which its source is found."""
IMAGE_LIKE_NAME = re.compile(r"image|picture|photo|\bimg", re.IGNORECASE)
IMAGE_LIKE_FILE = re.compile(r"\.(png|jpe?g|webp|gif|bmp|tiff?)$", re.IGNORECASE)
PLACE = re.compile(f"{IMAGE}|{re.escape(PLACEHOLDER)}")


def source_of(value: Any, name: str) -> ImageSource | None:
    """What a row says of one image; None where it says nothing, so that an image column must.

    Raises: BadRow for what is no path, address or bytes.
    """
    if isinstance(value, str | bytes) and value:
        try:
            return value.encode("utf-8").decode() if isinstance(value, str) else value
        except UnicodeEncodeError as error:
            raise BadRow(f"{name} is no valid text at character {error.start + 1}: {error.reason}") from error
    if isinstance(value, Mapping):
        given = {key: part for key, part in value.items() if part not in (None, "", b"")}  # Parquet fills up with nulls
        if isinstance(given.get("bytes"), bytes):  # a hub dataset's own form, which may name a path besides
            return bytes(given["bytes"])
        for key in SOURCES:
            if key in given:
                source = source_of(given[key], name)
                return f"base64:{source}" if key == "base64" and isinstance(source, str) else source
        if set(given) <= {"type", "detail", "index"}:
            return None
    raise BadRow(f"{name} is {shown(value)}; an image is a path, an address, or base64 after `data:image/...;base64,`")


def of_columns(columns: Mapping[str, Any]) -> list[ImageSource] | None:
    """The sources in a row's image columns; None where it has no such column. Raises: BadRow."""
    found: list[ImageSource] | None = None
    for column in IMAGE_COLUMNS:
        if column not in columns:
            continue
        value = columns[column]
        given = list(value) if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]
        sources = [source_of(item, f"{column}[{index}]") for index, item in enumerate(given)]
        missing = next((index for index, source in enumerate(sources) if source is None), None)
        if missing is not None:
            raise BadRow(f"{column}[{missing}] names no path, address or bytes: {shown(given[missing])}")
        if sources and found:
            raise BadRow(f"the row has images in both of {' and '.join(f'`{name}`' for name in IMAGE_COLUMNS)}")
        found = [source for source in sources if source is not None] or found or []
    return found


def looks_like_images(name: str, value: Any) -> bool:
    """Whether a column may hold images under another name."""
    first = value[0] if isinstance(value, list) and value else value
    return IMAGE_LIKE_NAME.search(name) is not None or (
        isinstance(first, str) and IMAGE_LIKE_FILE.search(first) is not None
    )


def place(messages: Sequence[Message], sources: Sequence[ImageSource] | None) -> tuple[Message, ...]:
    """Messages whose images all have sources, those of the columns put where `<image>` or an empty part stands.

    Where nothing says where they stand, they come first in the user's first turn, as in TRL and ms-swift.
    `sources`: of the columns; None leaves `<image>` the text that it is. Raises: BadRow where the numbers differ.
    """
    if sources is None:
        placed = list(messages)
    else:
        placed = [_with_places(message) for message in messages]
        if sources and not any(message.images for message in placed):
            first = next((i for i, message in enumerate(placed) if message.role == "user"), None)
            if first is None:
                raise BadRow(f"the row has {len(sources)} images and no turn of the user that they could stand in")
            told = placed[first]
            placed[first] = replace(
                told, content=IMAGE * len(sources) + told.content, images=(None,) * len(sources) + told.images
            )
    places = sum(source is None for message in placed for source in message.images)
    if places != len(sources or ()):
        raise BadRow(
            f"the row's columns name {len(sources or ())} images, and its turns hold {places} x {PLACEHOLDER} (or an "
            "empty part)"
        )
    rest = iter(sources or ())
    filled = []
    for message in placed:
        if message.images and message.role == "assistant":
            raise BadRow("the assistant's turn holds an image; only what is asked can")
        images = tuple(next(rest) if source is None else source for source in message.images)
        filled.append(replace(message, images=images) if images else message)
    return tuple(filled)


def _with_places(message: Message) -> Message:
    """A message in which `<image>` is a place for an image."""
    if PLACEHOLDER not in message.content:
        return message
    own = iter(message.images)
    images = tuple(next(own) if found.group() == IMAGE else None for found in PLACE.finditer(message.content))
    return replace(message, content=message.content.replace(PLACEHOLDER, IMAGE), images=images)
