"""Rules for the cause of a stall: from the evidence to one finding. Pure.

The rules apply in order; each either names a cause or passes. The last one names the missing evidence.
"""

from collections.abc import Callable, Sequence
from typing import Any

from surefoot.diagnostics.monitor import python_stacks
from surefoot.diagnostics.monitor.evidence import RankEvidence, StallEvidence
from surefoot.diagnostics.monitor.flight_recorder import MEANINGS, TRAVELLING, Collective, FlightRecord, read_flight
from surefoot.findings import CATALOGUE, Finding

IDLE_SHARE = 0.05
"""Share of a core below which a process waits."""
BUSY_SHARE = 0.5
IN_A_STEP = ("data_wait", "collectives", "forward", "forward_backward", "backward", "optimizer")
"""Phases of a step in order; a rank also communicates at the end of the backward."""
LOCKS = ("threading.py", "queue.py", "multiprocessing/connection.py", "multiprocessing/synchronize.py", "selectors.py")
"""Files whose innermost frame shows that a thread waits for another thread or process."""

Rule = Callable[["_Case"], Finding | None]


class _Case:
    """The evidence with its parsed flight records."""

    def __init__(self, evidence: StallEvidence) -> None:
        self.evidence = evidence
        self.ranks = [rank for rank in evidence.ranks if not rank.has_ended]
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

    def is_full(self, group: str) -> bool:
        """Return whether all ranks that are known to have used a group wait in it."""
        members = {number for number, flight in self.flights.items() if group in flight.last}
        inside = {
            rank.rank for rank in self.ranks if any(collective.group == group for collective in self.waiting(rank))
        }
        # A single member waits for other ranks.
        return members <= inside and (len(members) > 1 or len(self.flights) == 1)

    def is_usual(self, call: str) -> bool:
        """Return whether a rank has called and finished this before."""
        return any(flight.done[call] for flight in self.flights.values() if call in flight.done)

    def finding(self, code: str, cause: str, fix: str, *, confidence: float = 1.0, **evidence: Any) -> Finding:
        all_evidence = {
            "silent_for_s": round(self.evidence.quiet_s, 1),
            "limit_s": round(self.evidence.limit_s, 1),
            **evidence,
            "ranks": "; ".join(_describe_rank(rank) for rank in self.evidence.ranks),
        }
        return Finding(code, cause, all_evidence, fix, confidence)


def find_stall(evidence: StallEvidence) -> Finding:
    """Return the finding for a stall: its cause, or the evidence that is missing."""
    case = _Case(evidence)
    for rule in RULES:
        finding = rule(case)
        if finding is not None:
            return finding
    return _report_unknown(case)


def _find_not_running(case: _Case) -> Finding | None:
    """Return a finding if no rank is running: none has begun, or all have ended and do not exit."""
    if case.ranks:
        return None
    ended = [rank for rank in case.evidence.ranks if rank.has_ended]
    duration = f"{case.evidence.quiet_s:.0f} s"
    return case.finding(
        "SF111",
        f"all ranks have ended, and the run is still there after {duration}"
        if ended
        else f"no rank has begun within {duration}",
        "A thread or a process that was started by the run may still be waited for: look at `py-spy dump`."
        if ended
        else "Do all machines run, with the same nnodes and rdzv_endpoint? Can torch be imported (a hung file system)?",
        confidence=0.6,
    )


def _find_dead(case: _Case) -> Finding | None:
    gone = [rank for rank in case.ranks if rank.state in ("gone", "zombie")]
    if not gone:
        return None
    by_kernel = case.evidence.oom_kills
    if by_kernel:
        return case.finding(
            "SF201",
            f"{_name_ranks(gone, 'was', 'were')} killed by the kernel for memory: the limit of the cgroup, or all of "
            "the machine, was reached, "
            f"{_describe_place(gone[0])}",
            "Lower per_device_train_batch_size or max_length, set gradient_checkpointing: true or zero_stage: 3, or "
            "give the job more memory.",
            rank=gone[0].rank,
            oom_kills=by_kernel,
        )
    why = "" if by_kernel is not None else "; whether for memory cannot be told: the kernel's count is not readable"
    return case.finding(
        "SF101",
        f"{_name_ranks(gone, 'is', 'are')} dead without a word, {_describe_place(gone[0])}{why}",
        "Look at what it printed last, and at who may have killed it: the scheduler, a person, the kernel (dmesg).",
        rank=gone[0].rank,
    )


def _find_stopped(case: _Case) -> Finding | None:
    held = [rank for rank in case.ranks if rank.state in ("stopped", "tracing-stop")]
    if held:
        return case.finding(
            "SF102",
            f"{_name_ranks(held, 'was', 'were')} stopped by a signal (SIGSTOP, or a debugger), "
            f"{_describe_place(held[0])}",
            f"Let it go on: kill -CONT {' '.join(str(rank.process) for rank in held)}",
            rank=held[0].rank,
        )
    # A rank that waits for others may have a thread that saves at the same time.
    blocked = [
        rank for rank in case.ranks if (rank.state == "disk-sleep" or rank.waits_for_disk) and not case.waiting(rank)
    ]
    if blocked:
        return case.finding(
            "SF103",
            f"{_name_ranks(blocked, 'waits', 'wait')} in the kernel for a disk or a device, "
            f"{_describe_place(blocked[0])}",
            "Look at the file system that the run reads and writes (a hung NFS mount?), and at dmesg.",
            confidence=0.8,
            rank=blocked[0].rank,
        )
    return None


def _find_mismatch(case: _Case) -> Finding | None:
    """Return a finding if ranks wait in different collectives of the same group and number."""
    calls: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank in case.ranks:
        for collective in case.waiting(rank):
            calls.setdefault((collective.group, collective.number), {}).setdefault(collective.call, []).append(
                rank.rank
            )
    for (group, number), by_call in calls.items():
        if len(by_call) > 1 and not all("all_to_all" in call for call in by_call):  # their sizes may differ
            unusual = [call for call in by_call if not case.is_usual(call)]
            fewest = min(len(ranks) for ranks in by_call.values())
            odd = unusual if len(unusual) == 1 else [call for call in by_call if len(by_call[call]) == fewest]
            named = {"rank": by_call[odd[0]][0]} if len(odd) == 1 else {}
            calls_text = " but ".join(f"{_list_ranks(ranks)} {call}" for call, ranks in by_call.items())
            return case.finding(
                "SF104",
                f"the ranks called different collectives as number {number} of {_describe_group(case, group)}: "
                f"{calls_text}",
                "Make all ranks take the same way through the program: no branch on the rank or on its own data.",
                group=group,
                **named,
            )
    return None


def _find_partial_completion(case: _Case) -> Finding | None:
    """Return a finding if a rank is still in a collective that another rank has finished: the data do not arrive.

    If the other rank called something else under that number, the call is wrong. If a third rank may not have entered
    the collective yet, the rank waits for that one: a rank that only sends finishes at once.
    """
    for rank in case.ranks:
        for collective in case.waiting(rank):
            finished = {
                other.rank: case.flights[other.rank].over[collective.group, collective.number]
                for other in case.ranks
                if other.rank in case.flights and (collective.group, collective.number) in case.flights[other.rank].over
            }
            which = f"number {collective.number} of {_describe_group(case, collective.group)}"
            odd = [number for number, call in finished.items() if call != collective.call]
            if odd and not all("all_to_all" in call for call in (collective.call, *finished.values())):
                return case.finding(
                    "SF104",
                    f"the ranks called different collectives as {which}: rank {rank.rank} {collective.call} "
                    f"but {_list_ranks(odd)} {finished[odd[0]]}, and went on",
                    CATALOGUE["SF104"].fix,
                    confidence=0.9,
                    group=collective.group,
                )
            if finished and _has_everyone_arrived(case, collective):
                return case.finding(
                    "SF108",
                    f"rank {rank.rank} is in {collective.call}, {which}, and {_list_ranks(list(finished))} "
                    f"{'are' if len(finished) > 1 else 'is'} through with it: what was sent does not arrive",
                    CATALOGUE["SF108"].fix,
                    confidence=0.7,
                )
    return None


def _has_everyone_arrived(case: _Case, collective: Collective) -> bool:
    """Return whether every rank is known to have entered a collective of its group."""
    lasts = [flight.last.get(collective.group) for flight in case.flights.values()]
    return len(lasts) == case.evidence.num_ranks and all(
        last is None or last.number >= collective.number for last in lasts
    )


def _find_crossed_groups(case: _Case) -> Finding | None:
    """Return a finding if each rank waits in a group without the others: they use two groups in different order."""
    groups = {rank.rank: {collective.group for collective in case.waiting(rank)} for rank in case.ranks}
    if len(groups) < 2 or not all(groups.values()) or all(map(case.is_full, set.union(*groups.values()))):
        return None
    together = set.intersection(*groups.values())
    if together:
        return None
    groups_text = "; ".join(
        f"rank {rank} in {_describe_group(case, sorted(names)[0])}" for rank, names in sorted(groups.items())
    )
    unusual = [
        rank.rank for rank in case.ranks if not any(case.is_usual(collective.call) for collective in case.waiting(rank))
    ]
    ahead = max(case.ranks, key=_measure_progress)
    named = {}
    if len(unusual) == 1:
        named = {"rank": unusual[0]}
    elif not unusual and sum(_measure_progress(rank) == _measure_progress(ahead) for rank in case.ranks) == 1:
        named = {"rank": ahead.rank}  # it omitted the collective that the others wait for
    return case.finding(
        "SF105",
        f"the ranks wait for each other in different groups: {groups_text}",
        "Make all ranks call the collectives of these groups in the same order.",
        confidence=0.9,
        **named,
    )


def _measure_progress(rank: RankEvidence) -> tuple[int, int]:
    """Return a sort key for the progress of a rank: its step, and its phase in the step."""
    return rank.step, IN_A_STEP.index(rank.phase) if rank.phase in IN_A_STEP else len(IN_A_STEP)


def _find_held_gil(case: _Case) -> Finding | None:
    """Return a finding if no thread of a rank can run, not even its evidence server: something holds the GIL."""
    if len(case.ranks) > 1 and not any(rank.answered for rank in case.ranks):
        return None  # the machine is too busy to answer in time
    for rank in case.ranks:
        if not rank.answered and not case.waiting(rank) and rank.stacks and rank.state in ("sleeping", "running"):
            return case.finding(
                "SF109",
                f"no Python thread of rank {rank.rank} can run: native code holds Python's lock, "
                f"{_describe_line(rank)}",
                "The stack under evidence/ shows the call. Native code must release the lock before it waits.",
                confidence=0.9,
                **_make_rank_evidence(rank),
            )
    return None


def _find_early_end(case: _Case) -> Finding | None:
    """Return a finding if all remaining ranks wait for ranks that have ended."""
    ended = [rank for rank in case.evidence.ranks if rank.has_ended]
    if not ended or not all(case.waiting(rank) for rank in case.ranks):
        return None
    call = case.waiting(case.ranks[0])[0]
    return case.finding(
        "SF106",
        f"{_name_ranks(ended, 'has', 'have')} ended, {_describe_place(ended[0])}, "
        f"and {_name_ranks(case.ranks, 'waits', 'wait')} in {call.call}, "
        f"number {call.number} of {_describe_group(case, call.group)}",
        "Give all ranks as many batches as each other, and look at what the ranks that ended printed: one that failed "
        "must end the others, too (srun --kill-on-bad-exit=1).",
        confidence=0.9,
        rank=ended[0].rank,
    )


def _find_absent_rank(case: _Case) -> Finding | None:
    """Return a finding if some ranks wait in a collective that the others never entered."""
    absent = [rank for rank in case.ranks if not case.waiting(rank)]
    inside = [rank for rank in case.ranks if case.waiting(rank)]
    if not absent or (not inside and len(case.ranks) > 1 and len({rank.phase for rank in absent}) == 1):
        return None
    rank = max(absent, key=lambda candidate: candidate.quiet_s)
    missed = ""
    if inside:
        call = case.waiting(inside[0])[0]
        missed = (
            f"; {_name_ranks(inside, 'waits', 'wait')} in {call.call}, "
            f"number {call.number} of {_describe_group(case, call.group)}"
        )
    if rank.phase == "data_wait":
        dead = [state for state in rank.children if state in ("zombie", "dead")]
        held = [state for state in rank.children if state == "stopped"]
        workers = " A process that prepares them is dead." if dead else " One is stopped." if held else ""
        return case.finding(
            "SF107",
            f"rank {rank.rank} waits for data in step {rank.step}, {_describe_line(rank)}{missed}.{workers}",
            "Look at the storage of the data and at the processes that prepare them; dataset_num_proc: 1 takes them "
            "out of the way.",
            **_make_rank_evidence(rank),
            children=", ".join(rank.children) or "none",
        )
    innermost = python_stacks.main_thread(rank.stacks)[:1]
    is_in_lock = rank.syscall == "futex" or (innermost and innermost[0].file.endswith(LOCKS))
    if is_in_lock and rank.cpu_share < IDLE_SHARE:
        return case.finding(
            "SF109",
            f"rank {rank.rank} waits for a lock or another thread of its own, {_describe_line(rank)}{missed}",
            "The stacks of all its threads are under evidence/: look for who holds what this one waits for.",
            confidence=0.8,
            **_make_rank_evidence(rank),
        )
    doing = "computes" if rank.cpu_share > BUSY_SHARE else "stands"
    return case.finding(
        "SF106",
        f"rank {rank.rank} {doing} {_describe_place(rank)}, {_describe_line(rank)}{missed}",
        "Inspect that line: the other ranks are blocked on it.",
        confidence=0.9,
        **_make_rank_evidence(rank),
    )


def _find_hung_collective(case: _Case) -> Finding | None:
    """Return a finding if all ranks are in the same collective and it does not end."""
    calls = [set(case.waiting(rank)) for rank in case.ranks]
    if not calls or not all(calls) or len(case.ranks) < case.evidence.num_ranks:
        return None
    shared = set.intersection(*calls)
    if not shared and not all(case.is_full(collective.group) for collective in set.union(*calls)):
        return None
    call = min(shared or set.union(*calls), key=lambda collective: (collective.group, collective.number))
    unequal = _find_unequal_exchange(case, call)
    if unequal is not None:
        return unequal
    who = "all ranks are in" if shared else "all ranks are in the collectives of the groups they share, some in"
    return case.finding(
        "SF108",
        f"{who} {call.call}, number {call.number} of {_describe_group(case, call.group)}, and it does not end: "
        "the network between them does not carry it",
        CATALOGUE["SF108"].fix,
        confidence=0.8,
    )


def _find_unequal_exchange(case: _Case, call: Collective) -> Finding | None:
    """Return a finding if the ranks of an all-to-all send other amounts in total than they wait for.

    Its sizes may differ from rank to rank, but the two totals must be equal.
    """
    parts = {
        rank.rank: part
        for rank in case.ranks
        for part in case.waiting(rank)
        if (part.group, part.number) == (call.group, call.number)
    }
    sent, awaited = sum(part.sent for part in parts.values()), sum(part.awaited for part in parts.values())
    if TRAVELLING not in call.kind or sent == awaited or not all(part.awaited for part in parts.values()):
        return None
    each = ", ".join(f"rank {rank} sends {part.sent} and waits for {part.awaited}" for rank, part in parts.items())
    return case.finding(
        "SF104",
        f"the ranks do not agree on how much is sent in {call.kind}, number {call.number} of "
        f"{_describe_group(case, call.group)}: {sent} elements, and {awaited} are waited for ({each})",
        "Let ranks tell each other how many rows they send before they wait for them: both must come from one count.",
        confidence=0.9,
        group=call.group,
    )


def _report_unknown(case: _Case) -> Finding:
    missing = list(case.unreadable)
    for rank in case.evidence.ranks:
        lacks = [
            name
            for name, evidence in (
                ("Python stacks", rank.stacks),
                ("an answer of its witness thread", rank.answered),
                ("a flight record", rank.flight is not None or case.evidence.num_ranks == 1),
            )
            if not evidence
        ]
        if lacks:
            missing.append(f"rank {rank.rank}: {', '.join(lacks)}")
    elsewhere = case.evidence.num_ranks - len(case.evidence.ranks)
    if elsewhere > 0:
        missing.append(f"{elsewhere} ranks on other machines: everything")
    lines = "; ".join(f"rank {rank.rank} {_describe_line(rank)}" for rank in case.ranks)
    return case.finding(
        "SF110",
        f"no rank goes on, and the evidence does not say why; {lines}",
        "Look at the stacks under evidence/. "
        + (f"Missing: {'; '.join(missing)}." if missing else "All evidence that is collected was there."),
        confidence=0.3,
        missing="; ".join(missing) or "none",
    )


RULES: Sequence[Rule] = (
    _find_not_running,
    _find_dead,
    _find_stopped,
    _find_mismatch,
    _find_partial_completion,
    _find_crossed_groups,
    _find_held_gil,
    _find_early_end,
    _find_absent_rank,
    _find_hung_collective,
)


def _make_rank_evidence(rank: RankEvidence) -> dict[str, Any]:
    """Return the evidence of a finding about one rank."""
    return {"rank": rank.rank, "line": _describe_line(rank)}


def _describe_line(rank: RankEvidence) -> str:
    return python_stacks.where(rank.stacks)


def _describe_place(rank: RankEvidence) -> str:
    phase = f"in {rank.phase} " if rank.phase else ""
    layer = f", in layer {rank.layer}" if rank.layer is not None else ""
    return f"{phase}of step {rank.step}{layer}" if rank.step else f"{phase}before the first step"


def _describe_group(case: _Case, group: str) -> str:
    meaning = next((f.meanings[group] for f in case.flights.values() if group in f.meanings), "")
    waiting = [
        (rank, collective.kind) for rank in case.ranks for collective in case.waiting(rank) if collective.group == group
    ]
    # With gloo the same call reduces gradients in the backward; weights are also gathered for later layers.
    is_of_experts = meaning == MEANINGS["mesh_ep"] or all(rank.phase == "forward" for rank, _ in waiting)
    if meaning and waiting and is_of_experts and all(TRAVELLING in kind for _, kind in waiting):
        meaning += ", tokens travelling to experts and back"
        layers = {rank.layer for rank, _ in waiting} - {None}
        meaning += f", layer {layers.pop()}" if len(layers) == 1 else ""
    return f"group {group} ({meaning})" if meaning else f"group {group}"


def _name_ranks(ranks: Sequence[RankEvidence], verb: str, verb_of_many: str) -> str:
    return f"{_list_ranks([rank.rank for rank in ranks])} {verb_of_many if len(ranks) > 1 else verb}"


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _describe_rank(rank: RankEvidence) -> str:
    end = ", has ended" if rank.has_ended else ""
    return (
        f"{rank.rank}: {rank.state}, {_describe_place(rank)}, "
        f"silent {rank.quiet_s:.0f} s, CPU {rank.cpu_share:.0%}{end}"
    )
