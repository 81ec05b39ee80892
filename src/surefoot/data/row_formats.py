"""Row formats: converts rows of every known format to conversations, and detects formats by column names.

This module does not depend on files, templates or tokens.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from surefoot.data.conversation import BadRow, Conversation, Message, Role, check_tools, check_turns, shown
from surefoot.data.image_columns import IMAGE_COLUMNS, PLACEHOLDER, looks_like_images, place_images, read_image_columns
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
IN_THE_ROW = "bytes in the row"
"""Placeholder for an image that has no name."""
ANSWERS = frozenset(("response", "output", "completion"))
"""Columns that a prompt-only row does not need."""
UNTRAINABLE_COLUMNS = ("video", "videos", "audio", "audios")


@dataclass(frozen=True)
class FormatSpec:
    """The format of the rows of one source."""

    format: str = "auto"
    """Name in FORMATS, or `auto`: detected from the columns."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Map from Surefoot's column names to those of the file."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """`tags` of a LLaMA-Factory entry: role_tag, content_tag, user_tag, ..."""
    only_mapped: bool = False
    """Whether to ignore optional columns that are not in `columns`, as LLaMA-Factory does."""
    named_in: str = "`columns`"
    """Name of the place that sets `columns`, for error messages."""
    system: str | None = None
    """System message of conversations without one."""
    prompts: bool = False
    """Whether rows are prompts, which the model answers in GRPO. A row's own answer is kept as a column."""


@dataclass(frozen=True)
class Format:
    """A row format: its required columns, its optional columns, and its reader."""

    required: frozenset[str]
    optional: frozenset[str]
    read: Callable[["Reader", Columns], Conversation]

    def required_columns(self, *, prompts: bool) -> frozenset[str]:
        """Return the columns a row must have; a prompt needs no answer."""
        return self.required - ANSWERS if prompts else self.required


def detect(columns: Collection[str], *, prompts: bool = False) -> str:
    """Return the name of the format that has these columns; `prompts`: see `FormatSpec`.

    Raises: BadRow if no format or several fit; it lists the candidates.
    """
    formats = {name: format.required_columns(prompts=prompts) for name, format in FORMATS.items()}
    if prompts:
        del formats["text"]  # a text has no question
    candidates = [name for name, needed in formats.items() if needed <= set(columns)]
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(sorted(columns)[:8]) + (f", ... ({len(columns)} columns)" if len(columns) > 8 else "")
    if candidates:
        raise BadRow(
            f"the columns ({names}) fit several formats: {', '.join(candidates)}. "
            f"Say which one with `dataset_format: {candidates[0]}`"
        )
    format_list = "; ".join(f"{name} ({' + '.join(sorted(needed, reverse=True))})" for name, needed in formats.items())
    example = "columns: {query: YOUR_COLUMN}" if prompts else "columns: {query: YOUR_COLUMN, response: YOUR_COLUMN}"
    raise BadRow(
        f"the columns ({names}) fit no known format: {format_list}. Say what yours mean, for example with `{example}`"
    )


def format_of(spec: FormatSpec, first_row: Columns) -> str:
    """Return the format of a file: the one named in its spec, or that of its first row.

    Raises: BadRow if it is ambiguous or unknown.
    """
    if spec.format != "auto":
        return spec.format
    return detect(_rename_columns(first_row, spec).keys(), prompts=spec.prompts)


def _rename_columns(row: Columns, spec: FormatSpec) -> Columns:
    """Rename the columns of a row to Surefoot's names."""
    if not spec.columns:
        return row
    required = FORMATS[spec.format].required if spec.format != "auto" else frozenset(spec.columns)
    absent = [source for name, source in spec.columns.items() if source not in row and name in required]
    if absent:
        raise BadRow(f"column '{absent[0]}', named in {spec.named_in}, is missing; the row has {shown(list(row))}")
    sources = set(spec.columns.values())
    mapped = {name: value for name, value in row.items() if name not in sources}
    if spec.only_mapped:
        format = FORMATS[spec.format]
        mapped = {name: value for name, value in mapped.items() if name not in format.optional or name in IMAGE_COLUMNS}
    return mapped | {name: row[source] for name, source in spec.columns.items() if source in row}


class Reader:
    """A reader for the rows of one file, which all have the same format.

    `keep_columns`: keep the columns that are not part of the conversation, for the method.
    """

    def __init__(self, spec: FormatSpec, format: str, *, keep_columns: bool = False) -> None:
        self.spec = spec
        self.format = format
        self._keep_columns = keep_columns
        tags = {"role_tag": "from", "content_tag": "value", **spec.tags}
        self._role_keys = (tags["role_tag"], "role", "from")
        self._content_keys = (tags["content_tag"], "content", "value")
        self._roles = dict(ROLES)
        self._roles |= {spec.tags[tag]: role for tag, role in ROLE_TAGS.items() if tag in spec.tags}
        self._detected: dict[tuple[str, ...], str] = {}

    def read(self, row: Columns) -> Conversation:
        """Return the conversation of a row.

        Raises: BadRow for a row whose format is not the file's, or that is no trainable conversation.
        """
        columns = _rename_columns(row, self.spec)
        if self.spec.format == "auto":
            names = tuple(columns)
            row_format = self._detected.get(names) if len(names) < 64 else None
            if row_format is None:
                row_format = self._detected[names] = detect(names, prompts=self.spec.prompts)
            if row_format != self.format:
                raise BadRow(
                    f"mixed formats: this row is {row_format}, the file began as {self.format}. Split the file"
                )
        format = FORMATS[self.format]
        missing = sorted(format.required_columns(prompts=self.spec.prompts) - columns.keys())
        if missing:
            raise BadRow(f"column '{missing[0]}' of format {self.format} is missing; the row has {shown(list(row))}")
        _refuse_untrainable(columns)
        if self.spec.prompts:
            return self._read_prompt(format, columns)
        conversation = self._read_conversation(format, columns)
        if conversation.kind == "chat":
            check_turns(conversation.messages)
            check_tools(conversation.messages, conversation.tools)
        if not self._keep_columns:
            return conversation
        used = format.required | format.optional
        return replace(conversation, columns={name: value for name, value in columns.items() if name not in used})

    def _read_conversation(self, format: Format, columns: Columns) -> Conversation:
        """Return the conversation with its images in their places, and the system message that it may lack."""
        conversation = self._place_row_images(format.read(self, columns), columns)
        messages, first = conversation.messages, conversation.first_trained
        if self.spec.system is None or conversation.kind != "chat" or (messages and messages[0].role == "system"):
            return conversation
        messages = (Message("system", self.spec.system), *messages)
        return replace(conversation, messages=messages, first_trained=first + 1 if first else 0)

    def _place_row_images(self, conversation: Conversation, columns: Columns) -> Conversation:
        """Return the conversation with the images of the row's columns put in their places."""
        sources = read_image_columns(
            {name: _parse_image_list(columns[name], name) for name in IMAGE_COLUMNS if name in columns}
        )
        if sources is None and any(PLACEHOLDER in message.content for message in conversation.messages):
            likely = next((name for name, value in columns.items() if looks_like_images(name, value)), None)
            if likely is not None:
                raise BadRow(f"a turn says {PLACEHOLDER}, and no column is `images`. Set columns: {{images: {likely}}}")
        if sources and conversation.kind in ("completion", "text", "text prompt"):
            raise BadRow(
                "the row has images, but bare texts instead of messages to put them into. Give messages, or "
                "name the text as a question: columns: {query: prompt}"
            )
        return replace(conversation, messages=place_images(conversation.messages, sources))

    def _read_prompt(self, format: Format, columns: Columns) -> Conversation:
        """Read a row as a prompt: its last answer, if it has one, is passed to the reward functions as `response`."""
        if isinstance(columns.get("prompt"), str) and self.format == "prompt_completion":
            prompt = Message("user", text_of(columns["prompt"], "prompt"))
            messages = self._place_row_images(Conversation((prompt,), "text prompt"), columns).messages
            tools: tuple[dict[str, Any], ...] = ()
            kind: Literal["prompt", "text prompt"] = "text prompt"
        else:
            stand_ins: dict[str, Any] = dict.fromkeys(format.required & ANSWERS, "")
            if self.format == "prompt_completion":
                stand_ins["completion"] = []
            conversation = self._read_conversation(format, {**columns, **stand_ins})
            messages, tools, kind = conversation.messages, conversation.tools, "prompt"
        answers = []
        while messages and messages[-1].role == "assistant":
            answers.append(messages[-1].content)
            messages = messages[:-1]
        if kind == "prompt":
            check_turns([*messages, Message("assistant", "")])
            check_tools(messages, tools)
        elif not messages[0].content:
            raise BadRow("the prompt is empty")
        used = (format.required | format.optional) - ANSWERS
        others = {name: value for name, value in columns.items() if name not in used}
        others["prompt"] = (
            messages[0].content if kind == "text prompt" else [message.as_template_input() for message in messages]
        )
        images = Conversation(messages).images
        if images:
            others["images"] = [source if isinstance(source, str) else IN_THE_ROW for source in images]
        if any(answers):
            others.setdefault("response", answers[0])
        for name in format.required & ANSWERS & columns.keys():
            answer = columns[name]
            is_messages = isinstance(answer, list) and answer and isinstance(answer[-1], dict)
            others.setdefault("response", answer[-1].get("content") if is_messages else answer)
        return Conversation(messages, kind, tools, columns=others)

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
            raise BadRow(f"{name} has role {shown(raw_role)}. Known roles: {', '.join(sorted(self._roles))}")
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


def _refuse_untrainable(columns: Columns) -> None:
    """Raise BadRow for rows that would be trained as text although they are not meant to be."""
    for name in UNTRAINABLE_COLUMNS:
        if columns.get(name):
            raise BadRow(f"the row has {name} ({shown(columns[name])}); this version trains on text and images")
    if columns.get("label") is False and "completion" in columns:
        raise BadRow("label is false: a bad answer of preference data (KTO), not one to learn")


def _read_prompt_completion(reader: Reader, columns: Columns) -> Conversation:
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRow("the completion is empty, so there is nothing to train on")
        turns = (Message("user", text_of(prompt, "prompt")), Message("assistant", text_of(completion, "completion")))
        return Conversation(turns, "completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        context, tools = reader.messages(prompt, "prompt")
        if reader.spec.prompts:
            return Conversation(context, tools=(*tools_of(columns.get("tools")), *tools))
        answers, more = reader.messages(completion, "completion")
        tools = (*tools_of(columns.get("tools")), *tools, *more)
        return Conversation((*context, *answers), tools=tools, first_trained=len(context))
    raise BadRow(
        f"prompt is {shown(prompt)} and completion {shown(completion)}; both must be texts or both lists of messages"
    )


def _read_alpaca(reader: Reader, columns: Columns) -> Conversation:
    """Read a row whose user turn is instruction and input, joined by a newline, as in LLaMA-Factory and ms-swift."""
    parts = [text_of(columns[name], name) for name in ("instruction", "input") if columns.get(name) is not None]
    question = "\n".join(part for part in parts if part)
    return _build_conversation(reader, columns, question, columns["output"], "output")


def _read_query_response(reader: Reader, columns: Columns) -> Conversation:
    return _build_conversation(reader, columns, text_of(columns["query"], "query"), columns["response"], "response")


def _build_conversation(reader: Reader, columns: Columns, question: str, answer: Any, name: str) -> Conversation:
    last = (Message("user", question), Message("assistant", text_of(answer, name)))
    tools = tools_of(columns.get("tools"))
    return Conversation((*reader.system(columns), *reader.history(columns), *last), tools=tools)


def _read_plain_text(_: Reader, columns: Columns) -> Conversation:
    text = text_of(columns["text"], "text")
    if not text:
        raise BadRow("the text is empty, so there is nothing to train on")
    return Conversation((Message("assistant", text),), "text")


def _define_format(required: str, optional: str, read: Callable[[Reader, Columns], Conversation]) -> Format:
    return Format(frozenset(required.split()), frozenset((*optional.split(), *IMAGE_COLUMNS)), read)


FORMATS: Mapping[str, Format] = {
    "messages": _define_format(
        "messages", "tools functions system", lambda reader, row: reader.conversation(row, "messages")
    ),
    "sharegpt": _define_format(
        "conversations", "tools system", lambda reader, row: reader.conversation(row, "conversations")
    ),
    "alpaca": _define_format("instruction output", "input history system tools", _read_alpaca),
    "query_response": _define_format("query response", "history system tools", _read_query_response),
    "prompt_completion": _define_format("prompt completion", "tools", _read_prompt_completion),
    "text": _define_format("text", "", _read_plain_text),
}
"""Formats by name. `messages` is OpenAI's format, which ms-swift and TRL share, with its dialects."""


def _parse_image_list(value: Any, name: str) -> Any:
    """Return an image column, one image or a list of them, parsed if the list is stored as JSON text."""
    return parsed(value, name) if isinstance(value, str) and value[:1] + value[-1:] == "[]" else value
