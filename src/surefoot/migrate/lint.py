"""Settings of other programs that work against each other, as findings."""

import re
from collections.abc import Iterator
from typing import Any

from surefoot.findings import CATALOGUE, Finding
from surefoot.migrate.field_map import number_of
from surefoot.migrate.parse_input import ParsedRun

LARGEST_CARD_GB = 141
GATHERED_GB = 40
"""Beside what training has on a card, from which a gathered model crowds it: half of one of 80 GB."""
BILLIONS = re.compile(r"(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z0-9])")
MOE_NAME = re.compile(r"(?i)moe|mixtral|\dB-A\d")
"""As in Qwen1.5-MoE-A2.7B and Qwen3-30B-A3B."""
DAY_S = 86_400


def lint(told: ParsedRun, *, is_zero3: bool, is_fp16: bool = False) -> Iterator[Finding]:
    """Settings that work against each other, whatever program they are of.

    `is_zero3`, `is_fp16`: what its DeepSpeed config asks for.
    """
    said = {name: number_of(value) for name, value in told.settings.items()}
    uses_vllm = said.get("use_vllm") is True
    counts = {name: value for name, value in said.items() if isinstance(value, int | float)}
    window, prompt, completion = (
        counts.get(name) for name in ("vllm_max_model_len", "max_length", "max_completion_length")
    )
    if uses_vllm and window and completion and window < completion + (prompt or 1):
        yield _finding(
            f"vllm_max_model_len={window} holds no prompt of max_length={prompt} with a completion of "
            f"max_completion_length={completion}"
            + (f", and images of up to MAX_PIXELS={told.environment['MAX_PIXELS']} come on top"
               if "MAX_PIXELS" in told.environment else ""),
            "Set vllm_max_model_len to their sum and more.",
            window=window, needed=completion + (prompt or 0),
        )  # fmt: skip
    size = BILLIONS.search(str(said.get("model") or said.get("model_name_or_path") or ""))
    share, ranks = counts.get("vllm_gpu_memory_utilization"), counts.get("vllm_tensor_parallel_size") or 1
    if uses_vllm and size and isinstance(share, float):
        needed_gb, room_gb = 2 * float(size[1]), share * ranks * LARGEST_CARD_GB
        if needed_gb > room_gb:
            yield _finding(
                f"the engine gets {share:.0%} of {ranks} GPU, {room_gb:.0f} GB even on cards of {LARGEST_CARD_GB} GB, "
                f"and the model has about {needed_gb:.0f} GB in bfloat16",
                "Raise vllm_tensor_parallel_size, or give the engine GPUs of its own.",
                needed_gb=round(needed_gb), room_gb=round(room_gb),
            )  # fmt: skip
    if is_zero3 and MOE_NAME.search(str(said.get("model") or said.get("model_name_or_path") or "")):
        patience_s = counts.get("ddp_timeout") or 0
        hidden = f", and ddp_timeout={patience_s} s, {patience_s // DAY_S} days, keeps that from being noticed"
        yield _finding(
            "ZeRO-3 gathers each expert where it is used: in a batch of which one rank has no token for an expert, the "
            "other ranks wait in its gather for ever (transformers 4, where each expert is a module of its own)"
            + (hidden if patience_s > DAY_S else ""),
            "Nothing is to be changed here: the experts of a layer are one parameter, which all ranks gather. There, "
            "make the MoE blocks leaf modules (deepspeed.utils.set_z3_leaf_modules), or use ZeRO-2.",
            **({"ddp_timeout_s": patience_s} if patience_s else {}),
        )
    is_large = size is not None and 2 * float(size[1]) > GATHERED_GB
    if uses_vllm and is_zero3 and size and is_large and "move_model_batches" not in said:
        yield _finding(
            f"ZeRO-3 gathers the whole model, about {2 * float(size[1]):.0f} GB, on each GPU to hand it to vLLM",
            "Hand over the adapter alone" + (", or set move_model_batches." if told.program == "ms-swift" else "."),
            gathered_gb=round(2 * float(size[1])),
        )
    allocator = told.environment.get("PYTORCH_CUDA_ALLOC_CONF", told.environment.get("PYTORCH_ALLOC_CONF", ""))
    sleeps = said.get("vllm_enable_sleep_mode") is True or said.get("sleep_level") in (1, 2)
    if uses_vllm and sleeps and "expandable_segments:True" in allocator:
        yield _finding(
            f"{allocator} with an engine that sleeps: memory that grows in segments cannot be given up (vllm#11743)",
            "Unset it. Here the server is started without it.",
            allocator=allocator,
        )
    halves = ("torch_dtype", "dtype", "mixed_precision", "bnb_4bit_compute_dtype")
    asked = [f"{name}: {said[name]}" for name in halves if said.get(name) in ("float16", "fp16", "half")]
    asked += ["fp16: true"] if said.get("fp16") is True else []
    asked += ["fp16.enabled of its DeepSpeed config"] if is_fp16 else []
    if asked:
        yield _finding(
            "fp16 overflows where a model was trained in bfloat16, as most are now: its activations reach beyond 65504",
            "Set bf16: true.",
            asked=asked,
        )


def _finding(cause: str, fix: str, **evidence: Any) -> Finding:
    return Finding("SF720", cause, evidence, fix or CATALOGUE["SF720"].fix, 0.8)
