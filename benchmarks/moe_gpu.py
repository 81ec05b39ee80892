"""LoRA on attention and experts of Qwen1.5-MoE-A2.7B's shape, random weights: Surefoot against transformers + PEFT.

    python benchmarks/moe_gpu.py             on one GPU
    python benchmarks/moe_gpu.py --tiny      the same steps with a tiny model on the CPU, to see that they run

Both start from one adapter and see the same packed sequences of 2048, then 4096 tokens, one a forward, with gradient
checkpointing, bfloat16 weights and fused AdamW. The peer runs transformers' `grouped_mm` experts, PEFT's
`target_parameters` and SDPA with a mask over documents. Each part has a process of its own. Prints a table with the
share of the device's own matrix rate and writes it, with device and versions, under benchmarks/results/.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from surefoot.data.collate import MicroBatch, collate
from surefoot.data.dataset import Sample
from surefoot.distributed.process_group import SINGLE_PROCESS
from surefoot.methods.base import BatchTotals, TrainContext
from surefoot.methods.sft.method import SftObjective
from surefoot.models.adapter import write_adapter
from surefoot.models.build import build_model, trainable_parameters
from surefoot.models.lora import LoraSettings, adaptable_names
from surefoot.training.step import counts_of, train_step

HERE = Path(__file__).parent
LENGTHS = (2048, 4096)
PACKS_PER_STEP, STEPS, WARMUP_STEPS = 4, 10, 3
LORA = LoraSettings(rank=16, alpha=32, targets=("attention", "experts"))
PART_TIMEOUT_S = 560
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_model(folder: Path, tiny: bool) -> dict[str, Any]:
    """Random weights in the shape of Qwen1.5-MoE-A2.7B (the defaults of its config)."""
    config = Qwen2MoeConfig(**(TINY if tiny else {}))
    torch.manual_seed(0)
    with torch.device(device()):
        model = Qwen2MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    return {}


def batches(length: int, vocab_size: int, count: int) -> list[MicroBatch]:
    """Packs of whole samples of 100 to 900 tokens, the second half of each trained."""
    rng = np.random.default_rng(length)
    packs = []
    for _ in range(count):
        cuts = np.cumsum(rng.integers(min(100, length // 4), min(900, length // 2), 64))
        bounds = [0, *cuts[cuts < length - 16].tolist(), length]
        samples = []
        for begin, end in pairwise(bounds):
            size = end - begin
            weights = (np.arange(size) >= size // 2).astype(np.float32)
            samples.append(Sample(rng.integers(0, vocab_size, size).astype(np.int32), weights, "random"))
        packs.append(collate(samples))
    return packs


def timed(step: Callable[[list[MicroBatch]], float], packs: list[MicroBatch]) -> dict[str, Any]:
    """Losses, tokens per second and peak memory of STEPS steps, the first ones not timed."""
    losses, seconds = [], []
    for index in range(STEPS):
        mine = packs[index * PACKS_PER_STEP : (index + 1) * PACKS_PER_STEP]
        wait()
        began = time.perf_counter()
        losses.append(step(mine))
        wait()
        seconds.append(time.perf_counter() - began)
    step_time_s = statistics.median(seconds[WARMUP_STEPS:])
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    tokens = sum(pack.num_tokens for pack in packs) / STEPS
    return {"losses": losses, "step_time_s": step_time_s, "tokens_per_second": tokens / step_time_s, "peak_bytes": peak}


def ours(folder: Path, adapter: Path, length: int) -> dict[str, Any]:
    built = build_model(folder, lora=LORA, device=device(), dtype=torch.bfloat16, gradient_checkpointing=True)
    parameters = trainable_parameters(built.model)
    if not adapter.exists():
        adapter.mkdir()
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        write_adapter(adapter, shapes, parameters.items(), LORA, "random", adaptable_names(built.model))
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4, weight_decay=0.0, fused=True)
    train_context = TrainContext(built.model, parameters, optimizer, SftObjective(built, 0.0), SINGLE_PROCESS, device())
    vocab_size = built.model.config.vocab_size

    def step(packs: list[MicroBatch]) -> float:
        tokens, trained, weight = counts_of(packs)
        totals = BatchTotals(round(tokens), round(trained), weight)
        on_device = [pack.to(device()) for pack in packs]
        return train_step(on_device, totals, train_context, learning_rate=1e-4, max_grad_norm=1.0).loss

    return timed(step, batches(length, vocab_size, PACKS_PER_STEP * STEPS))


def peer(folder: Path, adapter: Path, length: int) -> dict[str, Any]:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="grouped_mm", device_map={"": device()}
    )
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    model.train()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)

    def step(packs: list[MicroBatch]) -> float:
        count = sum(pack.num_trained for pack in packs)
        total = 0.0
        for pack in (pack.to(device()) for pack in packs):
            with torch.autocast(device().type, dtype=torch.bfloat16):
                logits: Tensor = model(input_ids=pack.ids, position_ids=pack.position_ids, use_cache=False).logits
            loss = F.cross_entropy(logits[0, pack.target_positions].float(), pack.targets, reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return timed(step, batches(length, base.config.vocab_size, PACKS_PER_STEP * STEPS))


def matrix_rate(size: int) -> dict[str, Any]:
    """FLOP/s of one large bfloat16 product, the best of many."""
    a, b = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        wait()
        began = time.perf_counter()
        a @ b
        wait()
        best = min(best, time.perf_counter() - began)
    return {"flops_per_second": 2 * size**3 / best}


def active_parameters(config: Qwen2MoeConfig) -> int:
    """Weights that a token meets in products, the output layer for the trained half included."""
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    attention = 4 * hidden * hidden
    experts = 3 * hidden * int(config.moe_intermediate_size * config.num_experts_per_tok)
    shared = 3 * hidden * int(config.shared_expert_intermediate_size)
    router = hidden * int(config.num_experts)
    return layers * (attention + experts + shared + router) + hidden * int(config.vocab_size) // 2


def part(name: str, root: Path, length: int, tiny: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", name, "--root", str(root), "--length", str(length)]
    done = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])],
        capture_output=True,
        text=True,
        timeout=PART_TIMEOUT_S,
        env=os.environ,
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tiny: bool = arguments.tiny
    if arguments.part:
        folder, adapter = arguments.root / "model", arguments.root / "adapter"
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "model": lambda: write_model(folder, tiny),
            "rate": lambda: matrix_rate(256 if tiny else 8192),
            "ours": lambda: ours(folder, adapter, arguments.length),
            "peer": lambda: peer(folder, adapter, arguments.length),
        }
        print(json.dumps(parts[arguments.part]()))
        return
    lines = []
    with tempfile.TemporaryDirectory(prefix="surefoot-moe-") as temporary:
        root = Path(temporary)
        for name in ("model", "rate"):
            made = part(name, root, 0, tiny)
            if "error" in made:
                sys.exit(f"{name}: {made['error']}")
        flops = 4 * active_parameters(Qwen2MoeConfig(**(TINY if tiny else {})))  # forward, and backward to the inputs
        for length in (128,) if tiny else LENGTHS:
            found = {name: part(name, root, length, tiny) for name in ("ours", "peer")}
            lines += rows_of(length, found, flops, made["flops_per_second"])
    report = f"""# Qwen1.5-MoE-A2.7B's shape, random weights, LoRA r={LORA.rank} on attention + experts

{datetime.date.today()}, {torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, tiny model"}, measured \
matrix rate {made["flops_per_second"] / 1e12:.2f} TFLOP/s (bfloat16), torch {torch.__version__}, \
{", ".join(f"{name} {version(name)}" for name in ("transformers", "peft"))}. {PACKS_PER_STEP} packs a step, median of \
{STEPS - WARMUP_STEPS} steps. The share counts forward and backward products of the active weights once, recomputation \
not.

| pack | | tokens/s | share of the matrix rate | peak GiB |
|---|---|---|---|---|
{chr(10).join(lines)}
"""
    print(report)
    if not tiny:
        path = HERE / "results" / f"{datetime.date.today()}-moe-gpu.md"
        path.write_text(report, encoding="utf-8")


def rows_of(length: int, found: dict[str, dict[str, Any]], flops: int, rate: float) -> list[str]:
    lines = []
    for name, label in (("ours", "Surefoot"), ("peer", "transformers grouped_mm + PEFT")):
        made = found[name]
        if "error" in made:
            lines.append(f"| {length} | {label} | failed: {made['error'][:120]} | | |")
            continue
        speed = made["tokens_per_second"]
        lines.append(
            f"| {length} | {label} | {speed:.0f} | {speed * flops / rate:.1%} | {made['peak_bytes'] / 2**30:.1f} |"
        )
    if all("error" not in made for made in found.values()):
        ratio = found["ours"]["tokens_per_second"] / found["peer"]["tokens_per_second"]
        worst = max(abs(a - b) for a, b in zip(found["ours"]["losses"], found["peer"]["losses"], strict=True))
        lines.append(f"| {length} | ratio; worst difference of {STEPS} losses | {ratio:.2f} x; {worst:.1e} | | |")
    return lines


if __name__ == "__main__":
    main()
