"""Chat templates: renders a conversation to its text and finds the spans of the assistant's turns.

The text is byte for byte that of transformers' `apply_chat_template`: the same function renders it. A trained span
begins where generation would begin (behind the generation prompt) and ends behind the end-of-turn token.

Texts of the data that look like special tokens are rendered as stand-in characters, so the template wrote every special
token in the result. This module does not depend on token ids, files or batches.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

from surefoot.data.conversation import BadRow, Conversation, Message
from surefoot.data.hidden_conversation import HiddenConversation
from surefoot.data.images import Image
from surefoot.data.oddities import Oddity, find_oddities
from surefoot.data.template_process import TEMPLATE_PROCESS, Rendering
from surefoot.errors import DataError

RENDER_DEADLINE_S = 3.0
"""CPU time limit of one rendering, which does not depend on the load of the machine."""
PLAIN_TURNS = (Message("user", "Q1"), Message("assistant", "A1"), Message("user", "Q2"), Message("assistant", "A2"))
"""Turns that show how a template begins and ends turns."""
MARK = "\U000ffffd"
"""Marker of a position in a message, in a rendering that is used for analysis only."""


@dataclass(frozen=True)
class TemplateSource:
    """All inputs of a rendering except for the conversation, as plain data."""

    template: str | None
    tool_template: str | None
    """Template for rows that declare tools; the same as `template` in most models."""
    special_tokens: Mapping[str, Any]
    """Variables `bos_token`, `eos_token`, ... of the template."""
    controls: tuple[str, ...]
    """Texts of the tokenizer's special tokens."""
    eos: str
    plain_start: str
    """Text that the tokenizer itself puts before a text without a template."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""
    parse_special_tokens: bool = False
    """Whether texts of the data that look like special tokens become special tokens."""


@dataclass(frozen=True)
class Span:
    """A trained span `[begin, end)` and its weight in the loss; None leaves the weight to `train_on`."""

    begin: int
    end: int
    weight: float | None = None


@dataclass(frozen=True)
class Text:
    """A rendered conversation.

    `pieces`: None if the whole text may be tokenised at once; else its parts (text, is control token), where plain text
    contains no control token.
    """

    text: str
    spans: tuple[Span, ...]
    pieces: tuple[tuple[str, bool], ...] | None = None
    oddities: int = 0
    """Bits of `Oddity`."""
    images: tuple[Image, ...] = ()
    """Images in order; each is still one token in the text."""


class ChatTemplate:
    """A renderer of conversations with one template."""

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self._controls = sorted(filter(None, source.controls), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, self._controls)) or r"(?!)")

    def render(self, conversation: Conversation) -> Text:
        """Return the text of a conversation and its trained spans.

        Raises: BadRow if the template refuses the row or its turns cannot be separated safely; DataError if the
        template itself cannot be used.
        """
        if conversation.kind not in ("chat", "prompt"):
            conversation = self._strip_special_tokens(conversation)
        hidden = HiddenConversation(conversation, self.control)
        if conversation.kind == "chat":
            text, spans = self._render_chat(hidden.conversation)
        elif conversation.kind == "prompt":
            text, spans = self._render_prompt(hidden.conversation), ()
        else:
            text, spans = self._render_plain(hidden.conversation)
        if not hidden.base:
            return self._build_text(text, spans, conversation, None)
        return self._restore_lookalikes(text, spans, conversation, hidden)

    def _render_plain(self, conversation: Conversation) -> tuple[str, tuple[Span, ...]]:
        if conversation.kind == "text prompt":
            return self.source.plain_start + conversation.messages[0].content, ()
        *context, last = (message.content for message in conversation.messages)
        prompt = self.source.plain_start + "".join(context)
        text = prompt + last + self.source.eos
        return text, (Span(len(prompt), len(text)),)

    def _strip_special_tokens(self, conversation: Conversation) -> Conversation:
        """Remove special tokens at the ends of plain texts that are added anyway, so that they do not occur twice."""
        texts = [message.content for message in conversation.messages]
        texts[0] = texts[0].removeprefix(self.source.plain_start)
        texts[-1] = texts[-1].removesuffix(self.source.eos)
        messages = [replace(message, content=text) for message, text in zip(conversation.messages, texts, strict=True)]
        return replace(conversation, messages=tuple(messages))

    def _render_prompt(self, conversation: Conversation) -> str:
        """Return the text of a conversation up to the beginning of the assistant's next turn."""
        messages, tools = conversation.messages, conversation.tools
        text = self._apply_template(messages, tools, add_generation_prompt=True)
        if tools:
            self._check_tools_shown(conversation, text)
        self._check_context_shown(messages, text)
        return text

    def _render_chat(self, conversation: Conversation) -> tuple[str, tuple[Span, ...]]:
        messages, tools = conversation.messages, conversation.tools
        full = self._apply_template(messages, tools)
        if tools:
            self._check_tools_shown(conversation, full)
        self._check_context_shown(messages, full)
        spans: list[Span] = []
        floor = 0
        for index, message in enumerate(messages):
            if message.role != "assistant" or index < conversation.first_trained:
                continue
            begin = self._find_begin(messages, index, tools, full, floor)
            end = self._find_end_of_turn(full, begin)
            if not end:
                raise BadRow(
                    f"the chat template writes no end-of-turn token ({' or '.join(self._ends) or 'a special token'}) "
                    f"after message {index + 1}, so the trained part has no end. Give another one with chat_template"
                )
            self._check_answer_shown(message, full[begin:end], index)
            spans.append(Span(begin, end, message.weight))
            floor = end
        return full, tuple(spans)

    def _find_begin(
        self, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]], full: str, floor: int
    ) -> int:
        """Return the position in the full text at which generation of turn `index` would begin."""
        before = self._apply_template(messages[:index], tools, add_generation_prompt=True)
        if full.startswith(before) and len(before) >= floor:
            return len(before)
        # The template shows earlier turns differently once later ones follow (Qwen3 drops their thoughts). Then the
        # text from the middle of the message before up to the generation prompt is the anchor.
        previous = messages[index - 1]
        middle = len(previous.content) // 2
        marked = replace(previous, content=previous.content[:middle] + MARK + previous.content[middle:])
        marked_full = self._apply_template([*messages[: index - 1], marked, *messages[index:]], tools)
        prompt = self._apply_template([*messages[: index - 1], marked], tools, add_generation_prompt=True)
        anchor = marked_full.find(MARK)
        tail = prompt[prompt.find(MARK) + 1 :]
        bare = self._apply_template([*messages[: index - 1], marked], tools)
        least = len(bare) - bare.find(MARK) - 1  # the rest of the message before; the generation prompt comes after
        shared = len(commonprefix([full[anchor:], tail]))  # noqa: RUF071 - these are no paths
        if shared < len(tail):  # the prompt holds more than the turn (an empty thought): only its header is shared
            shared = self._find_header_end(tail[:shared], least)
        has_header = shared > least or shared == len(tail) == least  # Mistral has no generation prompt
        if marked_full.count(MARK) != 1 or marked_full.replace(MARK, "") != full or anchor < floor or not has_header:
            raise BadRow(
                f"the chat template renders earlier turns differently once turn {index + 1} follows, so the trained "
                "part cannot be separated from the rest. Give another one with chat_template"
            )
        return anchor + shared

    def _find_header_end(self, shared: str, least: int) -> int:
        """Return the end of the last special token of a cut generation prompt and its line (a role); 0 without one."""
        controls = [match.end() for match in self.control.finditer(shared) if match.end() > least]
        line = shared.find("\n", controls[-1]) + 1 if controls else 0
        return line or max(controls, default=0)

    @cached_property
    def _plain_rendering(self) -> str:
        """Rendering of plain turns, or of the first two; empty if the template refuses both."""
        for messages in (PLAIN_TURNS, PLAIN_TURNS[:2]):
            with suppress(BadRow):  # a template may refuse these turns; only rows matter
                return self._apply_template(messages, ())
        return ""

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Special tokens that end an assistant turn, found in a rendering of plain turns."""
        text, ends = self._plain_rendering, []
        for answer in ("A1", "A2"):
            behind = text.find(answer) + len(answer)
            match = self.control.search(text, behind) if answer in text else None
            if match is not None and not text[behind : match.start()].strip():
                ends.append(match.group())
        ends += [self.source.eos, "<|eom_id|>"]  # Llama 3.1 ends a turn that waits for a tool with the latter
        return tuple(dict.fromkeys(end for end in ends if end in self._controls))

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """`ends` of a template that is fit for training.

        Raises: DataError if it writes the assistant's header, but not as a generation prompt.
        """
        if "A1" in self._plain_rendering:
            begin = len(before := self._apply_template(PLAIN_TURNS[:1], (), add_generation_prompt=True))
            header = self._plain_rendering[begin : self._plain_rendering.find("A1")].strip()
            if header and before == self._apply_template(PLAIN_TURNS[:1], ()):
                raise DataError(
                    f"the chat template writes {header!r} before the assistant's words, but not as the generation "
                    "prompt, so the model would be trained to write it itself. Give a template that handles "
                    "add_generation_prompt with chat_template"
                )
        return self.ends

    @cached_property
    def _header_tokens(self) -> frozenset[str]:
        """Special tokens of the generation prompt: each of them begins another turn."""
        question = [Message("user", "Q1")]
        with suppress(BadRow):
            before, bare = (
                self._apply_template(question, (), add_generation_prompt=True),
                self._apply_template(question, ()),
            )
            return frozenset(self.control.findall(before[len(bare) :]))
        return frozenset()

    def _find_end_of_turn(self, text: str, begin: int) -> int | None:
        """Return the end of the first end-of-turn token from `begin` on, or of another token that ends the turn."""
        end = min((at + len(token) for token in self._ends if (at := text.find(token, begin)) >= 0), default=0)
        header = min((at for token in self._header_tokens if (at := text.find(token, begin)) >= 0), default=len(text))
        if 0 < end <= header:
            return end
        # The turn does not end like a plain one: in some models, a call ends with a token of its own.
        last = [match.end() for match in self.control.finditer(text, begin, header)]
        return last[-1] if last and not text[last[-1] : header].strip() else None

    def _check_tools_shown(self, conversation: Conversation, text: str) -> None:
        """Raise BadRow unless each tool is named more often than in a rendering without tools."""
        try:
            bare = self._apply_template(conversation.messages, ())
        except BadRow:  # the template accepts calls only together with tools
            bare = ""
        for tool in conversation.tools:
            name = tool["function"]["name"]
            if text.count(name) <= bare.count(name):
                raise BadRow(
                    f"the chat template does not show the tool '{name}' that the row declares. Use a model whose "
                    "template knows tools, or give one with chat_template"
                )

    def _check_context_shown(self, messages: Sequence[Message], text: str) -> None:
        """Raise BadRow unless the text contains the words of system, user and tools, verbatim or as JSON."""
        for number, message in enumerate(messages, 1):
            for words in map(str.strip, message.pieces):
                if message.role == "assistant" or words in text:
                    continue
                if not any(json.dumps(words, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)):
                    raise BadRow(
                        f"the chat template does not show the words of message {number} ({message.role}: "
                        f"{words[:40]!r}). Give another one with chat_template"
                    )

    def _check_answer_shown(self, message: Message, span: str, index: int) -> None:
        """Raise BadRow unless the span holds the answer and the tool calls. Only a thought before it may be missing."""
        words = message.content.strip()
        answer = words.split("</think>")[-1].strip() if words.startswith("<think>") else words
        if "</think>" in words and "<think>" not in words:  # its beginning is in the generation prompt
            answer = words.split("</think>")[-1].strip()
        if words not in span and answer not in span:
            raise BadRow(
                f"the chat template does not show the words of message {index + 1} ({answer[:40]!r}) in the "
                "assistant's turn. Give another one with chat_template"
            )
        names = Counter(call["function"]["name"] for call in message.tool_calls)
        for name, count in names.items():
            word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
            if len(word.findall(span)) < len(word.findall(answer)) + count:
                raise BadRow(
                    f"the chat template does not show {'the call' if count == 1 else f'all {count} calls'} of '{name}' "
                    f"in message {index + 1}. Use a model whose template knows tools, or give one with chat_template"
                )

    def _build_text(
        self,
        text: str,
        spans: tuple[Span, ...],
        conversation: Conversation,
        pieces: tuple[tuple[str, bool], ...] | None,
    ) -> Text:
        oddities = find_oddities(text, conversation, is_trained=bool(spans))
        if self._ends_twice(text, spans, conversation):
            oddities |= Oddity.ENDS_TWICE
        if pieces is not None:
            oddities |= Oddity.LOOKALIKE
        return Text(text, spans, pieces, oddities)

    def _ends_twice(self, text: str, spans: Sequence[Span], conversation: Conversation) -> bool:
        return any(
            message.content.rstrip().endswith(self._ends)
            for message in conversation.messages
            if message.role == "assistant" and conversation.kind == "chat"
        ) or any(self._has_second_end(text, span.end) for span in spans)

    def _has_second_end(self, text: str, end: int) -> bool:
        match = self.control.match(text, end)
        return match is not None and match.group() in (
            self.source.eos,
            *(self._ends if self.source.template else ()),
        )

    def _apply_template(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        template = self.source.tool_template if tools else self.source.template
        if template is None:
            raise DataError(
                "the data are conversations, but the model's tokenizer has no chat template. Use an instruct model, "
                "give chat_template: FILE, or use prompt/completion texts"
            )
        return TEMPLATE_PROCESS.render(
            Rendering(
                template,
                [message.as_template_input() for message in messages],
                tools,
                {**self.source.special_tokens, **self.source.kwargs},
                add_generation_prompt,
                RENDER_DEADLINE_S,
            )
        )

    def _restore_lookalikes(
        self, hidden_text: str, spans: tuple[Span, ...], conversation: Conversation, hidden: HiddenConversation
    ) -> Text:
        """Return the text with look-alikes restored, cut into control tokens and plain text."""
        pieces: list[tuple[str, bool]] = []
        end = 0
        for match in self.control.finditer(hidden_text):
            pieces.append((hidden.restore(hidden_text[end : match.start()]), False))
            pieces.append((match.group(), True))
            end = match.end()
        pieces.append((hidden.restore(hidden_text[end:]), False))
        text = "".join(piece for piece, _ in pieces)
        is_prompt = conversation.kind == "prompt"
        if conversation.kind in ("chat", "prompt") and text != self._apply_template(
            conversation.messages, conversation.tools, add_generation_prompt=is_prompt
        ):
            if self.source.parse_special_tokens:
                rendering = (self._render_prompt(conversation), ()) if is_prompt else self._render_chat(conversation)
                return self._build_text(*rendering, conversation, None)
            raise BadRow(
                "a text of the row holds a special token that the chat template reads itself, so it cannot be kept as "
                "text. Remove it, or set parse_special_tokens: true"
            )
        restored_spans = tuple(
            Span(
                len(hidden.restore(hidden_text[: span.begin])),
                len(hidden.restore(hidden_text[: span.end])),
                span.weight,
            )
            for span in spans
        )
        parts = (
            None
            if self.source.parse_special_tokens
            else tuple((part, is_control) for part, is_control in pieces if part)
        )
        return self._build_text(text, restored_spans, conversation, parts)
