"""Rules for the cause of a stall: from the evidence to one finding. Pure.

The rules apply in order; each either names a cause or passes. If all pass, the finding lists the missing evidence.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from surefoot.diagnostics.monitor import python_stacks
from surefoot.diagnostics.monitor.evidence import RankEvidence, StallEvidence
from surefoot.diagnostics.monitor.flight_recorder import TRAVELLING, Collective
from surefoot.diagnostics.rules.stall_case import StallCase, describe_line, describe_place, list_ranks, name_ranks
from surefoot.findings import Finding
from surefoot.findings.stalls import ON_ONE_MACHINE

IDLE_SHARE = 0.05
"""Share of a core below which a process waits."""
BUSY_SHARE = 0.5
WORKERS = {
    "dead": "is dead",
    "zombie": "is dead",
    "stopped": "is stopped",
    "disk-sleep": "waits in the kernel for a disk or a device",
}
"""State of a worker process, by psutil's name -> why it sends no data."""
IN_A_STEP = ("data_wait", "collectives", "forward", "forward_backward", "backward", "optimizer")
"""Phases of a step in order; a rank also communicates at the end of the backward."""
DEVICE_QUERIES = ("torch/cuda/__init__.py", "torch/cuda/memory.py", "pynvml.py", "surefoot/system/nvml.py")
"""Files whose functions ask the driver of a GPU."""
QUERY_FRAMES = 3
"""Innermost frames in which such a function is looked for."""
LOCKS = ("threading.py", "queue.py", "multiprocessing/connection.py", "multiprocessing/synchronize.py", "selectors.py")
"""Files whose innermost frame shows that a thread waits for another thread or process."""


def find_stall(evidence: StallEvidence) -> Finding:
    """Return the finding for a stall: its cause, or the evidence that is missing."""
    case = StallCase(evidence)
    findings = (rule(case) for rule in RULES)
    return next((finding for finding in findings if finding is not None), None) or _report_unknown(case)


def _find_not_running(case: StallCase) -> Finding | None:
    """Return a finding if no rank is running: none has begun, or all have ended and do not exit."""
    if case.ranks:
        return None
    duration = f"{case.evidence.quiet_s:.0f} s"
    late_end = f"all ranks have ended, but the run has not exited after {duration}"
    return case.finding("SF111", late_end if case.ended else f"no rank has begun within {duration}", confidence=0.6)


def _find_dead(case: StallCase) -> Finding | None:
    dead = [rank for rank in case.ranks if rank.state in ("gone", "zombie")]
    if not dead:
        return None
    place, rank, oom_kills = describe_place(dead[0]), dead[0].rank, case.evidence.oom_kills
    if oom_kills:
        cause = (
            f"{name_ranks(dead, 'was', 'were')} killed by the kernel, {place}: the cgroup or the machine had no memory"
        )
        return case.finding("SF201", cause, rank=rank, oom_kills=oom_kills)
    unknown = "; whether memory was the reason is unknown: the kernel's count of such kills is not readable"
    cause = f"{list_ranks([rank.rank for rank in dead])} exited without reporting an error, {place}"
    return case.finding("SF101", cause + (unknown if oom_kills is None else ""), rank=rank)


def _find_stopped(case: StallCase) -> Finding | None:
    stopped = [rank for rank in case.ranks if rank.state in ("stopped", "tracing-stop")]
    if stopped:
        return case.finding(
            "SF102",
            f"{name_ranks(stopped, 'was', 'were')} stopped by a signal (SIGSTOP, or a debugger), "
            f"{describe_place(stopped[0])}",
            f"Continue it: kill -CONT {' '.join(str(rank.process) for rank in stopped)}",
            rank=stopped[0].rank,
        )
    # A rank that waits in a collective is excluded: its saver thread may be writing to the disk at the same time.
    blocked = [
        rank for rank in case.ranks if (rank.state == "disk-sleep" or rank.waits_for_disk) and not case.waiting(rank)
    ]
    if not blocked:
        return None
    cause = f"{name_ranks(blocked, 'waits', 'wait')} in the kernel for a disk or a device, {describe_place(blocked[0])}"
    return case.finding("SF103", cause, confidence=0.8, rank=blocked[0].rank)


def _find_mismatch(case: StallCase) -> Finding | None:
    """Return a finding if ranks wait in different collectives of the same group and number."""
    calls: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank in case.ranks:
        for call in case.waiting(rank):
            calls.setdefault((call.group, call.number), {}).setdefault(call.call, []).append(rank.rank)
    for (group, number), by_call in calls.items():
        if len(by_call) == 1 or _are_all_to_alls(by_call):
            continue
        unusual = [call for call in by_call if not case.is_usual(call)]
        fewest = min(len(ranks) for ranks in by_call.values())
        odd = unusual if len(unusual) == 1 else [call for call in by_call if len(by_call[call]) == fewest]
        calls_text = " but ".join(f"{list_ranks(ranks)} {call}" for call, ranks in by_call.items())
        evidence: dict[str, Any] = {"group": group, **({"rank": by_call[odd[0]][0]} if len(odd) == 1 else {})}
        cause = f"the ranks called different collectives as {case.describe_number(group, number)}: {calls_text}"
        return case.finding("SF104", cause, **evidence)
    return None


def _are_all_to_alls(calls: Iterable[str]) -> bool:
    """Return whether all calls are all-to-alls, whose sizes may differ from rank to rank."""
    return all(TRAVELLING in call for call in calls)


def _find_stuck_kernel(case: StallCase) -> Finding | None:
    """Return a finding if the GPU of a rank has not come to any collective that the rank has called.

    Then a kernel that was called before them does not end, whatever the network does.
    """
    stuck = [
        rank
        for rank in case.ranks
        if case.waiting(rank) and all(call.has_started is False for call in case.waiting(rank))
    ]
    if not stuck:
        return None
    rank = stuck[0]
    others = [other for other in case.ranks if other not in stuck and case.waiting(other)]
    waiting = f"; {_describe_waiting(case, others)}" if others else ""
    return case.finding(
        "SF106",
        f"the GPU of {name_ranks(stuck, 'has', 'have')} not begun {case.describe_call(case.waiting(rank)[0])}, which "
        f"was called {describe_place(rank)}: a kernel before it does not end{waiting}",
        "CUDA_LAUNCH_BLOCKING=1 makes the line of the stack the one that starts the kernel; compare with compile: "
        "false and kernels of other packages left out. Errors of the GPU would be in the kernel's log (dmesg).",
        confidence=0.8,
        **_make_rank_evidence(rank),
    )


def _find_partial_completion(case: StallCase) -> Finding | None:
    """Return a finding if a rank is still in a collective that another rank has finished: the data do not arrive.

    All ranks are on this machine: those of other machines give no evidence.

    If the other rank called something else under that number, the call is wrong. If a third rank may not have entered
    the collective yet, the rank waits for that one: in a broadcast the sender
    may return before the receivers arrive.
    """
    for rank in case.ranks:
        for call in case.waiting(rank):
            key = (call.group, call.number)
            finished_by = {
                other.rank: case.flights[other.rank].finished for other in case.ranks if other.rank in case.flights
            }
            finished = {
                number: finished_calls[key] for number, finished_calls in finished_by.items() if key in finished_calls
            }
            odd = [number for number, finished_call in finished.items() if finished_call != call.call]
            if odd and not _are_all_to_alls((call.call, *finished.values())):
                return case.finding(
                    "SF104",
                    f"the ranks called different collectives as {case.describe_number(*key)}: rank {rank.rank} "
                    f"{call.call} but {list_ranks(odd)} {finished[odd[0]]}, and went on",
                    confidence=0.9,
                    group=call.group,
                )
            if finished and _has_everyone_arrived(case, call):
                return case.finding(
                    "SF108",
                    f"rank {rank.rank} is still in {case.describe_call(call)}, which {list_ranks(finished)} "
                    f"{'have' if len(finished) > 1 else 'has'} finished: the data that were sent do not arrive",
                    ON_ONE_MACHINE,
                    confidence=0.7,
                )
    return None


def _has_everyone_arrived(case: StallCase, call: Collective) -> bool:
    """Return whether every rank is known to have entered a collective of its group."""
    lasts = [flight.last.get(call.group) for flight in case.flights.values()]
    return len(lasts) == case.evidence.num_ranks and all(last is None or last.number >= call.number for last in lasts)


def _find_crossed_groups(case: StallCase) -> Finding | None:
    """Return a finding if each rank waits in a group without the others: they use two groups in different order."""
    groups = {rank.rank: {call.group for call in case.waiting(rank)} for rank in case.ranks}
    if len(groups) < 2 or not all(groups.values()) or all(map(case.all_members_wait_in, set.union(*groups.values()))):
        return None
    if set.intersection(*groups.values()):
        return None
    groups_text = "; ".join(
        f"rank {rank} in {case.describe_group(min(names))}" for rank, names in sorted(groups.items())
    )
    unusual = [rank for rank in case.ranks if not any(case.is_usual(call.call) for call in case.waiting(rank))]
    furthest = max(map(_measure_progress, case.ranks))
    # The rank that is ahead omitted the collective that the others wait for.
    suspects = unusual or [rank for rank in case.ranks if _measure_progress(rank) == furthest]
    evidence: dict[str, Any] = {"rank": suspects[0].rank} if len(suspects) == 1 else {}
    cause = f"the ranks wait for each other in different groups: {groups_text}"
    return case.finding("SF105", cause, confidence=0.9, **evidence)


def _measure_progress(rank: RankEvidence) -> tuple[int, int]:
    """Return a sort key for the progress of a rank: its step, and its phase in the step."""
    return rank.step, IN_A_STEP.index(rank.phase) if rank.phase in IN_A_STEP else len(IN_A_STEP)


def _find_held_gil(case: StallCase) -> Finding | None:
    """Return a finding if no thread of a rank can run, not even its evidence server: something holds the GIL."""
    if len(case.ranks) > 1 and not any(rank.answered for rank in case.ranks):
        return None  # the machine is too busy to answer in time
    for rank in case.ranks:
        if not rank.answered and not case.waiting(rank) and rank.stacks and rank.state in ("sleeping", "running"):
            return case.finding(
                "SF109",
                f"no Python thread of rank {rank.rank} can run: native code holds the GIL, {describe_line(rank)}",
                "The stack under evidence/ shows the call. Native code must release the GIL before it waits.",
                confidence=0.9,
                **_make_rank_evidence(rank),
            )
    return None


def _find_early_end(case: StallCase) -> Finding | None:
    """Return a finding if all remaining ranks wait for ranks that have ended."""
    if not case.ended or not all(case.waiting(rank) for rank in case.ranks):
        return None
    return case.finding(
        "SF106",
        f"{name_ranks(case.ended, 'has', 'have')} ended, {describe_place(case.ended[0])}, "
        f"and {_describe_waiting(case, case.ranks)}",
        "Give all ranks the same number of batches, and read the last output of the ranks that ended: a rank that "
        "fails must end the others, too (srun --kill-on-bad-exit=1).",
        confidence=0.9,
        rank=case.ended[0].rank,
    )


def _describe_waiting(case: StallCase, ranks: Sequence[RankEvidence]) -> str:
    return f"{name_ranks(ranks, 'waits', 'wait')} in {case.describe_call(case.waiting(ranks[0])[0])}"


def _list_absent(case: StallCase) -> list[RankEvidence]:
    """Return the ranks that wait in no collective, the longest silent first."""
    return sorted((rank for rank in case.ranks if not case.waiting(rank)), key=lambda rank: -rank.quiet_s)


def _pick_absent_rank(case: StallCase) -> RankEvidence | None:
    """Return the rank that holds up the run: the longest silent of those that wait in no collective.

    None if several ranks are all in the same phase and none waits in a collective: then nothing shows which one it is.
    """
    absent = _list_absent(case)
    is_shown = len(absent) < len(case.ranks) or len({rank.phase for rank in absent}) > 1 or len(absent) == 1
    return absent[0] if absent and is_shown else None


def _describe_missed(case: StallCase) -> str:
    """Return who waits for the absent rank, as the end of a sentence; empty if no rank waits in a collective."""
    inside = [rank for rank in case.ranks if case.waiting(rank)]
    return f"; {_describe_waiting(case, inside)}" if inside else ""


def _find_data_wait(case: StallCase) -> Finding | None:
    """Return a finding if the rank that holds up the run, or every rank, waits for data."""
    absent = _list_absent(case)
    waiting = [rank for rank in absent if rank.phase == "data_wait"]
    rank = waiting[0] if waiting and len(waiting) == len(absent) else _pick_absent_rank(case)
    if rank not in waiting:
        return None
    worker = next((f" A worker process {about}." for state, about in WORKERS.items() if state in rank.children), "")
    return case.finding(
        "SF107",
        f"{name_ranks(waiting, 'waits', 'wait')} for data in step {rank.step}, {describe_line(rank)}"
        f"{_describe_missed(case)}.{worker}",
        **_make_rank_evidence(rank),
        children=", ".join(rank.children) or "none",
    )


def _find_device_query(case: StallCase) -> Finding | None:
    """Return a finding if the rank that holds up the run waits for the driver of its device."""
    rank = _pick_absent_rank(case)
    frames = python_stacks.main_thread(rank.stacks)[:QUERY_FRAMES] if rank is not None else []
    query = next((frame for frame in frames if frame.file.endswith(DEVICE_QUERIES)), None)
    if rank is None or query is None or query.function == "synchronize":  # which waits for kernels
        return None
    return case.finding(
        "SF114",
        f"rank {rank.rank} waits for the driver of its GPU, inside {query.function} {describe_line(rank)}"
        f"{_describe_missed(case)}",
        confidence=0.9,
        **_make_rank_evidence(rank),
    )


def _find_own_lock(case: StallCase) -> Finding | None:
    """Return a finding if the rank that holds up the run waits for a lock or a thread of its own process."""
    rank = _pick_absent_rank(case)
    if rank is None or rank.cpu_share >= IDLE_SHARE:
        return None
    innermost = python_stacks.main_thread(rank.stacks)[:1]
    if rank.syscall != "futex" and not (innermost and innermost[0].file.endswith(LOCKS)):
        return None
    return case.finding(
        "SF109",
        f"rank {rank.rank} waits for a lock or another thread of its own, {describe_line(rank)}"
        f"{_describe_missed(case)}",
        confidence=0.8,
        **_make_rank_evidence(rank),
    )


def _find_rank_behind(case: StallCase) -> Finding | None:
    """Return a finding for the rank that holds up the run, whatever it does."""
    rank = _pick_absent_rank(case)
    if rank is None:
        return None
    activity = "computes" if rank.cpu_share > BUSY_SHARE else "is blocked"
    return case.finding(
        "SF106",
        f"rank {rank.rank} {activity} {describe_place(rank)}, {describe_line(rank)}{_describe_missed(case)}",
        "Inspect that line" + (": the other ranks are blocked on it." if case.evidence.num_ranks > 1 else "."),
        confidence=0.9,
        **_make_rank_evidence(rank),
    )


def _make_rank_evidence(rank: RankEvidence) -> dict[str, Any]:
    """Return the evidence of a finding about one rank."""
    return {"rank": rank.rank, "line": describe_line(rank)}


def _find_hung_collective(case: StallCase) -> Finding | None:
    """Return a finding if all ranks are in the same collective and it does not end. All are on this machine."""
    calls = [set(case.waiting(rank)) for rank in case.ranks]
    if not calls or not all(calls) or len(case.ranks) < case.evidence.num_ranks:
        return None
    shared = set.intersection(*calls)
    if not shared and not all(case.all_members_wait_in(call.group) for call in set.union(*calls)):
        return None
    call = min(shared or set.union(*calls), key=lambda collective: (collective.group, collective.number))
    unequal = _find_unequal_exchange(case, call)
    if unequal is not None:
        return unequal
    subject = "all ranks are in" if shared else "all ranks are in the collectives of the groups they share, some in"
    cause = f"{subject} {case.describe_call(call)}, and it does not end: the connection between them does not carry it"
    return case.finding("SF108", cause, ON_ONE_MACHINE, confidence=0.8)


def _find_unequal_exchange(case: StallCase, call: Collective) -> Finding | None:
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
        f"the ranks do not agree on the size of {call.kind}, {case.describe_number(call.group, call.number)}: {sent} "
        f"elements are sent, and {awaited} are waited for ({each})",
        "Exchange the numbers of rows before the rows: what is sent and what is waited for must come from one count.",
        confidence=0.9,
        group=call.group,
    )


def _report_unknown(case: StallCase) -> Finding:
    missing = list(case.unreadable)
    for rank in case.evidence.ranks:
        lacks = [
            name
            for name, evidence in (
                ("Python stacks", rank.stacks),
                ("a response of its evidence server", rank.answered),
                ("a flight record", rank.flight is not None or case.evidence.num_ranks == 1),
            )
            if not evidence
        ]
        if lacks:
            missing.append(f"rank {rank.rank}: {', '.join(lacks)}")
    elsewhere = case.evidence.num_ranks - len(case.evidence.ranks)
    if elsewhere > 0:
        missing.append(f"{elsewhere} ranks on other machines: everything")
    lines = "; ".join(f"rank {rank.rank} {describe_line(rank)}" for rank in case.ranks)
    return case.finding(
        "SF110",
        f"no rank makes progress, and the evidence does not show why; {lines}",
        "Read the stacks under evidence/. "
        + (f"Missing: {'; '.join(missing)}." if missing else "No evidence is missing."),
        confidence=0.3,
        missing="; ".join(missing) or "none",
    )


RULES: Sequence[Callable[[StallCase], Finding | None]] = (
    _find_not_running,  # SF111
    _find_dead,  # SF201, SF101
    _find_stopped,  # SF102, SF103
    _find_mismatch,  # SF104
    _find_stuck_kernel,  # SF106
    _find_partial_completion,  # SF104, SF108
    _find_crossed_groups,  # SF105
    _find_held_gil,  # SF109
    _find_early_end,  # SF106
    _find_data_wait,  # SF107
    _find_device_query,  # SF114
    _find_own_lock,  # SF109
    _find_rank_behind,  # SF106
    _find_hung_collective,  # SF108, SF104
)
"""The rules in their order: the first with a finding wins, so a rule stands before all that are more general."""
