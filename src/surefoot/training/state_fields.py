"""Checks of the fields of a checkpoint's state.json. A file may match its checksum and still be invalid."""

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.data.sampler import Position
from surefoot.methods.base import Method
from surefoot.system.json_files import is_count, is_number

ADDED_IN_FORMAT_3 = frozenset(("base_fingerprint", "data_seen", "evaluation_is_due", "reward_files", "pending"))
"""Fields that the first versions with format 3 did not write."""


def check_state(values: Mapping[str, Any], method: type[Method], may_lack: frozenset[str] = frozenset()) -> None:
    """Raise ValueError unless these are the fields of a `TrainState` of a run of this method as JSON."""
    missing = sorted(CHECKS.keys() - values.keys() - may_lack)
    unknown = sorted(values.keys() - CHECKS.keys())
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    if unknown:
        raise ValueError(f"it has the unknown key {unknown[0][:80]!r}")
    for name, value in values.items():
        if not CHECKS[name](value):
            raise ValueError(f"{name} is {repr(value)[:80]}")
    for problem in method.problems_of_pending(values.get("pending", ())):
        raise ValueError(f"pending: {problem}")


def _is_share(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "step": is_count,
    "tokens": is_count,
    "trained_tokens": is_count,
    "loss_sum": is_number,
    "base_fingerprint": _is_text,
    "data_fingerprint": _is_text,
    "data_seen": _are_texts,
    "position": Position.is_json,
    "epoch": _is_share,
    "warmup_end": _is_share,
    "evaluation_is_due": lambda value: isinstance(value, bool),
    "reward_files": _are_texts,
    "pending": lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
}
"""Field of `TrainState` -> check whether a JSON value is valid for it."""
