"""How other programs name their data: sources of ms-swift and axolotl, as entries of `dataset`."""

import re
from typing import Any

from surefoot.errors import ConfigError
from surefoot.migrate.parse_input import ParsedRun

AXOLOTL_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": None, "completion": "text"}
SAMPLED = re.compile(r"^(?:(HF|MS|hf|ms)::)?(?:([\w.-]+/[\w.-]+):([\w./-]+?)|(.+?))(?:#(\d+))?$")
"""ms-swift's `HF::owner/name:subset#500`, or a path."""


OF_MODELSCOPE = "ids are those of huggingface.co here; theirs are ModelScope's"
OWNERS_THERE = ("AI-ModelScope/", "LLM-Research/", "ZhipuAI/", "damo/", "iic/", "modelscope/", "swift/")
"""Who has nothing, or something else, at huggingface.co."""


def is_of_modelscope(name: str) -> bool:
    return name.startswith(OWNERS_THERE)


def odd_value(told: ParsedRun, name: str, value: Any, wanted: str) -> ConfigError:
    """For a setting whose value is not what is `wanted`, with its place."""
    return ConfigError(f"{name}={value!r}, and not {wanted} ({told.places.get(name, told.program)}).")


def mappings(told: ParsedRun, name: str, value: Any) -> list[dict[str, Any]]:
    """Entries with a path each. Raises: ConfigError."""
    if not isinstance(value, list) or not all(isinstance(one, dict) and one.get("path") for one in value):
        raise odd_value(told, name, value, "a list of mappings with a path each")
    return value


def axolotl_source(item: dict[str, Any]) -> dict[str, Any]:
    """An entry of axolotl's `datasets` as one of ours."""
    source = {"path": item.get("path")}
    if item.get("name"):
        source["subset"] = item["name"]
    if item.get("split"):
        source["split"] = item["split"]
    known = AXOLOTL_FORMATS.get(str(item.get("type")))
    return {**source, **({"format": known} if known else {})}


def axolotl_left(told: ParsedRun, value: Any) -> dict[str, str]:
    """What its sources say that is not carried."""
    left = {}
    for item in mappings(told, "datasets", value):
        for name, given in item.items():
            if name == "type" and (not isinstance(given, str) or given not in AXOLOTL_FORMATS):
                left[f"type = {given} of {item['path']}"] = "name its columns with `columns`, or its form with `format`"
            elif name == "type" and given == "alpaca":
                left[f"type = alpaca of {item['path']}"] = (
                    "theirs writes Alpaca's own prompt around a question; here it is a turn of the chat template"
                )
            elif name not in ("path", "name", "split", "type"):
                left[f"{name} = {given} of {item['path']}"] = "sources have path, subset, split, format and columns"
    return left


def swift_source(one: str) -> Any:
    """A source of ms-swift; of `name#500` the first rows."""
    match = SAMPLED.match(one)
    if match is None:
        return one
    _, name, subset, path, count = match.groups()
    source = {"path": name or path, "subset": subset, "split": f"[:{count}]" if count else None}
    said = {key: given for key, given in source.items() if given}
    return said["path"] if len(said) == 1 else said


def swift_left(name: str, value: Any) -> dict[str, str]:
    """What its sources mean that is not carried."""
    left = {}
    for one in value if isinstance(value, list) else [value]:
        match = SAMPLED.match(str(one))
        if match is not None and match[5]:
            left[f"#{match[5]} of {name} = {one}"] = "the first rows are taken; theirs are drawn at random"
        if match is not None and (match[1] or "MS").upper() == "MS":
            is_theirs = match[1] or match[2] or is_of_modelscope(match[4])
            left |= {f"{name} = {one}": OF_MODELSCOPE} if is_theirs else {}
    return left
