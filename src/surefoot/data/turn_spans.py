"""Positions of the assistant's turns in a rendered conversation.

Marks in the messages show where a template writes each of them. A turn begins behind the generation prompt, which the
template writes when it renders the messages before the turn: only the last exchange of them, so the time is linear in
the number of messages. A turn ends behind the first end-of-turn token that follows its last words or call.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

from surefoot.data.conversation import BadRow, Message
from surefoot.data.template_source import Template
from surefoot.data.turn_ends import TurnEnds

MARK = "\U000ffffd"
"""Marker of a position in a message, in a rendering that is used for analysis only."""
_NUMBERED_MARK = re.compile(f"{MARK}(\\d+){MARK}")
_TAG = re.compile(r"<[^<>]*>")
_LINE = re.compile(r"[^\n]*\n+")


@dataclass(frozen=True)
class Turn:
    """A turn `[begin, end)` of the assistant; `index` of its message."""

    index: int
    begin: int
    end: int


def hidden_words(words: str, index: int) -> BadRow:
    """Return the error of a template that does not show the words of an assistant's message."""
    return BadRow(
        f"the chat template does not show the words of message {index + 1} ({words.strip()[:40]!r}) in the "
        "assistant's turn. Give another one with chat_template"
    )


class TurnFinder:
    """Finds the turns of one rendered conversation."""

    def __init__(
        self,
        template: Template,
        ends: TurnEnds,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        text: str,
    ) -> None:
        self._template, self._ends = template, ends
        self._messages, self._tools = messages, tools
        self.text = text
        """The rendered conversation; `find` appends the end of the last turn if the template writes none."""

    def find(self, first: int) -> list[Turn]:
        """Return the assistant's turns from message `first` on.

        Raises: BadRow if a turn cannot be separated safely from the rest.
        """
        indices = [i for i, message in enumerate(self._messages) if message.role == "assistant" and i >= first]
        begins = [self._find_begin(index) for index in indices]
        limits = [*begins[1:], len(self.text)]
        turns: list[Turn] = []
        for index, begin, limit in zip(indices, begins, limits, strict=True):
            if turns and begin < turns[-1].end:
                raise self._cannot_separate(index)
            turns.append(Turn(index, begin, self._find_end(index, begin, limit)))
        self._check_marks(turns)
        return turns

    def _find_begin(self, index: int) -> int:
        """Return the position at which generation of turn `index` would begin."""
        anchor = self._locate(_content_mark(index - 1))
        before = self._messages[:index]
        if anchor >= 0:
            for context in dict.fromkeys((_last_exchange(before), tuple(range(index)))):
                begin = self._find_begin_behind(anchor, index, [self._messages[i] for i in context])
                if begin is not None:
                    return begin
        elif self.text.startswith(prompt := self._template.render(before, self._tools, add_generation_prompt=True)):
            return len(prompt)
        for earlier, message in enumerate(before):
            if message.role == "assistant":
                self._check_order(earlier, self._locate(_content_mark(earlier + 1)))
        raise self._cannot_separate(index)

    def _check_order(self, index: int, next_begin: int) -> None:
        """Raise BadRow if words or calls of a message stand behind `next_begin`, unless that is negative: unknown."""
        if 0 <= next_begin < max(map(self._locate, _marks_of(self._messages[index], index)), default=0):
            raise BadRow(
                f"the chat template writes words or calls of message {index + 1} behind the message that follows, so "
                "they cannot be trained as one turn. Split the message, or give another template with chat_template"
            )

    def _find_begin_behind(self, anchor: int, index: int, context: Sequence[Message]) -> int | None:
        """Return where turn `index` begins: behind the mark at `anchor`, in the last message of `context`."""
        marked = [*context[:-1], _mark_message(context[-1], 0)]
        prompt = self._render_tail(marked, add_generation_prompt=True)
        if prompt is None:
            return None
        if self.text.startswith(prompt, anchor):
            return self._skip_header(anchor + len(prompt))
        begins = (self._find_behind_bare(marked, prompt, anchor, index), self._find_thought(marked, anchor, index))
        return min((begin for begin in begins if begin is not None), default=None)

    def _find_thought(self, marked: Sequence[Message], anchor: int, index: int) -> int | None:
        """Return where turn `index` begins, behind a prompt that asks for a thought if it has one, else for none.

        Without thoughts switched on, a prompt may hold an empty one, of which the text has the beginning alone. With
        thoughts switched on, it may begin one that the text does not have.
        """
        has_thought = self._messages[index].reasoning is not None
        template = self._template.thinking if has_thought else self._template.not_thinking
        prompt = self._render_tail(marked, add_generation_prompt=True, template=template)
        is_there = prompt is not None and self.text.startswith(prompt, anchor)
        return self._skip_header(anchor + len(prompt)) if prompt is not None and is_there else None

    def _skip_header(self, begin: int) -> int:
        """Return a position behind the generation prompt of a plain answer, if the text goes on with it there."""
        return begin + len(self._ends.header) * self.text.startswith(self._ends.header, begin)

    def _find_behind_bare(self, marked: Sequence[Message], prompt: str, anchor: int, index: int) -> int | None:
        """Return where turn `index` begins by its header, if the text does not go on with the generation prompt."""
        # The message before is written in another way when it is the last, or the prompt holds more than the turn,
        # such as an empty thought. Its header is searched for then.
        bare = self._render_tail(marked)
        if bare == prompt:  # a template that always writes the generation prompt (Command-R7B)
            bare = prompt[: self._ends.find_first(prompt, 0, len(prompt))] or None
        if bare is None or not prompt.startswith(bare):
            return None
        return self._find_header(prompt[len(bare) :], anchor, index)

    def _find_header(self, prompt: str, anchor: int, index: int) -> int | None:
        """Return the end of the header of turn `index`: what the text shares with the generation prompt.

        It ends with a special token, or with the line that this begins (a role), which may end in spaces.
        """
        first = self._template.control.search(prompt)
        if first is None:
            return None
        marks = map(self._locate, _marks_of(self._messages[index], index))
        words = min((mark for mark in marks if mark >= 0), default=len(self.text))
        at = self.text.find(prompt[: first.end()], anchor, words)
        if at < 0:
            return None
        shared = commonprefix([self.text[at : at + len(prompt)], prompt])  # noqa: RUF071 - these are no paths
        end = [match.end() for match in self._template.control.finditer(shared)][-1]
        line = _LINE.match(shared, end)
        role = _LINE.match(prompt, end)
        if line is None and role is not None and (name := role.group().strip()):  # LLaVA-OneVision
            line = re.compile(f"{re.escape(name)}[^\\S\n]*\n").match(self.text[at:], end)
        return at + (line.end() if line else end)

    def _render_tail(
        self, marked: Sequence[Message], *, add_generation_prompt: bool = False, template: Template | None = None
    ) -> str | None:
        """Return the text behind the first mark; None if the template refuses the messages or omits the mark."""
        template = template or self._template
        text = template.try_render(marked, self._tools, add_generation_prompt=add_generation_prompt)
        match = _NUMBERED_MARK.search(text or "")
        return _NUMBERED_MARK.sub("", text[match.end() :]) if text and match else None

    def _find_end(self, index: int, begin: int, limit: int) -> int:
        message = self._messages[index]
        if self._marks.get(_content_mark(index)) == []:
            raise hidden_words(message.content, index)
        next_mark = self._locate(_content_mark(index + 1))
        if next_mark >= 0:
            limit = min(limit, next_mark)
        self._check_order(index, limit)
        pieces = [self._locate(mark) for mark in _marks_of(message, index)]
        if pieces and min(pieces) >= 0:
            eos = self._template.source.eos
            if len(message.tool_calls) > 1 and eos and eos in self.text[begin : max(pieces)]:
                raise BadRow(
                    f"the chat template ends the turn ({eos}) between the calls of message {index + 1}, so its end "
                    "would be trained before the last call. Give another one with chat_template"
                )
            end = self._ends.find_first(self.text, max(pieces), limit)
        elif next_mark >= 0 or index == len(self._messages) - 1:
            end = self._ends.find_last(self.text, begin, limit)
        elif message.reasoning:  # it may end like a turn
            raise self._cannot_separate(index)
        else:
            end = self._ends.find_first(self.text, begin, limit)
        token = self._ends.unwritten.get(bool(message.tool_calls), "")
        if not end and token and index == len(self._messages) - 1:
            self.text += token
            end = len(self.text)
        if not end:
            ends = " or ".join(self._ends.written) or "a special token"
            advice = "Give another one with chat_template"
            if not self._template.source.generation_ends:  # GLM's template writes none, for example
                advice += ", or take generation_config.json of the model's release, whose eos_token_id may name it"
            raise BadRow(
                f"the chat template writes no end-of-turn token ({ends}) after message {index + 1}, so the trained "
                f"part has no end. {advice}"
            )
        return end

    def _check_marks(self, turns: Sequence[Turn]) -> None:
        """Raise BadRow if words of an assistant's message are outside its turn, or words of another inside."""
        turn_of = {turn.index: turn for turn in turns}
        for mark, positions in self._marks.items():
            own = turn_of.get(mark // 2)
            if own is not None:
                is_right = not positions or own.begin <= positions[0] <= own.end
            else:
                is_right = not any(turn.begin < position < turn.end for turn in turns for position in positions)
            if not is_right:
                raise self._cannot_separate(mark // 2)

    def _cannot_separate(self, index: int) -> BadRow:
        return BadRow(
            f"the chat template renders earlier turns differently once turn {index + 1} follows, so the trained "
            "part cannot be separated from the rest. Give another one with chat_template"
        )

    @cached_property
    def _marks(self) -> dict[int, list[int]]:
        """Positions of each mark in the text.

        Messages that the template reads differently with a mark have none.
        """
        numbers = [mark for i, message in enumerate(self._messages) for mark in _marks_of(message, i)]
        return self._read_marks(numbers) or self._read_marks(self._list_readable(numbers)) or {}

    def _list_readable(self, numbers: Sequence[int]) -> list[int]:
        """Return the marks without those with which the template writes another text."""
        if self._read_marks(numbers) is not None:
            return list(numbers)
        if len(numbers) == 1:
            return []
        middle = len(numbers) // 2
        return [*self._list_readable(numbers[:middle]), *self._list_readable(numbers[middle:])]

    def _locate(self, mark: int) -> int:
        """Return the first position of a mark in the text, -1 without one."""
        return next(iter(self._marks.get(mark, ())), -1)

    def _read_marks(self, numbers: Sequence[int]) -> dict[int, list[int]] | None:
        """Return the positions of each mark; None if the template writes another text with them."""
        messages = list(self._messages)
        for number in numbers:
            messages[number // 2] = _mark_message(messages[number // 2], number)
        marked = self._template.try_render(messages, self._tools)
        if marked is None or _NUMBERED_MARK.sub("", marked) != self.text:
            return None
        positions: dict[int, list[int]] = {number: [] for number in numbers}
        removed = 0
        for match in _NUMBERED_MARK.finditer(marked):
            positions[int(match[1])].append(match.start() - removed)
            removed += len(match.group())
        return positions


def _last_exchange(messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the indices of the messages on which the generation prompt behind them depends.

    These are the system message, the last user turn, and the last call with its results.
    """
    roles = [message.role for message in messages]
    users = [i for i, role in enumerate(roles) if role == "user"][-1:]
    calls = [i for i, role in enumerate(roles) if role == "assistant"][-1:]
    start = [0] if roles[0] == "system" else []
    return tuple(sorted({*start, *users, *range(max(users + calls, default=0), len(messages))}))


def _content_mark(index: int) -> int:
    return 2 * index


def _marks_of(message: Message, index: int) -> Iterable[int]:
    """Yield the marks of a message: an even number for its words, an odd one for its last call."""
    if message.content.strip() or not message.tool_calls:
        yield _content_mark(index)
    if message.tool_calls:
        yield _content_mark(index) + 1


def _mark_message(message: Message, number: int) -> Message:
    mark = f"{MARK}{number}{MARK}"
    if number % 2:
        *calls, call = message.tool_calls
        name = call["function"]["name"]
        marked = {**call, "function": {**call["function"], "name": name[:1] + mark + name[1:]}}
        return replace(message, tool_calls=(*calls, marked))
    at = _find_mark_position(message)
    return replace(message, content=message.content[:at] + mark + message.content[at:])


def _find_mark_position(message: Message) -> int:
    """Return the position of a mark within the words: behind thoughts, not at their ends and not within a tag.

    Templates strip white space at the ends and search for tags.
    """
    text = message.content
    begin = text.rfind("</think>") + len("</think>") if message.role == "assistant" and "</think>" in text else 0
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    end = max(begin, len(text.rstrip()))
    middle = (begin + end) // 2
    return next((tag.end() for tag in _TAG.finditer(text, begin, end) if tag.start() < middle < tag.end()), middle)
