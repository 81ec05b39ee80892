"""Data sources of ms-swift and axolotl as entries of `dataset`."""

import re
from typing import Any

from surefoot.config.schema import HUB_ID
from surefoot.migrate.parsed_run import ParsedRun, resolve_path

AXOLOTL_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": None, "completion": "text"}
AXOLOTL_COLUMNS = {"field": "text", "field_messages": "messages", "field_system": "system", "field_tools": "tools"}
"""Setting of an axolotl source -> the standard column that it names."""
CARRIED_OF_AXOLOTL = frozenset({"path", "name", "split", "type", *AXOLOTL_COLUMNS})
READ_MESSAGE_KEYS = {"role": ("role", "from"), "content": ("content", "value")}
"""Part of a message -> the keys that a row may have for it."""
SWIFT_SOURCE = re.compile(r"^(?:(HF|MS|hf|ms)::)?(?:([\w.-]+/[\w.-]+):([\w./-]+?)|(.+?))(?:#(\d+))?$")
"""Source of ms-swift: `HF::owner/name:subset#500`, or a path."""


MODELSCOPE_NOTE = "this is an id of ModelScope, but ids of data here are those of huggingface.co"
MODELSCOPE_MODEL_NOTE = (
    "ms-swift fetches it from ModelScope unless USE_HF=1 is set, Surefoot from huggingface.co: write modelscope:{} to "
    "fetch it from ModelScope, with the package modelscope"
)
TRAINED_ANYWAY = (("roles_to_train", ["assistant"]), ("train_on_eos", "turn"))
"""Options of axolotl's sources that say what is trained here by default: the assistant's turns with their ends."""
MODELSCOPE_OWNERS = ("AI-ModelScope/", "LLM-Research/", "ZhipuAI/", "damo/", "iic/", "modelscope/", "swift/")
"""Owners on ModelScope whose models are missing or different on huggingface.co."""


def is_modelscope_id(name: str) -> bool:
    return name.startswith(MODELSCOPE_OWNERS)


def note_hub_of_model(run: ParsedRun, model: str) -> str | None:
    """Return the note on a model of ms-swift that is fetched from another hub here; None for a folder."""
    if not HUB_ID.match(model) or resolve_path(run.base, model).exists():
        return None
    return MODELSCOPE_MODEL_NOTE.format(model)


def check_entries(run: ParsedRun, name: str, value: Any) -> list[dict[str, Any]]:
    """Return the entries of a list of data sources. Raises: ConfigError if an entry is no mapping with a path."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) and entry.get("path") for entry in value):
        raise run.make_value_error(name, value, "a list of mappings with a path each")
    return value


def map_axolotl_source(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of axolotl's `datasets` as an entry of `dataset`."""
    source = {"path": entry.get("path")}
    if entry.get("name"):
        source["subset"] = entry["name"]
    if entry.get("split"):
        source["split"] = entry["split"]
    if row_format := AXOLOTL_FORMATS.get(str(entry.get("type"))):
        source["format"] = row_format
    named = {column: entry[name] for name, column in AXOLOTL_COLUMNS.items() if entry.get(name)}
    # Both names of messages are detected.
    columns = {column: name for column, name in named.items() if name not in (column, "messages", "conversations")}
    return {**source, "columns": columns} if columns else source


def _has_read_keys(name: str, option: Any) -> bool:
    """Return whether an option of an axolotl source names keys of messages that are read without it."""
    if name == "message_property_mappings" and isinstance(option, dict):
        return all(key in READ_MESSAGE_KEYS.get(part, ()) for part, key in option.items())
    return option in READ_MESSAGE_KEYS.get(name.removeprefix("message_field_"), ())


def list_axolotl_left_out(run: ParsedRun, value: Any) -> dict[str, str]:
    """Return the options of axolotl's sources that are not carried, each with its reason."""
    left_out = {}
    for entry in check_entries(run, "datasets", value):
        for name, option in entry.items():
            if name == "type" and (not isinstance(option, str) or option not in AXOLOTL_FORMATS):
                left_out[f"type = {option} of {entry['path']}"] = (
                    "set its columns with `columns`, or its format with `format`"
                )
            elif name == "type" and option == "alpaca":
                left_out[f"type = alpaca of {entry['path']}"] = (
                    "axolotl writes Alpaca's prompt around a question. Here the question is a turn of the chat template"
                )
            elif (name, option) not in TRAINED_ANYWAY and not (
                name in CARRIED_OF_AXOLOTL or _has_read_keys(name, option)
            ):
                left_out[f"{name} = {option} of {entry['path']}"] = (
                    "sources have path, subset, split, format and columns"
                )
    return left_out


def parse_swift_source(text: str) -> Any:
    """Return a source of ms-swift as an entry of `dataset`; `name#500` becomes the first 500 rows."""
    match = SWIFT_SOURCE.match(text)
    if match is None:
        return text
    _, name, subset, path, count = match.groups()
    source = {"path": name or path, "subset": subset, "split": f"[:{count}]" if count else None}
    fields = {key: part for key, part in source.items() if part}
    return fields["path"] if len(fields) == 1 else fields


def list_swift_left_out(name: str, value: Any, *, default_hub: str) -> dict[str, str]:
    """Return the meaning of ms-swift's sources that is not carried, each with its reason.

    `default_hub`: HF or MS, the hub of sources that name none.
    """
    left_out = {}
    for source in value if isinstance(value, list) else [value]:
        match = SWIFT_SOURCE.match(str(source))
        if match is not None and match[5]:
            left_out[f"#{match[5]} of {name} = {source}"] = (
                "the first rows are taken, whereas ms-swift samples them at random"
            )
        if match is not None and (match[1] or default_hub).upper() == "MS":
            is_modelscope = match[1] or match[2] or is_modelscope_id(match[4])
            left_out |= {f"{name} = {source}": MODELSCOPE_NOTE} if is_modelscope else {}
    return left_out
