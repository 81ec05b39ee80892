"""Row formats of preference data: a question with a chosen and a rejected answer, as peers write them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from surefoot.data.conversation import BadRow, Conversation, Message, shown
from surefoot.data.message_content import parsed, text_of, tools_of
from surefoot.data.messages import Columns, MessageReader

QUESTIONS = ("prompt", "messages", "conversations", "instruction", "query")
"""Columns that may hold the question of a row with `chosen` and `rejected`."""
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
"""Beginnings of turns in the texts of Anthropic's HH data."""
Messages = tuple[Message, ...]


def read_preference(reader: MessageReader, columns: Columns) -> Conversation:
    """Read a row with `chosen` and `rejected`: answers beside a question, or two whole conversations."""
    names = [name for name in QUESTIONS if columns.get(name)]
    chosen, rejected = (_read_answer(reader, columns[name], name, names) for name in ("chosen", "rejected"))
    tools = tools_of(columns.get("tools"))
    context: Messages
    if chosen[0].role != "assistant" and rejected[0].role != "assistant":
        whole = chosen
        context, chosen, rejected = _split_conversations(chosen, rejected)
        _check_question(reader, columns, context, whole)
        return build_pair((*_system_of(reader, columns, context), *context), chosen, rejected, tools)
    if len(names) != 1:
        reason = f"{', '.join(names)} are there" if names else f"none of {', '.join(QUESTIONS)} is there"
        raise BadRow(f"chosen and rejected need one column with the question, and {reason}. Name it with `columns`")
    (name,) = names
    question = parsed(columns[name], name) if name in ("messages", "conversations") else columns[name]
    if (
        name == "prompt"
        and isinstance(question, str)
        and all(isinstance(columns[side], str) for side in ("chosen", "rejected"))
    ):
        if columns.get("system") or columns.get("history"):
            raise BadRow(
                "three bare texts are joined without a chat template, which `system` and `history` need. Name the "
                "question: columns: {query: prompt}"
            )
        return build_pair((Message("user", text_of(question, name)),), chosen, rejected, kind="completion")
    if isinstance(question, str):
        parts = [text_of(question, name)]
        if name == "instruction" and columns.get("input"):
            parts.append(text_of(columns["input"], "input"))
        context = (*reader.history(columns), Message("user", "\n".join(part for part in parts if part)))
    else:
        context, declared = reader.messages(question, name)
        tools += declared
    return build_pair((*_system_of(reader, columns, context), *context), chosen, rejected, tools)


def read_rejected_response(reader: MessageReader, columns: Columns) -> Conversation:
    """Read a row of ms-swift whose own answer is the chosen one, beside a rejected text."""
    if columns.get("messages"):
        messages, tools = reader.messages(columns["messages"], "messages")
    else:
        if "query" not in columns or "response" not in columns:
            raise BadRow("rejected_response needs `messages`, or `query` and `response`, with the chosen answer")
        turns = (
            Message("user", text_of(columns["query"], "query")),
            Message("assistant", text_of(columns["response"], "response")),
        )
        messages, tools = (*reader.history(columns), *turns), ()
    is_answer = [message.role == "assistant" for message in reversed(messages)]
    begin = len(messages) - len(list(takewhile(bool, is_answer)))
    rejected = _read_answer(reader, columns["rejected_response"], "rejected_response", ["messages"])
    context = (*_system_of(reader, columns, messages), *messages[:begin])
    return build_pair(context, messages[begin:], rejected, (*tools_of(columns.get("tools")), *tools))


def read_rejected_messages(reader: MessageReader, columns: Columns) -> Conversation:
    """Read a row of ms-swift with two whole conversations."""
    (chosen, tools), (rejected, more) = (
        reader.messages(columns[name], name) for name in ("messages", "rejected_messages")
    )
    context, chosen, rejected = _split_conversations(chosen, rejected)
    tools = (*tools_of(columns.get("tools")), *tools, *(tool for tool in more if tool not in tools))
    return build_pair((*_system_of(reader, columns, context), *context), chosen, rejected, tools)


def build_pair(
    context: Messages,
    chosen: Messages,
    rejected: Messages,
    tools: tuple[dict[str, Any], ...] = (),
    kind: Any = "chat",
) -> Conversation:
    """Return the conversation with the chosen answer, and in it the one with the rejected. Raises: BadRow."""
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(message.content or message.tool_calls for message in answer if message.role == "assistant"):
            raise BadRow(f"the {name} answer is empty, so there is nothing to compare")
    if chosen == rejected:
        raise BadRow("the chosen and the rejected answer are equal, so there is nothing to learn")
    sides = [
        Conversation((*context, *answer), kind, tools, first_trained=len(context)) for answer in (chosen, rejected)
    ]
    return replace(sides[0], rejected=sides[1])


def _read_answer(reader: MessageReader, value: Any, name: str, questions: Sequence[str]) -> Messages:
    if value is None:
        raise BadRow(f"'{name}' is null: a pair needs both answers")
    if isinstance(value, str):
        text = text_of(value, name)
        if not questions and text.startswith(HUMAN):
            return _read_turns_of_text(text, name)
        return (Message("assistant", text),)
    return reader.messages([value] if isinstance(value, dict) else value, name)[0]


def _read_turns_of_text(text: str, name: str) -> Messages:
    """Return the turns of a text of Anthropic's HH data."""
    messages: list[Message] = []
    for part in text.split(HUMAN)[1:]:
        question, *answers = part.split(ASSISTANT)
        messages.append(Message("user", question.strip()))
        messages += [Message("assistant", answer.strip()) for answer in answers]
    if len(messages) % 2 or any(message.role == "user" for message in messages[1::2]):
        raise BadRow(f"the turns of '{name}' (Human, Assistant) do not alternate: {shown(text)}")
    return tuple(messages)


def _split_conversations(chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """Return the messages that two conversations begin with, and the rest of each."""
    most = min(len(chosen), len(rejected)) - 1
    pairs = zip(chosen[:most], rejected[:most], strict=True)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not any(message.role == "user" for message in chosen[:count]):
        raise BadRow("the two conversations begin with other questions, so their answers cannot be compared")
    return chosen[:count], chosen[count:], rejected[count:]


def _check_question(reader: MessageReader, columns: Columns, context: Messages, chosen: Messages) -> None:
    """Raise BadRow if a column beside two whole conversations says something else than they do.

    UltraFeedback repeats the question in `prompt`, and the chosen conversation in `messages`.
    """
    repeated: dict[str, tuple[Any, ...]] = {"prompt": (context,), "messages": (context, chosen)}
    last = context[-1].content.strip()
    for name in (*QUESTIONS, "history"):
        value = columns.get(name)
        if not value:
            continue
        if isinstance(value, str) and name == "prompt":
            is_same = value.strip() == last
        else:
            is_same = name in repeated and reader.messages(value, name)[0] in repeated[name]
        if not is_same:
            raise BadRow(
                f"chosen and rejected are whole conversations, and `{name}` ({shown(value)}) is not the question in "
                "them. Remove the column, or leave only the answers in chosen and rejected"
            )


def _system_of(reader: MessageReader, columns: Columns, messages: Sequence[Message]) -> Messages:
    system = reader.system(columns)
    if system and messages and messages[0].role == "system":
        raise BadRow("the system prompt is given twice: in the `system` column and as the first message")
    return system
