"""Counts that decide speed on a GPU, taken without one: calls of attention in vision towers, and kernels of a step.

    PYTHONPATH=. python benchmarks/gpu_counts.py

Towers and layers have the depths and numbers of published models and tiny widths, which change no count. A GPU's code
runs on the CPU, with stand-ins for its kernels. Writes benchmarks/results/<date>-gpu-counts.md.
"""

import datetime
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.support.batches import batch
from tests.support.cuda_branches import AMPERE, HOPPER, count_waits, cuda_branches, is_counting, two_devices
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from surefoot.config.schema import Checkpointing
from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models import triton_grouped_gemm as triton
from surefoot.models import vision
from surefoot.models.build import build_model
from surefoot.models.fused_norms import fuse_norms
from surefoot.models.lora import LoraSettings

HERE = Path(__file__).parent
TURING = (7, 5)
IMAGES = torch.tensor([[1, 48, 64]] * 8)
"""Frames, height and width in patches: eight images of 768 tokens."""
SMALL_IMAGES = torch.tensor([[1, 16, 16]] * 8)
"""Smaller ones, for which the host waits as often."""
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 200, "eos_token_id": 1}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def qwen2_5_vl() -> PreTrainedModel:
    tower = {**TOWER, "depth": 32, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
    text = {**TEXT, "rope_parameters": MROPE}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower))


def qwen3_vl() -> PreTrainedModel:
    tower = {**TOWER, "depth": 27, "patch_size": 16, "deepstack_visual_indexes": [8, 16, 24]}
    text = {**TEXT, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower))


def count_attention_calls(model: PreTrainedModel) -> tuple[int, Tensor]:
    """Return the number of calls of torch's attention for the images, and their vectors."""
    calls, attend = Counter[str](), F.scaled_dot_product_attention

    def count(*arguments: Any, **options: Any) -> Tensor:
        calls["attention"] += 1
        return attend(*arguments, **options)

    with torch.no_grad(), patch.object(F, "scaled_dot_product_attention", count):
        features = model.eval().base_model.get_image_features(pixels_of(model, IMAGES), IMAGES, return_dict=True)
    return calls["attention"], torch.cat(list(features.pooler_output))


def count_tower_waits(model: PreTrainedModel, grid_place: str) -> int:
    """Return the waits of the host for eight images in bfloat16, by a GPU's code.

    `grid_place`: where the grids are, `gpu` or `host`.
    """
    grid, pixels = SMALL_IMAGES.clone(), pixels_of(model, SMALL_IMAGES).bfloat16()
    model.bfloat16()
    places: dict[str, list[Tensor]] = {"gpu": [pixels, *model.parameters(), *model.buffers()]}
    places.setdefault(grid_place, []).append(grid)
    with cuda_branches(), torch.no_grad(), two_devices(places["gpu"], places.get("host", [])) as (waits, mixed):
        model.base_model.get_image_features(pixels, grid, return_dict=True)
    model.float()
    assert not mixed
    return waits.total()


def pixels_of(model: PreTrainedModel, grid: Tensor) -> Tensor:
    config = model.config.vision_config
    size = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return torch.randn(int(grid.prod(1).sum()), size, generator=torch.Generator().manual_seed(0))


def compare_towers() -> list[str]:
    rows = []
    for name, model in (("Qwen2.5-VL", qwen2_5_vl()), ("Qwen3-VL", qwen3_vl())):
        stock_waits = count_tower_waits(model, "gpu")  # first, because it rounds the weights
        stock, wanted = count_attention_calls(model)
        vision.plug_in(model)
        ours, found = count_attention_calls(model)
        difference = float((found - wanted).abs().max())
        cells = f"{stock:,} | {ours:,} | {stock_waits} | {count_tower_waits(model, 'host')} | {difference:.1e}"
        rows.append(f"| {name}, {model.config.vision_config.depth} blocks | {cells} |")
    return rows


WITHOUT_KERNEL = ("_unsafe_view", "empty", "empty_like", "new_empty")


class Kernels(TorchDispatchMode):
    """Counter of the operations that launch a kernel, by name: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_counting() and not func.is_view and func.overloadpacket.__name__ not in WITHOUT_KERNEL:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def counting(self, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(*args: Any) -> Tensor:
            self.counts["triton"] += 1
            return kernel(*args)

        return compute


def count_kernels(
    folder: Path, checkpointing: Checkpointing, capability: tuple[int, int] = HOPPER
) -> tuple[Counter[str], int]:
    """Return the kernels and the waits of one micro-batch in bfloat16 with LoRA r=8 on attention and experts."""
    with cuda_branches(capability):
        built = build_model(
            folder, lora=LoraSettings(rank=8, alpha=8.0), device=torch.device("cpu"), dtype=torch.bfloat16,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        fuse_norms(built.model)
        objective, rows = SftObjective(built, 0.0), batch([60, 100])
        totals = BatchTotals(rows.num_tokens, rows.num_trained, rows.trained_weight)
        objective.loss(rows, totals).total.backward()
        kernels = Kernels()
        with (
            patch.object(triton, "multiply", kernels.counting(triton.multiply)),
            patch.object(triton, "multiply_pairs", kernels.counting(triton.multiply_pairs)),
            count_waits() as waits,
            kernels,
        ):
            objective.loss(rows, totals).total.backward()
    return kernels.counts, sum(waits.values())


def write_model(folder: Path) -> None:
    config = Qwen2MoeConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=256, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    )  # fmt: skip
    torch.manual_seed(0)  # the number of experts that get tokens depends on the weights
    Qwen2MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def compare_checkpointing(folder: Path) -> list[str]:
    rows = []
    for checkpointing in (True, "selective", False):
        counts, _ = count_kernels(folder, checkpointing)
        numbers = (sum(counts.values()), counts["_grouped_mm"], counts["mm"] + counts["addmm"], counts["_to_copy"])
        cells = " | ".join(f"{number:,}" for number in numbers)
        rows.append(f"| {str(checkpointing).lower()} | {cells} |")
    return rows


def compare_products(folder: Path) -> list[str]:
    rows = []
    for name, capability in (("torch's (Hopper)", HOPPER), ("Triton's (Ampere, Ada)", AMPERE), ("none", TURING)):
        counts, waits = count_kernels(folder, True, capability)
        products = counts["_grouped_mm"] + counts["triton"] + counts["mm"] + counts["addmm"] + counts["addmm_"]
        rows.append(f"| {name} | {products:,} | {sum(counts.values()):,} | {waits} |")
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        checkpointing, products = compare_checkpointing(Path(name)), compare_products(Path(name))
    today = datetime.date.today().isoformat()
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    lines = [
        "# Counts of a GPU's code, without a GPU",
        "",
        f"{today}, on the CPU with stand-ins for kernels (`benchmarks/gpu_counts.py`). {versions}.",
        "",
        "Eight images of 768 tokens in a vision tower: calls of attention, each of which is one kernel on a GPU, and "
        "reads of the GPU for which the host would wait.",
        "",
        "| | calls: transformers, `sdpa` | Surefoot | waits: transformers | Surefoot | largest difference |",
        "|---|---|---|---|---|---|",
        *compare_towers(),
        "",
        "One micro-batch of Qwen1.5-MoE-A2.7B's layers (24 layers, 60 experts, LoRA r=8 on attention and experts, "
        "bfloat16), by `gradient_checkpointing`. Kernels are operations that are neither views nor allocations; "
        "attention and RMSNorm are one each.",
        "",
        "| | kernels | grouped products | other products | casts |",
        "|---|---|---|---|---|",
        *checkpointing,
        "",
        "The same micro-batch with `gradient_checkpointing: true`, by the kernel of the experts' products.",
        "",
        "| products of experts | products | kernels | waits of the host |",
        "|---|---|---|---|",
        *products,
        "",
    ]
    print("\n".join(lines))
    (HERE / "results" / f"{today}-gpu-counts.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
