"""Completions that further steps train on, as JSON in a checkpoint: written, checked and read.

The current rollout is a header and an entry for each trajectory. Each prefetched rollout is one more entry.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic import TypeAdapter

from surefoot.data.images import image_of
from surefoot.data.sampler import Position
from surefoot.methods.grpo.batch import Trajectory
from surefoot.methods.rollout.types import Completion
from surefoot.system.json_files import is_number

LOGPROBS = ("logprobs", "rollout_logprobs", "old_logprobs", "reference_logprobs")
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class CurrentRollout:
    """The completions that steps are trained on."""

    trajectories: list[Trajectory]
    metrics: Mapping[str, float]
    began: float
    """Share of the data seen before them."""
    epoch: float
    """Share of the data seen after all steps on them."""
    next: Position

    def header(self) -> dict[str, Any]:
        """Return the entry before those of the trajectories."""
        return {"began": self.began, "epoch": self.epoch, "next": asdict(self.next), "about": dict(self.metrics)}


def prefetched_entry(begin: Position, completions: Iterable[Entry]) -> dict[str, Any]:
    """Return the entry of a prefetched rollout. `begin`: position of the data at which its prompts begin."""
    return {"ahead": asdict(begin), "completions": list(completions)}


def read_pending(pending: Sequence[Entry]) -> tuple[CurrentRollout | None, dict[Position, list[Completion]]]:
    """Return the current rollout, if any, and the completions of prefetched ones by position."""
    in_use, ahead = _split(pending)
    current = None
    if in_use:
        header, *rows = in_use
        trajectories = [
            Trajectory(**{**row, "images": tuple(image_of(image) for image in row["images"])}) for row in rows
        ]
        current = CurrentRollout(
            trajectories, header["about"], header["began"], header["epoch"], Position(**header["next"])
        )
    prefetched = {
        Position(**entry["ahead"]): [Completion(**values) for values in entry["completions"]] for entry in ahead
    }
    return current, prefetched


def _split(pending: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Return the entries of the current rollout, and those of prefetched ones."""
    return [entry for entry in pending if "ahead" not in entry], [entry for entry in pending if "ahead" in entry]


def problems_of_pending(pending: Sequence[Entry]) -> Iterator[str]:
    """Yield why entries are not what `read_pending` reads. A file may match its checksum and hold none."""
    in_use, ahead = _split(pending)
    for entry in ahead:
        if entry.keys() != {"ahead", "completions"} or not Position.is_json(entry["ahead"]):
            yield "prefetched completions have no position in the data"
        else:
            yield from _problems_of_rows(Completion, entry["completions"])
    if in_use:
        header, *rows = in_use
        is_placed = (
            header.keys() == {"began", "epoch", "next", "about"}
            and Position.is_json(header["next"])
            and all(is_number(header[name]) and header[name] >= 0 for name in ("began", "epoch"))
        )
        if not is_placed:
            yield "the current completions have no position in the data"
        elif not isinstance(header["about"], dict) or not all(map(is_number, header["about"].values())):
            yield "metrics of the current completions are not numbers"
        elif "policy_version" not in header["about"]:
            yield "the current completions have no policy version"
        yield from _problems_of_rows(Trajectory, rows)


def _problems_of_rows(kind: type[Completion] | type[Trajectory], rows: Any) -> Iterator[str]:
    name = kind.__name__.lower()
    field_names = {field.name for field in fields(kind)}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() <= field_names for row in rows):
        yield f"an entry is no {name}"
        return
    try:
        adapter: TypeAdapter[list[Any]] = TypeAdapter(list[kind])  # type: ignore[valid-type]
        completions = adapter.validate_json(json.dumps(rows), strict=True)
    except ValueError as error:  # also pydantic's ValidationError
        yield f"an entry is no {name}: {str(error)[:200]}"
        return
    for completion in completions:
        lists = [getattr(completion, field_name, None) for field_name in LOGPROBS]
        tokens = [*completion.ids, *getattr(completion, "prompt", ())]
        if (
            not completion.ids
            or min(tokens) < 0
            or any(values is not None and len(values) != len(completion.ids) for values in lists)
        ):
            yield f"a {name} has not one log-probability per token, or a negative token"
