"""Checks of a checkpoint's completions for further steps. A file may match its checksum and hold none."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter

from surefoot.data.sampler import Position
from surefoot.methods.grpo.batch import Trajectory
from surefoot.methods.grpo.types import Completion
from surefoot.system.json_files import is_number

LOGPROBS = ("rollout_logprobs", "old_logprobs", "reference_logprobs")


def _is_share(value: Any) -> bool:
    return is_number(value) and value >= 0


def problems_of_pending(pending: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why entries of a checkpoint are not what `RolloutSource.restore` reads."""
    in_use = [entry for entry in pending if "ahead" not in entry]
    for entry in (entry for entry in pending if "ahead" in entry):
        if entry.keys() != {"ahead", "completions"} or not Position.is_json(entry["ahead"]):
            yield "completions that were asked for ahead have no place in the data"
        else:
            yield from _problems_of_rows(Completion, entry["completions"])
    if in_use:
        about, *rows = in_use
        has_keys = about.keys() == {"began", "epoch", "next", "about"}
        shares = (about.get("began"), about.get("epoch"))
        if not has_keys or not Position.is_json(about["next"]) or not all(map(_is_share, shares)):
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
    except ValueError as error:  # also pydantic's ValidationError
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
