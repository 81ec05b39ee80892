"""Chat templates: renders a conversation to its text and finds the spans of the assistant's turns.

The text is byte for byte that of transformers' `apply_chat_template`: the same function renders it. A trained span
begins where generation would begin (behind the generation prompt) and ends behind the end-of-turn token.

Texts of the data that look like special tokens are rendered as stand-in characters, so the template wrote every special
token in the result. This module does not depend on token ids, files or batches.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from surefoot.data.conversation import BadRow, Conversation, Message
from surefoot.data.hidden_conversation import HiddenConversation
from surefoot.data.images import Image
from surefoot.data.oddities import Oddity, find_oddities, opens_thought
from surefoot.data.template_source import PLAIN_TURNS, Template, TemplateSource
from surefoot.data.turn_ends import TurnEnds, find_turn_ends, render_plain_turns
from surefoot.data.turn_spans import TurnFinder, hidden_words
from surefoot.errors import DataError


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


_SWITCH = re.compile(r"/(?:no_?)?think\b")
"""Words with which a message switches thoughts on or off. Some templates read them and do not show them (SmolLM3)."""


def _is_shown(words: str, text: str) -> bool:
    """Return whether a text contains words, verbatim or as JSON, apart from white space at their ends."""
    words = words.strip()
    return words in text or any(json.dumps(words, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


class ChatTemplate:
    """A renderer of conversations with one template."""

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self._template = Template(source)
        self.control = self._template.control

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
        text = self._template.render(conversation.messages, conversation.tools, add_generation_prompt=True)
        self._check_context_shown(conversation, text)
        return text

    def _render_chat(self, conversation: Conversation) -> tuple[str, tuple[Span, ...]]:
        messages, tools = conversation.messages, conversation.tools
        text = self._template.render(messages, tools)
        self._check_context_shown(conversation, text)
        finder = TurnFinder(self._template, self._ends, messages, tools, text)
        turns = finder.find(conversation.first_trained)
        for turn in turns:
            self._check_answer_shown(messages[turn.index], text[turn.begin : turn.end], turn.index)
        return finder.text, tuple(Span(turn.begin, turn.end, messages[turn.index].weight) for turn in turns)

    @cached_property
    def _all_ends(self) -> TurnEnds:
        return find_turn_ends(self._template)

    @property
    def ends(self) -> tuple[str, ...]:
        """Special tokens at which a model stops that was trained on this template."""
        return self._all_ends.last

    @cached_property
    def _ends(self) -> TurnEnds:
        """Ends of turns of a template that is fit for training.

        Raises: DataError if it writes the assistant's header, but not as a generation prompt.
        """
        plain = render_plain_turns(self._template)
        if "A1" in plain:
            before = self._template.render(PLAIN_TURNS[:1], (), add_generation_prompt=True)
            header = plain[len(before) : plain.find("A1")].strip()
            if header and before == self._template.render(PLAIN_TURNS[:1], ()):
                raise DataError(
                    f"the chat template writes {header!r} before the assistant's words, but not as the generation "
                    "prompt, so the model would be trained to write it itself. Give a template that handles "
                    "add_generation_prompt with chat_template"
                )
        return self._all_ends

    @cached_property
    def _opens_thoughts(self) -> bool:
        return opens_thought(self._template.try_render(PLAIN_TURNS[:1], (), add_generation_prompt=True) or "")

    @cached_property
    def _has_channel(self) -> bool:
        """Whether the template writes thoughts between other words than <think>, as gpt-oss's does."""
        turns = (PLAIN_TURNS[0], replace(PLAIN_TURNS[1], reasoning="R1"))
        text = self._template.try_render(turns, ()) or ""
        return "R1" in text and "<think>" not in text

    def _check_context_shown(self, conversation: Conversation, text: str) -> None:
        """Raise BadRow unless the text contains the tools and the words of system, user and tools."""
        self._check_tools_shown(conversation, text)
        for number, message in enumerate(conversation.messages, 1):
            for words in map(str.strip, message.pieces):
                if message.role == "assistant" or _is_shown(words, text) or _is_shown(_SWITCH.sub("", words), text):
                    continue
                raise BadRow(
                    f"the chat template does not show the words of message {number} ({message.role}: "
                    f"{words[:40]!r}). Give another one with chat_template"
                )

    def _check_tools_shown(self, conversation: Conversation, text: str) -> None:
        """Raise BadRow unless the system message names each tool, or the template names it for being declared."""
        names = [tool["function"]["name"] for tool in conversation.tools]
        system = "".join(message.content for message in conversation.messages if message.role == "system")
        hidden = [name for name in names if name not in system]
        if not hidden:
            return
        bare = self._template.try_render(conversation.messages, ()) or ""  # it may accept calls only beside tools
        for name in hidden:
            if text.count(name) <= bare.count(name):
                raise BadRow(
                    f"neither the chat template nor the system message shows the tool '{name}' that the row declares. "
                    "Use a model whose template knows tools, give one with chat_template, or describe the tool in the "
                    "system message"
                )

    def _check_answer_shown(self, message: Message, span: str, index: int) -> None:
        """Raise BadRow unless the span holds the answer and the tool calls. Only a thought before it may be missing."""
        words = message.content.strip()
        answer = words.split("</think>")[-1].strip() if words.startswith("<think>") else words
        if "</think>" in words and "<think>" not in words:  # its beginning is in the generation prompt
            answer = words.split("</think>")[-1].strip()
        if words not in span and answer not in span:
            raise hidden_words(answer, index)
        names = Counter(call["function"]["name"] for call in message.tool_calls)
        for name, count in names.items():
            word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
            if len(word.findall(span)) < len(word.findall(answer)) + count:
                ids = [str(call.get("id")) for call in message.tool_calls if call["function"]["name"] == name]
                advice = (
                    f"It writes the ids of calls instead ({ids[0][:40]!r}): give ids that hold the name as its model's "
                    f"documentation shows, such as functions.{name}:0"
                    if all(number in span for number in ids)
                    else "Use a model whose template knows tools, give one with chat_template, or write the call as "
                    "text in `content`, as the model's documentation shows"
                )
                raise BadRow(
                    f"the chat template does not show {'the call' if count == 1 else f'all {count} calls'} of '{name}' "
                    f"in message {index + 1}. {advice}"
                )

    def _build_text(
        self,
        text: str,
        spans: tuple[Span, ...],
        conversation: Conversation,
        pieces: tuple[tuple[str, bool], ...] | None,
    ) -> Text:
        oddities = find_oddities(
            text,
            conversation,
            is_trained=bool(spans),
            opens_thoughts=conversation.kind == "chat" and self._opens_thoughts,
            has_channel=conversation.kind == "chat" and self._has_channel,
        )
        if self._ends_twice(text, spans, conversation):
            oddities |= Oddity.ENDS_TWICE
        if pieces is not None:
            oddities |= Oddity.LOOKALIKE
        return Text(text, spans, pieces, oddities)

    def _ends_twice(self, text: str, spans: Sequence[Span], conversation: Conversation) -> bool:
        return any(
            message.content.rstrip().endswith(self._ends.written)
            for message in conversation.messages
            if message.role == "assistant" and conversation.kind == "chat"
        ) or any(self._has_second_end(text, span) for span in spans)

    def _has_second_end(self, text: str, span: Span) -> bool:
        match = self.control.match(text, span.end)
        ends = (self.source.eos, *(self._ends.written if self.source.template else ()))
        # A template may write another token behind the last turn, as that of Phi-4-mini does.
        return (
            match is not None and match.group() in ends and text[span.begin : span.end].rstrip().endswith(match.group())
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
        if conversation.kind in ("chat", "prompt") and not self._is_rendering(text, conversation):
            if self.source.parse_special_tokens:
                rendering = (self._render_prompt(conversation), ()) if is_prompt else self._render_chat(conversation)
                return self._build_text(*rendering, conversation, None)
            raise BadRow(
                "a text of the row holds a special token that the chat template reads itself, so it cannot be kept as "
                "text. Remove it (thoughts: write them into reasoning_content), or set parse_special_tokens: true"
            )
        bounds = hidden.restore_positions(hidden_text, [at for span in spans for at in (span.begin, span.end)])
        restored_spans = tuple(
            replace(span, begin=begin, end=end)
            for span, begin, end in zip(spans, bounds[::2], bounds[1::2], strict=True)
        )
        parts = (
            None
            if self.source.parse_special_tokens
            else tuple((part, is_control) for part, is_control in pieces if part)
        )
        return self._build_text(text, restored_spans, conversation, parts)

    def _is_rendering(self, text: str, conversation: Conversation) -> bool:
        """Return whether the template writes this text; the end of the last turn may be added to it."""
        is_prompt = conversation.kind == "prompt"
        written = self._template.render(conversation.messages, conversation.tools, add_generation_prompt=is_prompt)
        added = () if is_prompt else self._ends.unwritten.values()
        return text in (written, *(written + end for end in added))
