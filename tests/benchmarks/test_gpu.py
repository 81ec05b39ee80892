"""The acceptance call of a GPU runs without one, and tells of each part that fails."""

import json
import os
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CALL = ROOT / "benchmarks" / "gpu"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def call() -> Any:
    spec = spec_from_file_location("acceptance", CALL / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=900
    )


@pytest.mark.models
def test_kernels_of_the_stand_in_agree_with_plain_maths() -> None:
    done = run(str(CALL / "numerics.py"), "--device", "cpu")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 20, done.stderr[-2000:]
    assert [row["name"] for row in rows if not row["passed"]] == []


@pytest.mark.long
def test_a_part_that_fails_or_hangs_is_a_row(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "HERE", tmp_path)
    row = "import json, time; print(json.dumps({'name': 'a', 'result': '1', 'limit': '', 'passed': True}), flush=True)"
    (tmp_path / "crashes.py").write_text(f"{row}; raise SystemExit('no such kernel')")
    (tmp_path / "hangs.py").write_text(f"{row}; time.sleep(600)")
    crashed = call.Part("crashes", "cpu", ENVIRONMENT).wait(time.monotonic() + 60)
    hung = call.Part("hangs", "cpu", ENVIRONMENT).wait(time.monotonic() + 5)
    for rows, said in ((crashed, "no such kernel"), (hung, "not done in time")):
        assert [one["passed"] for one in rows] == [True, False]
        assert said in rows[1]["result"]


def test_without_a_gpu_the_call_says_what_to_do() -> None:
    done = run(str(CALL))
    assert done.returncode == 1
    assert "--stand-in" in done.stderr


@pytest.mark.models
def test_every_part_runs_on_the_cpu() -> None:
    done = run(str(CALL), "--stand-in")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "FAILED" not in done.stdout
    for part in ("attention, sinks", "architectures, bfloat16, LoRA", "run moe-lora-router", "Qwen3-8B, 128 tokens"):
        assert part in done.stdout
