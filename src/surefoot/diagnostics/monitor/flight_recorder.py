"""What PyTorch's Flight Recorder says of one rank: which collectives it asked for, and in which it still is.

Read from torch's dumps. With gloo every entry is `scheduled` and no group has a description of its own, so only
what holds for gloo and NCCL alike is used: numbers within a group, names, sizes, types, and whether it was retired.
Standard library only.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

MEANINGS = {
    "default_pg": "all ranks",
    "agreement": "what the ranks agree on: batch sizes, stop signals, errors",
    "mesh_fsdp": "the ranks that share sharded weights: their gathers and sums",
    "mesh_dp_replicate": "the copies of sharded weights: their sums",
    "mesh_ep": "the ranks that share experts",
}
"""Description of a process group -> what goes over it. Where all ranks share experts they do so in `default_pg`."""
TRAVELLING = "all_to_all"
"""In the name of the collectives in which tokens travel to experts and back."""


@dataclass(frozen=True)
class Collective:
    """One collective as one rank asked for it."""

    group: str
    """The name of its process group."""
    number: int
    """In its group, from 1."""
    kind: str
    """all_reduce, all_to_all, ..."""
    sizes: str
    """Of its inputs."""
    types: str
    asked_s: float = field(default=0.0, compare=False)
    """When the rank asked for it, by the clock of its machine; 0 where the record does not say."""
    sent: int = field(default=0, compare=False)
    awaited: int = field(default=0, compare=False)
    """Elements of its inputs and of its outputs; 0 where the record does not say."""

    @property
    def call(self) -> str:
        """What ranks must agree on."""
        return f"{self.kind} of {self.types} {self.sizes}"


@dataclass(frozen=True)
class FlightRecord:
    """What one rank asked for, the last of each group."""

    last: Mapping[str, Collective]
    """Group -> the newest."""
    waiting: tuple[Collective, ...]
    """Not over yet."""
    meanings: Mapping[str, str]
    """Group -> what goes over it."""
    asked: Mapping[tuple[str, int], float]
    """(group, number) of all that are still recorded -> when the rank asked for it, in seconds."""
    done: Mapping[str, int]
    """`Collective.call` -> how often it is over."""
    over: Mapping[tuple[str, int], str]
    """(group, number) of those that are over -> its `Collective.call`."""


def read_flight(dump: Any) -> FlightRecord | None:
    """The record in a dump (JSON, read); None where there is none. Raises: ValueError for what is no dump."""
    if dump is None or (isinstance(dump, dict) and "entries" not in dump):  # a run of one process asks for nothing
        return None
    last: dict[str, Collective] = {}
    waiting, meanings, asked, over, done = [], {}, {}, {}, Counter[str]()
    try:
        for entry in dump["entries"]:
            if entry["is_p2p"]:
                continue
            group, description = entry["process_group"]
            found = Collective(
                group,
                int(entry["collective_seq_id"]),
                str(entry["profiling_name"]).rpartition(":")[2],
                str(entry["input_sizes"]),
                "/".join(entry["input_dtypes"]),
                entry.get("time_created_ns", 0) / 1e9,
                sum(map(prod, entry["input_sizes"])),
                sum(map(prod, entry.get("output_sizes", ()))),
            )
            if found.asked_s:
                asked[group, found.number] = found.asked_s
            meanings[group] = MEANINGS.get(description, description)
            if group not in last or last[group].number <= found.number:
                last[group] = found
            if entry["retired"]:
                done[found.call] += 1
                over[group, found.number] = found.call
            else:
                waiting.append(found)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no dump of the Flight Recorder: {error!r}") from error
    return FlightRecord(last, tuple(waiting), meanings, asked, done, over) if last else None
