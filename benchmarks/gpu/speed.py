"""Speed and memory of true shapes with random weights: LoRA in Surefoot and in transformers + PEFT.

Both start from one adapter and see the same packed rows of 2,048, then 4,096 tokens and more, one a forward, with
gradient checkpointing, bfloat16 weights and fused AdamW. The peer runs transformers' `grouped_mm` experts, PEFT's
`target_parameters` and SDPA with a mask over documents. Each side of each shape has a process of its own. The share of
the device's own matrix rate counts forward and backward products of the active weights once, recomputation not.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from part import Row, main
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from surefoot.data.collate import MicroBatch, collate
from surefoot.data.dataset import Sample
from surefoot.distributed.process_group import SINGLE_PROCESS
from surefoot.methods.base import BatchTotals, TrainContext
from surefoot.methods.sft.method import SftObjective
from surefoot.models.adapter import write_adapter
from surefoot.models.build import build_model, compile_layers, trainable_parameters
from surefoot.models.grouped_gemm import (
    Addends,
    Groups,
    LowRank,
    grouped_linear,
    grouped_linear_dw,
    grouped_linear_dx,
    select_kernel,
)
from surefoot.models.lora import LoraSettings
from surefoot.training.step import counts_of, train_step

PACKS_PER_STEP, STEPS, WARMUP_STEPS = 4, 5, 2
SIDE_TIMEOUT_S = 120
DETAILS = "SUREFOOT_GPU_KERNELS"
"""Environment variable: the file to which all numbers and the longest kernels are added."""
LOSSES_WITHIN = 5e-3
"""Largest difference of the losses, near 12, of both sides in bfloat16."""
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16,
    "shared_expert_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model's shape, and the modules that LoRA adapts."""

    config: type[PreTrainedConfig]
    sizes: dict[str, Any]
    targets: tuple[str, ...]
    lengths: tuple[int, ...] = (2048, 4096)
    """Tokens of a row."""

    def make_config(self, is_tiny: bool) -> PreTrainedConfig:
        return self.config(**(self.sizes | (TINY if is_tiny else {})))


SHAPES = {
    "Qwen1.5-MoE-A2.7B": Shape(Qwen2MoeConfig, {}, ("attention", "experts"), (2048, 4096, 16384)),
    "Qwen3-30B-A3B, 12 of 48 layers": Shape(
        Qwen3MoeConfig,
        {
            "num_hidden_layers": 12, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": True, "vocab_size": 151936,
        },
        ("attention", "experts"),
    ),
    "Qwen3-8B": Shape(
        Qwen3Config,
        {
            "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
        },
        ("all",),
    ),
}  # fmt: skip


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def write_model(shape: Shape, folder: Path, is_tiny: bool) -> None:
    """Write a model whose file of weights has a header and no content: it reads as zeros, and takes no room on disk."""
    config = shape.make_config(is_tiny)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir()
    model.config.save_pretrained(folder)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@torch.no_grad()
def set_random_weights(model: PreTrainedModel) -> None:
    """Give the weights of the base random values, the same on both sides."""
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            name = name.replace(".base_layer", "").removeprefix("base_model.model.")
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def make_packs(length: int, vocab_size: int, count: int) -> list[MicroBatch]:
    """Return rows of whole samples of 100 to 900 tokens, the second half of each trained."""
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


Step = Callable[[list[MicroBatch]], float]


def measure(step: Step, vocab_size: int, length: int, device: torch.device) -> dict[str, Any]:
    """Return losses, tokens per second, peak memory and the kernels' times of a step; the first steps are not timed."""
    packs = make_packs(length, vocab_size, PACKS_PER_STEP * STEPS)
    losses, seconds = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for index in range(STEPS):
        mine = packs[index * PACKS_PER_STEP : (index + 1) * PACKS_PER_STEP]
        wait(device)
        began = time.perf_counter()
        losses.append(step(mine))
        wait(device)
        seconds.append(time.perf_counter() - began)
    step_time_s = statistics.median(seconds[WARMUP_STEPS:])
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    result = {
        "losses": losses, "seconds": seconds, "peak_bytes": peak,
        "tokens_per_second": PACKS_PER_STEP * length / step_time_s,
    }  # fmt: skip
    if device.type == "cuda":
        result["waits"] = count_waits(step, mine)
        result |= profile(step, mine)
    return result


def count_waits(step: Step, packs: list[MicroBatch]) -> dict[str, int]:
    """Return where the host waits for the device in a step, and how often."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(packs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    return dict(Counter(places))


KINDS = {
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "grouped", "matmul"),
    "attention": ("flash", "fmha", "attention"),
    "sort": ("sort", "radix", "scan"),
    "copies": ("copy", "Memcpy", "Memset", "index", "gather", "scatter"),
}
"""Parts of the names of kernels, by what they compute; all others are elementwise and reductions."""


def profile(step: Step, packs: list[MicroBatch]) -> dict[str, Any]:
    """Return the shares of a step's time by kind of kernel and idle, its launches, and the longest kernels."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        began = time.perf_counter()
        step(packs)
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began
    kernels = [event for event in profiled.key_averages() if event.device_time_total > 0]
    split = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    for event in kernels:
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), "elementwise")
        split[kind] += event.self_device_time_total * 1e-6 / wall_s
    split["idle"] = 1 - sum(split.values())
    longest = sorted(kernels, key=lambda event: -event.self_device_time_total)[:25]
    lines = [f"{e.self_device_time_total / 1e3:8.1f} ms {e.count:6} x {e.key[:110]} {e.key[-160:]}" for e in longest]
    return {"split": split, "launches": sum(event.count for event in kernels), "kernels": lines}


def ours(
    shape: Shape, folder: Path, adapter: Path, device: torch.device, *, is_compiled: bool = False
) -> tuple[Step, PreTrainedModel]:
    lora = LoraSettings(rank=16, alpha=32, targets=shape.targets)
    built = build_model(
        folder,
        lora=lora,
        device=device,
        dtype=torch.bfloat16,
        gradient_checkpointing=True,
    )
    if is_compiled:
        compile_layers(built)
    set_random_weights(built.model)
    parameters = trainable_parameters(built.model)
    if not adapter.exists():
        adapter.mkdir()
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        write_adapter(adapter, shapes, parameters.items(), lora, "random", built.model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4, weight_decay=0.0, fused=True)
    context = TrainContext(built.model, parameters, optimizer, SftObjective(built, 0.0), SINGLE_PROCESS, device)

    def step(packs: list[MicroBatch]) -> float:
        totals = BatchTotals.of(counts_of(packs))
        on_device = [pack.to(device) for pack in packs]
        return train_step(on_device, totals, context, learning_rate=1e-4, max_grad_norm=1.0).loss

    return step, built.model


def peer(shape: Shape, folder: Path, adapter: Path, device: torch.device) -> tuple[Step, PreTrainedModel]:
    from peft import PeftModel

    has_experts = "experts" in shape.targets
    base = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map={"": device},
        **({"experts_implementation": "grouped_mm"} if has_experts else {}),
    )
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    set_random_weights(model)
    model.train()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)

    def step(packs: list[MicroBatch]) -> float:
        count = sum(pack.num_trained for pack in packs)
        total = torch.zeros((), device=device)
        for pack in (pack.to(device) for pack in packs):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits: Tensor = model(input_ids=pack.ids, position_ids=pack.position_ids, use_cache=False).logits
            loss = F.cross_entropy(logits[0, pack.target_positions].float(), pack.targets, reduction="sum") / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step, base


Side = Callable[[Shape, Path, Path, torch.device], tuple[Step, PreTrainedModel]]
SIDES: dict[str, Side] = {
    "Surefoot": ours,
    "transformers + PEFT": peer,
    "Surefoot, compile": partial(ours, is_compiled=True),
}


def matrix_rate(device: torch.device) -> float:
    """Return the FLOP/s of one large bfloat16 product, the best of many."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        wait(device)
        began = time.perf_counter()
        a @ b
        wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def flops_per_token(config: PreTrainedConfig) -> int:
    """Return the operations of a token, forward and backward to the inputs; the output layer for the trained half."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    attention = 2 * hidden * size * (heads + config.num_key_value_heads)
    mlp = 3 * hidden * config.intermediate_size
    if per_token := getattr(config, "num_experts_per_tok", None):
        shared = getattr(config, "shared_expert_intermediate_size", 0)
        mlp = 3 * hidden * (config.moe_intermediate_size * per_token + shared) + hidden * config.num_experts
    return int(4 * (config.num_hidden_layers * (attention + mlp) + hidden * config.vocab_size // 2))


def run_side(name: str, side: str, root: Path, device: torch.device, is_tiny: bool) -> dict[str, Any]:
    """Return what a process of its own measured, or its error."""
    command = [sys.executable, __file__, "--side", name, side, str(root), str(device), str(int(is_tiny))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SIDE_TIMEOUT_S, env=os.environ)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {SIDE_TIMEOUT_S} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return {"error": lines[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def speed(device: torch.device) -> Iterator[Row]:
    """Rows for each shape and length."""
    is_tiny = device.type == "cpu"
    rate = matrix_rate(device)
    yield Row("bfloat16 product of 8192", f"{rate / 1e12:.0f} TFLOP/s")
    if device.type == "cuda":
        yield from time_grouped_products(device)
    for name, shape in SHAPES.items():
        yield from compare(name, shape, rate, device, is_tiny)


def time_grouped_products(device: torch.device) -> Iterator[Row]:
    """Rows for the products of Qwen1.5-MoE-A2.7B's experts on 4,096 tokens, by each kernel that the GPU has."""
    experts, rows, hidden, outer, rank = 60, 16384, 2048, 2816, 16
    ids = torch.arange(experts, device=device).repeat_interleave(rows // experts + 1)[:rows]
    x, dy = (torch.randn(rows, width, device=device).bfloat16() for width in (hidden, outer))
    weight = (torch.randn(experts, outer, hidden, device=device) / hidden**0.5).bfloat16()
    a, b = (torch.randn(shape, device=device).bfloat16() for shape in ((experts, rank, hidden), (experts, rank, outer)))
    chosen = select_kernel(device, torch.bfloat16, (hidden, outer))
    for kernel in dict.fromkeys((chosen, "triton" if chosen == "torch" else chosen)):
        groups = replace(Groups.of(ids, experts, x.dtype, (hidden, outer)), kernel=kernel)
        low = grouped_linear(x, a, groups)
        products: dict[str, Callable[[], Tensor]] = {
            "y with LoRA": partial(grouped_linear, x, weight, groups, Addends(low=LowRank(low, b, 0.5))),
            "low-rank inner products": partial(grouped_linear, x, a, groups),
            "dx": partial(grouped_linear_dx, dy, weight, groups),
            "gradient of A": partial(grouped_linear_dw, low, x, groups),
        }
        times = ", ".join(f"{name} {1e3 * time_median(run, device):.2f} ms" for name, run in products.items())
        yield Row(f"grouped products by {kernel or 'a product each'}", times)


def time_median(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of ten calls, after three."""
    times = []
    for _ in range(13):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def compare(name: str, shape: Shape, rate: float, device: torch.device, is_tiny: bool) -> Iterator[Row]:
    root = Path(tempfile.mkdtemp(prefix="surefoot-speed-"))
    try:
        write_model(shape, root / "model", is_tiny)
        sides = SIDES if device.type == "cuda" else dict.fromkeys(["Surefoot", "transformers + PEFT"])
        found = {side: run_side(name, side, root, device, is_tiny) for side in sides}
    finally:
        shutil.rmtree(root)
    if path := os.environ.get(DETAILS):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({name: found}, indent=1) + "\n")
    flops = flops_per_token(shape.make_config(is_tiny))
    for side, measured in found.items():
        if "error" in measured:
            yield Row(f"{name}: {side}", measured["error"], "", False)
            continue
        for length, values in measured.items():
            split = ", ".join(f"{kind} {share:.0%}" for kind, share in values.get("split", {}).items())
            yield Row(
                f"{name}, {length} tokens: {side}",
                f"{values['tokens_per_second']:.0f} tokens/s, {values['tokens_per_second'] * flops / rate:.1%} of the "
                f"matrix rate, peak {values['peak_bytes'] / 2**30:.1f} GiB; {split}"
                f"; waits a step: {sum(values.get('waits', {}).values())}, launches: {values.get('launches', 0)}",
            )
    theirs = found.pop("transformers + PEFT")
    for side, measured in found.items():
        if "error" in measured or "error" in theirs:
            continue
        for length, values in measured.items():
            ratio = values["tokens_per_second"] / theirs[length]["tokens_per_second"]
            worst = max(abs(a - b) for a, b in zip(values["losses"], theirs[length]["losses"], strict=True))
            yield Row(
                f"{name}, {length} tokens: {side} to transformers + PEFT",
                f"{ratio:.2f} x; losses differ by {worst:.1e} at most",
                f"{LOSSES_WITHIN:.0e}",
                worst <= LOSSES_WITHIN,
            )


def run_one(name: str, side: str, root: Path, device: torch.device, is_tiny: bool) -> dict[str, Any]:
    shape, folder = SHAPES[name], root / "model"
    step, model = SIDES[side](shape, folder, root / "adapter", device)
    lengths = (64, 128) if is_tiny else shape.lengths
    return {str(length): measure(step, model.config.vocab_size, length, device) for length in lengths}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        _, _, shape_name, side_name, folder_name, device_name, tiny = sys.argv
        print(json.dumps(run_one(shape_name, side_name, Path(folder_name), torch.device(device_name), tiny == "1")))
    else:
        main(speed)
