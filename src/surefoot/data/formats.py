"""From the columns of a row to a conversation: the one type everything behind this door sees.

Knows nothing of templates or tokens.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.data.sources import Row
from surefoot.errors import DataError

Role = Literal["system", "user", "assistant"]
FORMATS = "messages (OpenAI), or prompt + completion (texts or message lists)"


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """A training sample before rendering. Assistant turns are trained.

    `is_plain`: a prompt and its completion as bare text, user then assistant, to be used without a chat template.
    """

    messages: tuple[Message, ...]
    place: str
    is_plain: bool = False
    first_trained: int = 0
    """Assistant turns before this message are context: those in the prompt of a prompt/completion pair."""


def to_conversation(row: Row) -> Conversation:
    """Tell the format by the columns and read the row.

    Raises: DataError where the columns fit no format or the content is not a trainable conversation.
    """
    columns = row.columns
    if "messages" in columns and ("prompt" in columns or "completion" in columns):
        raise DataError(f"{row.place}: has both 'messages' and prompt/completion columns, so its format is ambiguous.")
    if "messages" in columns:
        return _check(_messages(columns["messages"], "messages", row.place), row.place)
    if "prompt" in columns and "completion" in columns:
        return _pair(columns["prompt"], columns["completion"], row.place)
    raise DataError(f"{row.place}: columns {sorted(columns)[:8]} fit no known format. Known: {FORMATS}.")


def _pair(prompt: Any, completion: Any, place: str) -> Conversation:
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise DataError(f"{place}: the completion is empty, so there is nothing to train on.")
        turns = (
            Message("user", _encodable(prompt, "prompt", place)),
            Message("assistant", _encodable(completion, "completion", place)),
        )
        return Conversation(turns, place, is_plain=True)
    if isinstance(prompt, list) and isinstance(completion, list):
        context = _messages(prompt, "prompt", place)
        checked = _check((*context, *_messages(completion, "completion", place)), place)
        return replace(checked, first_trained=len(context))
    raise DataError(
        f"{place}: prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}; "
        "both must be texts or both lists of messages."
    )


def _messages(value: Any, column: str, place: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{place}: '{column}' must be a non-empty list of {{role, content}} objects, found {_show(value)}."
        )
    return tuple(_message(item, f"{column}[{index}]", place) for index, item in enumerate(value))


def _message(item: Any, name: str, place: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{place}: {name} must be an object with role and content, found {_show(item)}.")
    role, content = item.get("role"), item.get("content")
    if role not in ("system", "user", "assistant"):
        raise DataError(f"{place}: {name} has role {_show(role)}. Known roles: system, user, assistant.")
    if not isinstance(content, str):
        raise DataError(f"{place}: {name} ({role}) has content {_show(content)}; it must be a text.")
    extra = sorted(
        key for key, value in item.items() if key not in ("role", "content") and value not in (None, [], "", {})
    )
    if extra:
        raise DataError(f"{place}: {name} ({role}) has {', '.join(extra)}, which this version does not train on.")
    return Message(role, _encodable(content, f"{name} ({role})", place))


def _encodable(text: str, name: str, place: str) -> str:
    """JSON can hold half of a surrogate pair, which no tokenizer can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {name} is no valid text at character {error.start + 1}: {error.reason}.") from error
    return text


def _check(messages: tuple[Message, ...], place: str) -> Conversation:
    """Optional system turn, then user and assistant in turn, assistant last."""
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise DataError(f"{place}: no assistant turn, so there is nothing to train on (roles: {', '.join(roles)}).")
    turns = roles[1:] if roles[0] == "system" else roles
    expected: list[Role] = ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]
    if turns != expected or turns[-1] != "assistant":
        wrong = next(
            (i for i, pair in enumerate(zip(turns, expected, strict=True)) if pair[0] != pair[1]), len(turns) - 1
        )
        position = wrong + len(roles) - len(turns) + 1
        raise DataError(
            f"{place}: roles out of order at message {position} of {len(roles)}: {', '.join(roles)}. "
            "Expected an optional system turn, then user and assistant in turn, ending with the assistant."
        )
    return Conversation(messages, place)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
