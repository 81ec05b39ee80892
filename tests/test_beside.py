"""Runs that no `surefoot train` started are watched too: from Python, under torchrun, in TRL."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from surefoot.beside import SUPERVISED
from surefoot.drill import settings_of
from surefoot.health.explain import explain
from surefoot.health.faults import VARIABLE
from tests.conftest import counting_rows, write_jsonl

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[1] / "examples" / "trl_watched.py"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command with a fault; whatever of it is left at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, fault: str = "") -> "subprocess.Popen[str]":
        env = {name: value for name, value in os.environ.items() if name != SUPERVISED}
        told = {VARIABLE: f"{fault}:{tmp_path / 'struck'}"} if fault else {}
        process = subprocess.Popen(
            command, env={**env, **told, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate(timeout=30)


@pytest.fixture
def settings(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    data = write_jsonl(tmp_path / "rows.jsonl", counting_rows(200))
    settings = {**settings_of(model_folder("mixtral"), data), "output_dir": str(tmp_path / "run"), "max_steps": 100_000}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    return settings


def first_finding(folder: Path) -> dict[str, Any]:
    """Waits for it."""
    deadline = time.monotonic() + 60
    while not (folder / "findings.jsonl").is_file() or not (folder / "findings.jsonl").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found: dict[str, Any] = json.loads((folder / "findings.jsonl").read_text().splitlines()[0])
    return found


def test_a_run_from_python_that_is_killed_is_named(settings: dict[str, Any], tmp_path: Path, start: Start) -> None:
    code = f"import surefoot; surefoot.train({str(tmp_path / 'run.json')!r})"
    process = start(sys.executable, "-c", code, fault="killed:0:7")
    process.wait(timeout=60)
    found = first_finding(Path(settings["output_dir"]))
    assert (found["code"], found["evidence"]["rank"], found["evidence"]["last_step"]) == ("SF101", 0, 7)


def test_a_run_under_torchrun_that_stands_still_is_named(
    settings: dict[str, Any], tmp_path: Path, start: Start
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start(sys.executable, *launcher, "-m", "surefoot", "train", str(tmp_path / "run.json"), fault="sleeping:1:9")
    found = first_finding(Path(settings["output_dir"]))
    assert (found["code"], found["evidence"]["rank"]) == ("SF106", 1)
    assert "in _sleep" in found["cause"]


def test_a_run_of_trl_that_stands_still_is_named(settings: dict[str, Any], tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "trl"
    arguments = [settings["model"], settings["dataset"], str(folder), "--steps", "10000"]
    process = start(sys.executable, str(EXAMPLE), *arguments, fault="sleeping-optimizer:0:12")
    found = first_finding(folder)
    assert found["code"] == "SF106"
    assert "stands in optimizer of step 12" in found["cause"]
    process.kill()


def test_a_run_of_trl_without_a_fault_has_no_finding(settings: dict[str, Any], tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "trl"
    process = start(sys.executable, str(EXAMPLE), settings["model"], settings["dataset"], str(folder))
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    told = explain(folder)
    assert told.findings == []
    assert [(rank.step, rank.doing) for rank in told.ranks] == [(20, "has ended")]
    assert not any("surefoot.beside" in " ".join(one.cmdline()) for one in psutil.Process().children(recursive=True))
