"""Checks of the model's files, and of the least memory that a run needs against what this machine has.

The estimates are lower bounds from the headers of the model's files, because a run that is refused must be one that
cannot work, and because `surefoot train` loads no torch before it starts its ranks. `surefoot plan` forecasts the peak.
"""

from dataclasses import dataclass
from pathlib import Path

from surefoot.config import RunConfig
from surefoot.config.optimizers import STATE_BYTES
from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.diagnostics.preflight.gpus import select_gpus
from surefoot.errors import ModelError
from surefoot.models.model_size import Weights, weights_of
from surefoot.models.resolve_model import folder_here, may_be_fetched

GIB = 1 << 30
FP32_BYTES, HALF_BYTES = 4, 2

PLAN_IT = (
    "`surefoot plan` names settings that fit: zero_stage: 3, offload: cpu, expert_parallel_size, tuning: lora, or more "
    "GPUs."
)


def read_weights(run: RunConfig) -> Weights | None:
    """Return the model's weights, or None if they are not here or cannot be read, which `check_model` reports."""
    folder = folder_here(run.model)
    try:
        return weights_of(folder) if folder is not None else None
    except (ValueError, ModelError):
        return None


def require_weights(run: RunConfig) -> Weights:
    """Return the model's weights. Raises: NotApplicable if they are not here or damaged."""
    weights = read_weights(run)
    if weights is None:
        raise NotApplicable("the size of the model is unknown")
    return weights


def element_bytes(run: RunConfig, *, is_on_gpus: bool) -> int:
    """Return the bytes of an element of the weights, as training computes with them."""
    return FP32_BYTES if run.dtype == "float32" or (run.dtype == "auto" and not is_on_gpus) else HALF_BYTES


def format_ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def check_model(context: CheckContext) -> Result:
    """Check that the files of a model that is on this machine are complete."""
    run, where = context.require_run(), context.where("model")
    folder = folder_here(run.model)
    if folder is None and not may_be_fetched(run.model):
        fix = "Give the folder of a model, or a name that the hub knows."
        return fail("SF718", f"{run.model}: no such folder", is_fatal=True, fix=fix, where=where)
    if folder is None:
        raise NotApplicable(f"{run.model} is not here yet: the run fetches it when it starts")
    if not (folder / "config.json").exists():
        raise NotApplicable("it is no model folder")
    is_fatal = Path(run.model).is_dir()  # a cached model may be fetched again in another version
    try:
        weights = weights_of(folder)
    except ValueError as error:
        return fail("SF718", str(error), is_fatal=is_fatal, where=where)
    except ModelError as error:
        raise NotApplicable("the model would be refused") from error
    if weights is None:
        raise NotApplicable(f"no safetensors files in {run.model}")
    stored = f" in {weights.quantization}, which is read as a float type" if weights.quantization else ""
    size = f"{weights.parameters / 1e9:.2f} G parameters, {weights.bytes / GIB:.1f} GiB{stored}"
    return ok(f"{size}, files are complete")


def check_device_memory(context: CheckContext) -> Result:
    """Check the least that a rank must hold on its GPU between two steps against the smallest GPU of the run."""
    run = context.require_run()
    if not context.is_on_gpus:
        raise NotApplicable("the run does not use GPUs")
    weights, gpu_bytes = require_weights(run), smallest_gpu_bytes(context)
    if gpu_bytes is None:
        raise NotApplicable("the memory of the GPUs is unknown")
    least, why = least_device_bytes(run, weights)
    summary = f"at least {least / GIB:.1f} GiB of the {gpu_bytes / GIB:.1f} GiB of a GPU: {why}"
    if least > gpu_bytes:
        cause, where = f"each rank needs {summary}", context.where("model")
        return fail("SF719", cause, is_fatal=True, fix=PLAN_IT, needed_bytes=least, gpu_bytes=gpu_bytes, where=where)
    return ok(f"{summary}; `surefoot plan` adds what a step needs")


def smallest_gpu_bytes(context: CheckContext) -> int | None:
    """Return the memory of the smallest GPU of the run, or None if it is unknown."""
    return min((card.memory_bytes for card in select_gpus(context) if card.memory_bytes), default=None)


def check_host_memory(context: CheckContext) -> Result:
    """Check the least that a run must hold in the memory of this machine against what is free."""
    run, machine = context.require_run(), context.machine
    is_on_gpus = context.is_on_gpus or run.device == "cuda"
    if is_on_gpus and run.offload is None and not _has_checkpoint_copy(run):
        raise NotApplicable("the training state is on the GPUs")
    weights, memory = require_weights(run), machine.memory_bytes
    if "available" not in memory:
        raise NotApplicable(machine.unknown.get("memory_bytes", "unknown"))
    free = memory["available"] + memory.get("swap_total", 0) - memory.get("swap_used", 0)
    free = min(free, memory.get("limit_left", free))
    least, why = _least_host_bytes(run, weights, is_on_gpus=is_on_gpus)
    summary = f"at least {least / GIB:.1f} GiB of {free / GIB:.1f} GiB that are free: {why}"
    if least > free:
        cause, where = f"this run needs {summary}", context.where("model")
        return fail("SF716", cause, is_fatal=True, needed_bytes=least, free_bytes=free, where=where)
    return ok(summary)


@dataclass(frozen=True)
class _Shards:
    """Numbers of ranks that share one copy of a part of the training state.

    The share of the experts in the model is unknown, so all weights count as experts.
    """

    sharded: int
    """Ranks that share what is sharded."""
    weights: int
    state: int
    """Ranks that share gradients and moments."""

    @staticmethod
    def of(run: RunConfig) -> "_Shards":
        ranks = run.nproc_per_node * run.nnodes
        sharded = ranks // run.dp_replicate_size
        experts = run.expert_parallel_size if isinstance(run.expert_parallel_size, int) else ranks
        unsharded = min(experts, sharded)
        return _Shards(
            sharded=sharded,
            weights=sharded if run.zero_stage == 3 else unsharded,
            state=sharded if run.zero_stage else unsharded,
        )


def least_device_bytes(run: RunConfig, weights: Weights) -> tuple[int, str]:
    """Return (the least bytes that a rank keeps on its GPU, their contents in words).

    Counts weights and moments, without gradients and activations.
    """
    if run.offload is not None and (run.tuning == "full" or run.zero_stage == 3):
        return 0, "all of them are offloaded"
    shards, parameters = _Shards.of(run), weights.parameters
    summary = f"{parameters / 1e9:.2f} G parameters"
    if run.tuning == "full":
        moments = int(parameters * STATE_BYTES[run.optim]) // shards.state
        return parameters * FP32_BYTES // shards.weights + moments, f"{summary} with the state of {run.optim}"
    return parameters * element_bytes(run, is_on_gpus=True) // shards.weights, summary


def _least_host_bytes(run: RunConfig, weights: Weights, *, is_on_gpus: bool) -> tuple[int, str]:
    """Return (the least bytes that all ranks of this machine hold between two steps, their contents in words).

    Activations come on top. The copy of a checkpoint stays once the first was started; replicas are copied once. Pinned
    memory is allocated in powers of two.
    """
    shards, local_ranks, parameters = _Shards.of(run), run.nproc_per_node, weights.parameters
    is_full, summary = run.tuning == "full", f"{parameters / 1e9:.2f} G parameters"
    copy_shards = shards.sharded if run.zero_stage else 1
    copied_shards = min(local_ranks, copy_shards)
    saved_bytes = FP32_BYTES + STATE_BYTES[run.optim]  # of a weight, or of its gradient, with the optimizer's state
    copy_bytes = int(parameters * saved_bytes) * copied_shards // copy_shards if _has_checkpoint_copy(run) else 0
    if run.offload is not None and run.zero_stage < 3 and not is_full:
        ranks = format_ranks(local_ranks)
        least = parameters * HALF_BYTES * local_ranks // shards.weights
        return least, f"{summary}, which each of {ranks} reads into host memory before its GPU"
    if run.offload is not None:  # host memory holds the sharded training state, or frozen weights with stage 3
        state = int(parameters * (FP32_BYTES + saved_bytes if is_full else HALF_BYTES))
        pinned = (FP32_BYTES, FP32_BYTES) if is_full else (HALF_BYTES,)  # weights, gradients
        rounding = sum(weights.rounding_bytes(shards.sharded, size) for size in pinned)
        copy_note = f", and {copy_bytes / GIB:.1f} GiB for the copy of checkpoints" if copy_bytes else ""
        least = state * local_ranks // shards.sharded + rounding * local_ranks + copy_bytes
        return least, f"the state of {summary}, offloaded{copy_note}"
    if is_on_gpus:
        rounding = int(saved_bytes / FP32_BYTES * weights.rounding_bytes(copy_shards, FP32_BYTES))
        return copy_bytes + rounding * copied_shards, f"the copy of checkpoints of {summary}"
    summary += f" on {format_ranks(local_ranks)}"
    weight_bytes = FP32_BYTES if is_full else element_bytes(run, is_on_gpus=False)
    least = parameters * weight_bytes * local_ranks // shards.weights + copy_bytes
    if is_full:
        least += int(parameters * saved_bytes) * local_ranks // shards.state
        copy_note = ", and the copy of checkpoints" if copy_bytes else ""
        summary += f" with their gradients and the state of {run.optim}{copy_note}"
    return least, summary


def _has_checkpoint_copy(run: RunConfig) -> bool:
    """Return whether steps follow a first checkpoint, whose buffer stays allocated. Adapters are too small to count."""
    return run.tuning == "full" and run.planned_checkpoints not in (0, 1)
