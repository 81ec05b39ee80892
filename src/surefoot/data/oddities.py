"""Oddities of samples: they can be trained on, but are suspicious. `checks` turns them into findings."""

import re
from collections.abc import Sequence
from enum import IntFlag

from surefoot.data.conversation import Conversation, Message

LEAKED_CHARACTERS = 20
"""Length of an answer from which its occurrence in the prompt is no coincidence."""
_THOUGHT = re.compile(r"<(?!/)[^<>\s]*think[^<>\s]*>|\[THINK\]", re.IGNORECASE)
"""The beginning of a thought, such as `<think>` or `<|START_THINKING|>`; the end of some is found too."""

_EMPTY_THOUGHT_FIRST = re.compile(r"<think>\s*</think>\s*<think>")


class Oddity(IntFlag):
    """An oddity, as a bit of a sample's flags in its shard."""

    ENDS_TWICE = 1
    """An answer is followed by two end-of-turn tokens, or ends with the text of one."""
    BEGINS_TWICE = 2
    """The sample begins with two beginning-of-sequence tokens."""
    ANSWER_IN_PROMPT = 4
    """The messages before the last answer contain it word for word."""
    LOOKALIKE = 8
    """Some text looks like a special token."""
    LOST_REASONING = 16
    """The template omits the last turn's reasoning, writes an empty thought before it, or writes it as an answer."""
    DROPPED_REASONING = 32
    """The template shows that, but omits the reasoning of earlier turns whose answers may be trained."""
    EMPTY_ANSWER = 64
    """The last answer is trained but empty: no words, reasoning or calls."""
    NO_THOUGHT = 128
    """The generation prompt begins a thought, and the last answer is trained without one."""


def find_oddities(
    text: str, conversation: Conversation, *, is_trained: bool, opens_thoughts: bool, has_channel: bool = False
) -> int:
    """Return the oddities of a rendered conversation that its messages show, as bits.

    `opens_thoughts`: the generation prompt of its template begins a thought. `has_channel`: the template writes
    thoughts between other words than <think>.
    """
    *context, last = conversation.messages
    answer = last.content.strip()
    newest = _get_last_exchange(conversation)
    earlier = conversation.messages[: len(conversation.messages) - len(newest)]
    oddities = 0
    if is_trained and len(answer) >= LEAKED_CHARACTERS and any(answer in message.content for message in context):
        oddities |= Oddity.ANSWER_IN_PROMPT
    is_misplaced = (has_channel or _EMPTY_THOUGHT_FIRST.search(text) is not None) and _shows_tags(text, conversation)
    if is_misplaced or any(_get_reasoning(message) not in text for message in newest):
        oddities |= Oddity.LOST_REASONING
    elif any(_get_reasoning(message) not in text for message in earlier if message.weight != 0):
        oddities |= Oddity.DROPPED_REASONING
    if is_trained and last.role == "assistant" and last.weight != 0:
        if not (answer or last.tool_calls or last.reasoning):
            oddities |= Oddity.EMPTY_ANSWER
        elif opens_thoughts and not (_get_reasoning(last) or _THOUGHT.search(answer)):
            oddities |= Oddity.NO_THOUGHT
    return oddities


def opens_thought(prompt: str) -> bool:
    """Return whether a generation prompt ends with the beginning of a thought."""
    thoughts = list(_THOUGHT.finditer(prompt))
    return bool(thoughts) and "END" not in thoughts[-1][0] and not prompt[thoughts[-1].end() :].strip()


def _shows_tags(text: str, conversation: Conversation) -> bool:
    """Return whether the template writes the tags of a thought with which the content of an answer begins."""
    answers = [message.content.strip() for message in conversation.messages if message.role == "assistant"]
    return "<think>" in text and any(answer.startswith("<think>") for answer in answers)


def _get_last_exchange(conversation: Conversation) -> Sequence[Message]:
    """Return the last user turn and those after it; templates may drop the reasoning of earlier turns."""
    messages = conversation.messages
    return messages[max((i for i, message in enumerate(messages) if message.role == "user"), default=0) :]


def _get_reasoning(message: Message) -> str:
    """Return the assistant's reasoning: that of the message, or the content before the end of a thought."""
    before, end, _ = message.content.partition("</think>")
    written = before.removeprefix("<think>").strip() if end and message.role == "assistant" else ""
    return message.reasoning.strip() if message.reasoning else written
