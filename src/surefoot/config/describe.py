"""Descriptions of every setting with its default, and a JSON schema of run.yaml for editors."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from surefoot.config.aliases import ALIASES, FLAG_ALIASES, NOT_HERE, VALUE_ALIASES
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.methods import available_classes, known_fields
from surefoot.config.schema import RunConfig
from surefoot.errors import ConfigError

GROUPS = {
    "model": "Model and data",
    "tuning": "What is trained",
    "max_length": "Samples and batches",
    "learning_rate": "Optimiser and length",
    "device": "Device and speed",
    "nproc_per_node": "Processes and health",
    "zero_stage": "Sharding",
    "save_steps": "Checkpoints, evaluation and reports",
}
"""First setting of each group, in the order of run.yaml -> the group's title."""
BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "up to"}
TYPES = {"integer": "whole number", "number": "number", "string": "text", "array": "list", "object": "mapping"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def describe_settings() -> dict[str, dict[str, Any]]:
    """Return each setting's type, default, description and group, and `methods` if only some methods have it.

    A name that means something else with another method is listed again, as `beta (dpo)`.
    """
    described: dict[str, dict[str, Any]] = {}
    group = ""
    for name, about, methods in _list_settings():
        group = f"Only with method {' or '.join(methods)}" if methods else GROUPS.get(name, group)
        key = f"{name} ({', '.join(methods)})" if name in described else name
        described[key] = {**about, "group": group, **({"methods": methods} if methods else {})}
    described["method"]["enum"] = list(available_classes()[0])
    return described


def _list_settings() -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield each setting's name, JSON schema, and the methods that have it with this schema; none if all have it."""
    for name, about in RunConfig.model_json_schema()["properties"].items():
        yield name, about, []
    own: dict[str, list[tuple[dict[str, Any], list[str]]]] = {}
    for method, kind in available_classes()[0].items():
        for name, about in kind.model_json_schema()["properties"].items():
            if name in RunConfig.model_fields:
                continue
            forms = own.setdefault(name, [])
            methods = next((methods for form, methods in forms if form == about), None)
            if methods is None:
                forms.append((about, [method]))
            else:
                methods.append(method)
    listed = [(name, about, methods) for name, forms in own.items() for about, methods in forms]
    owners = list(dict.fromkeys(tuple(methods) for _, _, methods in listed))
    yield from sorted(listed, key=lambda each: owners.index(tuple(each[2])))  # each group in one piece


def settings_as_text(words: Sequence[str], width: int) -> str:
    """Return the settings whose names or descriptions contain all words, in groups, as lines of at most `width`.

    Raises: ConfigError if there are none.
    """
    lines: list[str] = []
    group = ""
    for name, about in describe_settings().items():
        text = " ".join(str(about["description"]).split())
        if not all(word.lower() in f"{name} {text}".lower() for word in words):
            continue
        if about["group"] != group:
            group = about["group"]
            lines += ["", group, ""]
        default = json.dumps(about["default"]) if "default" in about else "required"
        wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
        lines += wrap(f"{name}: {default}  ({allowed_values(about)})", subsequent_indent="    ")
        lines += wrap(text, initial_indent="    ", subsequent_indent="    ")
    if not lines:
        raise ConfigError(f"settings: no setting has {' and '.join(words)} in its name or description.")
    return "\n".join(lines[1:])


def allowed_values(about: Mapping[str, Any]) -> str:
    """Return the values that a setting may have, from its JSON schema: `cpu | null`, `whole number above 0`."""
    forms = [_describe_form(form) for form in about.get("anyOf", [about])]
    return " | ".join(dict.fromkeys(forms))


def _describe_form(form: Mapping[str, Any]) -> str:
    if "const" in form or "enum" in form:
        return " | ".join(str(value) for value in form.get("enum", [form.get("const")]))
    kind = form.get("type")
    if kind == "boolean":
        return "true | false"
    if kind == "array" and (values := form.get("items", {}).get("enum")):
        return f"list of {' | '.join(values)}"
    bounds = [f"{word} {form[bound]:g}" for bound, word in BOUNDS.items() if bound in form]
    return " ".join([TYPES.get(str(kind), str(kind) if kind else "mapping"), *bounds])


def run_schema() -> dict[str, Any]:
    """Return a JSON schema of run.yaml: every setting in each form it may have, and the names of other programs.

    It accepts whatever `load_config` reads, and more: paths and conflicts between settings are not checked.
    """
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    kinds: list[type[RunConfig]] = [RunConfig, *available_classes()[0].values()]
    for kind in kinds:
        definitions |= kind.model_json_schema().get("$defs", {})
    for name, about, methods in _list_settings():
        widened = _widen_schema(name, about)
        if name in properties:  # what is valid with either method
            before = properties[name]
            widened["anyOf"] = before["anyOf"] + [form for form in widened["anyOf"] if form not in before["anyOf"]]
            text = f"{before['description']} With method {' or '.join(methods)}: {about['description']}"
            widened = {"description": text, "anyOf": widened["anyOf"]}
        properties[name] = widened
    properties["method"]["anyOf"][0]["enum"] = list(available_classes()[0])
    for definition in definitions.values():
        definition.pop("title", None)
    for name, target in ALIASES.items():
        properties[name] = {"$ref": f"#/properties/{target}", "description": f"The same as {target}."}
    for name, (target, value) in FLAG_ALIASES.items():
        properties[name] = {"type": ["boolean", "null"], "description": f"true is {target}: {value}."}
    for name, reason in NOT_HERE.items():
        properties[name] = {"enum": [False, None], "description": f"Not available: {reason}."}
    for name in DEEPSPEED_KEYS:
        properties[name] = {"type": ["string", "object", "null"], "description": "A DeepSpeed config, or its file."}
    required = [name for name, field in known_fields().items() if field.is_required()]
    names = {name: [name, *(alias for alias, target in ALIASES.items() if target == name)] for name in required}
    return {
        "$schema": DIALECT,
        "title": "run.yaml of Surefoot",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "allOf": [{"anyOf": [{"required": [name]} for name in alternatives]} for alternatives in names.values()],
        "$defs": definitions,
    }


def _widen_schema(name: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a setting, widened to every form that run.yaml may hold."""
    forms = [{key: value for key, value in about.items() if key not in ("title", "description", "default")}]
    if "anyOf" in forms[0]:
        forms = forms[0]["anyOf"]
    for form in list(forms):
        items = form.get("items", {})
        if "$ref" in items:  # a list of items: one of them, or its text, is a list too
            form["items"] = {"anyOf": [items, {"type": "string"}]}
            forms += [items, {"type": "string"}]
        if name == "report_to" and "enum" in items:
            forms += [{"enum": [*items["enum"], "none"]}]
        if form.get("type") in ("number", "integer"):
            forms.append({"type": "string", "pattern": r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"})
    if name in VALUE_ALIASES:
        forms.append({"enum": list(VALUE_ALIASES[name])})
    if name in ("scale_rewards", "resume_from_checkpoint"):
        forms.append({"type": "boolean"})
    if {"type": "null"} not in forms:
        forms.append({"type": "null"})
    return {**{key: about[key] for key in ("description", "default") if key in about}, "anyOf": forms}
