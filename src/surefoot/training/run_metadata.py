"""Metadata of a run's hardware and software: environment.json."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from surefoot.distributed.process_group import World
from surefoot.findings import Finding
from surefoot.system.machine_snapshot import collect
from surefoot.system.rank_consistency import facts_of, ranks_differ
from surefoot.version import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """Return the hardware and software that the run uses."""
    return {
        "surefoot": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def describe_machines(run_folder: Path, device: torch.device, ranks: World) -> tuple[dict[str, Any], Finding | None]:
    """Return the snapshots of all machines, that of rank 0 apart, and a finding if ranks differ. Collective."""
    is_first_here = ranks.local_rank == 0
    machine = collect(run_folder if is_first_here else None, gpus=is_first_here).as_dict()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    facts = facts_of({**machine, "device": name})
    reports = ranks.gather({"host": machine["host"], "facts": facts, "machine": machine if is_first_here else None})
    first, *others = [report["machine"] for report in reports if report["machine"] is not None]
    differing = ranks_differ([report["facts"] for report in reports], [report["host"] for report in reports])
    return {"machine": first, "other_machines": others}, differing
