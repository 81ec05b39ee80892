"""Checks of what a run needs against what this machine and its model have. Pure, except that model files are read."""

import json
from pathlib import Path
from typing import Any

from surefoot.config import RolloutConfig, RunConfig, rollout_settings, vllm_settings
from surefoot.config.optimizers import STATE_BYTES
from surefoot.config.vllm_args import SMALLER, memory_share, pipeline_parallel, tensor_parallel, value_of
from surefoot.data.conversation import TEXT_BESIDE_IMAGES_TOKENS
from surefoot.diagnostics.preflight import memory
from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.diagnostics.preflight.memory import FP32_BYTES, GIB, HALF_BYTES, PLAN_IT, format_ranks
from surefoot.diagnostics.preflight.system import LEAST_INODES
from surefoot.models.resolve_model import folder_here, longest_context

FILES, FILES_OF_A_RANK = 8, 2
"""Number of files of a checkpoint, and of each rank in it, folders included."""
MOST_SHARED = 0.7
"""Largest share of a GPU for a rollout server that leaves room to train: an estimate; `surefoot plan` is exact."""


def check_devices(context: CheckContext) -> Result:
    run, gpus = context.run, context.gpus
    if run is None:
        if gpus:
            return ok(f"{gpus} GPUs")
        raise NotApplicable("no GPU on this machine, and no run is given")
    ranks = run.nproc_per_node
    if run.device == "cuda" and not gpus:
        visible = context.machine.environment.get("CUDA_VISIBLE_DEVICES", "not set")
        fix = "Set device: cpu, or run on a machine with GPUs."
        return fail(
            "SF715", "device=cuda, but no GPU is visible on this machine", fix=fix, gpus=0, CUDA_VISIBLE_DEVICES=visible
        )
    if context.is_on_gpus and ranks > gpus:
        cause = f"nproc_per_node={ranks}, but this machine has {gpus} GPUs"
        return fail("SF715", cause, fix=f"Set nproc_per_node: {gpus}.", gpus=gpus)
    if not context.is_on_gpus:
        return ok(f"{format_ranks(ranks)} on the CPU")
    return ok(f"{format_ranks(ranks)} on {gpus} GPU{'s' if gpus > 1 else ''}")


def check_checkpoints(context: CheckContext) -> Result:
    """Check the size of what a run will write against what is free."""
    run, disk = context.require_run(), context.machine.output
    if disk is None:
        raise NotApplicable("output_dir is unknown")
    num_checkpoints, count_text = _count_new_checkpoints(run)
    files = num_checkpoints * (FILES + FILES_OF_A_RANK * run.nproc_per_node * run.nnodes)
    if LEAST_INODES <= disk.free_inodes < files:  # `output_dir` reports fewer free inodes for any run
        cause = f"{count_text} need {files} files, and only {disk.free_inodes} more can be created at {disk.path}"
        where = context.where("save_total_limit", "save_steps")
        return fail("SF711", cause, needed_files=files, free_inodes=disk.free_inodes, where=where)
    weights = memory.require_weights(run)
    if run.tuning != "full":
        raise NotApplicable("adapters are small")
    checkpoint_bytes = int(weights.parameters * (FP32_BYTES + STATE_BYTES[run.optim]))
    summary = (
        f"{count_text} of {checkpoint_bytes / GIB:.1f} GiB and a model of {weights.bytes / GIB:.1f} GiB, "
        f"{disk.free_bytes / GIB:.1f} GiB free at {disk.path}"
    )
    policy_bytes = 0
    if vllm_settings(run) is not None:  # each policy is written to output_dir for the server
        policy_bytes = weights.parameters * memory.element_bytes(run, is_on_gpus=context.is_on_gpus)
        summary += f"; the weights for the server take {policy_bytes / GIB:.1f} GiB more"
    needed = num_checkpoints * checkpoint_bytes + weights.bytes + policy_bytes
    if needed > disk.free_bytes:
        first_bytes = min(num_checkpoints, 1) * checkpoint_bytes
        is_fatal = not _list_checkpoints(run) and max(first_bytes, weights.bytes) > disk.free_bytes
        where = context.where("save_total_limit")
        return fail("SF717", summary, is_fatal=is_fatal, needed_bytes=needed, free_bytes=disk.free_bytes, where=where)
    return ok(summary)


def _count_new_checkpoints(run: RunConfig) -> tuple[int, str]:
    """Return (the largest number of further checkpoints at a time, the same in words)."""
    num_planned = run.planned_checkpoints
    # The newest is written before the oldest is deleted. If all are kept and their number is unknown, count two.
    num_checkpoints = run.save_total_limit + 1 if run.save_total_limit else num_planned or 2
    num_checkpoints = num_checkpoints if num_planned is None else min(num_checkpoints, num_planned)
    num_checkpoints = max(num_checkpoints - len(_list_checkpoints(run)), min(num_checkpoints, 1))
    keeps_all = not run.save_total_limit and num_planned is None
    return num_checkpoints, f"{num_checkpoints} checkpoint{'s' * (num_checkpoints != 1)}" + (
        " at the least, since all are kept," if keeps_all else ""
    )


def _list_checkpoints(run: RunConfig) -> list[Path]:
    return list((run.run_folder / "checkpoints").glob("step-*"))


def check_rollout_server(context: CheckContext) -> Result:
    """Check the memory that a vLLM server and training need on the GPUs that they share."""
    run = vllm_settings(context.run)
    if run is None:
        raise NotApplicable("no run with a vLLM server is given")
    if not context.is_on_gpus:
        raise NotApplicable("the run uses no GPU")
    visible = context.machine.environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else [str(number) for number in range(context.gpus)]
    training_devices = {device.strip() for device in devices[: run.nproc_per_node]}
    server_devices = {device.strip() for device in (run.vllm_devices or ",".join(devices)).split(",")}
    shared_devices = training_devices & server_devices
    if run.vllm_server is not None or not shared_devices:
        return ok("on GPUs of its own, as far as this machine shows")
    # A server that sleeps takes its share too, at its start and at each rollout, while the model is on the GPU.
    share, where = memory_share(run.vllm_args), context.where("vllm_args", "rollout_engine")
    numbers = ", ".join(sorted(shared_devices))
    summary = f"the server takes {share:.0%} of each of its GPUs, and training uses {numbers} of them"
    conflict = _find_memory_conflict(context, run, share)
    if conflict:
        return fail("SF721", f"{summary}: {conflict}", is_fatal=True, fix=PLAN_IT, share=share, where=where)
    if share > MOST_SHARED:
        return fail("SF721", summary, share=share, where=where)
    return ok(summary)


def _find_memory_conflict(context: CheckContext, run: RolloutConfig, share: float) -> str:
    """Return why a server's share of a GPU does not fit beside training, or an empty string.

    Compares lower bounds of both, so an empty string does not mean that they fit.
    """
    model_parallel_size = tensor_parallel(run.vllm_args) * pipeline_parallel(run.vllm_args)
    server_gpus = len(run.vllm_devices.split(",")) if run.vllm_devices is not None else context.gpus
    if model_parallel_size > server_gpus:
        return f"it is split over {model_parallel_size} GPUs, and has {server_gpus}"
    weights, gpu_bytes = memory.read_weights(run), memory.smallest_gpu_bytes(context)
    is_smaller = any(value_of(run.vllm_args, name) is not None for name in SMALLER)
    if weights is None or gpu_bytes is None or is_smaller:
        return ""
    weight_bytes, share_bytes = weights.parameters * HALF_BYTES // model_parallel_size, share * gpu_bytes
    if weight_bytes > share_bytes:
        return f"its part of the weights are {weight_bytes / GIB:.1f} GiB, and its share {share_bytes / GIB:.1f} GiB"
    least, _ = memory.least_device_bytes(run, weights)
    if least + share_bytes > gpu_bytes:  # sleep mode frees its share, but not while it generates
        return (
            f"{share_bytes / GIB:.1f} GiB and the {least / GIB:.1f} GiB that training keeps there are more than "
            f"the {gpu_bytes / GIB:.1f} GiB of a GPU"
        )
    return ""


def check_rollout_precision(context: CheckContext) -> Result:
    """Check that a server does not compute in float16 a model that was trained in bfloat16."""
    run = vllm_settings(context.run)
    if run is None or not run.starts_server:
        raise NotApplicable("no run that starts a vLLM server is given")
    requested, config = value_of(run.vllm_args, "--dtype"), _read_text_config(run)
    trained_dtype = config.get("dtype", config.get("torch_dtype"))
    if requested in ("float16", "half") and trained_dtype == "bfloat16":
        cause = (
            f"vllm_args say --dtype {requested}, and the model's config.json says bfloat16, whose numbers reach beyond "
            "65504: activations overflow, and completions are not those of what is trained"
        )
        fix, where = "Leave --dtype out: the server computes as training does.", context.where("vllm_args")
        return fail("SF720", cause, fix=fix, dtype=requested, model_dtype=trained_dtype, where=where)
    return ok(requested or "as training computes")


def check_lengths(context: CheckContext) -> Result:
    """Check the longest sequence of a run against the number of positions of the model."""
    run = context.require_run()
    max_positions = longest_context(_read_text_config(run))
    if max_positions is None:
        raise NotApplicable("the model's config.json is not here, or names no max_position_embeddings")
    longest, summary = run.max_length, f"samples of up to max_length={run.max_length} tokens"
    settings = ["max_length"]
    if rollout_settings(run) is not None:
        longest = run.max_row_tokens + run.max_added_tokens
        summary = f"a prompt of {run.max_row_tokens} tokens and a completion of {run.max_added_tokens}"
        settings = ["max_prompt_length" if run.row.is_prompt else "max_length", "max_completion_length"]
    room = run.max_row_tokens - TEXT_BESIDE_IMAGES_TOKENS
    most_pixels, side = _read_image_limits(run)
    tokens = most_pixels // side**2
    if tokens > room and run.max_pixels is not None:
        image = f"an image of max_pixels={run.max_pixels} is up to {tokens} tokens"
        cause = f"{image}, too many for {summary}; images are never cut"
        fix = f"Lower max_pixels to {max(1, room) * side**2} or less, or raise {settings[0]}."
        where = context.where("max_pixels", *settings)
        return fail("SF738", cause, fix=fix, image_tokens=tokens, room=room, where=where)
    if longest > max_positions:
        cause, where = f"{summary}, and the model has positions for {max_positions}", context.where(*settings)
        return fail("SF738", cause, longest=longest, max_position_embeddings=max_positions, where=where)
    image_note = ""
    if tokens > room:
        image_note = (
            f"; by the model's own {most_pixels} pixels an image may be up to {tokens} tokens: rows that do not fit "
            "are skipped and reported, and max_pixels makes images smaller"
        )
    return ok(f"{summary}; the model has positions for {max_positions}{image_note}")


def _read_image_limits(run: RunConfig) -> tuple[int, int]:
    """Return (most pixels of an image, pixels of a token's side); (0, 1) for a model that reads no images.

    The run's max_pixels, or the processor's under any of its names: max_pixels, size.longest_edge, size.max_pixels.
    """
    folder = folder_here(run.model)
    try:
        vision = _read_json(folder / "config.json")["vision_config"] if folder is not None else {}
        has_cells = {"spatial_merge_size", "temporal_patch_size"} & vision.keys()
        side = int(vision["patch_size"]) * int(vision.get("spatial_merge_size", 2)) if has_cells else 0
        if folder is None or side < 1:
            return 0, 1
        if run.max_pixels is not None:
            return run.max_pixels, side
        whole = folder / "processor_config.json"  # transformers reads it first
        processor = _read_json(whole).get("image_processor") if whole.is_file() else None
        processor = processor or _read_json(folder / "preprocessor_config.json")
        size = processor.get("size") or {}
        return int(processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 0), side
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, 1


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def _read_text_config(run: RunConfig) -> dict[str, Any]:
    """Return the part of config.json about the language model; empty if it cannot be read."""
    folder = folder_here(run.model)
    try:
        config = _read_json(folder / "config.json") if folder is not None else {}
        return dict(config.get("text_config", config))
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
