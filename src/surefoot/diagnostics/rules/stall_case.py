"""The evidence of a stall with its parsed flight records, and its description in words. Pure."""

from collections.abc import Collection, Sequence
from typing import Any

from surefoot.diagnostics.monitor import python_stacks
from surefoot.diagnostics.monitor.evidence import RankEvidence, StallEvidence
from surefoot.diagnostics.monitor.flight_recorder import MEANINGS, TRAVELLING, Collective, FlightRecord, read_flight
from surefoot.findings import Finding


class StallCase:
    """The evidence of a stall with its parsed flight records."""

    def __init__(self, evidence: StallEvidence) -> None:
        self.evidence = evidence
        self.ranks = [rank for rank in evidence.ranks if not rank.has_ended]
        self.ended = [rank for rank in evidence.ranks if rank.has_ended]
        self.flights: dict[int, FlightRecord] = {}
        self.unreadable: list[str] = []
        for rank in evidence.ranks:
            try:
                record = read_flight(rank.flight)
            except ValueError as error:  # from another version of torch: the diagnosis continues without it
                self.unreadable.append(f"rank {rank.rank}: {error}")
                continue
            if record is not None:
                self.flights[rank.rank] = record

    def waiting(self, rank: RankEvidence) -> tuple[Collective, ...]:
        """Return the collectives in which a rank waits."""
        return self.flights[rank.rank].waiting if rank.rank in self.flights else ()

    def all_members_wait_in(self, group: str) -> bool:
        """Return whether all ranks that are known to have used a group wait in it."""
        members = {number for number, flight in self.flights.items() if group in flight.last}
        inside = {rank.rank for rank in self.ranks if any(call.group == group for call in self.waiting(rank))}
        # A single member waits for other ranks.
        return members <= inside and (len(members) > 1 or len(self.flights) == 1)

    def is_usual(self, call: str) -> bool:
        """Return whether a rank has called and finished this before."""
        return any(call in flight.num_finished for flight in self.flights.values())

    def finding(self, code: str, cause: str, fix: str = "", *, confidence: float = 1.0, **evidence: Any) -> Finding:
        """Return a finding whose evidence ends with the state of all ranks."""
        all_evidence = {
            "silent_for_s": round(self.evidence.quiet_s, 1),
            "limit_s": round(self.evidence.limit_s, 1),
            **evidence,
            "ranks": "; ".join(_describe_rank(rank) for rank in self.evidence.ranks),
        }
        return Finding(code, cause, all_evidence, fix, confidence)

    def describe_call(self, call: Collective) -> str:
        return f"{call.call}, {self.describe_number(call.group, call.number)}"

    def describe_number(self, group: str, number: int) -> str:
        return f"number {number} of {self.describe_group(group)}"

    def describe_group(self, group: str) -> str:
        meaning = next((f.meanings[group] for f in self.flights.values() if group in f.meanings), "")
        waiting = [(rank, call.kind) for rank in self.ranks for call in self.waiting(rank) if call.group == group]
        # With gloo the same call reduces gradients in the backward; weights are also gathered for later layers.
        is_of_experts = meaning == MEANINGS["mesh_ep"] or all(rank.phase == "forward" for rank, _ in waiting)
        if meaning and waiting and is_of_experts and all(TRAVELLING in kind for _, kind in waiting):
            meaning += ", tokens travelling to experts and back"
            layers = {rank.layer for rank, _ in waiting} - {None}
            meaning += f", layer {layers.pop()}" if len(layers) == 1 else ""
        return f"group {group} ({meaning})" if meaning else f"group {group}"


def describe_line(rank: RankEvidence) -> str:
    """Return the line of the user's program that a rank executes."""
    return python_stacks.where(rank.stacks)


def describe_place(rank: RankEvidence) -> str:
    """Return a rank's phase, step and layer."""
    phase = f"in {rank.phase} " if rank.phase else ""
    layer = f", in layer {rank.layer}" if rank.layer is not None else ""
    return f"{phase}of step {rank.step}{layer}" if rank.step else f"{phase}before the first step"


def name_ranks(ranks: Sequence[RankEvidence], verb: str, plural_verb: str) -> str:
    """Return the ranks as the subject of a sentence, with its verb."""
    return f"{list_ranks([rank.rank for rank in ranks])} {plural_verb if len(ranks) > 1 else verb}"


def list_ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _describe_rank(rank: RankEvidence) -> str:
    end = ", has ended" if rank.has_ended else ""
    return (
        f"{rank.rank}: {rank.state}, {describe_place(rank)}, silent {rank.quiet_s:.0f} s, CPU {rank.cpu_share:.0%}{end}"
    )
