"""The rule for a rank that was killed or crashed: the cause of its end, and where it was. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from surefoot.diagnostics.monitor.event_log import Entry, last_start, open_phases
from surefoot.diagnostics.monitor.python_stacks import main_thread
from surefoot.diagnostics.monitor.python_stacks import where as location
from surefoot.diagnostics.rules.memory_spike import LARGE_TIMES
from surefoot.findings import Finding

MOST_MESSAGES = 3
"""Number of the kernel's messages that are shown."""


@dataclass(frozen=True)
class MachineAtDeath:
    """State of the machine after one of its processes ended."""

    has_memory_limit: bool = True
    """Whether the cgroup of the process has one. Its count of kills includes those because the machine had no memory
    left."""
    killed: Collection[int] = ()
    """Processes that the kernel killed for memory, according to its log."""
    gpu_errors: Sequence[Finding] = ()
    """Errors that GPUs reported during the run."""
    kernel_messages: Sequence[str] = ()
    """Recent messages of the kernel about hardware, storage, and crashes of the run's processes."""


def find_death(
    rank: int | None,
    how: str,
    *,
    for_memory: bool | None,
    history: Sequence[Entry],
    last_stacks: str = "",
    machine: MachineAtDeath | None = None,
) -> Finding:
    """Return the finding for a rank that ended as `how` says. `rank`: None for the launcher, whose end ends its ranks.

    `for_memory`: whether the kernel killed a process of its cgroup for memory; None if unknown. `history`: recorded
    events of the run, oldest first. `last_stacks`: output of its crash handler. `machine`: None for one that reports
    nothing.
    """
    machine = machine or MachineAtDeath()
    entries = last_start(history, 0 if rank is None else rank)
    evidence = {"end": how, **_describe_last_event(entries)}
    if machine.kernel_messages:
        evidence["kernel_says"] = "; ".join(machine.kernel_messages[-MOST_MESSAGES:])
    who = "the launcher of the ranks"
    if rank is not None:
        evidence, who = {"rank": rank, **evidence}, f"rank {rank}"
    where = _describe_place(entries)
    is_in_log = "SIGKILL" in how and bool(entries) and entries[-1].process in machine.killed
    if for_memory or is_in_log:
        anonymous = [entry.values["anonymous_bytes"] for entry in entries if "anonymous_bytes" in entry.values]
        if anonymous:
            evidence["anonymous_memory_gib"] = round(anonymous[-1] / 2**30, 2)
        spike, sizes = _describe_batch(entries)
        limit = (
            "it reached the limit of its cgroup for"
            if for_memory and machine.has_memory_limit
            else "the machine had no"
        )
        return Finding(
            "SF201",
            f"{who} {how}{where}. The kernel killed it because {limit} memory{spike}",
            {**evidence, **sizes},
        )
    if machine.gpu_errors:
        gpu_error = machine.gpu_errors[0]
        cause = f"{who} {how}{where}, and {gpu_error.cause}"
        return Finding(gpu_error.code, cause, {**evidence, **gpu_error.evidence}, gpu_error.fix, confidence=0.9)
    inside = main_thread(last_stacks)[:1]
    if "SIGABRT" in how and inside and inside[0].file.endswith("distributed_c10d.py"):
        # gloo's own thread aborts the process here; if Python code aborts it, that code is innermost.
        return Finding(
            "SF104",
            f"{who} {how}{where}, inside {inside[0].function} {location(last_stacks)}: gloo aborts when another "
            "rank sent more than this one expected",
            {**evidence, "collective": inside[0].function, "line": location(last_stacks)},
            "Call the collective with the same size on all ranks: no shape may depend on a rank's own data.",
            confidence=0.7,
        )
    why, confidence = "", 1.0
    if "SIGKILL" in how and for_memory is None:
        why = ". Whether memory was the reason is unknown: the kernel's count of such kills is not readable"
        confidence = 0.8
    elif "SIGKILL" in how:
        why = ". It did not reach the memory limit of its cgroup, so a person or the scheduler may have killed it"
    return Finding("SF101", f"{who} {how}{where}{why}", evidence, confidence=confidence)


def _describe_batch(entries: Sequence[Entry]) -> tuple[str, dict[str, int]]:
    """Return (the peculiarity of its current batch, the tokens of that batch and of the usual one)."""
    batches = [entry for entry in entries if entry.kind == "batch" and entry.values]
    tokens = [entry.values["tokens"] for entry in batches]
    last_step = _find_last_step(entries) if entries else 0
    has_ended = any(entry.kind == "step" and entry.step == last_step for entry in entries)
    # Other trainers report a batch at its end.
    if len(batches) < 2 or has_ended or batches[-1].step != last_step:
        return "", {}
    usual = median(tokens[:-1])
    sizes = {"tokens_of_its_batch": round(tokens[-1]), "usual_tokens": round(usual)}
    if tokens[-1] < LARGE_TIMES * usual:
        return "", sizes
    return f", in a batch of {tokens[-1]:.0f} tokens, where {usual:.0f} are usual", sizes


def _describe_last_event(entries: Sequence[Entry]) -> dict[str, object]:
    if not entries:
        return {"last_step": "none"}
    return {"last_step": _find_last_step(entries), "last_event": f"{entries[-1].kind} {entries[-1].phase}".strip()}


def _find_last_step(entries: Sequence[Entry]) -> int:
    return max(entry.step for entry in entries)  # the end of a run has no step


def _describe_place(entries: Sequence[Entry]) -> str:
    if not entries:
        return ", before it had begun"
    inside = open_phases(entries)
    phase = f" in {inside[-1]}" if inside else ""
    step = _find_last_step(entries)
    return f"{phase} of step {step}" if step else f"{phase} before the first step"
