"""Parsers for message contents in every dialect: texts, typed parts, reasoning, weights, tools and tool calls."""

import json
from dataclasses import dataclass
from typing import Any

from surefoot.data.conversation import IMAGE, BadRow, ImageSource, shown
from surefoot.data.image_columns import IMAGE_PARTS, source_of
from surefoot.data.rows import MAX_DEPTH
from surefoot.system.json_files import nesting_depth

WEIGHTS = ("loss", "loss_weight", "weight", "train", "training")
"""Keys for a message's loss weight: those of ms-swift, LLaMA-Factory v1, OpenAI, axolotl."""
MAX_WEIGHT = 1e6
REASONING = ("reasoning_content", "reasoning", "thinking")
UNTRAINABLE_PARTS = ("video", "video_url", "audio", "input_audio", "audio_url")


@dataclass(frozen=True)
class Parts:
    """The contents of a list of typed parts: OpenAI's (`text`) or LLaMA-Factory v1's (`value`)."""

    text: str = ""
    reasoning: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    images: tuple[ImageSource | None, ...] = ()

    @staticmethod
    def read(parts: list[Any], name: str) -> "Parts":
        """Read the parts of a message; `name` is its place in the row. Raises: BadRow for an unknown part."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: tuple[dict[str, Any], ...] = ()
        tools: tuple[dict[str, Any], ...] = ()
        images: list[ImageSource | None] = []
        for index, part in enumerate(parts):
            where = f"{name}, part {index}"
            if isinstance(part, str):
                texts.append(text_of(part, where))
                continue
            kind = part.get("type", "text") if isinstance(part, dict) else None
            if kind in UNTRAINABLE_PARTS:
                raise BadRow(f"{where} is of type {kind}; this version trains on text and images")
            if kind in IMAGE_PARTS:
                texts.append(IMAGE)
                images.append(source_of(part, where))
                continue
            keys = ("value", "text", kind)  # the last is Mistral's {"type": "thinking", "thinking": ...}
            value = next((part[key] for key in keys if key in part), None) if isinstance(part, dict) else None
            if kind == "thinking" and isinstance(value, list):  # of parts again
                value = Parts.read(value, where).text
            if kind in ("text", "input_text", "output_text", "tool_result", "observation"):
                texts.append(text_of(value, where))
            elif kind in ("reasoning", "thinking"):
                thoughts.append(text_of(value, where))
            elif kind in ("tool_call", "function_call"):
                calls += tool_calls_of(parsed(value, where), where)
            elif kind == "tools":
                tools += tools_of(value)
            else:
                raise BadRow(
                    f"{where} is {shown(part)}; known part types: text, image, image_url, reasoning, tool_call, tools"
                )
        return Parts("".join(texts), "".join(thoughts) if thoughts else None, calls, tools, tuple(images))


def text_of(value: Any, name: str) -> str:
    """Return a text that a tokenizer accepts. JSON can hold half a surrogate pair, and NUL indicates binary data."""
    if not isinstance(value, str):
        raise BadRow(f"{name} is {shown(value)}; it must be a text")
    if IMAGE in value:
        raise BadRow(f"{name} holds the character U+{ord(IMAGE):X}, which marks images here")
    if "\0" in value:
        raise BadRow(f"{name} holds a NUL character at position {value.index(chr(0)) + 1}: binary data, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{name} is no valid text at character {error.start + 1}: {error.reason}") from error
    return value


def parsed(value: Any, name: str) -> Any:
    """Parse JSON text, in which CSV and Parquet files often store lists and objects. Raises: BadRow."""
    if not isinstance(value, str):
        return value
    try:
        return _parse_json(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} should be JSON, but is not: {error}; it begins {shown(value)}") from error


def _parse_json(text: str) -> Any:
    """Parse a JSON value. Raises: ValueError, RecursionError."""
    value = json.loads(text)
    if nesting_depth(value) > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} values inside each other")
    return value


def weight_of(others: dict[str, Any], name: str) -> float | None:
    """Remove a message's loss weight from its keys and return it. Raises: BadRow for a value that is no weight."""
    for key in WEIGHTS:
        if key in others:
            value = others.pop(key)
            if isinstance(value, bool | int | float) and 0 <= value <= MAX_WEIGHT:
                return float(value)
            raise BadRow(
                f"{name} has {key}={shown(value)}; a weight in the loss is true, false or a number from 0 to "
                f"{MAX_WEIGHT:g}"
            )
    return None


def first_text(others: dict[str, Any], keys: tuple[str, ...], name: str) -> str | None:
    """Remove `keys` from a message and return the text of the first present one. Raises: BadRow."""
    texts = [text_of(others.pop(key), f"{name}, {key}") for key in keys if key in others]
    return texts[0] if texts else None


def tool_calls_of(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Return one tool call or a list of them in OpenAI's form. Raises: BadRow."""
    if not value:
        return ()
    calls = value if isinstance(value, list) else [value]
    return tuple(_convert_tool_call(call, name) for call in calls)


def _convert_tool_call(call: Any, name: str) -> dict[str, Any]:
    """Convert a call, in OpenAI's form (`function: {name, arguments}`) or bare, to that form; parse its arguments."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(f"{name} has a tool call without a function name: {shown(call)}")
    text_of(function["name"], f"{name}, the name of a called function")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = _parse_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadRow(
                f"{name} calls {function['name']} with malformed arguments ({error}): {shown(arguments)}"
            ) from error
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise BadRow(f"{name} calls {function['name']} with arguments {shown(arguments)}; they must be an object")
    check_texts(arguments, name)
    outer = {key: text_of(value, f"{name}, id") for key, value in call.items() if key == "id" and value is not None}
    return {**outer, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Return declared tools in OpenAI's form; bare function descriptions are wrapped."""
    if not value:
        return ()
    value = parsed(value, "tools")
    if not value:
        return ()
    tools = value if isinstance(value, list) else [value]
    wrapped = []
    for tool in tools:
        tool = parsed(tool, "tools")
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"tools holds {shown(tool)}, which is no function with a name")
        check_texts(tool, "tools")
        wrapped.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(wrapped)


def check_texts(value: Any, name: str) -> None:
    """Raise BadRow if a text inside a JSON value is not accepted by tokenizers."""
    if isinstance(value, str):
        text_of(value, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            text_of(key, name)
            check_texts(item, name)
    elif isinstance(value, list | tuple):
        for item in value:
            check_texts(item, name)
