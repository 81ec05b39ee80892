"""The one type behind every data format: a conversation, checked. Standard library only.

Knows nothing of files, columns, templates or tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

IMAGE = "\U000ffffb"
"""Stands in a message's content where an image does."""
ImageSource = str | bytes
"""What a row says of an image: a path, an address, base64 text, or its bytes."""
TEXT_BESIDE_IMAGES_TOKENS = 16
"""Of a conversation, at the least: a judgement, for what is said before rows are read."""


class BadRow(Exception):
    """A row that cannot be trained on; the text says why, the caller knows where."""


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: Role
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    """`{"type": "function", "function": {"name": ..., "arguments": {...}}}`, arguments as an object."""
    reasoning: str | None = None
    """What the assistant thought before it answered; templates know it as `reasoning_content`."""
    weight: float | None = None
    """Weight in the loss that the row itself asks for; None leaves it to `train_on`."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the message (`name`, `tool_call_id`, ...), handed to the template as they are."""
    images: tuple[ImageSource | None, ...] = ()
    """One for each IMAGE in the content; None while the row's columns still have to say which."""

    def as_template_input(self) -> dict[str, Any]:
        """The message as chat templates read it. A key without a value is left out: templates ask for its presence."""
        content: Any = self.content
        if IMAGE in self.content:
            content = [part for piece in self.pieces for part in (_IMAGE_PART, {"type": "text", "text": piece})][1:]
            content = [part for part in content if part.get("text") != ""]
        message: dict[str, Any] = {**self.others, "role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message

    @property
    def pieces(self) -> list[str]:
        """The texts before, between and after the images."""
        return self.content.split(IMAGE)


_IMAGE_PART = {"type": "image"}


@dataclass(frozen=True)
class Conversation:
    """A training sample before rendering.

    `kind`: `chat` goes through the chat template; `completion` is a prompt and its completion as bare text (two
    messages); `text` is one bare text, all of it trained (one message). `prompt` is a chat that ends before the
    assistant's turn, `text prompt` a bare text to go on from (one message).
    """

    messages: tuple[Message, ...]
    kind: Literal["chat", "completion", "text", "prompt", "text prompt"] = "chat"
    tools: tuple[dict[str, Any], ...] = ()
    first_trained: int = 0
    """Assistant turns before this message are context: those in the prompt of a prompt/completion pair."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns that are not part of the conversation, for reward functions."""

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
"""Which turns may follow which; `` is the start, `calls` an assistant turn with tool calls, `calls in words` one that
writes them as text."""


def check_turns(messages: Sequence[Message]) -> None:
    """Refuse a conversation whose turns do not follow each other, or that ends without the assistant.

    Raises: BadRow with the position of the first turn that is out of order.
    """
    roles = [message.role for message in messages]
    if not roles:
        raise BadRow("the conversation is empty")
    if "assistant" not in roles:
        raise BadRow(f"no assistant turn, so there is nothing to train on (roles: {_listed(roles)})")
    state = ""
    for position, message in enumerate(messages, 1):
        if message.role not in FOLLOWERS[state]:
            after = f"after {'tool calls' if state == 'calls' else state}" if state else "at the start"
            raise BadRow(
                f"roles out of order at message {position} of {len(roles)}: {message.role} {after}, where "
                f"{' or '.join(FOLLOWERS[state])} must stand (roles: {_listed(roles)})"
            )
        in_words = message.role == "assistant" and "<tool_call>" in message.content  # Hermes writes calls as text
        state = "calls" if message.tool_calls else "calls in words" if in_words else message.role
    if messages[-1].role != "assistant":
        raise BadRow(f"roles out of order: the conversation ends with {roles[-1]}, not with the assistant")


def check_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
    """Refuse calls of tools that the row does not declare: the model could not know them.

    Raises: BadRow naming the tool.
    """
    declared = [tool.get("function", {}).get("name") for tool in tools]
    for message in messages:
        for call in message.tool_calls:
            name = call["function"]["name"]
            if name not in declared:
                known = f"declares {', '.join(map(str, declared[:6]))}" if declared else "has no `tools`"
                raise BadRow(f"a tool call of '{name}', but the row {known}; the model could not know the tool")


def _listed(roles: Sequence[str]) -> str:
    return ", ".join(roles[:8]) + (", ..." if len(roles) > 8 else "")


def shown(value: Any) -> str:
    """A value of a row as errors quote it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
