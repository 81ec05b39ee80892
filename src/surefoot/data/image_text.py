"""The text of images in a rendered conversation: each placeholder is replaced by what the model's processor writes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from surefoot.data.conversation import BadRow
from surefoot.data.template import Span, Text


def insert_image_texts(text: Text, token: str, image_texts: Sequence[str], control: re.Pattern[str]) -> Text:
    """Return a rendered conversation in which each placeholder `token` is replaced by the text of its image.

    `control`: pattern of control tokens. Raises: BadRow if the template shows another number of images.
    """
    pieces = text.pieces
    whole: Sequence[tuple[str, bool]] = ((text.text, True),) if pieces is None else pieces
    shown = sum(piece.count(token) for piece, is_control in whole if is_control)
    if shown != len(image_texts):
        raise wrong_number_of_images(shown, token, len(image_texts))
    rest, starts, offset = iter(image_texts), [], 0
    changed: list[tuple[str, bool]] = []
    for piece, is_control in whole:
        parts = piece.split(token) if is_control else [piece]
        changed.append((parts[0], is_control))
        begin = offset + len(parts[0])
        for part in parts[1:]:
            image_text = next(rest)
            starts.append((begin, len(image_text) - len(token)))
            changed += [*_cut_at_controls(image_text, control), (part, is_control)]
            begin += len(token) + len(part)
        offset += len(piece)

    def shift(position: int) -> int:
        return position + sum(growth for start, growth in starts if start < position)

    return replace(
        text,
        text="".join(piece for piece, _ in changed),
        spans=tuple(Span(shift(span.begin), shift(span.end), span.weight) for span in text.spans),
        pieces=None if pieces is None else tuple(_merge_plain(changed)),
    )


def wrong_number_of_images(shown: int, token: str, expected: int) -> BadRow:
    """Return the error of a template that does not show each image of a row once."""
    return BadRow(
        f"the chat template shows {shown} images ({token}) of the row's {expected}. Give another one with chat_template"
    )


def _cut_at_controls(text: str, control: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    end = 0
    for match in control.finditer(text):
        yield text[end : match.start()], False
        yield match.group(), True
        end = match.end()
    yield text[end:], False


def _merge_plain(pieces: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Yield pieces without empty ones, and with neighbouring plain texts as one: they are tokenised together."""
    plain = ""
    for piece, is_control in pieces:
        if not is_control:
            plain += piece
        elif piece:
            if plain:
                yield plain, False
            plain = ""
            yield piece, True
    if plain:
        yield plain, False
