"""Removal of the settings that make an imported run invalid, each with its reason."""

import re
from typing import Any

from surefoot.config import load_config
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.deepspeed import PRESETS
from surefoot.config.methods import known_fields
from surefoot.errors import ConfigError
from surefoot.migrate.parse_input import ParsedRun, resolve_path

REQUIRED = frozenset(
    "model dataset method output_dir tuning rollout_engine reward_funcs nproc_per_node nnodes rdzv_endpoint".split()
)
"""Surefoot settings that are never dropped: without them it would be another run, so the import fails instead."""


def drop_invalid_settings(run: ParsedRun, settings: dict[str, tuple[Any, str]]) -> dict[str, str]:
    """Remove the invalid settings from `settings`, one at a time, and return each peer setting with its reason.

    Raises: ConfigError if no removal makes the run valid.
    """
    ignored = () if run.method == "grpo" else ("method",)
    left_out: dict[str, str] = {}

    def find_error(without: str = "") -> ConfigError | None:
        remaining = {name: value for name, (value, _) in settings.items() if name not in (*ignored, without)}
        try:
            _check_settings(run, {name: value for name, value in remaining.items() if value is not None})
        except ConfigError as error:
            return error
        return None

    while (error := find_error()) is not None:
        candidates = [name for name in settings if name not in REQUIRED and name not in DEEPSPEED_KEYS]
        errors = {name: find_error(name) for name in candidates}
        fixes = [name for name in candidates if errors[name] is None] or [
            name for name in candidates if str(errors[name]) != str(error) and re.search(rf"\b{name}\b", str(error))
        ]
        if not fixes:
            raise _add_location(error, run, settings)
        value, origin = settings[fixes[-1]]
        if isinstance(value, str) and not re.search("str|Literal|bool", str(known_fields()[fixes[-1]].annotation)):
            raise _add_location(error, run, settings)  # text for a number: the peer would refuse it too
        del settings[fixes[-1]]
        lines = str(error).splitlines()
        why = next((line for line in lines if f"{fixes[-1]}=" in line), lines[0])
        peer_name = fixes[-1] if origin.startswith("default of") else origin.partition(" of ")[0]
        left_out[f"{peer_name} = {value}"] = why.replace(" (argument)", "")
    return left_out


def _add_location(error: ConfigError, run: ParsedRun, settings: dict[str, tuple[Any, str]]) -> ConfigError:
    """Return the error with the file and line of the peer setting that it names."""
    for name, (_, origin) in settings.items():
        if f"{name}=" in str(error) and not origin.startswith("default of"):
            peer_name, _, _ = origin.partition(" of ")
            where = run.locations.get(peer_name, run.program)
            return ConfigError(str(error).replace("(argument)", f"({peer_name}, {where})"))
    return error


def _check_settings(run: ParsedRun, values: dict[str, Any]) -> None:
    """Raise ConfigError if the values make no valid run. Placeholders fill in a missing model, data or rewards."""
    weights = values.get("reward_weights")
    reward_names = ["exact_match"] * (len(weights) if isinstance(weights, list) else 1)
    rewards = {"reward_funcs": reward_names} if run.method == "grpo" else {}
    values = {"model": "some/model", "dataset": "rows.jsonl", **rewards, **values}
    deepspeed: dict[str, Any] = {}
    for name in DEEPSPEED_KEYS & values.keys():
        value = values[name]
        if isinstance(value, str) and value not in PRESETS:
            file = resolve_path(run.base, value)
            values = {key: setting for key, setting in values.items() if key != name}
            deepspeed = {name: str(file)} if file.is_file() else {}
    load_config(None, [], {**values, **deepspeed})
