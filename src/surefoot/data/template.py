"""Chat templates: from a conversation to its text, and which characters of it are the assistant's.

The text is what transformers' `apply_chat_template` gives, byte for byte: the same function renders it. A trained span
begins where generation would begin (behind the generation prompt) and ends behind the end-of-turn token.

Texts of the data that look like special tokens are rendered under stand-in characters, so every special token seen in
the result was written by the template. Knows nothing of token ids, files or batches.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from surefoot.data.conversation import BadRow, Conversation, Message
from surefoot.data.images import Image
from surefoot.data.template_process import TEMPLATE_PROCESS, Rendering
from surefoot.errors import DataError

RENDER_DEADLINE_S = 3.0
"""Computing that one rendering may take. The same on a machine that is busy."""
STAND_INS = (0xF0000, 0x100000)
"""Where stand-in characters are taken from: the private planes of Unicode; the second if a text uses the first."""
PLAIN_TURNS = (Message("user", "Q1"), Message("assistant", "A1"), Message("user", "Q2"), Message("assistant", "A2"))
"""On which is seen how a template begins and ends turns."""
MARK = "\U000ffffd"
"""Marks a place in a message, in a rendering that is only looked at."""


@dataclass(frozen=True)
class TemplateSource:
    """Everything a rendering depends on besides the conversation, as plain data."""

    template: str | None
    tool_template: str | None
    """Used where a row declares tools; the same as `template` in most models."""
    special_tokens: Mapping[str, Any]
    """What templates know as `bos_token`, `eos_token`, ..."""
    controls: tuple[str, ...]
    """Texts of the tokenizer's special tokens."""
    eos: str
    plain_start: str
    """What the tokenizer itself puts before a text without a template."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""
    parse_special_tokens: bool = False
    """Let texts of the data that look like special tokens become special tokens."""


@dataclass(frozen=True)
class Span:
    """A trained stretch `[begin, end)` and its weight in the loss; None leaves the weight to `train_on`."""

    begin: int
    end: int
    weight: float | None = None


@dataclass(frozen=True)
class Text:
    """One rendered conversation.

    `pieces`: None where the whole text may be tokenised at once; else its parts, each a control token or plain text in
    which nothing is a control token.
    """

    text: str
    spans: tuple[Span, ...]
    pieces: tuple[tuple[str, bool], ...] | None = None
    ends_twice: bool = False
    """An answer is followed by two end-of-turn tokens, or ends with the text of one."""
    answer_in_prompt: bool = False
    """The last answer stands word for word in what comes before it."""
    has_lookalikes: bool = False
    """Some text looks like a special token."""
    lost_reasoning: bool = False
    """The template does not show the last turn's reasoning."""
    dropped_reasoning: bool = False
    """It shows that, and not the one of earlier turns whose answers may be trained."""
    empty_answer: bool = False
    """The last answer, which is trained, says nothing: no words, thoughts or calls."""
    images: tuple[Image, ...] = ()
    """In order; each is one token of the text yet."""


class ChatTemplate:
    """Renders conversations under one template."""

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self._controls = sorted(filter(None, source.controls), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, self._controls)) or r"(?!)")

    def render(self, conversation: Conversation) -> Text:
        """The text of a conversation and its trained spans.

        Raises: BadRow where the template refuses the row or its turns cannot be told apart safely; DataError where the
        template itself cannot be used.
        """
        if conversation.kind not in ("chat", "prompt"):
            conversation = self._without_own_ends(conversation)
        hidden = _Hidden(conversation, self._control)
        if conversation.kind == "chat":
            text, spans = self._chat(hidden.conversation)
        elif conversation.kind == "prompt":
            text, spans = self._prompt(hidden.conversation), ()
        else:
            text, spans = self._plain(hidden.conversation)
        if not hidden.base:
            return self._finished(text, spans, conversation, None)
        return self._restored(text, spans, conversation, hidden)

    def _plain(self, conversation: Conversation) -> tuple[str, tuple[Span, ...]]:
        if conversation.kind == "text prompt":
            return self.source.plain_start + conversation.messages[0].content, ()
        *context, last = (message.content for message in conversation.messages)
        prompt = self.source.plain_start + "".join(context)
        text = prompt + last + self.source.eos
        return text, (Span(len(prompt), len(text)),)

    def _without_own_ends(self, conversation: Conversation) -> Conversation:
        """Plain texts that begin or end with the special token that is put there anyway: it is not put there twice."""
        texts = [message.content for message in conversation.messages]
        texts[0] = texts[0].removeprefix(self.source.plain_start)
        texts[-1] = texts[-1].removesuffix(self.source.eos)
        messages = [replace(message, content=text) for message, text in zip(conversation.messages, texts, strict=True)]
        return replace(conversation, messages=tuple(messages))

    def _prompt(self, conversation: Conversation) -> str:
        """A conversation up to where the assistant's next turn begins."""
        messages, tools = conversation.messages, conversation.tools
        text = self._template(messages, tools, add_generation_prompt=True)
        if tools:
            self._check_tools_shown(conversation, text)
        self._check_asked(messages, text)
        return text

    def _chat(self, conversation: Conversation) -> tuple[str, tuple[Span, ...]]:
        messages, tools = conversation.messages, conversation.tools
        full = self._template(messages, tools)
        if tools:
            self._check_tools_shown(conversation, full)
        self._check_asked(messages, full)
        spans: list[Span] = []
        floor = 0
        for index, message in enumerate(messages):
            if message.role != "assistant" or index < conversation.first_trained:
                continue
            begin = self._begin(messages, index, tools, full, floor)
            end = self._end_of_turn(full, begin)
            if not end:
                raise BadRow(
                    f"the chat template writes no end-of-turn token ({' or '.join(self._ends) or 'a special token'}) "
                    f"after message {index + 1}, so the trained part has no end. Give another one with chat_template"
                )
            self._check_words(message, full[begin:end], index)
            spans.append(Span(begin, end, message.weight))
            floor = end
        return full, tuple(spans)

    def _begin(
        self, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]], full: str, floor: int
    ) -> int:
        """Where generation of turn `index` would begin in the full text."""
        before = self._template(messages[:index], tools, add_generation_prompt=True)
        if full.startswith(before) and len(before) >= floor:
            return len(before)
        # The template shows earlier turns differently once later ones follow (Qwen3 drops their thoughts). Then the
        # text from within the message before up to the generation prompt is the anchor.
        asked = messages[index - 1]
        middle = len(asked.content) // 2
        marked = replace(asked, content=asked.content[:middle] + MARK + asked.content[middle:])
        seen = self._template([*messages[: index - 1], marked, *messages[index:]], tools)
        prompt = self._template([*messages[: index - 1], marked], tools, add_generation_prompt=True)
        anchor = seen.find(MARK)
        tail = prompt[prompt.find(MARK) + 1 :]
        bare = self._template([*messages[: index - 1], marked], tools)
        least = len(bare) - bare.find(MARK) - 1  # the rest of the message before; the generation prompt comes after
        shared = _common_prefix(full[anchor:], tail)
        if shared < len(tail):  # it holds more than the turn has (an empty thought): only its header is shared
            shared = self._header_end(tail[:shared], least)
        has_header = shared > least or shared == len(tail) == least  # Mistral has no generation prompt
        if seen.count(MARK) != 1 or seen.replace(MARK, "") != full or anchor < floor or not has_header:
            raise BadRow(
                f"the chat template renders earlier turns differently once turn {index + 1} follows, so the trained "
                "part cannot be told from the rest. Give another one with chat_template"
            )
        return anchor + shared

    def _header_end(self, shared: str, least: int) -> int:
        """Behind the last special token of a cut generation prompt and the line it begins (a role); 0 without one."""
        controls = [found.end() for found in self._control.finditer(shared) if found.end() > least]
        line = shared.find("\n", controls[-1]) + 1 if controls else 0
        return line or max(controls, default=0)

    @cached_property
    def _turns(self) -> str:
        """A conversation of plain turns, or a part of it; empty where the template refuses that."""
        for messages in (PLAIN_TURNS, PLAIN_TURNS[:2]):
            with suppress(BadRow):  # a template may refuse what it likes; rows are what counts
                return self._template(messages, ())
        return ""

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The special tokens that end a turn of the assistant, seen on a conversation of plain turns."""
        text, ends = self._turns, []
        for answer in ("A1", "A2"):
            behind = text.find(answer) + len(answer)
            found = self._control.search(text, behind) if answer in text else None
            if found is not None and not text[behind : found.start()].strip():
                ends.append(found.group())
        ends += [self.source.eos, "<|eom_id|>"]  # Llama 3.1 ends a turn that waits for a tool with the latter
        return tuple(dict.fromkeys(end for end in ends if end in self._controls))

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """`ends`, of a template that can be trained with.

        Raises: DataError where it writes the assistant's header, but not as a generation prompt.
        """
        if "A1" in self._turns:
            begin = len(before := self._template(PLAIN_TURNS[:1], (), add_generation_prompt=True))
            header = self._turns[begin : self._turns.find("A1")].strip()
            if header and before == self._template(PLAIN_TURNS[:1], ()):
                raise DataError(
                    f"the chat template writes {header!r} before the assistant's words, but not as the generation "
                    "prompt, so the model would be trained to write it itself. Give a template that handles "
                    "add_generation_prompt with chat_template"
                )
        return self.ends

    @cached_property
    def _headers(self) -> frozenset[str]:
        """The special tokens of the generation prompt: where one stands, another turn has begun."""
        asked = [Message("user", "Q1")]
        with suppress(BadRow):
            before, bare = self._template(asked, (), add_generation_prompt=True), self._template(asked, ())
            return frozenset(self._control.findall(before[len(bare) :]))
        return frozenset()

    def _end_of_turn(self, text: str, begin: int) -> int | None:
        """Behind the first end-of-turn token from `begin` on, or behind another special token that ends the turn."""
        end = min((at + len(token) for token in self._ends if (at := text.find(token, begin)) >= 0), default=0)
        header = min((at for token in self._headers if (at := text.find(token, begin)) >= 0), default=len(text))
        if 0 < end <= header:
            return end
        # The turn ends in another way than a plain one: a call, in some models, with a token of its own.
        last = [found.end() for found in self._control.finditer(text, begin, header)]
        return last[-1] if last and not text[last[-1] : header].strip() else None

    def _check_tools_shown(self, conversation: Conversation, text: str) -> None:
        """Each tool must be named more often than in a rendering without tools."""
        try:
            bare = self._template(conversation.messages, ())
        except BadRow:  # a template that knows calls only beside tools
            bare = ""
        for tool in conversation.tools:
            name = tool["function"]["name"]
            if text.count(name) <= bare.count(name):
                raise BadRow(
                    f"the chat template does not show the tool '{name}' that the row declares. Use a model whose "
                    "template knows tools, or give one with chat_template"
                )

    def _check_asked(self, messages: Sequence[Message], text: str) -> None:
        """The words of the system, the user and the tools must be in the text, as they are or as JSON."""
        for number, message in enumerate(messages, 1):
            for words in map(str.strip, message.pieces):
                if message.role == "assistant" or words in text:
                    continue
                if not any(json.dumps(words, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)):
                    raise BadRow(
                        f"the chat template does not show the words of message {number} ({message.role}: "
                        f"{words[:40]!r}). Give another one with chat_template"
                    )

    def _check_words(self, message: Message, span: str, index: int) -> None:
        """The trained span must hold the answer and the tool calls. Only a thought before the answer may be missing."""
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

    def _finished(
        self,
        text: str,
        spans: tuple[Span, ...],
        conversation: Conversation,
        pieces: tuple[tuple[str, bool], ...] | None,
    ) -> Text:
        last = conversation.messages[-1]
        answer = last.content.strip()
        asked = conversation.messages[:-1]
        ends_twice = any(
            message.content.rstrip().endswith(self._ends)
            for message in conversation.messages
            if message.role == "assistant" and conversation.kind == "chat"
        ) or any(self._ends_again(text, span.end) for span in spans)
        newest = _last_exchange(conversation)
        earlier = conversation.messages[: len(conversation.messages) - len(newest)]
        lost_reasoning = any(thought not in text for message in newest if (thought := _thought(message)))
        return Text(
            text,
            spans,
            pieces,
            ends_twice=ends_twice,
            answer_in_prompt=bool(spans) and len(answer) >= 20 and any(answer in message.content for message in asked),
            has_lookalikes=pieces is not None,
            lost_reasoning=lost_reasoning,
            dropped_reasoning=not lost_reasoning
            and any(thought not in text for one in earlier if one.weight != 0 and (thought := _thought(one))),
            empty_answer=bool(spans)
            and last.role == "assistant"
            and last.weight != 0
            and not (answer or last.tool_calls or last.reasoning),
        )

    def _ends_again(self, text: str, end: int) -> bool:
        found = self._control.match(text, end)
        return found is not None and found.group() in (self.source.eos, *(self._ends if self.source.template else ()))

    def _template(
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

    def _restored(
        self, hidden_text: str, spans: tuple[Span, ...], conversation: Conversation, hidden: "_Hidden"
    ) -> Text:
        """The text with look-alikes put back, cut into control tokens and plain text."""
        pieces: list[tuple[str, bool]] = []
        end = 0
        for found in self._control.finditer(hidden_text):
            pieces.append((hidden.restore(hidden_text[end : found.start()]), False))
            pieces.append((found.group(), True))
            end = found.end()
        pieces.append((hidden.restore(hidden_text[end:]), False))
        text = "".join(piece for piece, _ in pieces)
        is_prompt = conversation.kind == "prompt"
        if conversation.kind in ("chat", "prompt") and text != self._template(
            conversation.messages, conversation.tools, add_generation_prompt=is_prompt
        ):
            if self.source.parse_special_tokens:
                again = (self._prompt(conversation), ()) if is_prompt else self._chat(conversation)
                return self._finished(*again, conversation, None)
            raise BadRow(
                "a text of the row holds a special token that the chat template reads itself, so it cannot be kept as "
                "text. Remove it, or set parse_special_tokens: true"
            )
        moved = tuple(
            Span(
                len(hidden.restore(hidden_text[: span.begin])),
                len(hidden.restore(hidden_text[: span.end])),
                span.weight,
            )
            for span in spans
        )
        kept = None if self.source.parse_special_tokens else tuple((piece, is_one) for piece, is_one in pieces if piece)
        return self._finished(text, moved, conversation, kept)


class _Hidden:
    """A conversation whose texts hold stand-ins for whatever looks like a special token. `base` 0: nothing did."""

    def __init__(self, conversation: Conversation, control: re.Pattern[str]) -> None:
        self.base = 0
        self.conversation = conversation
        texts = "\n".join(_texts(conversation))
        found = sorted(set(control.findall(texts)))
        if not found:
            return
        self.base = next((base for base in STAND_INS if not any(chr(base + i) in texts for i in range(len(found)))), 0)
        if not self.base:
            raise BadRow("the texts use characters of both private planes of Unicode, besides special tokens")
        self._stand_ins = {text: chr(self.base + index) for index, text in enumerate(found)}
        self._originals = {ord(stand_in): text for text, stand_in in self._stand_ins.items()}
        self._control = control
        self.conversation = Conversation(
            tuple(
                Message(
                    message.role,
                    self._hide(message.content),
                    self._hide(message.tool_calls),
                    self._hide(message.reasoning),
                    message.weight,
                    self._hide(message.others),
                    message.images,
                )
                for message in conversation.messages
            ),
            conversation.kind,
            self._hide(conversation.tools),
            conversation.first_trained,
        )

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control.sub(lambda found: self._stand_ins[found.group()], value)
        if isinstance(value, dict):
            return {self._hide(key): self._hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._hide(item) for item in value)
        return value

    def restore(self, text: str) -> str:
        return text.translate(self._originals)


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a conversation."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Conversation):
        for message in value.messages:
            yield message.content
            if message.reasoning or message.tool_calls or message.others:
                yield from _texts([message.reasoning, message.tool_calls, message.others])
        if value.tools:
            yield from _texts(value.tools)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _last_exchange(conversation: Conversation) -> Sequence[Message]:
    """The turns after the user's last one; thoughts in earlier ones may be dropped."""
    messages = conversation.messages
    return messages[max((i for i, message in enumerate(messages) if message.role == "user"), default=0) :]


def _thought(message: Message) -> str:
    """What the assistant thought: its reasoning, or what the content holds before the end of a thought."""
    before, end, _ = message.content.partition("</think>")
    written = before.removeprefix("<think>").strip() if end and message.role == "assistant" else ""
    return message.reasoning.strip() if message.reasoning else written


def _common_prefix(one: str, other: str) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(index for index in range(length) if one[index] != other[index])
