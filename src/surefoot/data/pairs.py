"""The tokens of a pair of answers: laid end to end, the question once, then each answer; and cut to a length.

Both answers keep the question's tokens in front of them, whatever is cut off its beginning.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from surefoot.data.conversation import BadRow
from surefoot.data.images import Image
from surefoot.data.render import Rendered
from surefoot.data.template import Span

QUESTION, CHOSEN, REJECTED = range(3)
"""Parts of a pair, in their order."""


class PairTrim(NamedTuple):
    """The tokens that are kept of each pair. Shapes: S pairs."""

    skipped: NDArray[np.int64]
    """[S]: tokens cut off the beginning of the question."""
    tokens: NDArray[np.int64]
    """[S, 3]: tokens that are kept of each part."""

    @property
    def sequence_tokens(self) -> NDArray[np.int64]:
        """[S]: tokens of the sequences, an answer or two, each with the question."""
        answers = self.tokens[:, CHOSEN:]
        totals: NDArray[np.int64] = answers.sum(1) + self.tokens[:, QUESTION] * (answers > 0).sum(1)
        return totals


def join_sides(
    sides: Sequence[Rendered | BadRow], image_token: int | None, is_desired: bool | None = None
) -> Rendered | BadRow:
    """Return the sample of a row: its only side, or its two sides joined; or the reason why there is none.

    `image_token`: the token that stands for images; None without. `is_desired`: label of the only side, if it has one.
    """
    problem = next((side for side in sides if isinstance(side, BadRow)), None)
    if problem is not None:
        return problem
    rendered = [side for side in sides if isinstance(side, Rendered)]
    if len(rendered) == 1:
        return rendered[0] if is_desired is None else mark_answer(rendered[0], is_desired)
    chosen, rejected = rendered
    return join_pair(chosen, rejected, image_token)


def take_images(ids: NDArray[np.int32], images: Sequence[Image], image_token: int | None) -> tuple[Image, ...]:
    """Return the first images, as many as fill the places of images among the tokens."""
    places = int(np.count_nonzero(ids == image_token)) if images else 0
    ends = np.cumsum([image.num_tokens for image in images])
    return tuple(images[: int(np.searchsorted(ends, places, side="right"))])


def join_pair(chosen: Rendered, rejected: Rendered, image_token: int | None) -> Rendered | BadRow:
    """Lay the tokens of a pair end to end. Return the reason if the two cannot be told apart.

    The question ends before the first token that differs or is trained, and before an image of which it would hold a
    part.
    """
    if not chosen.spans or not rejected.spans:
        return BadRow(f"no token of the {'rejected' if chosen.spans else 'chosen'} answer is trained")
    most = min(span.begin for span in (*chosen.spans, *rejected.spans))
    is_equal = chosen.ids[:most] == rejected.ids[:most]
    question = most if is_equal.all() else int(np.argmin(is_equal))
    shared = take_images(chosen.ids[:question], chosen.images, image_token)
    if shared != rejected.images[: len(shared)]:
        return BadRow("its two answers follow other images, so they answer no common question")
    places = np.flatnonzero(chosen.ids[:question] == image_token) if chosen.images else ()
    if len(places) > (whole := sum(image.num_tokens for image in shared)):
        question = int(places[whole])
    if not question:
        return BadRow("nothing stands before the two answers: a pair needs a question")
    images = (*chosen.images, *rejected.images[len(shared) :])
    if np.array_equal(chosen.ids[question:], rejected.ids[question:]) and chosen.images == rejected.images:
        return BadRow("the chosen and the rejected answer have the same tokens, so there is nothing to learn")
    shift = len(chosen.ids) - question
    spans = tuple(Span(span.begin + shift, span.end + shift, span.weight) for span in rejected.spans)
    return replace(
        chosen,
        ids=np.concatenate([chosen.ids, rejected.ids[question:]]),
        spans=chosen.spans + spans,
        flags=chosen.flags | rejected.flags,
        images=images,
        parts=(question, len(chosen.ids) - question, len(rejected.ids) - question),
    )


def mark_answer(side: Rendered, is_desired: bool) -> Rendered | BadRow:
    """Return a single answer as one side of a pair whose other side is empty; or the reason if it is no answer."""
    if not side.spans:
        return BadRow("no token of the answer is trained")
    question = side.spans[0].begin
    if not question:
        return BadRow("nothing stands before the answer: it needs a question")
    answer = len(side.ids) - question
    return replace(side, parts=(question, answer, 0) if is_desired else (question, 0, answer))


def trim_within(parts: NDArray[np.int32], max_length: int, *, cuts_question: bool) -> PairTrim:
    """Return what is kept of each pair so that no sequence is longer than `max_length`. Shapes: parts [S, 3].

    `cuts_question`: cut tokens off the beginning of the question, else off the end of each answer.
    """
    tokens = parts.astype(np.int64)
    question, answers = tokens[:, QUESTION], tokens[:, CHOSEN:]
    if not cuts_question:
        question = np.minimum(question, max_length)
        answers = np.minimum(answers, (max_length - question)[:, None])
        return PairTrim(np.zeros_like(question), np.column_stack([question, answers]))
    skipped = np.minimum(np.maximum(question + answers.max(1) - max_length, 0), question)
    return PairTrim(skipped, np.column_stack([question - skipped, np.minimum(answers, max_length)]))


def select_tokens(parts: NDArray[np.int32], trim: PairTrim, sample: int) -> NDArray[np.int64]:
    """Return the indices of the tokens that are kept of a pair, among all of its tokens. Shapes: parts [S, 3]."""
    begins = np.cumsum([0, *parts[sample, :-1]])
    begins[QUESTION] += trim.skipped[sample]
    ranges = zip(begins, trim.tokens[sample], strict=True)
    return np.concatenate([np.arange(begin, begin + count) for begin, count in ranges])
