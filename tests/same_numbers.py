"""Numbers of small fixed runs, to show that a change of the code changes no number. On one machine, bit for bit.

    python tests/same_numbers.py record FILE     before the change
    python tests/same_numbers.py compare FILE    after it

Runs the command line alone, and knows nothing of the code behind it. Not a test: other processors round otherwise.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from safetensors.torch import load_file

from tests.support.data import counting_rows, write_jsonl
from tests.support.grpo import VOWELS, prompt_rows
from tests.support.models import make_model, make_tokenizer
from tests.support.vision import make_processor, make_vision_model, picture_rows, vision_tokenizer

BASE = {"max_length": 128, "max_steps": 6, "learning_rate": 1e-2, "global_batch_size": 6,
        "per_device_train_batch_size": 2, "device": "cpu", "report": False, "preflight": False}  # fmt: skip
GRPO = {"method": "grpo", "dataset": "prompts.jsonl", "reward_funcs": [VOWELS], "num_generations": 4,
        "global_batch_size": 8, "max_completion_length": 6, "max_length": 64}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "dense-lora": {"model": "llama"},
    "dense-full-packed": {"model": "qwen2", "tuning": "full", "packing": True, "global_batch_size": 2},
    "dense-full-2-ranks-zero-3": {"model": "llama", "tuning": "full", "nproc_per_node": 2, "zero_stage": 3},
    "moe-lora-aux-loss": {"model": "qwen2_moe", "router_aux_loss_coef": 0.01},
    "moe-lora-router": {"model": "qwen3_moe", "target_modules": ["all", "router"], "gradient_checkpointing": True},
    "moe-full-2-ranks": {"model": "mixtral", "tuning": "full", "nproc_per_node": 2, "zero_stage": 2},
    "moe-lora-expert-parallel": {"model": "qwen2_moe", "nproc_per_node": 2, "expert_parallel_size": 2},
    "moe-full-expert-parallel-zero-3": {
        "model": "mixtral", "tuning": "full", "nproc_per_node": 2, "expert_parallel_size": 2, "zero_stage": 3,
    },
    "grpo": {"model": "llama", **GRPO, "beta": 0.1, "num_iterations": 2},
    "grpo-gspo-moe-2-ranks": {"model": "qwen2_moe", **GRPO, "loss_type": "gspo", "nproc_per_node": 2},
    "vision-lora": {"model": "qwen2_5_vl", "dataset": "pictures.jsonl", "max_length": 256},
    "vision-moe-full-2-ranks": {
        "model": "qwen3_vl_moe", "dataset": "pictures.jsonl", "tuning": "full", "freeze_vision_tower": False,
        "max_length": 256, "nproc_per_node": 2,
    },
    "resumed-on-2-ranks": {
        "model": "qwen2_moe", "router_aux_loss_coef": 0.01, "nproc_per_node": 2,
        "resume_from_checkpoint": "moe-lora-aux-loss/checkpoints/step-00000003",
    },
    "evaluated": {"model": "qwen2", "eval_fraction": 0.2, "eval_steps": 3, "save_steps": 0},
}  # fmt: skip
NUMBERS = ("loss", "grad_norm", "learning_rate", "reward", "eval_loss", "aux_loss", "trained_tokens")
"""Keys of metrics.jsonl that must not change; those that a run does not have are left out."""


def make_parts(folder: Path) -> None:
    """Write the models and data that jobs name."""
    write_jsonl(folder / "train.jsonl", counting_rows(40))
    write_jsonl(folder / "prompts.jsonl", prompt_rows(12))
    write_jsonl(folder / "pictures.jsonl", [*picture_rows(folder), *counting_rows(28)])
    for kind in {job["model"] for job in JOBS.values()}:
        is_vision = "_vl" in kind
        tokenizer = vision_tokenizer() if is_vision else make_tokenizer()
        model = make_vision_model(kind, tokenizer) if is_vision else make_model(kind)
        model.save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
        if is_vision:
            make_processor(kind).save_pretrained(folder / kind)


def run_job(folder: Path, name: str) -> dict[str, Any]:
    """Run one job with the command line; return its numbers and a hash of the tensors that it trained."""
    rank = {"lora_rank": 4} if JOBS[name].get("tuning") != "full" else {}
    settings = {**BASE, **rank, "dataset": "train.jsonl", "save_steps": 3, **JOBS[name], "output_dir": name}
    (folder / f"{name}.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "train", f"{name}.json"],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SUREFOOT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name}: exit status {done.returncode}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [{key: line[key] for key in ("step", *NUMBERS) if key in line} for line in lines]
    return {"steps": steps, "tensors": hash_tensors(folder / name)}


def hash_tensors(run: Path) -> str:
    """Return a hash of names, shapes and values of the adapter or model that a run wrote."""
    artifact = Path(json.loads((run / "summary.json").read_text())["artifact"])
    hashed = hashlib.sha256()
    for path in sorted((run.parent / artifact).glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.tolist()}".encode())
    return hashed.hexdigest()


def main() -> int:
    """Record or compare; the exit status is 1 where a number differs."""
    verb, file = sys.argv[1], Path(sys.argv[2])
    recorded = json.loads(file.read_text()) if verb == "compare" else {}
    numbers = {}
    with tempfile.TemporaryDirectory(prefix="surefoot-numbers-") as name:
        make_parts(Path(name))
        for job in JOBS:
            numbers[job] = run_job(Path(name), job)
            result = "recorded" if verb == "record" else "equal" if recorded.get(job) == numbers[job] else "DIFFERENT"
            print(f"{job:34} {result:9} last loss {numbers[job]['steps'][-1].get('loss')}", flush=True)
    if verb == "record":
        file.write_text(json.dumps(numbers, indent=1) + "\n")
        return 0
    differing = [job for job in JOBS if recorded.get(job) != numbers[job]]
    print(f"{len(JOBS) - len(differing)} of {len(JOBS)} jobs have the same numbers", *differing, sep="\n  ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
