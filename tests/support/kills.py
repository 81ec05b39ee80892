"""Runs that are killed several times, and resumed each time."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import surefoot
from tests.support.processes import training_process


def start(settings: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes]":
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", str(folder / "run.yaml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_lines(path: Path, count: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if path.is_file() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)


def kill_and_resume(settings: dict[str, Any], folder: Path, moments: Sequence[int]) -> Path:
    """Start a run, kill it after so many lines of metrics and start it again, for each moment; return its folder."""
    run = Path(settings["output_dir"])
    kills = 0
    for lines in moments:
        process = start(settings, folder)
        wait_for_lines(run / "metrics.jsonl", lines, process)
        time.sleep(0.013 * (lines % 5))
        if process.poll() is None:
            training_process(process.pid).kill()
            kills += 1
        process.wait(30)
    assert kills >= len(moments) - 1
    resumed = surefoot.train(settings, screen=False)
    assert resumed.status == "completed"
    assert not list((run / "checkpoints").glob(".*"))
    return run
