"""Compares what `surefoot plan` forecasts with what runs really take on this machine's CPU, and writes the table.

    python benchmarks/plan_accuracy.py [--write docs/plan-accuracy.md]

Runs with random models: the peak resident set of every rank is what the kernel says at the end of its last step
(`peak_memory_bytes`), after a checkpoint was saved where the run saves. Times of a step are the median of all ranks'
from the third step on; leave the machine alone meanwhile.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from surefoot.config import load_config
from surefoot.diagnostics.drill import write_job
from surefoot.diagnostics.monitor.event_log import read_history
from surefoot.planner.devices import measure_cpu
from surefoot.planner.forecast import forecast

ALLOWED = 0.10
DENSE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
MOE = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 768, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense LoRA": (DENSE, {}),
    "dense LoRA, packing": (DENSE, {"packing": True}),
    "dense LoRA, checkpointing": (DENSE, {"gradient_checkpointing": True, "per_device_train_batch_size": 4}),
    "dense full": (DENSE, {"tuning": "full"}),
    "dense full, accumulation": (DENSE, {"tuning": "full", "global_batch_size": 4}),
    "dense full, 2 ranks, zero_stage 2": (DENSE, {"tuning": "full", "nproc_per_node": 2}),
    "dense full, 2 ranks, zero_stage 3": (DENSE, {"tuning": "full", "nproc_per_node": 2, "zero_stage": 3}),
    "MoE LoRA": (MOE, {}),
    "MoE LoRA, packing, checkpointing": (MOE, {"packing": True, "gradient_checkpointing": True}),
    "MoE full": (MOE, {"tuning": "full"}),
    "MoE LoRA, 2 ranks, zero_stage 2": (MOE, {"nproc_per_node": 2}),
    "MoE full, 2 ranks, EP 2": (MOE, {"tuning": "full", "nproc_per_node": 2, "expert_parallel_size": 2}),
    "MoE LoRA, 2 ranks, EP 2": (MOE, {"nproc_per_node": 2, "expert_parallel_size": 2}),
    "MoE full, 4 ranks, EP 2": (MOE, {"tuning": "full", "nproc_per_node": 4, "expert_parallel_size": 2}),
    "MoE full, 4 ranks, EP 4": (MOE, {"tuning": "full", "nproc_per_node": 4, "expert_parallel_size": 4}),
}
LENGTH, STEPS = 512, 6


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Random weights beside the tokenizer of the drill's job."""
    made = transformers.AutoConfig.for_model(**{"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None, **config})
    transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(folder)


def write_rows(path: Path) -> None:
    words = "one two three four five six seven eight nine ten".split()
    text = " ".join(words * 60)  # more than `LENGTH` tokens: every sequence is cut to that
    row = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": text}]}
    path.write_text((json.dumps(row) + "\n") * 64)


def measure(config: Path, folder: Path) -> tuple[int, float]:
    """(the largest peak of a rank in bytes, seconds of a step)."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "train", str(config)], env=environment, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{config}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    steps = [entry.values for entry in read_history(folder).entries if entry.kind == "step"]
    ranks = len(steps) // STEPS
    peak = max(values["peak_memory_bytes"] for values in steps)
    return int(peak), median(values["step_time_s"] for values in steps[2 * ranks :])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--write", type=Path, help="where the table goes")
    arguments.add_argument("--only", default="", help="runs whose name has this")
    arguments.add_argument("--owners", action="store_true", help="show what the forecasts are made of")
    asked = arguments.parse_args()
    lines, worst, ratios = [], 0.0, []
    with tempfile.TemporaryDirectory(prefix="surefoot-plan-") as name:
        root = Path(name)
        write_job(root)
        rows = root / "long.jsonl"
        write_rows(rows)
        models = {}
        for kind, about in (("dense", DENSE), ("moe", MOE)):
            models[kind] = root / kind
            models[kind].mkdir()
            for file in (root / "model").glob("*token*"):
                (models[kind] / file.name).write_bytes(file.read_bytes())
            for file in (root / "model").glob("chat_template*"):
                (models[kind] / file.name).write_bytes(file.read_bytes())
            write_model(models[kind], about)
        for number, (title, (about, settings)) in enumerate(RUNS.items()):
            if asked.only not in title:
                continue
            run = root / f"run-{number}"
            said = {
                "model": str(models["dense" if about is DENSE else "moe"]), "dataset": str(rows),
                "output_dir": str(run), "max_length": LENGTH, "truncation": "right", "train_on": "all",
                "max_steps": STEPS, "per_device_train_batch_size": 2, "save_steps": 3, "report": False, "device": "cpu",
                "dataset_num_proc": 0, "preflight": False, **settings,
            }  # fmt: skip
            config = root / f"run-{number}.json"
            config.write_text(json.dumps(said))
            told = forecast(load_config(config, []).run, Path(said["model"]), measure_cpu(1 << 40))
            planned = max(owners.host_bytes for owners in told.phases.values())
            measured, step_s = measure(config, run)
            ratios.append(told.step_s / step_s)
            off = planned / measured - 1
            worst = max(worst, abs(off))
            if asked.owners:
                for phase in ("step", "save"):
                    print(phase, {one: round(size / 2**20) for one, size in told.phases[phase].host.items()})
            memory = f"{planned / 2**20:.0f} | {measured / 2**20:.0f} | {off:+.1%}"
            lines.append(f"| {title} | {memory} | {told.step_s:.1f} | {step_s:.1f} |")
            print(lines[-1], flush=True)
    table = "\n".join(
        [
            "# Accuracy of `surefoot plan`",
            "",
            "Made by `python benchmarks/plan_accuracy.py --write docs/plan-accuracy.md`.",
            "",
            "The table has the peak resident set of a rank (MiB) and the time of a step (s). CPU, torch "
            f"{torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
            f"{' '.join(platform.libc_ver())}. The largest error of memory is {worst:.1%} (allowed: {ALLOWED:.0%}). "
            f"Times are forecast from measured rates of matrix products and sigmoids on {os.cpu_count()} cores: they "
            f"are {min(ratios):.2f} to {max(ratios):.2f} of the measured times.",
            "",
            "| run | forecast, MiB | measured, MiB | | forecast, s | measured, s |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            f"No GPU has been measured. Measured {time.strftime('%Y-%m-%d')}.",
            "",
        ]
    )
    if asked.write:
        asked.write.write_text(table)
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
