"""Runs of the command line on the device: tiny models, each run beside the same run in float32 on the CPU.

Then what a run must survive: kill -9 and resume with the same numbers, offload, memory that is too small, and chat.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from part import Row, failure, main
from tests.same_numbers import BASE, JOBS, make_parts

LOSS_WITHIN = 0.03
"""Largest relative difference of a loss in bfloat16 after six steps."""
DEADLINE_S = 120
NAMES = ("dense-lora", "dense-full-packed", "moe-lora-aux-loss", "moe-lora-router", "grpo", "vision-lora", "evaluated")


class RunFailed(Exception):
    """Error of a run that ended with another status than 0."""


def surefoot(folder: Path, *arguments: str, status: int = 0) -> str:
    """Run a verb in the folder and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", *arguments],
        cwd=folder,
        env={**os.environ, "SUREFOOT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode != status:
        raise RunFailed(f"status {done.returncode}: {last_line(done.stderr or done.stdout)}")
    return done.stdout + done.stderr


def last_line(text: str) -> str:
    """Return the last line of what a run printed: the error."""
    return (text.strip().splitlines() or ["it printed nothing"])[-1][:300]


def write_config(folder: Path, name: str, **changes: Any) -> str:
    rank = {} if changes.get("tuning") == "full" else {"lora_rank": 4}
    settings = {**BASE, **rank, "dataset": "train.jsonl", "save_steps": 3, **changes, "output_dir": name}
    (folder / f"{name}.json").write_text(json.dumps(settings), encoding="utf-8")
    return f"{name}.json"


def losses_of(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def trained(folder: Path, name: str, **changes: Any) -> list[float]:
    surefoot(folder, "train", write_config(folder, name, **changes))
    return losses_of(folder / name)


def runs(device: torch.device) -> Iterator[Row]:
    """A row for each kind of run."""
    with tempfile.TemporaryDirectory(prefix="surefoot-gpu-") as name:
        folder = Path(name)
        make_parts(folder)
        with ThreadPoolExecutor(min(len(NAMES), max(1, (os.cpu_count() or 1) // 2))) as pool:
            yield from pool.map(partial(compare_with_cpu, folder, device.type), NAMES)
        on_gpu = (offloaded, too_large) if device.type == "cuda" else ()
        for check in (killed_and_resumed, *on_gpu, answered):
            title = (check.__doc__ or "").rstrip(".")
            try:
                yield Row(title, check(folder, device.type), "", True)
            except Exception as error:  # noqa: BLE001 - the row tells of it
                yield failure(title, error)


def compare_with_cpu(folder: Path, device: str, job: str) -> Row:
    """Return the row of a run on the device beside the same run on the CPU."""
    try:
        wanted = trained(folder, f"{job}-cpu", **JOBS[job])
        found = trained(folder, job, **{**JOBS[job], "device": device})
        worst = max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(found, wanted, strict=True))
        text = f"losses {found[0]:.4f} to {found[-1]:.4f}, CPU {wanted[0]:.4f} to {wanted[-1]:.4f}"
        return Row(f"run {job}", text, f"{LOSS_WITHIN:.0%}", worst <= LOSS_WITHIN)
    except Exception as error:  # noqa: BLE001 - the row tells of it
        return failure(f"run {job}", error)


def killed_and_resumed(folder: Path, device: str) -> str:
    """A run killed with kill -9 and resumed has the numbers of one that was not."""
    settings = {**JOBS["moe-lora-aux-loss"], "device": device, "max_steps": 12, "save_steps": 2}
    wanted = trained(folder, "whole", **settings)
    config = write_config(folder, "killed", **settings)
    command = [sys.executable, "-m", "surefoot", "train", config]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "killed" / "checkpoints" / "step-00000004").is_dir():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RunFailed(f"status {process.poll()} before its second checkpoint")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    before = len(losses_of(folder / "killed"))
    surefoot(folder, "train", config)
    found = losses_of(folder / "killed")
    if found != wanted:
        raise RunFailed(f"losses {found}, not {wanted}")
    return f"killed at step {before} of 12, then equal bit for bit"


def offloaded(folder: Path, device: str) -> str:
    """Full fine-tuning with ZeRO 3 and offload has the losses of a run without."""
    settings = {"model": "qwen2_moe", "tuning": "full", "device": device}
    wanted = trained(folder, "resident", **settings)
    found = trained(folder, "offloaded", **settings, zero_stage=3, offload="cpu")
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    if worst > LOSS_WITHIN:
        raise RunFailed(f"losses {found}, not {wanted}")
    return f"losses differ by {worst:.1e} at most"


def too_large(folder: Path, device: str) -> str:
    """A run that needs more memory than there is names SF209."""
    limit = "import torch; torch.cuda.set_per_process_memory_fraction(0.0005)"
    (folder / "limit").mkdir()
    (folder / "limit" / "sitecustomize.py").write_text(limit, encoding="utf-8")
    config = write_config(folder, "large", model="llama", device=device, max_steps=2, preflight=False)
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "train", config],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder / 'limit'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    text = done.stdout + done.stderr
    if "SF209" not in text:
        raise RunFailed(f"status {done.returncode}: {last_line(text)}")
    return f"status {done.returncode}, SF209"


def answered(folder: Path, device: str) -> str:
    """Chat answers on the device."""
    output = surefoot(folder, "chat", "dense-lora", "--prompt", "Count to four.", "--max-new-tokens", "16", "--json")
    return " ".join(output.split())[:120] + f" ({device})"


if __name__ == "__main__":
    main(runs)
