"""Checks of what a run asks for against what this machine has. Pure, but for the headers of the model's files."""

import json
from pathlib import Path
from typing import Any

from surefoot.config import RolloutConfig, RunConfig, vllm_settings
from surefoot.config.vllm_args import SMALLER, memory_share, pipeline_parallel, tensor_parallel, value_of
from surefoot.data.conversation import TEXT_BESIDE_IMAGES_TOKENS
from surefoot.diagnostics.preflight.check import Check, CheckContext, fail, not_applicable, ok
from surefoot.diagnostics.preflight.gpus import used
from surefoot.diagnostics.preflight.model_size import Weights, weights_of
from surefoot.diagnostics.preflight.system import LEAST_INODES
from surefoot.models.resolve_model import folder_here, longest_context, may_be_fetched

GIB = 1 << 30
FP32_BYTES, HALF_BYTES = 4, 2
STATE_BYTES, MOMENTS_BYTES = 12, 8
"""Of a trained parameter besides itself: a gradient and AdamW's two moments, in float32."""
CHECKPOINT_BYTES = 12
"""Of a trained parameter: itself and the two moments."""
FILES, FILES_OF_A_RANK = 8, 2
"""Of a checkpoint, folders counted."""

PLAN_IT = (
    "`surefoot plan` names settings that fit: zero_stage: 3, offload: cpu, expert_parallel_size, tuning: lora, or more "
    "GPUs."
)
MOST_SHARED = 0.7
"""Of a GPU, so that something is left to train with: a judgement, which `surefoot plan` makes exact."""


def devices(seen: CheckContext) -> Check:
    name, run, gpus = "devices", seen.run, seen.gpus
    if run is None:
        return ok(name, f"{gpus} GPUs") if gpus else not_applicable(name, "no GPU here, and no run is given")
    if run.device == "cuda" and not gpus:
        return fail(name, "SF715", "device=cuda, and no GPU is seen here", gpus=0,
                     fix="Set device: cpu, or run where GPUs are seen.",
                     CUDA_VISIBLE_DEVICES=seen.machine.environment.get("CUDA_VISIBLE_DEVICES", "not set"))  # fmt: skip
    if seen.is_on_gpus and run.nproc_per_node > gpus:
        return fail(name, "SF715", f"nproc_per_node={run.nproc_per_node}, and {gpus} GPUs are here", gpus=gpus,
                     fix=f"Set nproc_per_node: {gpus}.")  # fmt: skip
    if not seen.is_on_gpus:
        return ok(name, f"{_ranks(run.nproc_per_node)} on the CPU")
    return ok(name, f"{_ranks(run.nproc_per_node)} on {gpus} GPU{'s' if gpus > 1 else ''}")


def model(seen: CheckContext) -> Check:
    """Whether the files of a model that is on this machine are whole."""
    name, run = "model", seen.run
    if run is None:
        return not_applicable(name, "no run is given")
    folder = folder_here(run.model)
    if folder is None and not may_be_fetched(run.model):
        return fail(name, "SF718", f"{run.model}: no such folder", is_fatal=True, where=_where(seen),
                     fix="Give the folder of a model, or a name that the hub knows.")  # fmt: skip
    if folder is None:
        return not_applicable(name, f"{run.model} is not here yet: it is fetched when the run starts")
    try:
        weights = weights_of(folder)
    except ValueError as error:
        is_fatal = Path(run.model).is_dir()  # of what was fetched, the run may fetch another version
        return fail(name, "SF718", str(error), is_fatal=is_fatal, where=_where(seen))
    if weights is None:
        return not_applicable(name, f"no safetensors files in {run.model}")
    return ok(name, f"{weights.parameters / 1e9:.2f} G parameters, {weights.bytes / GIB:.1f} GiB, files are whole")


def host_memory(seen: CheckContext) -> Check:
    """The least that a run must hold in the memory of this machine, against what is free."""
    name, run = "host memory", seen.run
    if run is None:
        return not_applicable(name, "no run is given")
    if (seen.is_on_gpus or run.device == "cuda") and run.offload is None and not _trains_beside_copy(run):
        return not_applicable(name, "what is trained lies on the GPUs")
    weights = _weights(seen)
    if weights is None:
        return not_applicable(name, "the size of the model is not known")
    free = seen.machine.memory_bytes.get("available")
    if free is None:
        return not_applicable(name, seen.machine.unknown.get("memory_bytes", "not known"))
    memory = seen.machine.memory_bytes
    free += memory.get("swap_total", 0) - memory.get("swap_used", 0)
    free = min(free, memory.get("limit_left", free))
    least, why = _least_bytes(seen, weights)
    said = f"at least {least / GIB:.1f} GiB of {free / GIB:.1f} GiB that are free: {why}"
    if least > free:
        return fail(name, "SF716", f"this run needs {said}", needed_bytes=least, free_bytes=free, where=_where(seen),
                     is_fatal=True)  # fmt: skip
    return ok(name, said)


def device_memory(seen: CheckContext) -> Check:
    """The least that a rank must hold on its GPU between two steps, against the smallest one that the run uses."""
    name, run = "device memory", seen.run
    if run is None or not seen.is_on_gpus:
        return not_applicable(name, "no run is given" if run is None else "the run does not use GPUs")
    weights, sizes = _weights(seen), [card.memory_bytes for card in used(seen) if card.memory_bytes]
    if weights is None or not sizes:
        return not_applicable(name, "the size of the model is not known" if weights is None else "no GPU tells its own")
    least, why = _least_device_bytes(run, weights)
    said = f"at least {least / GIB:.1f} GiB of the {min(sizes) / GIB:.1f} GiB of a GPU: {why}"
    if least > min(sizes):
        return fail(name, "SF719", f"each rank needs {said}", needed_bytes=least, gpu_bytes=min(sizes),
                     where=_where(seen), is_fatal=True, fix=PLAN_IT)  # fmt: skip
    return ok(name, f"{said}; `surefoot plan` adds what a step needs")


def _least_device_bytes(run: RunConfig, weights: Weights) -> tuple[int, str]:
    """(what a rank keeps on its GPU at the least, of what): weights and moments; gradients and activations come on top.

    Of a model that is trained in full with offload nothing stays there.
    """
    ranks = run.nproc_per_node * run.nnodes
    sharing = ranks // run.dp_replicate_size
    experts = run.expert_parallel_size if isinstance(run.expert_parallel_size, int) else ranks
    spread = min(experts, sharing)  # how much of the model experts are is not known, so all of it is taken
    parameters, said = weights.parameters, f"{weights.parameters / 1e9:.2f} G parameters"
    of_weights = sharing if run.zero_stage == 3 else spread
    if run.tuning == "full":
        if run.offload is not None:
            return 0, "all of them are offloaded"
        moments = parameters * MOMENTS_BYTES // (sharing if run.zero_stage else spread)
        return parameters * FP32_BYTES // of_weights + moments, f"{said} with AdamW's moments"
    if run.offload is not None and run.zero_stage == 3:
        return 0, "all of them are offloaded"
    return parameters * (FP32_BYTES if run.dtype == "float32" else HALF_BYTES) // of_weights, said


def _least_bytes(seen: CheckContext, weights: Weights) -> tuple[int, str]:
    """(what all ranks of this machine must hold between two steps at the least, of what). Activations come on top.

    Once a checkpoint was begun its copy is there; pinned memory comes in powers of two.
    """
    run = seen.run
    assert run is not None
    ranks, here = run.nproc_per_node * run.nnodes, run.nproc_per_node
    is_full = run.tuning == "full"
    sharing = ranks // run.dp_replicate_size
    """Ranks that share one copy of what is sharded."""
    each = FP32_BYTES if run.dtype in ("auto", "float32") and run.offload is None else HALF_BYTES
    parameters = weights.parameters
    said = f"{parameters / 1e9:.2f} G parameters"
    experts = run.expert_parallel_size if isinstance(run.expert_parallel_size, int) else ranks
    # Of shared experts each rank has a part; how much of the model they are is not known, so all of it is taken.
    spread = min(experts, sharing)
    state_parts = sharing if run.zero_stage else 1
    copied = parameters * CHECKPOINT_BYTES * min(here, state_parts) // state_parts  # of the same parts one is copied
    copied = copied if _trains_beside_copy(run) else 0
    if run.offload is not None and run.zero_stage < 3 and not is_full:
        said += f", which each of {_ranks(here)} reads there before its GPU gets them"
        return parameters * each * here // spread, said
    if run.offload is not None:  # sharded training state lies in host memory, or frozen weights with stage 3
        state = parameters * (FP32_BYTES + STATE_BYTES if is_full else each)
        pinned = (FP32_BYTES, FP32_BYTES) if is_full else (each,)  # weights, gradients
        rounding = sum(weights.rounding_bytes(sharing, size) for size in pinned)
        also = f", and {copied / GIB:.1f} GiB that checkpoints are copied to" if copied else ""
        return state * here // sharing + rounding * here + copied, f"the state of {said}, offloaded{also}"
    if seen.is_on_gpus or run.device == "cuda":
        rounding = CHECKPOINT_BYTES // FP32_BYTES * weights.rounding_bytes(state_parts, FP32_BYTES)
        return copied + rounding * min(here, state_parts), f"what checkpoints of {said} are copied to"
    said += f" on {_ranks(here)}"
    total = parameters * (FP32_BYTES if is_full else each) * here // (sharing if run.zero_stage == 3 else spread)
    if is_full:
        total += parameters * STATE_BYTES * here // (sharing if run.zero_stage else spread)
        said += " with their gradients and AdamW's moments" + (", and the copy of checkpoints" if copied else "")
    return total + copied, said


def _trains_beside_copy(run: RunConfig) -> bool:
    """Whether steps follow a first checkpoint, whose place in memory is kept. Adapters are small."""
    saves_again = run.save_steps and (run.max_steps is None or run.max_steps > run.save_steps)
    return run.tuning == "full" and bool(saves_again)


def checkpoints(seen: CheckContext) -> Check:
    """What a run will write, against what is free."""
    name, run, disk = "checkpoints", seen.run, seen.machine.output
    if run is None or disk is None:
        return not_applicable(name, "no run is given" if run is None else "output_dir is not known")
    kept, counted = _kept_checkpoints(run)
    files = kept * (FILES + FILES_OF_A_RANK * run.nproc_per_node * run.nnodes)
    if LEAST_INODES <= disk.free_inodes < files:  # fewer are named whatever the run does
        return fail(name, "SF711", f"{counted} are {files} files, and {disk.free_inodes} may still be made at "
                     f"{disk.path}", needed_files=files, free_inodes=disk.free_inodes,
                     where=_where(seen, "save_total_limit", "save_steps"))  # fmt: skip
    weights = _weights(seen)
    if weights is None:
        return not_applicable(name, "the size of the model is not known")
    if run.tuning != "full":
        return not_applicable(name, "adapters are small")
    each = weights.parameters * CHECKPOINT_BYTES
    said = (
        f"{counted} of {each / GIB:.1f} GiB and a model of {weights.bytes / GIB:.1f} GiB, "
        f"{disk.free_bytes / GIB:.1f} GiB free at {disk.path}"
    )
    sent = 0
    if vllm_settings(run) is not None:  # each policy lies in output_dir for the server to read
        is_float32 = run.dtype == "float32" or (run.dtype == "auto" and not seen.is_on_gpus)
        sent = weights.parameters * (FP32_BYTES if is_float32 else HALF_BYTES)
        said += f"; what the server is sent is {sent / GIB:.1f} GiB more"
    needed = kept * each + weights.bytes + sent
    if needed > disk.free_bytes:
        one = min(kept, 1) * each
        is_begun = bool(_checkpoints_there(run))
        return fail(
            name,
            "SF717",
            said,
            is_fatal=not is_begun and max(one, weights.bytes) > disk.free_bytes,
            needed_bytes=needed,
            free_bytes=disk.free_bytes,
            where=_where(seen, "save_total_limit"),
        )
    return ok(name, said)


def _kept_checkpoints(run: RunConfig) -> tuple[int, str]:
    """(how many more there will be at a time, the same in words)."""
    ever = -(-run.max_steps // run.save_steps) if run.save_steps and run.max_steps is not None else None
    # The newest is written before the oldest goes; where all are kept and none knows how many, two at the least.
    kept = run.save_total_limit + 1 if run.save_total_limit else ever or 2
    kept = 0 if not run.save_steps else min(kept, ever or kept)
    kept = max(kept - len(_checkpoints_there(run)), min(kept, 1))
    keeps_all = run.save_steps and not run.save_total_limit and ever is None
    return kept, f"{kept} checkpoint{'s' * (kept != 1)}" + (" at the least, since all are kept," if keeps_all else "")


def _checkpoints_there(run: RunConfig) -> list[Path]:
    return list((run.run_folder / "checkpoints").glob("step-*"))


def rollout_server(seen: CheckContext) -> Check:
    """A vLLM server on the GPUs that train: what both of them want."""
    name, run = "rollout server", vllm_settings(seen.run)
    if run is None:
        return not_applicable(name, "no run with a vLLM server is given")
    if not seen.is_on_gpus:
        return not_applicable(name, "it works on the CPU")
    visible = seen.machine.environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else [str(number) for number in range(seen.gpus)]
    trains_on = {one.strip() for one in devices[: run.nproc_per_node]}
    shared = trains_on & {one.strip() for one in (run.vllm_devices or ",".join(devices)).split(",")}
    if run.vllm_server is not None or not shared:
        return ok(name, "on GPUs of its own, as far as can be seen from here")
    # A server that sleeps takes its share too, when it starts and at each rollout: then the model lies there.
    share = memory_share(run.vllm_args)
    said = f"the server takes {share:.0%} of each of its GPUs, and training uses {', '.join(sorted(shared))} of them"
    beside = _beside_training(seen, run, share)
    if beside:
        return fail(name, "SF721", f"{said}: {beside}", is_fatal=True, share=share, fix=PLAN_IT,
                     where=_where(seen, "vllm_args", "rollout_engine"))  # fmt: skip
    if share > MOST_SHARED:
        return fail(name, "SF721", said, share=share, where=_where(seen, "vllm_args", "rollout_engine"))
    return ok(name, said)


def rollout_precision(seen: CheckContext) -> Check:
    """Whether a server computes in float16 what was trained in bfloat16."""
    name, run = "rollout precision", vllm_settings(seen.run)
    if run is None or not run.starts_server:
        return not_applicable(name, "no run that starts a vLLM server is given")
    asked, said = value_of(run.vllm_args, "--dtype"), _text_config(folder_here(run.model)) or {}
    trained = said.get("dtype", said.get("torch_dtype"))
    if asked in ("float16", "half") and trained == "bfloat16":
        return fail(
            name,
            "SF720",
            f"vllm_args say --dtype {asked}, and the model's config.json says bfloat16, whose numbers reach beyond "
            "65504: activations overflow, and completions are not those of what is trained",
            fix="Leave --dtype out: the server computes as training does.",
            dtype=asked,
            model_dtype=trained,
            where=_where(seen, "vllm_args"),
        )
    return ok(name, asked or "as training computes")


def _beside_training(seen: CheckContext, run: RolloutConfig, share: float) -> str:
    """Why a server's share of a GPU does not do beside training, where that can be said: it is the least of both."""
    weights, sizes = _weights(seen), [card.memory_bytes for card in used(seen) if card.memory_bytes]
    cut = tensor_parallel(run.vllm_args) * pipeline_parallel(run.vllm_args)
    its_gpus = len(run.vllm_devices.split(",")) if run.vllm_devices is not None else seen.gpus
    if cut > its_gpus:
        return f"it is cut over {cut} GPUs, and has {its_gpus}"
    is_smaller = any(value_of(run.vllm_args, name) is not None for name in SMALLER)
    if weights is None or not sizes or is_smaller:
        return ""
    gpu, its_own = min(sizes), weights.parameters * HALF_BYTES // cut
    if its_own > share * gpu:
        return f"its part of the weights are {its_own / GIB:.1f} GiB, and its share {share * gpu / GIB:.1f} GiB"
    least, _ = _least_device_bytes(run, weights)
    if least + share * gpu > gpu:  # asleep it gives its share up, but not while it makes completions
        return (
            f"{share * gpu / GIB:.1f} GiB and the {least / GIB:.1f} GiB that training keeps there are more than the "
            f"{gpu / GIB:.1f} GiB of a GPU"
        )
    return ""


def context(seen: CheckContext) -> Check:
    """The longest sequence of a run, against what the model's positions were made for."""
    name, run = "context", seen.run
    if run is None:
        return not_applicable(name, "no run is given")
    most = longest_context(_text_config(folder_here(run.model)) or {})
    if most is None:
        return not_applicable(name, "the model's config.json is not here, or names no max_position_embeddings")
    longest, said = run.max_length, f"samples of up to max_length={run.max_length} tokens"
    settings = ["max_length"]
    if isinstance(run, RolloutConfig):
        longest = run.max_row_tokens + run.max_completion_length
        said = f"a prompt of {run.max_row_tokens} tokens and a completion of {run.max_completion_length}"
        settings = ["max_prompt_length", "max_completion_length"]
    room = run.max_row_tokens - TEXT_BESIDE_IMAGES_TOKENS
    most_pixels, side = _largest_image(run)
    tokens = most_pixels // side**2
    if tokens > room and run.max_pixels is not None:
        return fail(name, "SF738", f"an image of max_pixels={run.max_pixels} is up to {tokens} tokens, and {said} "
                     "hold none of them; images are never cut", image_tokens=tokens, room=room,
                     fix=f"Lower max_pixels to {max(1, room) * side**2} or less, or raise {settings[0]}.",
                     where=_where(seen, "max_pixels", *settings))  # fmt: skip
    if longest > most:
        return fail(name, "SF738", f"{said}, and the model has positions for {most}", longest=longest,
                     max_position_embeddings=most, where=_where(seen, *settings))  # fmt: skip
    of_images = ""
    if tokens > room:
        of_images = (
            f"; by the model's own {most_pixels} pixels an image may be up to {tokens} tokens: rows that do not fit "
            "are left out and named, and max_pixels makes images smaller"
        )
    return ok(name, f"{said}; the model has positions for {most}{of_images}")


def _largest_image(run: RunConfig) -> tuple[int, int]:
    """(most pixels, by the run or the model's processor; pixels of a token's side); (0, 1) where images are not read.

    Under the names that processors have for it: max_pixels, size.longest_edge, size.max_pixels.
    """
    folder = folder_here(run.model)
    try:
        vision = _json(folder / "config.json")["vision_config"] if folder is not None else None
        side = int(vision["patch_size"]) * int(vision.get("spatial_merge_size", 2)) if vision is not None else 0
        if folder is None or side < 1:
            return 0, 1
        if run.max_pixels is not None:
            return run.max_pixels, side
        processor = _json(folder / "preprocessor_config.json")
        size = processor.get("size") or {}
        return int(processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 0), side
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, 1


def _json(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def _text_config(folder: Path | None) -> dict[str, Any] | None:
    """Of config.json what is about the language model; None where there is none."""
    if folder is None:
        return None
    try:
        told = json.loads((folder / "config.json").read_text("utf-8"))
        return dict(told.get("text_config", told))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _weights(seen: CheckContext) -> Weights | None:
    """None where they are not here, or damaged: `model` says so."""
    assert seen.run is not None
    folder = folder_here(seen.run.model)
    try:
        return weights_of(folder) if folder is not None else None
    except ValueError:
        return None


def _where(seen: CheckContext, *names: str) -> str:
    assert seen.loaded is not None
    return seen.loaded.where(*(names or ("model",)))


CHECKS = (devices, model, device_memory, host_memory, checkpoints, rollout_server, rollout_precision, context)
