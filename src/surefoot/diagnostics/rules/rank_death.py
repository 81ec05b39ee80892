"""A rank that was killed or crashed: what is known of its end, and where it was. Pure."""

from collections.abc import Collection, Sequence
from statistics import median

from surefoot.diagnostics.monitor.event_log import Entry, last_start, open_phases
from surefoot.diagnostics.monitor.python_stacks import main_thread
from surefoot.diagnostics.monitor.python_stacks import where as location
from surefoot.diagnostics.rules.memory_spike import LARGE_TIMES
from surefoot.findings import Finding


def find_death(
    rank: int | None,
    how: str,
    *,
    for_memory: bool | None,
    has_limit: bool = True,
    history: Sequence[Entry],
    last_stacks: str = "",
    killed: Collection[int] = (),
) -> Finding:
    """The finding for a rank that ended as `how` says; None for the launcher, which takes its ranks along.

    `for_memory`: whether the kernel killed one of its cgroup for memory; None where that cannot be told. `has_limit`:
    whether that group has a limit; the kernel counts those there too that it killed because the machine had none left.
    `history`: what was recorded of the run, oldest first. `last_stacks`: what its handler for crashes wrote.
    `killed`: processes that the kernel killed for memory, by its log.
    """
    mine = last_start(history, 0 if rank is None else rank)
    evidence = {"end": how, **_last_words(mine)}
    who = "the launcher of the ranks"
    if rank is not None:
        evidence, who = {"rank": rank, **evidence}, f"rank {rank}"
    where = _where(mine)
    is_in_log = "SIGKILL" in how and bool(mine) and mine[-1].process in killed
    if for_memory or is_in_log:
        anonymous = [entry.values["anonymous_bytes"] for entry in mine if "anonymous_bytes" in entry.values]
        if anonymous:
            evidence["anonymous_memory_gib"] = round(anonymous[-1] / 2**30, 2)
        spike, sizes = _batch(mine)
        limit = "it reached the limit of its cgroup for" if for_memory and has_limit else "the machine had no"
        return Finding(
            "SF201",
            f"{who} {how}{where}. The kernel killed it because {limit} memory{spike}",
            {**evidence, **sizes},
            "Lower per_device_train_batch_size or max_length, set gradient_checkpointing: true or zero_stage: 3, or "
            "give the job more memory.",
        )
    inside = main_thread(last_stacks)[:1]
    if "SIGABRT" in how and inside and inside[0].file.endswith("distributed_c10d.py"):
        # gloo's own thread aborts the process; one that Python code aborts has that code innermost.
        return Finding(
            "SF104",
            f"{who} {how}{where}, inside {inside[0].function} {location(last_stacks)}: gloo aborts when another "
            "rank sent more than this one expected",
            {**evidence, "collective": inside[0].function, "line": location(last_stacks)},
            "All ranks must call a collective with the same size: no shape that depends on a rank's own data.",
            confidence=0.7,
        )
    why = ". Whether for memory cannot be told here: the kernel's count of its cgroup is not readable"
    if for_memory is not None:
        why = ". No memory limit of its cgroup was reached; was it killed by hand, or by the scheduler?"
    is_kill = "SIGKILL" in how
    return Finding(
        "SF101",
        f"{who} {how}{where}{why if is_kill else ''}",
        evidence,
        "Look at what it printed last, and at who may have killed it: the scheduler, a person, the kernel (dmesg)."
        if is_kill
        else "Look at what it printed last; native code that aborts leaves its stack in events/rank-NNNNN.stacks.",
        confidence=1.0 if for_memory is not None or not is_kill else 0.8,
    )


def _batch(mine: Sequence[Entry]) -> tuple[str, dict[str, int]]:
    """(what is odd about the batch that it worked on, the tokens of that and of the usual one)."""
    batches = [entry for entry in mine if entry.kind == "batch" and entry.values]
    tokens = [entry.values["tokens"] for entry in batches]
    has_ended = any(entry.kind == "step" and entry.step == _last_step(mine) for entry in mine)
    if len(batches) < 2 or has_ended or batches[-1].step != _last_step(mine):  # others tell of a batch at its end
        return "", {}
    usual = median(tokens[:-1])
    sizes = {"tokens_of_its_batch": round(tokens[-1]), "usual_tokens": round(usual)}
    if tokens[-1] < LARGE_TIMES * usual:
        return "", sizes
    return f", in a batch of {tokens[-1]:.0f} tokens, where {usual:.0f} are usual", sizes


def _last_words(mine: Sequence[Entry]) -> dict[str, object]:
    if not mine:
        return {"last_step": "none"}
    return {"last_step": _last_step(mine), "last_event": f"{mine[-1].kind} {mine[-1].phase}".strip()}


def _last_step(mine: Sequence[Entry]) -> int:
    return max(entry.step for entry in mine)  # the end of a run is of no step


def _where(mine: Sequence[Entry]) -> str:
    if not mine:
        return ", before it had begun"
    inside = open_phases(mine)
    phase = f" in {inside[-1]}" if inside else ""
    step = _last_step(mine)
    return f"{phase} of step {step}" if step else f"{phase} before the first step"
