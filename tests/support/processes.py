"""The command line and other processes of the tests."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil


def training_process(supervisor: int) -> psutil.Process:
    """The process that trains, or starts the ranks, of `surefoot train`."""
    (job,) = psutil.Process(supervisor).children()
    return job


def surefoot(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout_s: float = 120
) -> Any:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "surefoot", *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


FAULTS = Path(__file__).with_name("faults")
