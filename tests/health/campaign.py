"""Every fault for real, and whether it is found: `campaign.py MODEL DATA FOLDER [--kinds ...] [--seeds N]`.

Prints a line of JSON per run: what was found and how soon. `make campaign` and the tests read them.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surefoot.health.faults import FAULTS, VARIABLE

TOGETHER = 3
"""Runs at the same time: a run that stands still costs nothing."""
GIVE_UP_S = 90.0
GROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 2 << 30
END_WITHIN_S = 15.0
"""After the finding."""


def strike(kind: str, settings: dict[str, Any], folder: Path, seed: int) -> dict[str, Any]:
    """One run with one fault on a rank and in a step that the seed draws."""
    fault = FAULTS[kind]
    draw = random.Random(f"{kind}-{seed}")
    rank, step = draw.randrange(2), draw.randrange(fault.first_step, fault.first_step + 8)
    folder.mkdir(parents=True)
    struck = folder / "struck"
    settings = {
        **settings,
        "output_dir": str(folder / "run"),
        "max_steps": 100_000,
        "save_steps": step if fault.phase == "save" else 0,
        "nproc_per_node": 2,
        "on_stall": "stop",
        "stall_timeout_s": 1.0,
    }
    (folder / "run.json").write_text(json.dumps(settings))
    began = time.monotonic()
    with open(folder / "output", "w") as output, limited(kind) as inside:
        done = subprocess.Popen(
            [*inside, sys.executable, "-m", "surefoot", "train", str(folder / "run.json")],
            env={**os.environ, VARIABLE: f"{kind}:{rank}:{step}:{struck}", "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        found_s, was_told = None, False
        findings = folder / "run" / "findings.jsonl"
        while done.poll() is None and time.monotonic() - began < GIVE_UP_S:
            if found_s is None and findings.is_file() and findings.stat().st_size:
                found_s = time.time()
            if found_s is not None and not was_told and time.time() - found_s > END_WITHIN_S:  # a leak ends no run
                done.terminate()
                was_told = True
            time.sleep(0.1)
        if done.poll() is None:  # not found: its supervisor ends the run when it is told to end at once
            done.kill()
        status = done.wait(30)
    found_s = found_s or (time.time() if findings.is_file() else None)
    made = [json.loads(line) for line in findings.read_text().splitlines()] if findings.is_file() else []
    first = made[0] if made else {"code": None, "evidence": {}, "cause": (folder / "output").read_text()[-500:]}
    return {
        "kind": kind,
        "seed": seed,
        "rank": rank,
        "step": step,
        "struck": struck.exists(),
        "expected": fault.code,
        "found": first["code"],
        "named_rank": first["evidence"].get("rank"),
        "after_s": round(found_s - float(struck.read_text()), 1) if found_s and struck.exists() else None,
        "status": status,
        "cause": first["cause"],
    }


@contextmanager
def limited(kind: str) -> Iterator[list[str]]:
    """The beginning of a command that runs in a cgroup of its own, where the fault needs one. Raises: OSError."""
    if not FAULTS[kind].needs_limits:
        yield []
        return
    groups = [GROUPS / name / f"surefoot-{os.getpid()}-{kind}" for name in ("cpu", "memory")]
    try:
        for group in groups:
            group.mkdir()
        (groups[1] / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        joins = "; ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
        yield ["sh", "-c", f'{joins}; exec "$@"', "sh"]
    finally:
        for group in groups:
            if group.is_dir():
                group.rmdir()


def can_limit() -> bool:
    """Whether cgroups may be made here: as root, where the controllers of version 1 are mounted."""
    return all(os.access(GROUPS / name / "cgroup.procs", os.W_OK) for name in ("cpu", "memory"))


def is_named(result: dict[str, Any]) -> bool:
    """Whether the right code was found, with the right rank where there is one."""
    fault = FAULTS[result["kind"]]
    return bool(result["found"] == fault.code and (not fault.names_rank or result["named_rank"] == result["rank"]))


def healthy(name: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run without a fault, in a shape that might be taken for one."""
    folder.mkdir(parents=True)
    settings = {**settings, **HEALTHY[name], "output_dir": str(folder / "run")}
    (folder / "run.json").write_text(json.dumps(settings))
    quirk = {VARIABLE: f"{QUIRKS[name]}:{folder / 'struck'}"} if name in QUIRKS else {}
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "train", str(folder / "run.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1", **quirk},
        capture_output=True,
        text=True,
    )
    findings = folder / "run" / "findings.jsonl"
    made = [json.loads(line) for line in findings.read_text().splitlines()] if findings.is_file() else []
    return {
        "kind": name,
        "status": done.returncode,
        "found": [one["code"] for one in made],
        "error": done.stderr[-300:],
    }


HEALTHY: dict[str, dict[str, Any]] = {
    "one-rank": {"max_steps": 200},
    "two-ranks": {"nproc_per_node": 2, "max_steps": 200},
    "experts-shared-out": {"nproc_per_node": 2, "expert_parallel_size": 2, "max_steps": 200},
    "three-ranks-zero3": {
        "nproc_per_node": 3,
        "zero_stage": 3,
        "tuning": "full",
        "global_batch_size": 7,
        "max_steps": 150,
    },
    "packing": {"packing": True, "max_length": 512, "max_steps": 150},
    "saving-each-step": {"nproc_per_node": 2, "save_steps": 1, "max_steps": 60},
    "evaluating": {"eval_fraction": 0.2, "eval_steps": 5, "max_steps": 100},
    "checkpointing": {"gradient_checkpointing": True, "tuning": "full", "max_steps": 150},
    "uneven-steps": {"nproc_per_node": 2, "max_steps": 60},
    "page-cache": {"max_steps": 300},
}
"""Shapes of runs -> their settings."""
QUIRKS = {
    "uneven-steps": "hiccup:1:10",
    "page-cache": "page-cache:0:5",
}
"""What happens in some of them that is no fault."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="*", default=[kind for kind, fault in FAULTS.items() if fault.code])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--healthy", action="store_true")
    given = parser.parse_args()
    settings = settings_of(given.model, given.data)
    with ThreadPoolExecutor(TOGETHER) as pool:
        if given.healthy:
            for result in pool.map(lambda name: healthy(name, settings, given.folder / name), HEALTHY):
                print(json.dumps({**result, "ok": result["status"] == 0 and not result["found"]}), flush=True)
            return
        runs = [(kind, seed) for seed in range(given.seeds) for kind in given.kinds]
        for result in pool.map(lambda run: strike(run[0], settings, given.folder / f"{run[0]}-{run[1]}", run[1]), runs):
            print(json.dumps({**result, "ok": is_named(result)}), flush=True)


def settings_of(model: Path, data: Path) -> dict[str, Any]:
    return {
        "model": str(model), "dataset": str(data), "max_length": 128, "learning_rate": 1e-4, "device": "cpu",
        "save_steps": 0, "global_batch_size": 4, "per_device_train_batch_size": 2,
    }  # fmt: skip


if __name__ == "__main__":
    main()
