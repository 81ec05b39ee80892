"""What of an imported run makes no valid one: taken out, with the reason."""

import re
from typing import Any

from surefoot.config import load_config
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.deepspeed import PRESETS
from surefoot.config.methods import known_fields
from surefoot.errors import ConfigError
from surefoot.migrate.parse_input import ParsedRun, found_at

KEPT = frozenset(
    "model dataset method output_dir tuning rollout_engine reward_funcs nproc_per_node nnodes rdzv_endpoint".split()
)
"""Of ours: without what these say it would be another run, so an import ends where they are wrong."""


def drop_what_is_refused(told: ParsedRun, ours: dict[str, tuple[Any, str]]) -> dict[str, str]:
    """Take out of `ours`, one by one, what makes no valid run; returns them with the reason.

    Raises: ConfigError where that does not help.
    """
    refused = () if told.method == "grpo" else ("method",)
    left: dict[str, str] = {}

    def problem(without: str = "") -> ConfigError | None:
        left_in = {name: value for name, (value, _) in ours.items() if name not in (*refused, without)}
        try:
            _check(told, {name: value for name, value in left_in.items() if value is not None})
        except ConfigError as error:
            return error
        return None

    while (found := problem()) is not None:
        asked = [name for name in ours if name not in KEPT and name not in DEEPSPEED_KEYS]
        after = {name: problem(name) for name in asked}
        helps = [name for name in asked if after[name] is None] or [
            name for name in asked if str(after[name]) != str(found) and re.search(rf"\b{name}\b", str(found))
        ]
        if not helps:
            raise _at_its_place(found, told, ours)
        value, origin = ours[helps[-1]]
        if isinstance(value, str) and not re.search("str|Literal|bool", str(known_fields()[helps[-1]].annotation)):
            raise _at_its_place(found, told, ours)  # no number: that program would not take it either
        del ours[helps[-1]]
        said = str(found).splitlines()
        why = next((line for line in said if f"{helps[-1]}=" in line), said[0])
        theirs = helps[-1] if origin.startswith("default of") else origin.partition(" of ")[0]
        left[f"{theirs} = {value}"] = why.replace(" (argument)", "")
    return left


def _at_its_place(error: ConfigError, told: ParsedRun, ours: dict[str, tuple[Any, str]]) -> ConfigError:
    """The same, with the line that says it there."""
    for name, (_, origin) in ours.items():
        if f"{name}=" in str(error) and not origin.startswith("default of"):
            said, _, _ = origin.partition(" of ")
            where = told.places.get(said, told.program)
            return ConfigError(str(error).replace("(argument)", f"({said}, {where})"))
    return error


def _check(told: ParsedRun, values: dict[str, Any]) -> None:
    """Raises: ConfigError where these make no run, whatever model, data and rewards are that it does not name."""
    weights = values.get("reward_weights")
    named = ["exact_match"] * (len(weights) if isinstance(weights, list) else 1)
    rewards = {"reward_funcs": named} if told.method == "grpo" else {}
    values = {"model": "some/model", "dataset": "rows.jsonl", **rewards, **values}
    beside: dict[str, Any] = {}
    for name in DEEPSPEED_KEYS & values.keys():
        value = values[name]
        if isinstance(value, str) and value not in PRESETS:
            file = found_at(told.base, value)
            values = {key: given for key, given in values.items() if key != name}
            beside = {name: str(file)} if file.is_file() else {}
    load_config(None, [], {**values, **beside})
