"""Reading of messages in the dialects of all formats. Independent of which columns a format has."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefoot.data.conversation import BadRow, Conversation, Message, Role, shown
from surefoot.data.message_content import (
    REASONING,
    Parts,
    check_texts,
    first_text,
    parsed,
    text_of,
    tool_calls_of,
    tools_of,
    weight_of,
)

Columns = Mapping[str, Any]

ROLES: Mapping[str, str] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "tool": "tool", "observation": "tool", "tool_response": "tool", "function": "tool", "ipython": "tool",
    "function_call": "calls", "tool_call": "calls",
}  # fmt: skip
"""Map from the formats' role names to Surefoot's; `calls` is an assistant turn that holds tool calls as JSON text."""

ROLE_TAGS: Mapping[str, str] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "calls",
    "system_tag": "system",
}
"""Map from LLaMA-Factory's tags, which rename roles, to Surefoot's roles."""


class MessageReader:
    """A reader of messages. `tags`: names of roles and keys, see `FormatSpec`."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        keys = {"role_tag": "from", "content_tag": "value", **tags}
        self._role_keys = (keys["role_tag"], "role", "from")
        self._content_keys = (keys["content_tag"], "content", "value")
        self._roles = dict(ROLES)
        self._roles |= {tags[tag]: role for tag, role in ROLE_TAGS.items() if tag in tags}

    def messages(self, value: Any, column: str) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
        """Return messages of any dialect and the tools declared in them. Turns of tool calls join the turn before."""
        value = parsed(value, column)
        if not isinstance(value, list) or not value:
            raise BadRow(f"'{column}' must be a non-empty list of messages, found {shown(value)}")
        messages: list[Message] = []
        tools: tuple[dict[str, Any], ...] = ()
        for index, item in enumerate(value):
            name = f"{column}[{index}]"
            role, message, declared = self._read_message(item, name)
            tools += declared
            if message.role == "system" and declared and not message.content:
                continue  # LLaMA-Factory v1 keeps the tools in a system turn of their own
            before = messages[-1] if messages else None
            if role == "calls" and before is not None and before.role == "assistant":
                messages[-1] = replace(
                    before,
                    tool_calls=before.tool_calls + message.tool_calls,
                    weight=before.weight if message.weight is None else message.weight,
                    images=before.images + message.images,
                )
            else:
                messages.append(message)
        return tuple(messages), tools

    def _read_message(self, item: Any, name: str) -> tuple[str, Message, tuple[dict[str, Any], ...]]:
        if not isinstance(item, dict):
            raise BadRow(f"{name} must be an object with a role and content, found {shown(item)}")
        role_key = next((key for key in self._role_keys if key in item), "role")
        content_key = next((key for key in self._content_keys if key in item), "content")
        raw_role = item.get(role_key)
        role = self._roles.get(raw_role) if isinstance(raw_role, str) else None
        if role is None:
            raise BadRow(
                f"{name} has role {shown(raw_role)}. Known roles: {', '.join(sorted(self._roles))}; `tags` of a "
                "dataset_info.json (user_tag, assistant_tag) may name others"
            )
        others = {key: value for key, value in item.items() if key not in (role_key, content_key) and value is not None}
        weight = weight_of(others, name)
        if weight and role not in ("assistant", "calls"):
            raise BadRow(f"{name} ({role}) has a weight of {weight} in the loss; only the assistant's turns take one")
        calls = tool_calls_of(others.pop("tool_calls", None), name)
        legacy = others.pop("function_call", None)
        if legacy:
            calls += tool_calls_of(legacy, name)
        reasoning = first_text(others, REASONING, name)
        content = item.get(content_key)
        parts = Parts()
        if isinstance(content, list):
            parts = Parts.read(content, name)
            content, calls, reasoning = parts.text, calls + parts.calls, reasoning or parts.reasoning
        if role == "calls":
            calls += tool_calls_of(parsed(content, name), name) if content else ()
            content = ""
            if not calls:
                raise BadRow(f"{name} ({raw_role}) holds no tool call")
        if content is None and (calls or reasoning is not None):
            content = ""
        if not isinstance(content, str):
            raise BadRow(f"{name} ({raw_role}) has content {shown(content)}; it must be a text")
        if calls and role not in ("assistant", "calls"):
            raise BadRow(f"{name} ({role}) has tool calls; only the assistant can call tools")
        check_texts(others, name)
        reasoning = reasoning if reasoning and reasoning.strip() else None  # exports write "" where there is none
        message_role: Role = "assistant" if role == "calls" else role  # type: ignore[assignment]
        content = content if parts.images else text_of(content, name)  # its parts are checked already
        message = Message(message_role, content, calls, reasoning, weight, others, parts.images, str(raw_role))
        return role, message, parts.tools

    def conversation(self, columns: Columns, name: str) -> Conversation:
        """Return the conversation of a row whose `name` column is a list of messages."""
        messages, tools = self.messages(columns[name], name)
        if columns.get("system") and messages[0].role == "system":
            raise BadRow("the system prompt is given twice: in the `system` column and as the first message")
        tools = (*tools_of(columns.get("tools")), *tools_of(columns.get("functions")), *tools)
        return Conversation((*self.system(columns), *messages), tools=tools)

    def system(self, columns: Columns) -> tuple[Message, ...]:
        """Return the message of the `system` column, if it is not empty."""
        value = columns.get("system")
        return (Message("system", text_of(value, "system")),) if value else ()

    def history(self, columns: Columns) -> tuple[Message, ...]:
        """Return the messages of the `history` column: earlier [question, answer] pairs."""
        value = parsed(columns.get("history") or [], "history")
        if not isinstance(value, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
            raise BadRow(f"'history' must be a list of [question, answer] pairs, found {shown(value)}")
        return tuple(
            Message("assistant" if side else "user", text_of(pair[side], f"history[{index}]"))
            for index, pair in enumerate(value)
            for side in (0, 1)
        )
