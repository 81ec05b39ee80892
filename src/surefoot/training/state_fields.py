"""Checks of the fields of a checkpoint's state.json. A file may match its checksum and still be no state."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter

from surefoot.data.sampler import Position
from surefoot.methods.grpo.batch import Trajectory
from surefoot.methods.grpo.types import Completion
from surefoot.system.json_files import is_count, is_number, is_size

ADDED_IN_FORMAT_3 = frozenset(("base_fingerprint", "data_seen", "evaluation_is_due", "reward_files", "pending"))
"""Fields that the first versions with format 3 did not write."""


def check_state(values: Mapping[str, Any], may_lack: frozenset[str] = frozenset()) -> None:
    """Raise ValueError unless these are the fields of a `TrainState` as JSON."""
    missing = sorted(CHECKS.keys() - values.keys() - may_lack)
    unknown = sorted(values.keys() - CHECKS.keys())
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    if unknown:
        raise ValueError(f"it has the unknown key {unknown[0][:80]!r}")
    for name, value in values.items():
        if not CHECKS[name](value):
            raise ValueError(f"{name} is {repr(value)[:80]}")
    for problem in _problems_of_pending(values.get("pending", ())):
        raise ValueError(f"pending: {problem}")


def _is_share(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_position(value: Any) -> bool:
    names = {field.name for field in fields(Position)}
    return isinstance(value, dict) and value.keys() == names and all(map(is_size, value.values()))


CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "step": is_count,
    "tokens": is_count,
    "trained_tokens": is_count,
    "loss_sum": is_number,
    "base_fingerprint": _is_text,
    "data_fingerprint": _is_text,
    "data_seen": _are_texts,
    "position": _is_position,
    "epoch": _is_share,
    "warmup_end": _is_share,
    "evaluation_is_due": lambda value: isinstance(value, bool),
    "reward_files": _are_texts,
    "pending": lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
}
"""Field of `TrainState` -> whether a value of JSON can be it."""


def _problems_of_pending(pending: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what `RolloutSource.restore` could not read."""
    in_use = [entry for entry in pending if "ahead" not in entry]
    for entry in (entry for entry in pending if "ahead" in entry):
        if entry.keys() != {"ahead", "completions"} or not _is_position(entry["ahead"]):
            yield "completions that were asked for ahead have no place in the data"
        else:
            yield from _problems_of_rows(Completion, entry["completions"])
    if in_use:
        about, *rows = in_use
        has_keys = about.keys() == {"began", "epoch", "next", "about"}
        if not (has_keys and _is_share(about["began"]) and _is_share(about["epoch"]) and _is_position(about["next"])):
            yield "completions in use have no place in the data"
        elif not isinstance(about["about"], dict) or not all(map(is_number, about["about"].values())):
            yield "measurements of completions in use are no numbers"
        elif "policy_version" not in about["about"]:
            yield "completions in use are of no policy version"
        yield from _problems_of_rows(Trajectory, rows)


def _problems_of_rows(kind: type[Completion] | type[Trajectory], rows: Any) -> Iterator[str]:
    names = {field.name for field in fields(kind)}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() <= names for row in rows):
        yield f"an entry is no {kind.__name__.lower()}"
        return
    try:
        adapter: TypeAdapter[list[Any]] = TypeAdapter(list[kind])  # type: ignore[valid-type]
        completions = adapter.validate_json(json.dumps(rows), strict=True)
    except ValueError as error:  # pydantic's is one
        yield f"an entry is no {kind.__name__.lower()}: {str(error)[:200]}"
        return
    for completion in completions:
        lists = [getattr(completion, name, None) for name in ("logprobs", *LOGPROBS)]
        tokens = [*completion.ids, *getattr(completion, "prompt", ())]
        if (
            not completion.ids
            or min(tokens) < 0
            or any(values is not None and len(values) != len(completion.ids) for values in lists)
        ):
            yield f"the tokens of a {kind.__name__.lower()} do not fit their likelihoods"


LOGPROBS = ("rollout_logprobs", "old_logprobs", "reference_logprobs")
