"""Tokenisation of rendered texts into token ids and trained spans. Independent of files, order and batches."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from surefoot.data.conversation import BadRow, Conversation, Message
from surefoot.data.image_text import insert_image_texts, wrong_number_of_images
from surefoot.data.images import Image, find_image
from surefoot.data.oddities import Oddity
from surefoot.data.renderer_source import RendererSource, build_template_source, is_fault, tokenizer_faults
from surefoot.data.template import ChatTemplate, Span, Text
from surefoot.data.template_process import TEMPLATE_PROCESS
from surefoot.data.template_source import Template
from surefoot.data.turn_spans import MARK
from surefoot.errors import DataError, ModelError

if TYPE_CHECKING:
    from surefoot.data.image_layout import ImageLayout


@dataclass(frozen=True)
class Rendered:
    """A tokenised conversation. Shapes: ids int32 [n]; spans are token positions."""

    ids: NDArray[np.int32]
    spans: tuple[Span, ...]
    flags: int
    """Bits of `Oddity`."""
    bounds: Sequence[tuple[int, int]] | None = None
    """Character range of each token, if requested."""
    images: tuple[Image, ...] = ()
    parts: tuple[int, int, int] | None = None
    """Tokens of the question, the chosen and the rejected answer, which `ids` holds one after the other; None if the
    row is no pair."""

    @property
    def digest(self) -> int:
        """64-bit hash of ids, spans and images: samples with equal digests train the same."""
        hashed = blake2b(self.ids.tobytes(), digest_size=8)
        hashed.update(repr((self.spans, self.parts) if self.parts else self.spans).encode())
        for image in self.images:
            hashed.update(image.sha256.encode())
        return int.from_bytes(hashed.digest(), "little")


def answer_ends(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None) -> frozenset[int]:
    """Return the tokens with which the chat template ends an answer, as they are trained; empty without a template.

    `kwargs`: further variables of the template. Base models often have a template that ends turns with another token
    than the tokenizer's end-of-sequence token.
    """
    if tokenizer.chat_template is None:
        return frozenset()
    try:
        with tokenizer_faults():
            source = build_template_source(tokenizer, dict(kwargs or {}), date(2024, 7, 26), parse_special_tokens=False)
        ends = ChatTemplate(source).ends
    except DataError:  # reported where conversations are trained or generated
        return frozenset()
    finally:
        TEMPLATE_PROCESS.end()
    return frozenset(tokenizer.convert_tokens_to_ids(list(ends)))


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[dict[str, str]]],
    kwargs: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Return the tokens of each conversation up to the beginning of its next answer.

    `kwargs`: further variables of the template, such as `enable_thinking`.
    Raises: ModelError if there is no chat template, or if it fails, does not end or renders nothing.
    """
    if tokenizer.chat_template is None:
        raise ModelError("the model's tokenizer has no chat template, so it cannot be talked to in turns.")
    try:
        template = Template(
            build_template_source(tokenizer, dict(kwargs or {}), date.today(), parse_special_tokens=False)
        )
        texts = [template.render([_read_turn(**turn) for turn in turns], (), add_generation_prompt=True)
                 for turns in conversations]  # fmt: skip
    except (BadRow, DataError) as error:
        raise ModelError(
            f"{error}. Correct the template (chat_template.jinja), or take the model's own, then try again."
        ) from error
    finally:
        TEMPLATE_PROCESS.end()
    with tokenizer_faults():
        prompts: list[list[int]] = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if not all(prompts):
        raise ModelError(
            "the chat template renders nothing of this conversation, so there is nothing to answer. Correct the "
            "template (chat_template.jinja), or take the model's own, then try again."
        )
    return prompts


def find_shared_system(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], today: date
) -> str | None:
    """Return the system message that two or more rendered conversations share.

    None if there is none, if the template writes it by itself, or if it cannot be told from the user's message.
    `kwargs`, `today`: further variables of the template, and the date, with which they were rendered.
    """
    turns = [Message("system", MARK), Message("user", MARK)]
    try:
        template = Template(build_template_source(tokenizer, dict(kwargs), today, parse_special_tokens=False))
        with_system, alone = template.try_render(turns, ()), template.try_render(turns[1:], ())
    except DataError:  # reported where conversations are trained or generated
        return None
    finally:
        TEMPLATE_PROCESS.end()
    if with_system is None or alone is None or with_system.count(MARK) != 2 or len(texts) < 2:
        return None
    before, between, _ = with_system.split(MARK)
    if alone.startswith(before + MARK) or not all(text.startswith(before) and between in text for text in texts):
        return None
    system, *others = {text.removeprefix(before).partition(between)[0] for text in texts}
    return None if others or alone.startswith(before + system + between) else system


def _read_turn(role: Any, content: str, **others: Any) -> Message:
    return Message(role, content, others=others)


class Renderer:
    """A renderer and tokeniser of conversations, with one tokenizer and its chat template."""

    def __init__(self, source: RendererSource) -> None:
        self._source = source
        self.template = ChatTemplate(source.template)
        with tokenizer_faults():
            self._tokenizer = Tokenizer.from_buffer(source.tokenizer_file.read_bytes())

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """Copy of the tokenizer that encodes special tokens as ordinary text."""
        content = json.loads(self._source.tokenizer_file.read_text("utf-8"))
        for token in content["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._source.template.controls
        with tokenizer_faults():
            tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _can_tokenize_pieces(self) -> bool:
        """Whether tokenising piece by piece between control tokens gives the same tokens as tokenising the whole."""
        controls = [*self._source.template.controls, self._source.template.eos]
        pieces = [("one two", False)]
        for control in controls:
            pieces += [(control, True), ("three\n four", False), (control, True), (" five", False)]
        with tokenizer_faults():
            expected = self._tokenizer.encode("".join(piece for piece, _ in pieces), add_special_tokens=False)
            return [
                token for piece, is_control in pieces for token in self._encode_piece(piece, is_control)[0]
            ] == expected.ids

    def render(self, conversation: Conversation, folder: Path = Path()) -> Text:
        """Return the text of a conversation, its trained spans and its images; `folder`: that of the row's file.

        Raises: BadRow, DataError, StorageError.
        """
        sources = conversation.images
        settings = self._source.images
        if sources and settings is None:
            count = "an image" if len(sources) == 1 else f"{len(sources)} images"
            raise BadRow(f"the row has {count}, and {self._source.no_vision_reason}")
        text = self.template.render(conversation)
        if not sources or settings is None:
            return text
        if settings.processor is None:
            return replace(text, images=tuple(find_image(source, folder, settings) for source in sources))
        images, image_texts = self.image_layout.measure(sources, folder, settings)
        text = insert_image_texts(text, settings.token, image_texts, self.template.control)
        return replace(text, images=images)

    @cached_property
    def image_layout(self) -> "ImageLayout":
        """The processor that measures images. It needs torch, so only workers whose images need it load it."""
        from surefoot.data.image_layout import ImageLayout

        assert self._source.images is not None
        assert self._source.images.processor is not None
        return ImageLayout(Path(self._source.images.processor))

    def tokenize(self, texts: Sequence[Text], *, with_bounds: bool = False) -> Iterator[Rendered | BadRow]:
        """Yield token ids and spans, in order; a text that cannot be tokenised safely yields the reason instead.

        A token is trained when any of its characters is in a trained span.
        """
        encodings = iter(self._encode([text.text for text in texts if text.pieces is None]))
        for text in texts:
            if text.pieces is None:
                encoding = next(encodings)
                if isinstance(encoding, BadRow):
                    yield encoding
                    continue
                ids, spans = encoding.ids, tuple(self._convert_span(encoding, span) for span in text.spans)
                bounds = encoding.offsets if with_bounds else None
            elif self._can_tokenize_pieces:
                with tokenizer_faults():
                    ids, bounds = self._tokenize_pieces(text.pieces)
                spans = tuple(_find_overlap(bounds, span) for span in text.spans)
            else:
                yield BadRow(
                    "a text of the row looks like a special token, and this tokenizer joins texts across special "
                    "tokens, so it cannot be kept as text. Remove it, or set parse_special_tokens: true"
                )
                continue
            begins_twice = list(ids[:2]) == [self._source.bos_id] * 2
            flags = text.oddities | (Oddity.BEGINS_TWICE if begins_twice else 0)
            try:
                tokens = np.asarray(ids, dtype=np.int32)
            except OverflowError:
                yield BadRow(f"the tokenizer gives its text the token {max(ids)}, which no model has")
                continue
            rendered = Rendered(tokens, spans, flags, bounds if with_bounds else None, text.images)
            try:
                yield self._expand_image_tokens(rendered)
            except BadRow as error:
                yield error

    def _encode(self, texts: list[str]) -> list[Encoding | BadRow]:
        """Encode texts. A text on which the tokenizer fails, as on catastrophic backtracking, is a bad row."""
        try:
            return list(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        except BaseException as error:
            if not is_fault(error):
                raise
            if len(texts) == 1:
                return [BadRow(f"the tokenizer fails on its text: {str(error)[:200]}")]
            return [encoding for text in texts for encoding in self._encode([text])]

    def _expand_image_tokens(self, sample: Rendered) -> Rendered:
        """Repeat each image's token, once for each of its cells. Raises: BadRow."""
        settings = self._source.images
        if settings is None:
            return sample
        indices = np.flatnonzero(sample.ids == settings.token_id)
        if settings.processor is not None:
            expected = sum(image.num_tokens for image in sample.images)
            if len(indices) != expected:
                raise BadRow(f"its text has {len(indices)} tokens of images, and its images have {expected}")
            return sample
        if len(indices) != len(sample.images):
            raise wrong_number_of_images(len(indices), settings.token, len(sample.images))
        counts = np.ones(len(sample.ids), np.int64)
        counts[indices] = [image.num_tokens for image in sample.images]
        starts = np.concatenate([[0], np.cumsum(counts)])
        bounds = sample.bounds
        return replace(
            sample,
            ids=np.repeat(sample.ids, counts),
            spans=tuple(Span(int(starts[span.begin]), int(starts[span.end]), span.weight) for span in sample.spans),
            bounds=None
            if bounds is None
            else [bound for bound, n in zip(bounds, counts.tolist(), strict=True) for _ in range(n)],
        )

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        ids = (self._tokenizer.token_to_id(control) for control in self._source.template.controls)
        return frozenset(token for token in ids if token is not None)

    def _convert_span(self, encoding: Encoding, span: Span) -> Span:
        if span.begin == span.end:
            return Span(0, 0, span.weight)
        begin, last = encoding.char_to_token(span.begin), encoding.char_to_token(span.end - 1)
        if begin is None or last is None:  # the tokenizer drops characters, such as white space
            return _find_overlap(encoding.offsets, span)
        bounds = encoding.token_to_chars(begin)
        if bounds is not None and bounds[0] < span.begin and encoding.ids[begin] in self._control_ids:
            begin += 1  # a header token that includes the white space behind it (Phi-3)
        end = last + 1
        while end < len(encoding):  # one character may be several tokens
            bounds = encoding.token_to_chars(end)
            if bounds is None or bounds[0] >= span.end:
                break
            end += 1
        return Span(begin, end, span.weight)

    def _tokenize_pieces(self, pieces: Sequence[tuple[str, bool]]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        bounds: list[tuple[int, int]] = []
        begin = 0
        for piece, is_control in pieces:
            piece_ids, piece_bounds = self._encode_piece(piece, is_control)
            ids += piece_ids
            bounds += [(begin + first, begin + last) for first, last in piece_bounds]
            begin += len(piece)
        return ids, bounds

    def _encode_piece(self, piece: str, is_control: bool) -> tuple[list[int], list[tuple[int, int]]]:
        if is_control:
            token = self._tokenizer.token_to_id(piece)
            assert token is not None  # the piece is one of the tokenizer's special tokens
            return [token], [(0, len(piece))]
        encoding = self._plain_tokenizer.encode(piece, add_special_tokens=False)
        return encoding.ids, encoding.offsets


def _find_overlap(bounds: Sequence[tuple[int, int]], span: Span) -> Span:
    inside = [index for index, (begin, end) in enumerate(bounds) if end > span.begin and begin < span.end]
    return Span(inside[0], inside[-1] + 1, span.weight) if inside else Span(0, 0, span.weight)


def check_vocabulary(largest: int, vocab_size: int, place: str) -> None:
    """Raise DataError for a token id that the model has no embedding for. `place`: of the row that has it."""
    if largest >= vocab_size:
        raise DataError(
            f"{place}: token id {largest} is outside the model's vocabulary of {vocab_size}. The tokenizer does not "
            "belong to the model."
        )
