"""Images of a row and their places in its messages, in every notation that users have.

This module opens no files: an image's source is the value in the row, a path, an address or its bytes.
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
"""Keys of a part, or of an object in an image column, that hold its source."""
IMAGE_LIKE_NAME = re.compile(r"image|picture|photo|\bimg", re.IGNORECASE)
IMAGE_LIKE_FILE = re.compile(r"\.(png|jpe?g|webp|gif|bmp|tiff?)$", re.IGNORECASE)
PLACE = re.compile(f"{IMAGE}|{re.escape(PLACEHOLDER)}")


def source_of(value: Any, name: str) -> ImageSource | None:
    """Return the source of an image; None where an image column must give it.

    Raises: BadRow for a value that is no path, address or bytes.
    """
    if isinstance(value, str | bytes) and value:
        try:
            return value.encode("utf-8").decode() if isinstance(value, str) else value
        except UnicodeEncodeError as error:
            raise BadRow(f"{name} is no valid text at character {error.start + 1}: {error.reason}") from error
    if isinstance(value, Mapping):
        fields = {key: part for key, part in value.items() if part not in (None, "", b"")}  # Parquet adds nulls
        if isinstance(fields.get("bytes"), bytes):  # the form of hub datasets, which may also name a path
            return bytes(fields["bytes"])
        for key in SOURCES:
            if key in fields:
                source = source_of(fields[key], name)
                return f"base64:{source}" if key == "base64" and isinstance(source, str) else source
        if set(fields) <= {"type", "detail", "index"}:
            return None
    raise BadRow(f"{name} is {shown(value)}; an image is a path, an address, or base64 after `data:image/...;base64,`")


def read_image_columns(columns: Mapping[str, Any]) -> list[ImageSource] | None:
    """Return the sources in a row's image columns; None where it has no such column. Raises: BadRow."""
    row_sources: list[ImageSource] | None = None
    for column in IMAGE_COLUMNS:
        if column not in columns:
            continue
        value = columns[column]
        items = list(value) if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]
        sources = [source_of(item, f"{column}[{index}]") for index, item in enumerate(items)]
        missing = next((index for index, source in enumerate(sources) if source is None), None)
        if missing is not None:
            raise BadRow(f"{column}[{missing}] names no path, address or bytes: {shown(items[missing])}")
        if sources and row_sources:
            raise BadRow(f"the row has images in both of {' and '.join(f'`{name}`' for name in IMAGE_COLUMNS)}")
        row_sources = [source for source in sources if source is not None] or row_sources or []
    return row_sources


def looks_like_images(name: str, value: Any) -> bool:
    """Return whether a column may hold images under another name."""
    first = value[0] if isinstance(value, list) and value else value
    return IMAGE_LIKE_NAME.search(name) is not None or (
        isinstance(first, str) and IMAGE_LIKE_FILE.search(first) is not None
    )


def place_images(messages: Sequence[Message], sources: Sequence[ImageSource] | None) -> tuple[Message, ...]:
    """Return messages whose images all have sources; those of the columns go to each `<image>` or empty part.

    If no message has such a place, the images come first in the user's first turn, as in TRL and ms-swift.
    `sources`: those of the columns; None leaves `<image>` as text. Raises: BadRow if the numbers differ.
    """
    if sources is None:
        placed = list(messages)
    else:
        placed = [_replace_placeholders(message) for message in messages]
        if sources and not any(message.images for message in placed):
            first = next((i for i, message in enumerate(placed) if message.role == "user"), None)
            if first is None:
                raise BadRow(f"the row has {len(sources)} images and no turn of the user to put them into")
            user_turn = placed[first]
            placed[first] = replace(
                user_turn,
                content=IMAGE * len(sources) + user_turn.content,
                images=(None,) * len(sources) + user_turn.images,
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
            raise BadRow("the assistant's turn holds an image; only other turns can")
        images = tuple(next(rest) if source is None else source for source in message.images)
        filled.append(replace(message, images=images) if images else message)
    return tuple(filled)


def _replace_placeholders(message: Message) -> Message:
    """Return a message in which each `<image>` is replaced by a place for an image."""
    if PLACEHOLDER not in message.content:
        return message
    own_images = iter(message.images)
    images = tuple(next(own_images) if match.group() == IMAGE else None for match in PLACE.finditer(message.content))
    return replace(message, content=message.content.replace(PLACEHOLDER, IMAGE), images=images)
