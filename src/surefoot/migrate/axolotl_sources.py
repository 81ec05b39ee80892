"""Data sources of axolotl as entries of `dataset`."""

from collections.abc import Iterator
from typing import Any

from surefoot.data.messages import ROLES
from surefoot.migrate.parsed_run import ParsedRun

FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": None, "completion": "text"}
COLUMNS = {"field": "text", "field_messages": "messages", "field_system": "system", "field_tools": "tools"}
"""Setting of a source -> the standard column that it names."""
PROMPT_COLUMNS = {
    "field_instruction": "instruction", "field_input": "input", "field_output": "output", "field_system": "system",
}  # fmt: skip
"""The same of a prompt that the run writes itself, as the mapping `type`."""
PROMPT_TEXTS = {
    "format": "the question is a turn of the chat template",
    "no_input_format": "the question is a turn of the chat template",
    "system_format": "the system message is a turn of the chat template",
    "system_prompt": "set it as `system`, which is for all sources",
}
"""Text of such a prompt -> why it is not carried."""
CARRIED = frozenset({"path", "name", "split", "type", "roles", "message_property_mappings", *COLUMNS})
MESSAGE_KEYS = {"role": ("role", "from"), "content": ("content", "value")}
"""Part of a message -> the keys that a row may have for it."""
ROLE_TAGS = {"user": "user_tag", "assistant": "assistant_tag", "system": "system_tag", "tool": "observation_tag"}
"""Role -> the tag that gives it another name."""
TRAINED_ANYWAY = (("roles_to_train", ["assistant"]), ("train_on_eos", "turn"))
"""Options that say what is trained here by default: the assistant's turns with their ends."""


def are_texts(entries: Any) -> bool:
    """Return whether all sources are plain texts, which axolotl cuts into samples of the longest length."""
    return bool(entries) and all(isinstance(each, dict) and each.get("type") == "completion" for each in entries)


def map_axolotl_source(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of axolotl's `datasets` as an entry of `dataset`."""
    own_prompt = entry["type"] if isinstance(entry.get("type"), dict) else None
    names = PROMPT_COLUMNS if own_prompt is not None else COLUMNS
    settings = entry if own_prompt is None else own_prompt
    named = {column: settings[name] for name, column in names.items() if settings.get(name)}
    # Both names of messages are detected.
    columns = {column: name for column, name in named.items() if name not in (column, "messages", "conversations")}
    row_format = "alpaca" if own_prompt is not None else FORMATS.get(str(entry.get("type")))
    source = {
        "path": entry.get("path"),
        "subset": entry.get("name"),
        "split": entry.get("split"),
        "format": row_format,
        "columns": columns,
        "tags": dict(_list_tags(entry)),
    }
    return {name: value for name, value in source.items() if value}


def _list_tags(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (tag, name) of the keys and roles that messages of a source have under other names."""
    for part, key in _list_message_keys(entry):
        if part in MESSAGE_KEYS and key not in MESSAGE_KEYS[part]:
            yield f"{part}_tag", key
    for role, others in _list_other_roles(entry):
        if role in ROLE_TAGS and others:
            yield ROLE_TAGS[role], others[0]


def _list_message_keys(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (part of a message, its key), of the present and the former form."""
    mappings = entry.get("message_property_mappings")
    yield from mappings.items() if isinstance(mappings, dict) else ()
    for part in MESSAGE_KEYS:
        if key := entry.get(f"message_field_{part}"):
            yield part, key


def _list_other_roles(entry: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield (role, the names that it has in the rows and that are not read as that role without being told)."""
    roles = entry.get("roles")
    for role, names in roles.items() if isinstance(roles, dict) else ():
        yield role, [str(name) for name in names or [] if ROLES.get(str(name)) != role]


def list_axolotl_left_out(run: ParsedRun, value: Any) -> dict[str, str]:
    """Return the options of axolotl's sources that are not carried, each with its reason."""
    left_out = {}
    for entry in run.check_entries("datasets", value):
        for option, why in _list_left_out(entry):
            left_out[f"{option} of {entry['path']}"] = why
        if entry.get("type") == "completion" and not are_texts(value):
            left_out[f"type = completion of {entry['path']}"] = (
                "axolotl cuts a long text into several samples. Beside conversations it is left out here"
            )
    return left_out


def _list_left_out(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (option, reason) of what is not carried of a source."""
    for name, option in entry.items():
        if name == "type" and isinstance(option, dict):
            for part in option.keys() - PROMPT_COLUMNS.keys():
                yield f"{part} = {option[part]}", PROMPT_TEXTS.get(part, "prompts have no such setting")
        elif name == "type" and option == "alpaca":
            yield (
                "type = alpaca",
                "axolotl writes Alpaca's prompt around a question. Here the question is a turn of the chat template",
            )
        elif name == "system_prompt":
            yield f"system_prompt = {option}", PROMPT_TEXTS["system_prompt"]
        elif name == "type" and option not in FORMATS:
            yield f"type = {option}", "set its columns with `columns`, or its format with `format`"
        elif (name, option) not in TRAINED_ANYWAY and name not in CARRIED and not _is_key_of_message(name):
            yield f"{name} = {option}", "sources have path, subset, split, format, columns and tags"
    for part, key in _list_message_keys(entry):
        if part not in MESSAGE_KEYS and key != part:
            yield f"message_property_mappings: {part} = {key}", "tags name the keys of role and content alone"
    for role, others in _list_other_roles(entry):
        if len(others) > 1 or (others and role not in ROLE_TAGS):
            yield f"roles: {role} = {others}", "a role has one further name here, and tools are the last of four roles"


def _is_key_of_message(name: str) -> bool:
    return name.removeprefix("message_field_") in MESSAGE_KEYS and name.startswith("message_field_")
