"""Whole runs with a server that computes, but is not vLLM's: what a run does when it cannot be believed, or goes."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.data import write_jsonl
from tests.support.models import make_tokenizer
from tests.support.processes import surefoot
from tests.support.quantised import make_wide_model

SERVER = Path(__file__).with_name("model_server.py")


@pytest.fixture
def run(model_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Any]:
    """(fault of the server, changes of the settings) -> what the command did; the run is in `run`."""
    command = tmp_path / "vllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {SERVER} "$@"\n')
    command.chmod(0o755)
    rows = [{"prompt": [{"role": "user", "content": f"Count to {number}"}]} for number in range(12)]
    settings = {
        "model": str(model_folder("llama")),
        "method": "grpo",
        "dataset": str(write_jsonl(tmp_path / "prompts.jsonl", rows)),
        "output_dir": str(tmp_path / "run"),
        "reward_funcs": [{"func": "regex", "args": {"pattern": "[aeiou]"}}],
        "num_generations": 4,
        "global_batch_size": 8,
        "max_prompt_length": 64,
        "max_completion_length": 6,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lora_rank": 4,
        "device": "cpu",
        "rollout_engine": "vllm",
        "vllm_command": str(command),
        "report": False,
    }

    def start(fault: str, **changes: Any) -> Any:
        path = tmp_path / "run.json"
        path.write_text(json.dumps({**settings, **changes}))
        environment = {"FAULT": fault, "PYTHONPATH": os.pathsep.join(sys.path)}
        return surefoot("train", str(path), env=environment, timeout_s=240)

    return start


def steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def findings(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/findings.jsonl").read_text().splitlines()]


def assert_no_server_is_left() -> None:
    left = [one for one in psutil.process_iter(["cmdline"]) if str(SERVER) in (one.info["cmdline"] or [])]
    assert left == []


@pytest.mark.matrix
def test_a_server_that_ignores_adapters_is_found_before_the_first_step(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("ignores_adapters")
    assert done.returncode == 3, done.stderr[-3000:]
    (found,) = findings(tmp_path)
    assert found["code"] == "SF805"
    assert found["evidence"]["change"] > 0
    assert steps(tmp_path) == []
    assert_no_server_is_left()


@pytest.mark.matrix
def test_a_server_whose_probabilities_drift_ends_the_run_after_three_steps(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Although it answers every probe as it should."""
    done = run("drifts")
    assert done.returncode == 3, done.stderr[-3000:]
    (found,) = findings(tmp_path)
    assert found["code"] == "SF805"
    assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3]
    assert all(line["logprob_difference"] == pytest.approx(0.5, abs=0.05) for line in steps(tmp_path))
    assert_no_server_is_left()


@pytest.mark.long
def test_a_trainer_beside_quantised_weights_learns_from_a_server_without_them(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_wide_model("llama")
    model.get_output_embeddings().weight.data.mul_(20)  # or noise in the adapter would change too little
    model.save_pretrained(tmp_path / "wide")
    make_tokenizer().save_pretrained(tmp_path / "wide")
    done = run("none", model=str(tmp_path / "wide"), quantization="nf4", quantization_block_size=32, max_steps=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(0 < line["logprob_difference"] < 0.5 for line in steps(tmp_path))
    assert any(line["grad_norm"] > 0 for line in steps(tmp_path))
    assert_no_server_is_left()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "changes",
    [{"zero_stage": 3}, {"zero_stage": 2, "max_staleness": 1}, {"zero_stage": 3, "top_p": 0.9}],
    ids=["zero3", "ahead", "cut"],
)
def test_ranks_learn_from_one_server(run: Callable[..., Any], tmp_path: Path, changes: dict[str, Any]) -> None:
    """As in ms-swift#3592: LoRA on sharded weights, and a server that gets the adapter alone."""
    done = run("none", nproc_per_node=2, **changes)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = steps(tmp_path)
    lag = changes.get("max_staleness", 0)
    assert [line["policy_version"] for line in metrics] == [max(step - lag, 0) for step in range(4)]
    assert all(line["logprob_difference"] < 5e-3 for line in metrics[: 1 if lag else 4])
    assert any(line["grad_norm"] > 0 for line in metrics)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()
    assert_no_server_is_left()


@pytest.mark.matrix
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_completions_made_ahead_go_to_another_number_of_ranks(
    run: Callable[..., Any], tmp_path: Path, before: int, after: int
) -> None:
    """The server draws others each time: the same ones can only be those of the checkpoint."""
    ahead = {"max_staleness": 1, "save_steps": 2, "save_total_limit": None, "zero_stage": 2}
    done = run("none", nproc_per_node=before, **ahead)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = tmp_path / "run/checkpoints/step-00000002"
    (pending,) = json.loads((saved / "state.json").read_text())["pending"]
    assert len(pending["completions"]) == 8
    goes_on = {"output_dir": str(tmp_path / "on"), "resume_from_checkpoint": str(saved), **ahead}
    done = run("none", nproc_per_node=after, **goes_on)
    assert done.returncode == 0, done.stderr[-3000:]
    made = [(tmp_path / name / "completions.jsonl").read_text().splitlines() for name in ("run", "on")]
    third, fourth = (
        [[json.loads(one) for one in run if json.loads(one)["step"] == step] for run in made] for step in (3, 4)
    )
    texts = [[(one["prompt"], one["completion"], one["reward"]) for one in run] for run in third]
    assert len(texts[0]) == 8
    assert texts[0] == texts[1]
    assert [one["policy_version"] for one in third[1]] == [1] * 8
    assert [one["completion"] for one in fourth[0]] != [one["completion"] for one in fourth[1]]


@pytest.mark.matrix
def test_a_server_that_dies_ends_all_ranks_and_keeps_what_was_learned(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("dies", nproc_per_node=2, zero_stage=3, save_steps=0)
    assert done.returncode == 3, done.stderr[-3000:]
    (found,) = findings(tmp_path)
    assert found["code"] == "SF801"
    assert "status 3" in found["cause"]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]
    assert_no_server_is_left()
