"""The conversation type behind every data format, and its checks. Standard library only.

This module does not depend on files, columns, templates or tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

IMAGE = "\U000ffffb"
"""Placeholder of an image in a message's content."""
ImageSource = str | bytes
"""An image as a row gives it: a path, an address, base64 text, or its bytes."""
TEXT_BESIDE_IMAGES_TOKENS = 16
"""Assumed minimum of text tokens in a conversation with images, for estimates made before rows are read."""


class BadRow(Exception):
    """A row that cannot be trained on. The message holds the reason; the caller adds the place."""


@dataclass(frozen=True)
class MessageForm:
    """Form in which a chat template reads messages, where templates differ."""

    content_is_parts: bool = False
    """Whether every content is a list of typed parts; else only one with images is."""
    call_content: str | None = ""
    """Content of a message with tool calls and no words."""
    arguments_are_text: bool = False
    """Whether the arguments of a call are JSON text; else an object."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    """`{"type": "function", "function": {"name": ..., "arguments": {...}}}`, arguments as an object."""
    reasoning: str | None = None
    """Reasoning of the assistant before its answer; templates call it `reasoning_content`."""
    weight: float | None = None
    """Loss weight set by the row; None leaves it to `train_on`."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the message (`name`, `tool_call_id`, ...), passed to the template unchanged."""
    images: tuple[ImageSource | None, ...] = ()
    """Source of each IMAGE in the content; None until it is taken from the row's columns."""
    row_role: str = field(default="", compare=False)
    """The row's own word for the role; empty if the row has none."""

    def describe_role(self) -> str:
        """Return the role, with the row's own word if that is another: `assistant (bot in the row)`."""
        return self.role if self.row_role in ("", self.role) else f"{self.role} ({self.row_role} in the row)"

    def as_template_input(self, form: MessageForm = MessageForm()) -> dict[str, Any]:
        """Return the message as chat templates read it. Keys without a value are left out: templates test for them."""
        message: dict[str, Any] = {**self.others, "role": self.role, "content": self._content_in(form)}
        if self.tool_calls:
            message["tool_calls"] = [_write_call(call, form) for call in self.tool_calls]
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message

    def _content_in(self, form: MessageForm) -> Any:
        if self.tool_calls and not self.content:
            return form.call_content
        if not form.content_is_parts and IMAGE not in self.content:
            return self.content
        parts = [part for piece in self.pieces for part in (_IMAGE_PART, {"type": "text", "text": piece})][1:]
        return [part for part in parts if part.get("text") != ""] or parts

    @property
    def pieces(self) -> list[str]:
        """The texts before, between and after the images."""
        return self.content.split(IMAGE)


_IMAGE_PART = {"type": "image"}


def _write_call(call: Mapping[str, Any], form: MessageForm) -> Mapping[str, Any]:
    if not form.arguments_are_text:
        return call
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


@dataclass(frozen=True)
class Conversation:
    """A training sample before rendering.

    `kind`: `chat` goes through the chat template; `completion` is a prompt and its completion as bare text (two
    messages); `text` is one bare text, all of it trained (one message). `prompt` is a chat that ends before the
    assistant's turn, `text prompt` a bare text to continue (one message).
    """

    messages: tuple[Message, ...]
    kind: Literal["chat", "completion", "text", "prompt", "text prompt"] = "chat"
    tools: tuple[dict[str, Any], ...] = ()
    first_trained: int = 0
    """Index of the first message that may be trained; earlier ones are the prompt of a prompt/completion pair."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns that are not part of the conversation, for the method."""
    rejected: "Conversation | None" = None
    """For a row of preference data: the same conversation with the rejected answer; this one has the chosen answer."""
    is_desired: bool | None = None
    """For a row with a label: whether its answer, what follows the last question, is desired."""

    @property
    def sides(self) -> tuple["Conversation", ...]:
        """The conversation, and for a row of preference data the one with the rejected answer."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def images(self) -> list[ImageSource]:
        """The images of all messages, in order."""
        return [source for message in self.messages for source in message.images if source is not None]


FOLLOWERS: Mapping[str, tuple[str, ...]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calls": ("tool",),
    "calls in words": ("tool", "user"),
    "tool": ("tool", "assistant"),
}
"""Turns that may follow each turn; `` is the start, `calls` an assistant turn with tool calls, `calls in words` a turn
that writes them as text."""


def check_turns(messages: Sequence[Message]) -> None:
    """Raise BadRow if turns are out of order, or if the conversation does not end with the assistant."""
    roles = [message.role for message in messages]
    if not roles:
        raise BadRow("the conversation is empty")
    names = _join_roles([message.describe_role() for message in messages])
    if "assistant" not in roles:
        raise BadRow(f"no assistant turn, so there is nothing to train on (roles: {names})")
    state = ""
    for position, message in enumerate(messages, 1):
        if message.role not in FOLLOWERS[state]:
            after = f"after {'tool calls' if state == 'calls' else state}" if state else "at the start"
            raise BadRow(
                f"roles out of order at message {position} of {len(roles)}: {message.describe_role()} {after}, "
                f"expected {' or '.join(FOLLOWERS[state])} (roles: {names})"
            )
        in_words = message.role == "assistant" and "<tool_call>" in message.content  # Hermes writes calls as text
        state = "calls" if message.tool_calls else "calls in words" if in_words else message.role
    if messages[-1].role != "assistant":
        raise BadRow(f"roles out of order: the conversation ends with {roles[-1]}, not with the assistant")


def check_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
    """Raise BadRow for calls of tools that the row does not declare: the model could not know them."""
    declared = [tool.get("function", {}).get("name") for tool in tools]
    for message in messages:
        for call in message.tool_calls:
            name = call["function"]["name"]
            if name not in declared:
                declaration = f"declares {', '.join(map(str, declared[:6]))}" if declared else "has no `tools`"
                raise BadRow(f"a tool call of '{name}', but the row {declaration}; the model could not know the tool")


def _join_roles(roles: Sequence[str]) -> str:
    return ", ".join(roles[:8]) + (", ..." if len(roles) > 8 else "")


def shown(value: Any) -> str:
    """Return the value of a row as errors quote it."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
