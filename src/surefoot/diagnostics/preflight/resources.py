"""Checks of what a run needs against what this machine has. Pure, except that model file headers are read."""

import json
from pathlib import Path
from typing import Any

from surefoot.config import RolloutConfig, RunConfig, vllm_settings
from surefoot.config.vllm_args import SMALLER, memory_share, pipeline_parallel, tensor_parallel, value_of
from surefoot.data.conversation import TEXT_BESIDE_IMAGES_TOKENS
from surefoot.diagnostics.preflight.check import Check, CheckContext, fail, not_applicable, ok
from surefoot.diagnostics.preflight.gpus import select_gpus
from surefoot.diagnostics.preflight.model_size import Weights, weights_of
from surefoot.diagnostics.preflight.system import LEAST_INODES
from surefoot.models.resolve_model import folder_here, longest_context, may_be_fetched

GIB = 1 << 30
FP32_BYTES, HALF_BYTES = 4, 2
STATE_BYTES, MOMENTS_BYTES = 12, 8
"""Bytes per trained parameter for its gradient and AdamW's two moments, and for the moments alone, all float32."""
CHECKPOINT_BYTES = 12
"""Bytes per trained parameter in a checkpoint: the parameter and its two moments, all float32."""
FILES, FILES_OF_A_RANK = 8, 2
"""Number of files of a checkpoint, and of each rank in it, folders included."""

PLAN_IT = (
    "`surefoot plan` names settings that fit: zero_stage: 3, offload: cpu, expert_parallel_size, tuning: lora, or more "
    "GPUs."
)
MOST_SHARED = 0.7
"""Largest share of a GPU for a rollout server that leaves room to train: an estimate; `surefoot plan` is exact."""


def devices(context: CheckContext) -> Check:
    name, run, gpus = "devices", context.run, context.gpus
    if run is None:
        return ok(name, f"{gpus} GPUs") if gpus else not_applicable(name, "no GPU here, and no run is given")
    if run.device == "cuda" and not gpus:
        return fail(name, "SF715", "device=cuda, and no GPU is seen here", gpus=0,
                     fix="Set device: cpu, or run where GPUs are seen.",
                     CUDA_VISIBLE_DEVICES=context.machine.environment.get(
                         "CUDA_VISIBLE_DEVICES", "not set"))  # fmt: skip
    if context.is_on_gpus and run.nproc_per_node > gpus:
        return fail(name, "SF715", f"nproc_per_node={run.nproc_per_node}, and {gpus} GPUs are here", gpus=gpus,
                     fix=f"Set nproc_per_node: {gpus}.")  # fmt: skip
    if not context.is_on_gpus:
        return ok(name, f"{_format_ranks(run.nproc_per_node)} on the CPU")
    return ok(name, f"{_format_ranks(run.nproc_per_node)} on {gpus} GPU{'s' if gpus > 1 else ''}")


def model(context: CheckContext) -> Check:
    """Check that the files of a model that is on this machine are complete."""
    name, run = "model", context.run
    if run is None:
        return not_applicable(name, "no run is given")
    folder = folder_here(run.model)
    if folder is None and not may_be_fetched(run.model):
        return fail(name, "SF718", f"{run.model}: no such folder", is_fatal=True, where=_locate_settings(context),
                     fix="Give the folder of a model, or a name that the hub knows.")  # fmt: skip
    if folder is None:
        return not_applicable(name, f"{run.model} is not here yet: it is fetched when the run starts")
    try:
        weights = weights_of(folder)
    except ValueError as error:
        is_fatal = Path(run.model).is_dir()  # a cached model may be fetched again in another version
        return fail(name, "SF718", str(error), is_fatal=is_fatal, where=_locate_settings(context))
    if weights is None:
        return not_applicable(name, f"no safetensors files in {run.model}")
    return ok(name, f"{weights.parameters / 1e9:.2f} G parameters, {weights.bytes / GIB:.1f} GiB, files are whole")


def host_memory(context: CheckContext) -> Check:
    """Check the least that a run must hold in the memory of this machine against what is free."""
    name, run = "host memory", context.run
    if run is None:
        return not_applicable(name, "no run is given")
    if (context.is_on_gpus or run.device == "cuda") and run.offload is None and not _has_checkpoint_copy(run):
        return not_applicable(name, "what is trained lies on the GPUs")
    weights = _read_weights(context)
    if weights is None:
        return not_applicable(name, "the size of the model is not known")
    free = context.machine.memory_bytes.get("available")
    if free is None:
        return not_applicable(name, context.machine.unknown.get("memory_bytes", "not known"))
    memory = context.machine.memory_bytes
    free += memory.get("swap_total", 0) - memory.get("swap_used", 0)
    free = min(free, memory.get("limit_left", free))
    least, why = _estimate_host_bytes(context, weights)
    summary = f"at least {least / GIB:.1f} GiB of {free / GIB:.1f} GiB that are free: {why}"
    if least > free:
        return fail(name, "SF716", f"this run needs {summary}", needed_bytes=least, free_bytes=free,
                     where=_locate_settings(context), is_fatal=True)  # fmt: skip
    return ok(name, summary)


def device_memory(context: CheckContext) -> Check:
    """Check the least that a rank must hold on its GPU between two steps against the smallest GPU of the run."""
    name, run = "device memory", context.run
    if run is None or not context.is_on_gpus:
        return not_applicable(name, "no run is given" if run is None else "the run does not use GPUs")
    weights, sizes = _read_weights(context), [card.memory_bytes for card in select_gpus(context) if card.memory_bytes]
    if weights is None or not sizes:
        return not_applicable(name, "the size of the model is not known" if weights is None else "no GPU tells its own")
    least, why = _estimate_device_bytes(run, weights)
    summary = f"at least {least / GIB:.1f} GiB of the {min(sizes) / GIB:.1f} GiB of a GPU: {why}"
    if least > min(sizes):
        return fail(name, "SF719", f"each rank needs {summary}", needed_bytes=least, gpu_bytes=min(sizes),
                     where=_locate_settings(context), is_fatal=True, fix=PLAN_IT)  # fmt: skip
    return ok(name, f"{summary}; `surefoot plan` adds what a step needs")


def _estimate_device_bytes(run: RunConfig, weights: Weights) -> tuple[int, str]:
    """Return (the least bytes that a rank keeps on its GPU, their contents in words).

    Counts weights and moments, without gradients and activations. Full fine-tuning with offload keeps nothing there.
    """
    ranks = run.nproc_per_node * run.nnodes
    shard_ranks = ranks // run.dp_replicate_size
    experts = run.expert_parallel_size if isinstance(run.expert_parallel_size, int) else ranks
    expert_ranks = min(experts, shard_ranks)  # the share of experts is unknown, so all weights count as experts
    parameters, summary = weights.parameters, f"{weights.parameters / 1e9:.2f} G parameters"
    weight_ranks = shard_ranks if run.zero_stage == 3 else expert_ranks
    if run.tuning == "full":
        if run.offload is not None:
            return 0, "all of them are offloaded"
        moments = parameters * MOMENTS_BYTES // (shard_ranks if run.zero_stage else expert_ranks)
        return parameters * FP32_BYTES // weight_ranks + moments, f"{summary} with AdamW's moments"
    if run.offload is not None and run.zero_stage == 3:
        return 0, "all of them are offloaded"
    return parameters * (FP32_BYTES if run.dtype == "float32" else HALF_BYTES) // weight_ranks, summary


def _estimate_host_bytes(context: CheckContext, weights: Weights) -> tuple[int, str]:
    """Return (the least bytes that all ranks of this machine hold between two steps, their contents in words).

    Activations come on top. The copy of a checkpoint stays once the first was started. Pinned memory is allocated in
    powers of two.
    """
    run = context.run
    assert run is not None
    ranks, local_ranks = run.nproc_per_node * run.nnodes, run.nproc_per_node
    is_full = run.tuning == "full"
    shard_ranks = ranks // run.dp_replicate_size
    """Number of ranks that share one copy of the sharded state."""
    weight_bytes = FP32_BYTES if run.dtype in ("auto", "float32") and run.offload is None else HALF_BYTES
    parameters = weights.parameters
    summary = f"{parameters / 1e9:.2f} G parameters"
    experts = run.expert_parallel_size if isinstance(run.expert_parallel_size, int) else ranks
    # Each rank has a part of the experts. Their share of the model is unknown, so all weights count as experts.
    expert_ranks = min(experts, shard_ranks)
    state_parts = shard_ranks if run.zero_stage else 1
    # Replicas are copied once.
    copy_bytes = parameters * CHECKPOINT_BYTES * min(local_ranks, state_parts) // state_parts
    copy_bytes = copy_bytes if _has_checkpoint_copy(run) else 0
    if run.offload is not None and run.zero_stage < 3 and not is_full:
        summary += f", which each of {_format_ranks(local_ranks)} reads there before its GPU gets them"
        return parameters * weight_bytes * local_ranks // expert_ranks, summary
    if run.offload is not None:  # host memory holds the sharded training state, or frozen weights with stage 3
        state = parameters * (FP32_BYTES + STATE_BYTES if is_full else weight_bytes)
        pinned = (FP32_BYTES, FP32_BYTES) if is_full else (weight_bytes,)  # weights, gradients
        rounding = sum(weights.rounding_bytes(shard_ranks, size) for size in pinned)
        copy_note = f", and {copy_bytes / GIB:.1f} GiB that checkpoints are copied to" if copy_bytes else ""
        return (
            state * local_ranks // shard_ranks + rounding * local_ranks + copy_bytes,
            f"the state of {summary}, offloaded{copy_note}",
        )
    if context.is_on_gpus or run.device == "cuda":
        rounding = CHECKPOINT_BYTES // FP32_BYTES * weights.rounding_bytes(state_parts, FP32_BYTES)
        return copy_bytes + rounding * min(local_ranks, state_parts), f"what checkpoints of {summary} are copied to"
    summary += f" on {_format_ranks(local_ranks)}"
    total = (
        parameters
        * (FP32_BYTES if is_full else weight_bytes)
        * local_ranks
        // (shard_ranks if run.zero_stage == 3 else expert_ranks)
    )
    if is_full:
        total += parameters * STATE_BYTES * local_ranks // (shard_ranks if run.zero_stage else expert_ranks)
        summary += " with their gradients and AdamW's moments" + (", and the copy of checkpoints" if copy_bytes else "")
    return total + copy_bytes, summary


def _has_checkpoint_copy(run: RunConfig) -> bool:
    """Return whether steps follow a first checkpoint, whose buffer stays allocated. Adapters are too small to count."""
    saves_again = run.save_steps and (run.max_steps is None or run.max_steps > run.save_steps)
    return run.tuning == "full" and bool(saves_again)


def checkpoints(context: CheckContext) -> Check:
    """Check the size of what a run will write against what is free."""
    name, run, disk = "checkpoints", context.run, context.machine.output
    if run is None or disk is None:
        return not_applicable(name, "no run is given" if run is None else "output_dir is not known")
    num_checkpoints, count_text = _count_new_checkpoints(run)
    files = num_checkpoints * (FILES + FILES_OF_A_RANK * run.nproc_per_node * run.nnodes)
    if LEAST_INODES <= disk.free_inodes < files:  # `storage` reports fewer free inodes for any run
        return fail(name, "SF711", f"{count_text} are {files} files, and {disk.free_inodes} may still be made at "
                     f"{disk.path}", needed_files=files, free_inodes=disk.free_inodes,
                     where=_locate_settings(context, "save_total_limit", "save_steps"))  # fmt: skip
    weights = _read_weights(context)
    if weights is None:
        return not_applicable(name, "the size of the model is not known")
    if run.tuning != "full":
        return not_applicable(name, "adapters are small")
    checkpoint_bytes = weights.parameters * CHECKPOINT_BYTES
    summary = (
        f"{count_text} of {checkpoint_bytes / GIB:.1f} GiB and a model of {weights.bytes / GIB:.1f} GiB, "
        f"{disk.free_bytes / GIB:.1f} GiB free at {disk.path}"
    )
    policy_bytes = 0
    if vllm_settings(run) is not None:  # each policy is written to output_dir for the server
        is_float32 = run.dtype == "float32" or (run.dtype == "auto" and not context.is_on_gpus)
        policy_bytes = weights.parameters * (FP32_BYTES if is_float32 else HALF_BYTES)
        summary += f"; what the server is sent is {policy_bytes / GIB:.1f} GiB more"
    needed = num_checkpoints * checkpoint_bytes + weights.bytes + policy_bytes
    if needed > disk.free_bytes:
        first_bytes = min(num_checkpoints, 1) * checkpoint_bytes
        is_begun = bool(_list_checkpoints(run))
        return fail(
            name,
            "SF717",
            summary,
            is_fatal=not is_begun and max(first_bytes, weights.bytes) > disk.free_bytes,
            needed_bytes=needed,
            free_bytes=disk.free_bytes,
            where=_locate_settings(context, "save_total_limit"),
        )
    return ok(name, summary)


def _count_new_checkpoints(run: RunConfig) -> tuple[int, str]:
    """Return (the largest number of further checkpoints at a time, the same in words)."""
    num_planned = -(-run.max_steps // run.save_steps) if run.save_steps and run.max_steps is not None else None
    # The newest is written before the oldest is deleted. If all are kept and their number is unknown, count two.
    num_checkpoints = run.save_total_limit + 1 if run.save_total_limit else num_planned or 2
    num_checkpoints = 0 if not run.save_steps else min(num_checkpoints, num_planned or num_checkpoints)
    num_checkpoints = max(num_checkpoints - len(_list_checkpoints(run)), min(num_checkpoints, 1))
    keeps_all = run.save_steps and not run.save_total_limit and num_planned is None
    return num_checkpoints, f"{num_checkpoints} checkpoint{'s' * (num_checkpoints != 1)}" + (
        " at the least, since all are kept," if keeps_all else ""
    )


def _list_checkpoints(run: RunConfig) -> list[Path]:
    return list((run.run_folder / "checkpoints").glob("step-*"))


def rollout_server(context: CheckContext) -> Check:
    """Check the memory that a vLLM server and training need on the GPUs that they share."""
    name, run = "rollout server", vllm_settings(context.run)
    if run is None:
        return not_applicable(name, "no run with a vLLM server is given")
    if not context.is_on_gpus:
        return not_applicable(name, "it works on the CPU")
    visible = context.machine.environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else [str(number) for number in range(context.gpus)]
    training_devices = {device.strip() for device in devices[: run.nproc_per_node]}
    shared_devices = training_devices & {
        device.strip() for device in (run.vllm_devices or ",".join(devices)).split(",")
    }
    if run.vllm_server is not None or not shared_devices:
        return ok(name, "on GPUs of its own, as far as can be seen from here")
    # A server that sleeps takes its share too, at its start and at each rollout, while the model is on the GPU.
    share = memory_share(run.vllm_args)
    summary = (
        f"the server takes {share:.0%} of each of its GPUs, and training uses {', '.join(sorted(shared_devices))} of "
        "them"
    )
    conflict = _find_memory_conflict(context, run, share)
    if conflict:
        return fail(name, "SF721", f"{summary}: {conflict}", is_fatal=True, share=share, fix=PLAN_IT,
                     where=_locate_settings(context, "vllm_args", "rollout_engine"))  # fmt: skip
    if share > MOST_SHARED:
        return fail(name, "SF721", summary, share=share, where=_locate_settings(context, "vllm_args", "rollout_engine"))
    return ok(name, summary)


def rollout_precision(context: CheckContext) -> Check:
    """Check that a server does not compute in float16 a model that was trained in bfloat16."""
    name, run = "rollout precision", vllm_settings(context.run)
    if run is None or not run.starts_server:
        return not_applicable(name, "no run that starts a vLLM server is given")
    requested, config = value_of(run.vllm_args, "--dtype"), _read_text_config(folder_here(run.model)) or {}
    trained_dtype = config.get("dtype", config.get("torch_dtype"))
    if requested in ("float16", "half") and trained_dtype == "bfloat16":
        return fail(
            name,
            "SF720",
            f"vllm_args say --dtype {requested}, and the model's config.json says bfloat16, whose numbers reach beyond "
            "65504: activations overflow, and completions are not those of what is trained",
            fix="Leave --dtype out: the server computes as training does.",
            dtype=requested,
            model_dtype=trained_dtype,
            where=_locate_settings(context, "vllm_args"),
        )
    return ok(name, requested or "as training computes")


def _find_memory_conflict(context: CheckContext, run: RolloutConfig, share: float) -> str:
    """Return why a server's share of a GPU does not fit beside training, or an empty string.

    Compares lower bounds of both, so an empty string does not mean that they fit.
    """
    weights, sizes = _read_weights(context), [card.memory_bytes for card in select_gpus(context) if card.memory_bytes]
    model_parallel_size = tensor_parallel(run.vllm_args) * pipeline_parallel(run.vllm_args)
    server_gpus = len(run.vllm_devices.split(",")) if run.vllm_devices is not None else context.gpus
    if model_parallel_size > server_gpus:
        return f"it is cut over {model_parallel_size} GPUs, and has {server_gpus}"
    is_smaller = any(value_of(run.vllm_args, name) is not None for name in SMALLER)
    if weights is None or not sizes or is_smaller:
        return ""
    gpu_bytes, weight_bytes = min(sizes), weights.parameters * HALF_BYTES // model_parallel_size
    if weight_bytes > share * gpu_bytes:
        return (
            f"its part of the weights are {weight_bytes / GIB:.1f} GiB, and its share {share * gpu_bytes / GIB:.1f} GiB"
        )
    least, _ = _estimate_device_bytes(run, weights)
    if least + share * gpu_bytes > gpu_bytes:  # sleep mode frees its share, but not while it generates
        return (
            f"{share * gpu_bytes / GIB:.1f} GiB and the {least / GIB:.1f} GiB that training keeps there are more than "
            f"the {gpu_bytes / GIB:.1f} GiB of a GPU"
        )
    return ""


def context(check_context: CheckContext) -> Check:
    """Check the longest sequence of a run against the number of positions of the model."""
    name, run = "context", check_context.run
    if run is None:
        return not_applicable(name, "no run is given")
    max_positions = longest_context(_read_text_config(folder_here(run.model)) or {})
    if max_positions is None:
        return not_applicable(name, "the model's config.json is not here, or names no max_position_embeddings")
    longest, summary = run.max_length, f"samples of up to max_length={run.max_length} tokens"
    settings = ["max_length"]
    if isinstance(run, RolloutConfig):
        longest = run.max_row_tokens + run.max_completion_length
        summary = f"a prompt of {run.max_row_tokens} tokens and a completion of {run.max_completion_length}"
        settings = ["max_prompt_length", "max_completion_length"]
    room = run.max_row_tokens - TEXT_BESIDE_IMAGES_TOKENS
    most_pixels, side = _read_image_limits(run)
    tokens = most_pixels // side**2
    if tokens > room and run.max_pixels is not None:
        return fail(name, "SF738", f"an image of max_pixels={run.max_pixels} is up to {tokens} tokens, and {summary} "
                     "hold none of them; images are never cut", image_tokens=tokens, room=room,
                     fix=f"Lower max_pixels to {max(1, room) * side**2} or less, or raise {settings[0]}.",
                     where=_locate_settings(check_context, "max_pixels", *settings))  # fmt: skip
    if longest > max_positions:
        return fail(name, "SF738", f"{summary}, and the model has positions for {max_positions}", longest=longest,
                     max_position_embeddings=max_positions,
                     where=_locate_settings(check_context, *settings))  # fmt: skip
    image_note = ""
    if tokens > room:
        image_note = (
            f"; by the model's own {most_pixels} pixels an image may be up to {tokens} tokens: rows that do not fit "
            "are left out and named, and max_pixels makes images smaller"
        )
    return ok(name, f"{summary}; the model has positions for {max_positions}{image_note}")


def _read_image_limits(run: RunConfig) -> tuple[int, int]:
    """Return (most pixels of an image, pixels of a token's side); (0, 1) for a model that reads no images.

    The run's max_pixels, or the processor's under any of its names: max_pixels, size.longest_edge, size.max_pixels.
    """
    folder = folder_here(run.model)
    try:
        vision = _read_json(folder / "config.json")["vision_config"] if folder is not None else None
        side = int(vision["patch_size"]) * int(vision.get("spatial_merge_size", 2)) if vision is not None else 0
        if folder is None or side < 1:
            return 0, 1
        if run.max_pixels is not None:
            return run.max_pixels, side
        processor = _read_json(folder / "preprocessor_config.json")
        size = processor.get("size") or {}
        return int(processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 0), side
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, 1


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def _read_text_config(folder: Path | None) -> dict[str, Any] | None:
    """Return the part of config.json about the language model, or None if it cannot be read."""
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return dict(config.get("text_config", config))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _format_ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _read_weights(context: CheckContext) -> Weights | None:
    """Return the model's weights, or None if they are not here or damaged, which `model` reports."""
    assert context.run is not None
    folder = folder_here(context.run.model)
    try:
        return weights_of(folder) if folder is not None else None
    except ValueError:
        return None


def _locate_settings(context: CheckContext, *names: str) -> str:
    assert context.loaded is not None
    return context.loaded.where(*(names or ("model",)))


CHECKS = (devices, model, device_memory, host_memory, checkpoints, rollout_server, rollout_precision, context)
