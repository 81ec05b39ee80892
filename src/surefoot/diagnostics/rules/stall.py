"""Why a run stands still: evidence in, one finding out. Pure.

The rules are asked in order; each either names a cause or passes. The last one names what is missing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from surefoot.diagnostics.monitor import python_stacks
from surefoot.diagnostics.monitor.evidence import RankEvidence, StallEvidence
from surefoot.diagnostics.monitor.flight_recorder import MEANINGS, TRAVELLING, Collective, FlightRecord, read_flight
from surefoot.findings import CATALOGUE, Finding

IDLE_SHARE = 0.05
"""Of a core: below it a process waits."""
BUSY_SHARE = 0.5
IN_A_STEP = ("wait for data", "communicate", "forward", "forward and backward", "backward", "optimizer")
"""Phases in their order; a rank communicates at the end of the backward too."""
LOCKS = ("threading.py", "queue.py", "multiprocessing/connection.py", "multiprocessing/synchronize.py", "selectors.py")
"""Files whose innermost frame says that a thread waits for another one, or for another process."""

Rule = Callable[["_Case"], Finding | None]


class _Case:
    """The evidence with its flight records read."""

    def __init__(self, evidence: StallEvidence) -> None:
        self.evidence = evidence
        self.ranks = [rank for rank in evidence.ranks if not rank.has_ended]
        self.flights: dict[int, FlightRecord] = {}
        self.unreadable: list[str] = []
        for rank in evidence.ranks:
            try:
                record = read_flight(rank.flight)
            except ValueError as error:  # of another version of torch: one piece of evidence less
                self.unreadable.append(f"rank {rank.rank}: {error}")
                continue
            if record is not None:
                self.flights[rank.rank] = record

    def waiting(self, rank: RankEvidence) -> tuple[Collective, ...]:
        """The collectives a rank is in."""
        return self.flights[rank.rank].waiting if rank.rank in self.flights else ()

    def is_full(self, group: str) -> bool:
        """Whether all ranks that are known to have used a group wait in it."""
        members = {number for number, flight in self.flights.items() if group in flight.last}
        inside = {rank.rank for rank in self.ranks if any(one.group == group for one in self.waiting(rank))}
        return members <= inside and (len(members) > 1 or len(self.flights) == 1)  # alone it waits for others

    def is_usual(self, call: str) -> bool:
        """Whether a rank called this before and it went well."""
        return any(flight.done[call] for flight in self.flights.values() if call in flight.done)

    def finding(self, code: str, cause: str, fix: str, *, confidence: float = 1.0, **evidence: Any) -> Finding:
        seen = {
            "silent_for_s": round(self.evidence.quiet_s, 1),
            "limit_s": round(self.evidence.limit_s, 1),
            **evidence,
            "ranks": "; ".join(_in_words(rank) for rank in self.evidence.ranks),
        }
        return Finding(code, cause, seen, fix, confidence)


def find_stall(evidence: StallEvidence) -> Finding:
    """The cause of a stall, or the evidence that is missing to name it."""
    case = _Case(evidence)
    for rule in RULES:
        found = rule(case)
        if found is not None:
            return found
    return _unknown(case)


def _not_under_way(case: _Case) -> Finding | None:
    """No rank is in the run: none has begun, or all have ended and do not leave."""
    if case.ranks:
        return None
    ended = [rank for rank in case.evidence.ranks if rank.has_ended]
    said = f"{case.evidence.quiet_s:.0f} s"
    return case.finding(
        "SF111",
        f"all ranks have ended, and the run is still there after {said}"
        if ended
        else f"no rank has begun within {said}",
        "A thread or a process that was started by the run may still be waited for: look at `py-spy dump`."
        if ended
        else "Do all machines run, with the same nnodes and rdzv_endpoint? Can torch be imported (a hung file system)?",
        confidence=0.6,
    )


def _dead(case: _Case) -> Finding | None:
    gone = [rank for rank in case.ranks if rank.state in ("gone", "zombie")]
    if not gone:
        return None
    by_kernel = case.evidence.oom_kills
    if by_kernel:
        return case.finding(
            "SF201",
            f"{_names(gone, 'was', 'were')} killed by the kernel for memory: the limit of the cgroup, or all of the "
            "machine, was reached, "
            f"{_where(gone[0])}",
            "Lower per_device_train_batch_size or max_length, set gradient_checkpointing: true or zero_stage: 3, or "
            "give the job more memory.",
            rank=gone[0].rank,
            oom_kills=by_kernel,
        )
    why = "" if by_kernel is not None else "; whether for memory cannot be told: the kernel's count is not readable"
    return case.finding(
        "SF101",
        f"{_names(gone, 'is', 'are')} dead without a word, {_where(gone[0])}{why}",
        "Look at what it printed last, and at who may have killed it: the scheduler, a person, the kernel (dmesg).",
        rank=gone[0].rank,
    )


def _stopped(case: _Case) -> Finding | None:
    held = [rank for rank in case.ranks if rank.state in ("stopped", "tracing-stop")]
    if held:
        return case.finding(
            "SF102",
            f"{_names(held, 'was', 'were')} stopped by a signal (SIGSTOP, or a debugger), {_where(held[0])}",
            f"Let it go on: kill -CONT {' '.join(str(rank.process) for rank in held)}",
            rank=held[0].rank,
        )
    # A rank that waits for others may have a thread that saves meanwhile.
    blocked = [
        rank for rank in case.ranks if (rank.state == "disk-sleep" or rank.waits_for_disk) and not case.waiting(rank)
    ]
    if blocked:
        return case.finding(
            "SF103",
            f"{_names(blocked, 'waits', 'wait')} in the kernel for a disk or a device, {_where(blocked[0])}",
            "Look at the file system that the run reads and writes (a hung NFS mount?), and at dmesg.",
            confidence=0.8,
            rank=blocked[0].rank,
        )
    return None


def _mismatched(case: _Case) -> Finding | None:
    """Two ranks wait in collectives of the same group and number that are not the same."""
    calls: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank in case.ranks:
        for one in case.waiting(rank):
            calls.setdefault((one.group, one.number), {}).setdefault(one.call, []).append(rank.rank)
    for (group, number), by_call in calls.items():
        if len(by_call) > 1 and not all("all_to_all" in call for call in by_call):  # their sizes may differ
            strange = [call for call in by_call if not case.is_usual(call)]
            fewest = min(len(ranks) for ranks in by_call.values())
            odd = strange if len(strange) == 1 else [call for call in by_call if len(by_call[call]) == fewest]
            named = {"rank": by_call[odd[0]][0]} if len(odd) == 1 else {}
            said = " but ".join(f"{_list(ranks)} {call}" for call, ranks in by_call.items())
            return case.finding(
                "SF104",
                f"the ranks called different collectives as number {number} of {_meaning(case, group)}: {said}",
                "Make all ranks take the same way through the program: no branch on the rank or on its own data.",
                group=group,
                **named,
            )
    return None


def _left_alone(case: _Case) -> Finding | None:
    """A rank is still in a collective that another one is through with: what that one sent does not arrive.

    Where the other one called something else under that number, it is the call that is wrong. Where a third one may
    not have come to it yet, that one is waited for: whoever only sends is through at once.
    """
    for rank in case.ranks:
        for one in case.waiting(rank):
            through = {
                other.rank: case.flights[other.rank].over[one.group, one.number]
                for other in case.ranks
                if other.rank in case.flights and (one.group, one.number) in case.flights[other.rank].over
            }
            which = f"number {one.number} of {_meaning(case, one.group)}"
            odd = [number for number, call in through.items() if call != one.call]
            if odd and not all("all_to_all" in call for call in (one.call, *through.values())):
                return case.finding(
                    "SF104",
                    f"the ranks called different collectives as {which}: rank {rank.rank} {one.call} but {_list(odd)} "
                    f"{through[odd[0]]}, and went on",
                    CATALOGUE["SF104"].fix,
                    confidence=0.9,
                    group=one.group,
                )
            if through and _have_all_come(case, one):
                return case.finding(
                    "SF108",
                    f"rank {rank.rank} is in {one.call}, {which}, and {_list(list(through))} "
                    f"{'are' if len(through) > 1 else 'is'} through with it: what was sent does not arrive",
                    CATALOGUE["SF108"].fix,
                    confidence=0.7,
                )
    return None


def _have_all_come(case: _Case, one: Collective) -> bool:
    """Whether every rank is known to have come to a collective of its group."""
    lasts = [flight.last.get(one.group) for flight in case.flights.values()]
    return len(lasts) == case.evidence.num_ranks and all(last is None or last.number >= one.number for last in lasts)


def _crossed(case: _Case) -> Finding | None:
    """Each rank waits in a group in which the others are not: they go through two groups in different order."""
    groups = {rank.rank: {one.group for one in case.waiting(rank)} for rank in case.ranks}
    if len(groups) < 2 or not all(groups.values()) or all(map(case.is_full, set.union(*groups.values()))):
        return None
    together = set.intersection(*groups.values())
    if together:
        return None
    said = "; ".join(f"rank {rank} in {_meaning(case, sorted(found)[0])}" for rank, found in sorted(groups.items()))
    strange = [rank.rank for rank in case.ranks if not any(case.is_usual(one.call) for one in case.waiting(rank))]
    ahead = max(case.ranks, key=_progress)
    named = {}
    if len(strange) == 1:
        named = {"rank": strange[0]}
    elif not strange and sum(_progress(rank) == _progress(ahead) for rank in case.ranks) == 1:
        named = {"rank": ahead.rank}  # it left out what the others wait for
    return case.finding(
        "SF105",
        f"the ranks wait for each other in different groups: {said}",
        "Make all ranks call the collectives of these groups in the same order.",
        confidence=0.9,
        **named,
    )


def _progress(rank: RankEvidence) -> tuple[int, int]:
    """How far a rank is in its step."""
    return rank.step, IN_A_STEP.index(rank.phase) if rank.phase in IN_A_STEP else len(IN_A_STEP)


def _locked(case: _Case) -> Finding | None:
    """A rank whose threads could not run, not even the witness: something holds Python's lock."""
    if len(case.ranks) > 1 and not any(rank.answered for rank in case.ranks):
        return None  # the machine is too busy to answer in time
    for rank in case.ranks:
        if not rank.answered and not case.waiting(rank) and rank.stacks and rank.state in ("sleeping", "running"):
            return case.finding(
                "SF109",
                f"no Python thread of rank {rank.rank} can run: native code holds Python's lock, {_line(rank)}",
                "The stack under evidence/ shows the call. Native code must release the lock before it waits.",
                confidence=0.9,
                **_place(rank),
            )
    return None


def _ended(case: _Case) -> Finding | None:
    """All that are left wait for ranks that are through."""
    ended = [rank for rank in case.evidence.ranks if rank.has_ended]
    if not ended or not all(case.waiting(rank) for rank in case.ranks):
        return None
    call = case.waiting(case.ranks[0])[0]
    return case.finding(
        "SF106",
        f"{_names(ended, 'has', 'have')} ended, {_where(ended[0])}, and {_names(case.ranks, 'waits', 'wait')} in "
        f"{call.call}, number {call.number} of {_meaning(case, call.group)}",
        "Give all ranks as many batches as each other, and look at what the ranks that ended printed: one that failed "
        "must end the others, too (srun --kill-on-bad-exit=1).",
        confidence=0.9,
        rank=ended[0].rank,
    )


def _behind(case: _Case) -> Finding | None:
    """Some ranks wait in a collective; the others never came."""
    absent = [rank for rank in case.ranks if not case.waiting(rank)]
    inside = [rank for rank in case.ranks if case.waiting(rank)]
    if not absent or (not inside and len(case.ranks) > 1 and len({rank.phase for rank in absent}) == 1):
        return None
    rank = max(absent, key=lambda one: one.quiet_s)
    missed = ""
    if inside:
        call = case.waiting(inside[0])[0]
        missed = (
            f"; {_names(inside, 'waits', 'wait')} in {call.call}, number {call.number} of {_meaning(case, call.group)}"
        )
    if rank.phase == "wait for data":
        dead = [state for state in rank.children if state in ("zombie", "dead")]
        held = [state for state in rank.children if state == "stopped"]
        workers = " A process that prepares them is dead." if dead else " One is stopped." if held else ""
        return case.finding(
            "SF107",
            f"rank {rank.rank} waits for data in step {rank.step}, {_line(rank)}{missed}.{workers}",
            "Look at the storage of the data and at the processes that prepare them; dataset_num_proc: 1 takes them "
            "out of the way.",
            **_place(rank),
            children=", ".join(rank.children) or "none",
        )
    innermost = python_stacks.main_thread(rank.stacks)[:1]
    is_in_lock = rank.syscall == "futex" or (innermost and innermost[0].file.endswith(LOCKS))
    if is_in_lock and rank.cpu_share < IDLE_SHARE:
        return case.finding(
            "SF109",
            f"rank {rank.rank} waits for a lock or another thread of its own, {_line(rank)}{missed}",
            "The stacks of all its threads are under evidence/: look for who holds what this one waits for.",
            confidence=0.8,
            **_place(rank),
        )
    doing = "computes" if rank.cpu_share > BUSY_SHARE else "stands"
    return case.finding(
        "SF106",
        f"rank {rank.rank} {doing} {_where(rank)}, {_line(rank)}{missed}",
        "See what it does at that line. The others wait for it.",
        confidence=0.9,
        **_place(rank),
    )


def _all_inside(case: _Case) -> Finding | None:
    """All ranks are in the same collective, and it does not end."""
    calls = [set(case.waiting(rank)) for rank in case.ranks]
    if not calls or not all(calls) or len(case.ranks) < case.evidence.num_ranks:
        return None
    shared = set.intersection(*calls)
    if not shared and not all(case.is_full(one.group) for one in set.union(*calls)):
        return None
    call = min(shared or set.union(*calls), key=lambda one: (one.group, one.number))
    unequal = _sent_otherwise(case, call)
    if unequal is not None:
        return unequal
    who = "all ranks are in" if shared else "all ranks are in the collectives of the groups they share, some in"
    return case.finding(
        "SF108",
        f"{who} {call.call}, number {call.number} of {_meaning(case, call.group)}, and it does not end: "
        "the network between them does not carry it",
        CATALOGUE["SF108"].fix,
        confidence=0.8,
    )


def _sent_otherwise(case: _Case, call: Collective) -> Finding | None:
    """In an all-to-all sizes differ from rank to rank, but what all send together is what all wait for."""
    parts = {
        rank.rank: one
        for rank in case.ranks
        for one in case.waiting(rank)
        if (one.group, one.number) == (call.group, call.number)
    }
    sent, awaited = sum(one.sent for one in parts.values()), sum(one.awaited for one in parts.values())
    if TRAVELLING not in call.kind or sent == awaited or not all(one.awaited for one in parts.values()):
        return None
    each = ", ".join(f"rank {rank} sends {one.sent} and waits for {one.awaited}" for rank, one in parts.items())
    return case.finding(
        "SF104",
        f"the ranks do not agree on how much is sent in {call.kind}, number {call.number} of "
        f"{_meaning(case, call.group)}: {sent} elements, and {awaited} are waited for ({each})",
        "Let ranks tell each other how many rows they send before they wait for them: both must come from one count.",
        confidence=0.9,
        group=call.group,
    )


def _unknown(case: _Case) -> Finding:
    missing = list(case.unreadable)
    for rank in case.evidence.ranks:
        lacks = [
            name
            for name, there in (
                ("Python stacks", rank.stacks),
                ("an answer of its witness thread", rank.answered),
                ("a flight record", rank.flight is not None or case.evidence.num_ranks == 1),
            )
            if not there
        ]
        if lacks:
            missing.append(f"rank {rank.rank}: {', '.join(lacks)}")
    elsewhere = case.evidence.num_ranks - len(case.evidence.ranks)
    if elsewhere > 0:
        missing.append(f"{elsewhere} ranks on other machines: everything")
    lines = "; ".join(f"rank {rank.rank} {_line(rank)}" for rank in case.ranks)
    return case.finding(
        "SF110",
        f"no rank goes on, and the evidence does not say why; {lines}",
        "Look at the stacks under evidence/. "
        + (f"Missing: {'; '.join(missing)}." if missing else "All evidence that is collected was there."),
        confidence=0.3,
        missing="; ".join(missing) or "none",
    )


RULES: Sequence[Rule] = (
    _not_under_way,
    _dead,
    _stopped,
    _mismatched,
    _left_alone,
    _crossed,
    _locked,
    _ended,
    _behind,
    _all_inside,
)


def _place(rank: RankEvidence) -> dict[str, Any]:
    """Evidence of a finding about one rank."""
    return {"rank": rank.rank, "line": _line(rank)}


def _line(rank: RankEvidence) -> str:
    return python_stacks.where(rank.stacks)


def _where(rank: RankEvidence) -> str:
    phase = f"in {rank.phase} " if rank.phase else ""
    layer = f", in layer {rank.layer}" if rank.layer is not None else ""
    return f"{phase}of step {rank.step}{layer}" if rank.step else f"{phase}before the first step"


def _meaning(case: _Case, group: str) -> str:
    meaning = next((f.meanings[group] for f in case.flights.values() if group in f.meanings), "")
    asked = [(rank, one.kind) for rank in case.ranks for one in case.waiting(rank) if one.group == group]
    # With gloo gradients are summed by the same call, in backward; weights are gathered for the layers to come, too.
    is_of_experts = meaning == MEANINGS["mesh_ep"] or all(rank.phase == "forward" for rank, _ in asked)
    if meaning and asked and is_of_experts and all(TRAVELLING in kind for _, kind in asked):
        meaning += ", tokens travelling to experts and back"
        layers = {rank.layer for rank, _ in asked} - {None}
        meaning += f", layer {layers.pop()}" if len(layers) == 1 else ""
    return f"group {group} ({meaning})" if meaning else f"group {group}"


def _names(ranks: Sequence[RankEvidence], verb: str, verb_of_many: str) -> str:
    return f"{_list([rank.rank for rank in ranks])} {verb_of_many if len(ranks) > 1 else verb}"


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _in_words(rank: RankEvidence) -> str:
    end = ", has ended" if rank.has_ended else ""
    return f"{rank.rank}: {rank.state}, {_where(rank)}, silent {rank.quiet_s:.0f} s, CPU {rank.cpu_share:.0%}{end}"
