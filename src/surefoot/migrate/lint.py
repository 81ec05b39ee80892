"""Findings about peer settings that conflict with each other."""

import re
from collections.abc import Iterator
from typing import Any

from surefoot.findings import CATALOGUE, Finding
from surefoot.migrate.field_map import parse_number
from surefoot.migrate.parsed_run import ParsedRun

LARGEST_CARD_GB = 141
GATHERED_GB = 40
"""Size from which a gathered model leaves too little memory for training: half of an 80 GB GPU."""
BILLIONS = re.compile(r"(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z0-9])")
MOE_NAME = re.compile(r"(?i)moe|mixtral|\dB-A\d")
"""Name of a Mixture-of-Experts model, as in Qwen1.5-MoE-A2.7B and Qwen3-30B-A3B."""
DAY_S = 86_400


def lint(run: ParsedRun, *, is_zero3: bool, is_fp16: bool = False) -> Iterator[Finding]:
    """Yield a finding for each group of settings that conflict, for any peer program.

    `is_zero3`, `is_fp16`: whether the DeepSpeed config sets ZeRO stage 3 or fp16.
    """
    settings = {name: parse_number(value) for name, value in run.settings.items()}
    uses_vllm = settings.get("use_vllm") is True
    counts = {name: value for name, value in settings.items() if isinstance(value, int | float)}
    window, prompt, completion = (
        counts.get(name) for name in ("vllm_max_model_len", "max_length", "max_completion_length")
    )
    if uses_vllm and window and completion and window < completion + (prompt or 1):
        yield _make_finding(
            f"vllm_max_model_len={window} is shorter than a prompt of max_length={prompt} plus a completion of "
            f"max_completion_length={completion}"
            + (f", and images of up to MAX_PIXELS={run.environment['MAX_PIXELS']} need further tokens"
               if "MAX_PIXELS" in run.environment else ""),
            "Set vllm_max_model_len to at least their sum.",
            window=window, needed=completion + (prompt or 0),
        )  # fmt: skip
    size = BILLIONS.search(str(settings.get("model") or settings.get("model_name_or_path") or ""))
    share, ranks = counts.get("vllm_gpu_memory_utilization"), counts.get("vllm_tensor_parallel_size") or 1
    if uses_vllm and size and isinstance(share, float):
        needed_gb, room_gb = 2 * float(size[1]), share * ranks * LARGEST_CARD_GB
        if needed_gb > room_gb:
            yield _make_finding(
                f"the engine gets {share:.0%} of {ranks} GPUs, {room_gb:.0f} GB even if each has {LARGEST_CARD_GB} GB, "
                f"and the model needs about {needed_gb:.0f} GB in bfloat16",
                "Raise vllm_tensor_parallel_size, or run the engine on separate GPUs.",
                needed_gb=round(needed_gb), room_gb=round(room_gb),
            )  # fmt: skip
    if is_zero3 and MOE_NAME.search(str(settings.get("model") or settings.get("model_name_or_path") or "")):
        timeout_s = counts.get("ddp_timeout") or 0
        timeout_note = f", and ddp_timeout={timeout_s} s, {timeout_s // DAY_S} days, hides this"
        yield _make_finding(
            "ZeRO-3 gathers each expert when it is used: if one rank's batch has no token for an expert, the other "
            "ranks wait in its gather forever (transformers 4, where each expert is a separate module)"
            + (timeout_note if timeout_s > DAY_S else ""),
            "Surefoot needs no change: all ranks gather the experts of a layer as one parameter. In "
            f"{run.program}, make the MoE blocks leaf modules (deepspeed.utils.set_z3_leaf_modules), or use ZeRO-2.",
            **({"ddp_timeout_s": timeout_s} if timeout_s else {}),
        )
    is_large = size is not None and 2 * float(size[1]) > GATHERED_GB
    if uses_vllm and is_zero3 and size and is_large and "move_model_batches" not in settings:
        yield _make_finding(
            f"ZeRO-3 gathers the whole model, about {2 * float(size[1]):.0f} GB, on each GPU to send it to vLLM",
            "Send the adapter alone" + (", or set move_model_batches." if run.program == "ms-swift" else "."),
            gathered_gb=round(2 * float(size[1])),
        )
    allocator = run.environment.get("PYTORCH_CUDA_ALLOC_CONF", run.environment.get("PYTORCH_ALLOC_CONF", ""))
    sleeps = settings.get("vllm_enable_sleep_mode") is True or settings.get("sleep_level") in (1, 2)
    if uses_vllm and sleeps and "expandable_segments:True" in allocator:
        yield _make_finding(
            f"{allocator} with an engine that sleeps: memory of expandable segments cannot be released (vllm#11743)",
            "Unset it. Surefoot starts the server without it.",
            allocator=allocator,
        )
    dtype_names = ("torch_dtype", "dtype", "mixed_precision", "bnb_4bit_compute_dtype")
    half_precision = [
        f"{name}: {settings[name]}" for name in dtype_names if settings.get(name) in ("float16", "fp16", "half")
    ]
    half_precision += ["fp16: true"] if settings.get("fp16") is True else []
    half_precision += ["fp16.enabled of its DeepSpeed config"] if is_fp16 else []
    if half_precision:
        yield _make_finding(
            "fp16 overflows in models that were trained in bfloat16, as most are: their activations exceed 65504",
            "Set bf16: true.",
            asked=half_precision,
        )


def _make_finding(cause: str, fix: str, **evidence: Any) -> Finding:
    return Finding("SF720", cause, evidence, fix or CATALOGUE["SF720"].fix, 0.8)
