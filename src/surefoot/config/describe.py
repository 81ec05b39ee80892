"""Descriptions of every setting with its default, and a JSON schema of run.yaml for editors."""

from typing import Any

from surefoot.config.aliases import ALIASES, FLAG_ALIASES, NOT_HERE, VALUE_ALIASES
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.methods import available_classes, known_fields, methods_with
from surefoot.config.schema import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def describe_settings() -> dict[str, dict[str, Any]]:
    """Return each setting's type, default and description, and `methods` if only some methods have it."""
    described: dict[str, dict[str, Any]] = {}
    for kind in _list_settings_classes():
        for name, about in kind.model_json_schema()["properties"].items():
            described.setdefault(name, about)
    described["method"]["enum"] = list(available_classes()[0])
    for name in described.keys() - RunConfig.model_fields.keys():
        described[name]["methods"] = methods_with(name)
    return described


def _list_settings_classes() -> list[type[RunConfig]]:
    """Return the settings class of every run, then that of each method."""
    return [RunConfig, *available_classes()[0].values()]


def run_schema() -> dict[str, Any]:
    """Return a JSON schema of run.yaml: every setting in each form it may have, and the names of other programs.

    It accepts whatever `load_config` reads, and more: paths and conflicts between settings are not checked.
    """
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for kind in _list_settings_classes():
        schema = kind.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= schema.get("$defs", {})
        for name, about in schema["properties"].items():
            properties.setdefault(name, _widen_schema(name, about))
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
