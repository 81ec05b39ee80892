"""From conversations to token ids with a mask of what is trained.

The text is the model's own chat template, byte for byte. What is trained is found by rendering the conversation up to
before and up to after each assistant turn: the span between, cut after its end-of-turn token.

Knows nothing of files, order or batches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from surefoot.data.formats import Conversation, Message
from surefoot.errors import DataError

BATCH_ROWS = 512


@dataclass(frozen=True)
class Sample:
    """One rendered conversation. Shapes: ids int32 [n], trained bool [n]; `trained[i]`: token i is learned."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    place: str


@dataclass(frozen=True)
class Text:
    """One rendered conversation before tokenising: characters `[begin, end)` of each span are trained."""

    text: str
    spans: tuple[tuple[int, int], ...]
    place: str


class Renderer:
    """Renders conversations with one tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is a slow tokenizer without character offsets; a fast one is needed."
            )
        if tokenizer.eos_token is None:
            raise DataError("the tokenizer names no end-of-sequence token, so completions could never end.")
        self._tokenizer = tokenizer
        begins = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        self._plain_start = str(tokenizer.bos_token) if begins else ""
        """What the tokenizer itself puts before a text without a template."""
        self._specials = sorted(
            {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}, key=len, reverse=True
        )

    def render(self, conversation: Conversation) -> Text:
        """The text of a conversation and its trained spans.

        Raises: DataError where there is no template, it fails, or its turns cannot be told apart.
        """
        if conversation.is_plain:
            prompt, completion = (message.content for message in conversation.messages)
            prompt = self._plain_start + prompt.removeprefix(self._plain_start)
            eos = str(self._tokenizer.eos_token)
            text = prompt + completion + ("" if completion.endswith(eos) else eos)
            return Text(text, ((len(prompt), len(text)),), conversation.place)
        messages = conversation.messages
        full = self._template(messages, conversation.place)
        spans = []
        for index, message in enumerate(messages):
            if message.role != "assistant" or index < conversation.first_trained:
                continue
            before = self._template(messages[:index], conversation.place, add_generation_prompt=True)
            through = full if index == len(messages) - 1 else self._template(messages[: index + 1], conversation.place)
            if not (through.startswith(before) and full.startswith(through)):
                raise DataError(
                    f"{conversation.place}: the chat template renders earlier turns differently once turn {index + 1} "
                    "follows, so the trained part cannot be told from the rest. Give another one with chat_template."
                )
            spans.append((len(before), self._end_of_turn(full, len(before), len(through))))
        return Text(full, tuple(spans), conversation.place)

    def _template(self, messages: Sequence[Message], place: str, *, add_generation_prompt: bool = False) -> str:
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{place}: the data are conversations, but the model's tokenizer has no chat template. Use an instruct "
                "model, give chat_template: FILE, or use prompt/completion texts."
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: Any = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise DataError(f"{place}: the chat template refused the conversation: {error}") from error
        return str(text)

    def _end_of_turn(self, text: str, begin: int, end: int) -> int:
        """Where training ends in `text[begin:end]`: behind the last special token, if only whitespace follows it."""
        stripped = text[begin:end].rstrip()
        for special in self._specials:
            if stripped.endswith(special):
                return begin + len(stripped)
        return end

    def tokenize(self, texts: Sequence[Text]) -> list[Sample]:
        """Token ids and masks. A token is trained when any of its characters is in a trained span."""
        encoded = self._tokenizer(
            [text.text for text in texts],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        samples = []
        for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
            trained = np.zeros(len(ids), dtype=np.bool_)
            for begin, end in text.spans:
                trained |= (bounds[:, 1] > begin) & (bounds[:, 0] < end)
            samples.append(Sample(np.asarray(ids, dtype=np.int32), trained, text.place))
        return samples

    def samples(self, conversations: Iterable[Conversation]) -> Iterator[Sample]:
        """Render and tokenise, in order, a batch at a time."""
        iterator = iter(conversations)
        while batch := list(islice(iterator, BATCH_ROWS)):
            yield from self.tokenize([self.render(conversation) for conversation in batch])
