"""All checks, cheap to expensive, and what they say together."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from surefoot.config import LoadedConfig
from surefoot.diagnostics.preflight import gpus, network, resources, system, versions
from surefoot.diagnostics.preflight.check import Check, CheckContext, Examine, not_applicable
from surefoot.diagnostics.preflight.slow_checks import CHECKS as ASKED
from surefoot.errors import ConfigError
from surefoot.system.deadline import Deadline, DeadlineExceeded
from surefoot.system.machine import Snapshot
from surefoot.system.machine_snapshot import collect

CHECKS: Sequence[Examine] = (
    *resources.CHECKS,
    *versions.CHECKS,
    *gpus.CHECKS,
    *system.CHECKS,
    *network.CHECKS,
)
WITHIN_S = 10.0
"""For all checks together that may read files of the model; they begin at the same time."""
SIGNS = {"ok": "ok     ", "warning": "WARNING", "failed": "FAILED ", "not applicable": "-      "}
VOLATILE = (
    "free_bytes free_inodes write_s available limit_left swap_used OMP_NUM_THREADS temperature_c memory_used_bytes "
    "processes slowed_by pcie_generation"
).split()
"""What changes from minute to minute, or is set for its ranks by a run, and is no change of the machine."""
OF_A_RUN = ("output", "rendezvous", "unknown")


def examine(machine: Snapshot, loaded: LoadedConfig | None = None, *, asked: bool = False) -> list[Check]:
    """Every check of a machine, and of a run on it; with those that are for who asks before a run starts."""
    seen = CheckContext(machine, loaded)
    begun = [(check, Deadline(partial(check, seen))) for check in CHECKS]
    deadline = time.monotonic() + WITHIN_S
    found = [_looked(check, partial(work.result, max(0.0, deadline - time.monotonic()))) for check, work in begun]
    if asked and has_answers(found):  # in this thread: a template that has no end is stopped by a signal
        found += [_looked(check, partial(check, seen)) for check in ASKED]
    elif asked:
        found += [not_looked_at(_name(check)) for check in ASKED]
    return found


def has_answers(checks: Sequence[Check]) -> bool:
    """Whether all came to their end: else a file system is dead, and who reads more of it waits for ever."""
    return all(check.is_answered for check in checks)


def not_looked_at(name: str) -> Check:
    """A check that has no answers to build on."""
    return not_applicable(name, "not looked at: other files gave no answer")


def _looked(check: Examine, answer: Callable[[], Check]) -> Check:
    """What a check says; where it cannot look, why: a file may be closed to it, and a model's config hold anything."""
    name = _name(check)
    try:
        return answer()
    except DeadlineExceeded:  # the model's files may lie on a file system that answers no more
        late = not_applicable(name, f"cannot be looked at: no answer within {WITHIN_S:g} s")
        return replace(late, is_answered=False)
    except Exception as error:  # noqa: BLE001 - said as it is: one check that fails hides no other
        said = " ".join(str(error).split())[:300]
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        return not_applicable(name, f"cannot be looked at: {kind}{said}")


def _name(check: Examine) -> str:
    return getattr(check, "__name__", "a check").replace("_", " ")


def snapshot_for(loaded: LoadedConfig | None, *, patient: bool = False) -> Snapshot:
    """This machine as a run would find it. `patient`: what is slow has longer."""
    if loaded is None:
        return collect(patient=patient)
    return collect(loaded.run.run_folder, loaded.run.rdzv_endpoint, patient=patient)


def as_launched(loaded: LoadedConfig) -> LoadedConfig:
    """A run with the ranks that torchrun started, where this is one of them: it also says where they meet.

    Raises: ConfigError for variables that are no numbers of ranks.
    """
    if not {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return loaded
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        said = os.environ[name]
        if not said.isdecimal() or int(said) < 1:
            raise ConfigError(f"{name}='{said}' is no number of ranks. Unset it, or start ranks with a launcher.")
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    sizes = {"nproc_per_node": here, "nnodes": max(1, ranks // here), "rdzv_endpoint": None}
    return replace(loaded, run=loaded.run.model_copy(update=sizes))


def as_text(checks: Sequence[Check]) -> str:
    """A line for each check, then the findings."""
    width = max(len(check.name) for check in checks)
    lines = [f"{SIGNS[check.status]} {check.name:{width}}  {check.text}" for check in checks]
    found = [check.finding.as_text() for check in checks if check.finding is not None]
    counts = {status: sum(check.status == status for check in checks) for status in SIGNS}
    lines += ["", *found] if found else []
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items() if count)])


def changes(before: Snapshot, now: Snapshot) -> list[str]:
    """What is different on a machine since a snapshot of it, or on another machine, a line each."""
    if not (before.topology and now.topology):  # older versions did not look
        before, now = replace(before, topology={}), replace(now, topology={})
    then, here = _flat("", asdict(before)), _flat("", asdict(now))
    unknown = {name for name in {**then, **here} if name.endswith(".capability") and not then.get(name)}
    names = [
        name
        for name in {**then, **here}
        if name not in unknown and name.rpartition(".")[2] not in VOLATILE and name.partition(".")[0] not in OF_A_RUN
    ]
    return [
        f"{name}: {then.get(name, 'not there')} -> {here.get(name, 'not there')}"
        for name in names
        if then.get(name) != here.get(name)
    ]


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(f"{name}.{key}" if name else key, inner).items()}
    if isinstance(value, list | tuple) and any(isinstance(one, dict) for one in value):
        return _flat(name, {str(number): one for number, one in enumerate(value)})
    if isinstance(value, list | tuple):
        value = ", ".join(str(one) for one in value)
    return {name: value}
