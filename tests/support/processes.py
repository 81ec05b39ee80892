"""The command line and other processes of the tests."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def training_process(supervisor: int) -> psutil.Process:
    """The process that trains, or starts the ranks, of `surefoot train`."""
    (job,) = psutil.Process(supervisor).children()
    return job


def command_lines(pid: int) -> dict[psutil.Process, list[str]]:
    """Return the command line of each descendant of a process; a descendant that ends meanwhile is left out."""
    lines = {}
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                lines[child] = child.cmdline()
    return lines


def kill_tree(process: "subprocess.Popen[Any]") -> None:
    """Kill a process and all below it, any of which may end meanwhile or have ended before, and wait for it."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    process.communicate(timeout=60)


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


def run_program(program: Path, *arguments: object, timeout_s: float = 180) -> None:
    """Run a Python program of the tests, which must end with status 0."""
    done = subprocess.run(
        [sys.executable, str(program), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]


FAULTS = Path(__file__).with_name("faults")
