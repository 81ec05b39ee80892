"""Runs without a fault, in shapes that might be taken for one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.observers import FAULT_VARIABLE


def healthy(name: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run without a fault, in a shape that might be taken for one."""
    folder.mkdir(parents=True)
    settings = {**settings, **HEALTHY[name], "output_dir": str(folder / "run")}
    if name == "long-tokenising":
        own = Path(settings["model"], "chat_template.jinja").read_text()
        (folder / "slow.jinja").write_text(SLOW + own)
        settings["chat_template"] = str(folder / "slow.jinja")
    (folder / "run.json").write_text(json.dumps(settings))
    quirk = {FAULT_VARIABLE: f"{QUIRKS[name]}:{folder / 'struck'}"} if name in QUIRKS else {}
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
    "long-tokenising": {"nproc_per_node": 2, "dataset_num_proc": 1, "max_steps": 50},
}
"""Shapes of runs -> their settings."""
SLOW = "{% for a in range(40) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
"""A chat template that takes a tenth of a second for each row: half a minute before the first step."""
QUIRKS = {
    "uneven-steps": "hiccup:1:10",
    "page-cache": "page-cache:0:5",
}
"""What happens in some of them that is no fault."""
