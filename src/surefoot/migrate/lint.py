"""Findings about peer settings that conflict with each other."""

import math
import re
from collections.abc import Iterator
from typing import Any

from surefoot.findings import Finding
from surefoot.migrate.model_kind import is_moe
from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.values import parse_number

LARGEST_CARD_GB = 141
GATHERED_GB = 40
"""Size from which a gathered model leaves too little memory for training: half of an 80 GB GPU."""
BILLIONS = re.compile(r"(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z0-9])")
DAY_S = 86_400
DTYPE_SETTINGS = ("torch_dtype", "dtype", "mixed_precision", "bnb_4bit_compute_dtype")
HALF_NAMES = ("float16", "fp16", "half")


def lint(run: ParsedRun, *, is_zero3: bool, is_fp16: bool = False) -> Iterator[Finding]:
    """Yield a finding for each group of settings that conflict, for any peer program.

    `is_zero3`, `is_fp16`: whether the DeepSpeed config sets ZeRO stage 3 or fp16.
    """
    settings = {name: parse_number(value) for name, value in run.settings.items()}
    model = str(settings.get("model") or settings.get("model_name_or_path") or "")
    size = BILLIONS.search(model)
    model_gb = 2 * float(size[1]) if size else 0.0
    uses_vllm = settings.get("use_vllm") is True
    if uses_vllm:
        yield from _lint_engine(run, settings, model_gb)
    if is_zero3 and is_moe(run, model):
        yield _make_expert_gather_finding(run.program, settings.get("ddp_timeout"))
    if uses_vllm and is_zero3 and model_gb > GATHERED_GB and "move_model_batches" not in settings:
        yield _make_finding(
            f"ZeRO-3 gathers the whole model, about {model_gb:.0f} GB, on each GPU to send it to vLLM",
            "Send the adapter alone" + (", or set move_model_batches." if run.program == "ms-swift" else "."),
            gathered_gb=round(model_gb),
        )
    allocator = run.environment.get("PYTORCH_CUDA_ALLOC_CONF", run.environment.get("PYTORCH_ALLOC_CONF", ""))
    sleeps = settings.get("vllm_enable_sleep_mode") is True or settings.get("sleep_level") in (1, 2)
    if uses_vllm and sleeps and "expandable_segments:True" in allocator:
        yield _make_finding(
            f"{allocator} with an engine that sleeps: memory of expandable segments cannot be released (vllm#11743)",
            "Unset it. Surefoot starts the server without it.",
            allocator=allocator,
        )
    half_precision = [f"{name}: {settings[name]}" for name in DTYPE_SETTINGS if settings.get(name) in HALF_NAMES]
    half_precision += ["fp16: true"] if settings.get("fp16") is True else []
    half_precision += ["fp16.enabled of its DeepSpeed config"] if is_fp16 else []
    if half_precision:
        yield _make_finding(
            "fp16 overflows in models that were trained in bfloat16, as most are: their activations exceed 65504",
            "Set bf16: true.",
            asked=half_precision,
        )


def _lint_engine(run: ParsedRun, settings: dict[str, Any], model_gb: float) -> Iterator[Finding]:
    """Yield the findings about the size of the vLLM engine. `model_gb`: in bfloat16; 0 if it is unknown."""
    counts = {name: value for name, value in settings.items() if isinstance(value, int | float)}
    names = ("vllm_max_model_len", "max_length", "max_completion_length")
    window, prompt, completion = (counts.get(name) for name in names)
    if window and completion and window < completion + (prompt or 1):
        yield _make_finding(
            f"vllm_max_model_len={window} is shorter than a prompt of max_length={prompt} plus a completion of "
            f"max_completion_length={completion}"
            + (f", and images of up to MAX_PIXELS={run.environment['MAX_PIXELS']} need further tokens"
               if "MAX_PIXELS" in run.environment else ""),
            "Set vllm_max_model_len to at least their sum.",
            window=window, needed=completion + (prompt or 0),
        )  # fmt: skip
    share, ranks = counts.get("vllm_gpu_memory_utilization"), counts.get("vllm_tensor_parallel_size") or 1
    room_gb = share * ranks * LARGEST_CARD_GB if isinstance(share, float) else math.inf
    if model_gb > room_gb:
        yield _make_finding(
            f"the engine gets {share:.0%} of {ranks} GPUs, {room_gb:.0f} GB even if each has {LARGEST_CARD_GB} GB, "
            f"and the model needs about {model_gb:.0f} GB in bfloat16",
            "Raise vllm_tensor_parallel_size, or run the engine on separate GPUs.",
            needed_gb=round(model_gb),
            room_gb=round(room_gb),
        )


def _make_expert_gather_finding(program: str, timeout_s: Any) -> Finding:
    """Return the finding that ZeRO-3 can wait forever for an expert. `timeout_s`: the run's ddp_timeout, if set."""
    timeout_s = timeout_s if isinstance(timeout_s, int | float) else 0
    timeout_note = f", and ddp_timeout={timeout_s} s, {timeout_s // DAY_S} days, hides this"
    return _make_finding(
        "ZeRO-3 gathers each expert when it is used: if one rank's batch has no token for an expert, the other "
        "ranks wait in its gather forever (transformers 4, where each expert is a separate module)"
        + (timeout_note if timeout_s > DAY_S else ""),
        "Surefoot needs no change: all ranks gather the experts of a layer as one parameter. In "
        f"{program}, make the MoE blocks leaf modules (deepspeed.utils.set_z3_leaf_modules), or use ZeRO-2.",
        **({"ddp_timeout_s": timeout_s} if timeout_s else {}),
    )


def _make_finding(cause: str, fix: str, **evidence: Any) -> Finding:
    return Finding("SF720", cause, evidence, fix, 0.8)
