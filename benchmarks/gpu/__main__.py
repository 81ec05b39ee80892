"""The acceptance call on a machine with a GPU: correctness, runs and speed, in one table.

    python benchmarks/gpu                 every part, in less than ten minutes
    python benchmarks/gpu --stand-in      the same parts with fewer and tiny models on the CPU, to see that they run

Needs no network, no files of weights and one GPU. The parts of correctness run at the same time, then the speed alone.
Prints the table, and writes it with date, device and versions under benchmarks/results/. The exit status is 1 if a
row fails. A part that does not end in time fails by itself.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CORRECTNESS = ("numerics", "architectures", "runs")
SPEED = "speed"
ALL_WITHIN_S, CORRECTNESS_WITHIN_S, KILLED_WITHIN_S = 570, 200, 10
STAND_IN_ARCHITECTURES = "llama,mixtral"


class Part:
    """A process that prints rows, read as they come."""

    def __init__(self, name: str, device: str, environment: dict[str, str]) -> None:
        self.name = name
        self.rows: list[dict[str, object]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / f"{name}.py"), "--device", device],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=read) for read in (self._read_rows, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read_rows(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self.rows += map(json.loads, lines)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._errors = lines.read().strip().splitlines()

    def wait(self, deadline: float) -> list[dict[str, object]]:
        """Return its rows, and one more if it did not end well before the deadline."""
        problem = ""
        try:
            status = self._process.wait(max(1.0, deadline - time.monotonic()))
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(KILLED_WITHIN_S)
            problem = "not done in time"
        for thread in self._threads:
            thread.join(KILLED_WITHIN_S)
        if problem:
            last = self._errors[-1][:300] if self._errors else ""
            self.rows.append({"name": self.name, "result": f"{problem}. {last}", "limit": "", "passed": False})
        return self.rows


def run_parts(device: str, environment: dict[str, str]) -> list[dict[str, object]]:
    """Return the rows of all parts."""
    began = time.monotonic()
    parts = [Part(name, device, {**environment, "OMP_NUM_THREADS": "1"}) for name in CORRECTNESS]
    limit = CORRECTNESS_WITHIN_S if device == "cuda" else ALL_WITHIN_S
    rows = [row for part in parts for row in part.wait(began + limit)]
    return rows + Part(SPEED, device, environment).wait(began + ALL_WITHIN_S + (0 if device == "cuda" else limit))


def describe_machine(device: str) -> str:
    if device != "cuda":
        return f"{platform.machine()}, {os.cpu_count()} cores: a stand-in for a GPU"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, {os.cpu_count()} CPU cores"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true", help="tiny models on the CPU; writes no file")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    arguments = parser.parse_args()
    device = "cpu" if arguments.stand_in else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU. Without one: python benchmarks/gpu --stand-in")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if arguments.stand_in:
        environment.setdefault("SUREFOOT_GPU_ARCHITECTURES", STAND_IN_ARCHITECTURES)
    rows = run_parts(device, environment)
    failed = sum(row["passed"] is False for row in rows)
    lines = [
        f"| {row['name']} | {row['result']} | {row['limit']} | {'FAILED' if row['passed'] is False else ''} |".replace(
            "\n", " "
        )
        for row in rows
    ]
    text = "\n".join(
        [
            "# Acceptance on a GPU",
            "",
            f"{datetime.date.today()}, {describe_machine(device)}. torch {torch.__version__}, "
            + ", ".join(f"{package} {version(package)}" for package in ("transformers", "peft"))
            + f". {len(rows) - failed} of {len(rows)} rows passed or are facts.",
            "",
            "| | result | limit | |",
            "|---|---|---|---|",
            *lines,
            "",
        ]
    )
    print(text)
    if not arguments.stand_in:
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / f"{datetime.date.today()}-gpu.md").write_text(text, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
