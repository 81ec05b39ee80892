"""The collectives of one rank in PyTorch's Flight Recorder: which it called, and in which it still waits.

Read from torch's dumps. With gloo no group has a description of its own, and it is not known when a collective starts.
Otherwise this module uses what gloo and NCCL share: numbers within a group, names, sizes, types, and whether it was
retired. Standard library only.
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
"""Description of a process group -> its traffic. If all ranks share experts, they use `default_pg` for it."""
STARTED = "time_discovered_started_ns"
"""Name of the time at which a collective was seen to have started on its GPU; 0 or absent if it was not."""
TRAVELLING = "all_to_all"
"""Part of the name of the collectives that carry tokens to experts and back."""


@dataclass(frozen=True)
class Collective:
    """One collective as one rank called it."""

    group: str
    """Name of its process group."""
    number: int
    """Number in its group, from 1."""
    kind: str
    """Kind of collective: all_reduce, all_to_all, ..."""
    sizes: str
    """Sizes of its inputs."""
    types: str
    called_s: float = field(default=0.0, compare=False)
    """Time at which the rank called it, by the clock of its machine; 0 if the record lacks it."""
    sent: int = field(default=0, compare=False)
    awaited: int = field(default=0, compare=False)
    """Number of elements of its inputs (`sent`) and outputs (`awaited`); 0 if the record lacks them."""
    has_started: bool | None = field(default=None, compare=False)
    """Whether the GPU has come to it, after the kernels that were called before; None if the record lacks that."""

    @property
    def call(self) -> str:
        """Description on which all ranks of the group must agree."""
        return f"{self.kind} of {self.types} {self.sizes}"


@dataclass(frozen=True)
class FlightRecord:
    """The collectives of one rank."""

    last: Mapping[str, Collective]
    """Group -> its newest collective."""
    waiting: tuple[Collective, ...]
    """Collectives that are unfinished."""
    meanings: Mapping[str, str]
    """Group -> its traffic."""
    called_s: Mapping[tuple[str, int], float]
    """(group, number) of each collective that is still recorded -> time at which the rank called it, in seconds."""
    num_finished: Mapping[str, int]
    """`Collective.call` -> number of finished collectives."""
    finished: Mapping[tuple[str, int], str]
    """(group, number) of each finished collective -> its `Collective.call`."""


def read_flight(dump: Any) -> FlightRecord | None:
    """Return the record in a parsed JSON dump; None if it holds none. Raises: ValueError for what is no dump."""
    if dump is None or (isinstance(dump, dict) and "entries" not in dump):  # a run of one process calls no collectives
        return None
    last: dict[str, Collective] = {}
    waiting, meanings, called_s, finished, num_finished = [], {}, {}, {}, Counter[str]()
    try:
        # NCCL notes starts with TORCH_NCCL_ENABLE_TIMING, gloo never.
        timed = {_backend_of(entry) for entry in dump["entries"] if entry.get(STARTED)}
        for entry in dump["entries"]:
            if entry["is_p2p"]:
                continue
            group, description = entry["process_group"]
            collective = Collective(
                group,
                int(entry["collective_seq_id"]),
                str(entry["profiling_name"]).rpartition(":")[2],
                str(entry["input_sizes"]),
                "/".join(entry["input_dtypes"]),
                entry.get("time_created_ns", 0) / 1e9,
                sum(map(prod, entry["input_sizes"])),
                sum(map(prod, entry.get("output_sizes", ()))),
                bool(entry.get(STARTED)) if _backend_of(entry) in timed else None,
            )
            if collective.called_s:
                called_s[group, collective.number] = collective.called_s
            meanings[group] = MEANINGS.get(description, description)
            if group not in last or last[group].number <= collective.number:
                last[group] = collective
            if entry["retired"]:
                num_finished[collective.call] += 1
                finished[group, collective.number] = collective.call
            else:
                waiting.append(collective)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no dump of the Flight Recorder: {error!r}") from error
    return FlightRecord(last, tuple(waiting), meanings, called_s, num_finished, finished) if last else None


def _backend_of(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[0]
