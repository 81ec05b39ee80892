"""Runner of all preflight checks, cheap to expensive, and their report."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from surefoot.config import LoadedConfig
from surefoot.diagnostics.preflight import (
    env_vars,
    gpus,
    learning_rate,
    memory,
    network,
    resources,
    slow_checks,
    system,
    versions,
)
from surefoot.diagnostics.preflight.check import Check, CheckContext, Result, run_check
from surefoot.errors import ConfigError
from surefoot.system.deadline import Deadline, DeadlineExceeded
from surefoot.system.machine import Snapshot
from surefoot.system.machine_snapshot import collect

CHECKS: Mapping[str, Callable[[CheckContext], Result]] = {
    "devices": resources.check_devices,
    "model": memory.check_model,
    "device memory": memory.check_device_memory,
    "host memory": memory.check_host_memory,
    "checkpoints": resources.check_checkpoints,
    "rollout server": resources.check_rollout_server,
    "rollout precision": resources.check_rollout_precision,
    "context": resources.check_lengths,
    "learning rate": learning_rate.check_learning_rate,
    "versions": versions.check_versions,
    "NCCL that is loaded": versions.check_loaded_nccl,
    "environment variables": env_vars.check_variables,
    "GPU driver": gpus.check_driver,
    "GPU errors": gpus.check_errors,
    "GPU clocks": gpus.check_clocks,
    "NVLink": gpus.check_nvlink,
    "PCIe": gpus.check_pcie,
    "GPU to GPU": gpus.check_peers,
    "GPUs are free": gpus.check_free_memory,
    "shared memory": system.check_shared_memory,
    "locked memory": system.check_locked_memory,
    "open files": system.check_open_files,
    "processes and threads": system.check_processes,
    "address space": system.check_address_space,
    "processors": system.check_processors,
    "bfloat16": system.check_bfloat16,
    "swap": system.check_swap,
    "IOMMU": system.check_iommu,
    "output_dir": system.check_storage,
    "host name": network.check_host_name,
    "interfaces": network.check_interfaces,
    "InfiniBand": network.check_infiniband,
    "GPU memory for network cards": network.check_peer_memory,
    "rdzv_endpoint": network.check_rendezvous,
}
SLOW_CHECKS: Mapping[str, Callable[[CheckContext], Result]] = {
    "resume": slow_checks.check_resume,
    "schedule": slow_checks.check_warmup,
    "chat template": slow_checks.check_chat_template,
    "rollout server's own": slow_checks.check_server,
}
"""Name -> check, in the order of the report. A check raises NotApplicable."""
WITHIN_S = 10.0
"""Deadline of all checks together; they start at the same time and may read files of the model."""
SIGNS = {"ok": "ok     ", "warning": "WARNING", "failed": "FAILED ", "not applicable": "-      "}
VOLATILE = (
    "free_bytes free_inodes write_s available limit_left swap_used OMP_NUM_THREADS temperature_c memory_used_bytes "
    "processes slowed_by pcie_generation gpu_query_s"
).split()
"""Snapshot fields that vary by the minute or that a run sets for its ranks, so they are no change of the machine."""
RUN_FIELDS = ("output", "rendezvous", "unknown")


def examine(machine: Snapshot, loaded: LoadedConfig | None = None, *, include_slow: bool = False) -> list[Check]:
    """Run every check of a machine and of a run on it; with `include_slow`, also the slow checks of the doctor."""
    context = CheckContext(machine, loaded)
    jobs = {name: Deadline(partial(check, context)) for name, check in CHECKS.items()}
    deadline = time.monotonic() + WITHIN_S
    results = [_run_check(name, job.result, max(0.0, deadline - time.monotonic())) for name, job in jobs.items()]
    if include_slow and has_answers(results):  # in this thread: a signal stops a template that does not end
        results += [_run_check(name, check, context) for name, check in SLOW_CHECKS.items()]
    elif include_slow:
        results += [not_looked_at(name) for name in SLOW_CHECKS]
    return results


def has_answers(checks: Sequence[Check]) -> bool:
    """Return whether all checks finished. If not, a file system hangs, and reading more of it would hang too."""
    return all(check.is_answered for check in checks)


def not_looked_at(name: str) -> Check:
    """Return a check that is skipped because earlier file reads did not finish."""
    return Check(name, "not applicable", "not checked: other files gave no answer")


def _run_check(name: str, check: Callable[..., Result], *arguments: Any) -> Check:
    """Return the result of a check, or why it could not run: files may be unreadable, and configs may hold anything."""
    try:
        return run_check(name, check, *arguments)
    except DeadlineExceeded:  # the file system of the model's files may hang
        text = f"cannot be checked: no answer within {WITHIN_S:g} s"
        return Check(name, "not applicable", text, is_answered=False)
    except Exception as error:  # noqa: BLE001 - reported, so that one failing check hides no other
        message = " ".join(str(error).split())[:300]
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        return Check(name, "not applicable", f"cannot be checked: {kind}{message}")


def snapshot_for(loaded: LoadedConfig | None, *, patient: bool = False) -> Snapshot:
    """Return a snapshot of this machine as a run would find it. `patient`: slow queries get longer deadlines."""
    if loaded is None:
        return collect(patient=patient)
    return collect(loaded.run.run_folder, loaded.run.rdzv_endpoint, patient=patient)


def as_launched(loaded: LoadedConfig) -> LoadedConfig:
    """Return a run with the ranks that torchrun started, if this is one of them. torchrun also sets the rendezvous.

    Raises: ConfigError for variables that are not numbers of ranks.
    """
    if not {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return loaded
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        value = os.environ[name]
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"{name}='{value}' is no number of ranks. Unset it, or start ranks with a launcher.")
    ranks, local_ranks = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    sizes = {"nproc_per_node": local_ranks, "nnodes": max(1, ranks // local_ranks), "rdzv_endpoint": None}
    return replace(loaded, run=loaded.run.model_copy(update=sizes))


def as_text(checks: Sequence[Check]) -> str:
    """Return a line for each check, then the findings."""
    width = max(len(check.name) for check in checks)
    lines = [f"{SIGNS[check.status]} {check.name:{width}}  {check.text}" for check in checks]
    findings = [check.finding.as_text() for check in checks if check.finding is not None]
    counts = {status: sum(check.status == status for check in checks) for status in SIGNS}
    lines += ["", *findings] if findings else []
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items() if count)])


def changes(before: Snapshot, now: Snapshot) -> list[str]:
    """Return the differences between two snapshots of one machine or of two machines, a line each."""
    if not (before.topology and now.topology):  # older versions recorded no topology
        before, now = replace(before, topology={}), replace(now, topology={})
    old, new = _flatten("", asdict(before)), _flatten("", asdict(now))
    unknown = {name for name in {**old, **new} if name.endswith(".capability") and not old.get(name)}
    names = [
        name
        for name in {**old, **new}
        if name not in unknown and name.rpartition(".")[2] not in VOLATILE and name.partition(".")[0] not in RUN_FIELDS
    ]
    return [
        f"{name}: {old.get(name, 'not there')} -> {new.get(name, 'not there')}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _flatten(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            k: v for key, inner in value.items() for k, v in _flatten(f"{name}.{key}" if name else key, inner).items()
        }
    if isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        return _flatten(name, {str(number): item for number, item in enumerate(value)})
    if isinstance(value, list | tuple):
        value = ", ".join(str(item) for item in value)
    return {name: value}
