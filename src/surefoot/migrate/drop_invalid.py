"""Removal of the settings that make an imported run invalid, each with its reason."""

import re
from typing import Any

from surefoot.config import load_config
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.load import is_number_type
from surefoot.config.methods import known_fields
from surefoot.errors import ConfigError
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.sharding import locate_deepspeed_config

REQUIRED = frozenset(
    "model dataset method loss_type init_adapter output_dir tuning rollout_engine reward_funcs nproc_per_node nnodes "
    "rdzv_endpoint teacher_model teacher_server teacher_top_k lmbda".split()
)
"""Surefoot settings that are never dropped: without them it would be another run, so the import fails instead."""


def drop_invalid_settings(imported: ImportedRun) -> None:
    """Leave out the invalid settings, one at a time, each with its reason.

    Raises: ConfigError if no removal makes the run valid.
    """
    run, settings = imported.source, imported.settings

    def find_error(without: str = "") -> ConfigError | None:
        values = {name: value for name, (value, _) in settings.items() if name != without}
        try:
            _check_settings(run, {name: value for name, value in values.items() if value is not None})
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
            raise _add_location(error, imported)
        name = fixes[-1]
        value, origin = settings[name]
        if isinstance(value, str) and is_number_type(known_fields()[name].annotation):
            raise _add_location(error, imported)  # text for a number: the peer would refuse it too
        del settings[name]
        lines = str(error).splitlines()
        why = next((line for line in lines if f"{name}=" in line), lines[0])
        peer_name = name if origin.startswith("default of") else origin.partition(" of ")[0]
        imported.left_out[f"{peer_name} = {value}"] = why.replace(" (argument)", "")


def _add_location(error: ConfigError, imported: ImportedRun) -> ConfigError:
    """Return the error with the file and line of the peer setting that it names."""
    text = str(error)
    for name, (_, origin) in imported.settings.items():
        if f"{name}=" in text and not origin.startswith("default of"):
            peer_name = origin.partition(" of ")[0]
            place = f"({peer_name}, {imported.source.get_location(peer_name)})"
            before, named, after = text.partition(f"{name}=")
            text = before + named + after.replace("(argument)", place, 1)
    return ConfigError(text) if text != str(error) else error


def _check_settings(run: ParsedRun, values: dict[str, Any]) -> None:
    """Raise ConfigError if the values make no valid run. Placeholders fill in what is missing."""
    weights = values.get("reward_weights")
    reward_names = ["exact_match"] * (len(weights) if isinstance(weights, list) else 1)
    rewards = {"reward_funcs": reward_names} if run.method == "grpo" else {}
    teacher = {} if run.method != "distill" or "teacher_server" in values else {"teacher_model": "some/teacher"}
    values = {"model": "some/model", "dataset": "rows.jsonl", **rewards, **teacher, **values}
    for name in DEEPSPEED_KEYS & values.keys():
        values[name] = locate_deepspeed_config(run, values.pop(name))
    load_config(None, [], values)
