"""What is read of GPUs and what is made of it. No card is here: the samples of the rules are written by hand, after
published figures, and the sampler talks through NVIDIA's own bindings to a library that a test compiles.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from surefoot.health.accelerators import Accelerators, GpuSample, Look, read_looks
from surefoot.health.diagnose.accelerators import find_in_gpus, in_words
from tests.conftest import surefoot as surefoot_command

SPINNING = GpuSample(0, 1.0, 71.0, 700.0, 1980, 3 << 30, 41)
WORKING = GpuSample(0, 0.99, 610.0, 700.0, 1755, 60 << 30, 64)
IDLE = GpuSample(0, 0.0, 71.0, 700.0, 345, 3 << 30, 33)
HOT = GpuSample(0, 1.0, 400.0, 700.0, 900, 60 << 30, 91, ("too hot (hardware)",))
UNKNOWN = GpuSample(0, None, None, None, None, None, None)


def looks(*samples: GpuSample, count: int = 20, every_s: float = 2.0) -> list[Look]:
    """The same seen again and again."""
    return [(1000.0 + n * every_s, samples) for n in range(count)]


def codes(seen: list[Look]) -> list[str]:
    return [finding.code for finding in find_in_gpus(seen)]


def test_a_card_that_is_busy_at_idle_power_spins() -> None:
    (finding,) = find_in_gpus(looks(SPINNING))
    assert finding.code == "SF307"
    assert "GPU 0 100% busy at 10% of its power" in finding.cause


def test_a_card_that_is_too_hot_is_named_with_its_reason() -> None:
    (finding,) = find_in_gpus(looks(HOT))
    assert (finding.code, finding.evidence["gpu"], finding.evidence["clock_mhz"]) == ("SF308", 0, 900)
    assert "too hot (hardware)" in finding.cause


@pytest.mark.parametrize("sample", [WORKING, IDLE, UNKNOWN], ids=["working", "idle", "unknown"])
def test_cards_without_a_finding(sample: GpuSample) -> None:
    assert codes(looks(sample)) == []


def test_moments_are_no_window() -> None:
    assert codes([]) == []
    assert codes(looks(SPINNING, count=5)) == []
    assert codes(looks(SPINNING, count=20, every_s=0.1)) == []
    assert codes(looks(SPINNING, count=20) + [(1040.0 + n, (WORKING,)) for n in range(40)]) == []


def test_a_look_in_words() -> None:
    assert in_words((0.0, (SPINNING, UNKNOWN))) == "0: 100% busy, 71 W of 700 W; 0: ? busy, ? W of ? W"


def test_without_a_driver_there_are_no_samples_and_a_reason(tmp_path: Path) -> None:
    accelerators = Accelerators(tmp_path)
    deadline = time.monotonic() + 20
    while not accelerators.why_not and time.monotonic() < deadline:
        time.sleep(0.05)
    assert accelerators.why_not.startswith("NVMLError")
    assert accelerators.looks() == []


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the compiled library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True, timeout=60)
    return {"LD_LIBRARY_PATH": str(folder)}


def test_nvml_is_read_through_its_own_bindings(tmp_path: Path, driver: dict[str, str]) -> None:
    code = (
        "import sys, time; from pathlib import Path; from surefoot.health.accelerators import Accelerators\n"
        "folder = Path(sys.argv[1]); (folder / 'events').mkdir()\n"
        "seen = Accelerators(folder); time.sleep(3); print(seen.looks()[0][1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, **driver}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    expected = (
        GpuSample(0, 1.0, 71.0, 700.0, 1980, 3 << 30, None),
        GpuSample(1, 1.0, 650.0, 700.0, 1980, 3 << 30, None, ("too hot (hardware)",)),
    )
    assert done.stdout == f"{expected}\n", done.stderr
    assert read_looks(tmp_path)[0][1] == expected


@pytest.mark.slow
def test_a_run_beside_spinning_cards_names_them(
    settings: dict[str, Any], tmp_path: Path, driver: dict[str, str]
) -> None:
    told = {**settings, "max_steps": 100_000, "save_steps": 0, "report": True}
    (tmp_path / "run.json").write_text(json.dumps(told))
    process = subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", str(tmp_path / "run.json")],
        env={**os.environ, **driver},
        stderr=subprocess.DEVNULL,
    )
    findings = Path(settings["output_dir"]) / "findings.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and (not findings.is_file() or findings.read_text().count("\n") < 2):
        time.sleep(0.2)
    process.terminate()
    process.wait(60)
    found = [json.loads(line)["code"] for line in findings.read_text().splitlines()]
    assert sorted(found) == ["SF307", "SF308"]
    page = (Path(settings["output_dir"]) / "report.html").read_text()
    assert "GPUs: busy (line) against power (dashed)" in page
    assert surefoot_command("explain", settings["output_dir"]).stdout.count("SF307") == 1
