"""Choice of the expert-parallel size for `auto`: a few steps are timed with each possible size.

The fastest size depends on the network between the ranks, the number of tokens and the number of experts, so it is
measured and not guessed. Losses are the same with any of them.
"""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from surefoot.config import LoadedConfig, RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.sampler import Position, StepBatch
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import World
from surefoot.errors import ConfigError, ModelError
from surefoot.methods.base import BatchTotals, TrainContext
from surefoot.models.build import meta_model
from surefoot.models.expert_layouts import can_be_shared_out, experts_of
from surefoot.system.allocators import is_out_of_memory
from surefoot.training.step import NotFinite, counts_of, train_step
from surefoot.training.train_setup import build_train_context, sharding_of

WARMUP_STEPS = 1
TIMED_STEPS = 3

Seconds = dict[int, float | None]
"""Seconds of a step, by size; None if it did not fit into memory."""
Batches = Callable[[Position], tuple[StepBatch, list[MicroBatch]]]


def choose_expert_parallel(
    config: RunConfig, base: Path, batches: Batches, position: Position, ranks: World, device: torch.device
) -> tuple[RunConfig, Seconds]:
    """Return the config with a number for `expert_parallel_size: auto`, and the seconds a step took with each size.

    Each size trains a model of its own on the steps from `position`; it is discarded afterwards. Nothing is measured
    if only one size is possible. Collective. Raises: ModelError if the memory is too small for each of them.
    """
    if config.expert_parallel_size != "auto":
        return config, {}
    sizes = possible_sizes(config, base, ranks.size)
    if len(sizes) == 1:
        return _set_size(config, 1), {}
    seconds: Seconds = {}
    for size in sizes:
        seconds[size] = _step_time_s(_set_size(config, size), base, batches, position, ranks, device)
        gc.collect()  # sharded modules contain reference cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    fitting = {size: step_time_s for size, step_time_s in seconds.items() if step_time_s is not None}
    if not fitting:
        raise ModelError(
            f"expert_parallel_size: auto: the accelerator's memory is too small with each of {sizes}. "
            "Set zero_stage: 3, gradient_checkpointing: true or a smaller per_device_train_batch_size."
        )
    return _set_size(config, min(fitting, key=lambda size: fitting[size])), seconds


def check_experts(loaded: LoadedConfig, base: Path) -> None:
    """Raise ConfigError if `expert_parallel_size` does not fit the model's experts. Reads no weights."""
    size = loaded.run.expert_parallel_size
    if size == "auto" or size == 1:
        return
    counts = _read_expert_counts(base)
    where = loaded.where("expert_parallel_size")
    if not counts:
        raise ConfigError(
            f"expert_parallel_size={size}, but {loaded.run.model} has no experts that ranks can share. "
            f"Set expert_parallel_size: 1 ({where})."
        )
    if any(count % size for count in counts):
        fitting = ", ".join(str(n) for n in range(1, min(counts) + 1) if not any(count % n for count in counts))
        raise ConfigError(
            f"expert_parallel_size={size} does not divide the {' or '.join(map(str, sorted(counts)))} experts of "
            f"{loaded.run.model}. Use one of {fitting}, or auto ({where})."
        )


def _read_expert_counts(base: Path) -> set[int]:
    """Return the numbers of experts in the layers of a model, where ranks can share them."""
    return {experts_of(module) for module in meta_model(base).modules() if can_be_shared_out(module)}


def possible_sizes(config: RunConfig, base: Path, num_ranks: int) -> list[int]:
    """Return the values of `expert_parallel_size` that divide both the ranks and all the experts of a model."""
    counts = _read_expert_counts(base)
    ranks = num_ranks // config.dp_replicate_size
    most = min(counts, default=1)
    sizes = [size for size in range(1, most + 1) if all(number % size == 0 for number in (ranks, *counts))]
    return [size for size in sizes if _can_be_sharded(_set_size(config, size), num_ranks)]


def _can_be_sharded(config: RunConfig, num_ranks: int) -> bool:
    """Return whether its other settings allow sharding: state that each rank has in full is not offloaded."""
    try:
        Layout.of(config, num_ranks)
    except ConfigError:
        return False
    return True


def describe_choice(config: RunConfig, seconds: Seconds) -> str:
    """Return the measured step times as a text for the user."""
    figures = ", ".join(
        f"{size}: {'out of memory' if step_time_s is None else f'{step_time_s:.3f} s a step'}"
        for size, step_time_s in seconds.items()
    )
    return f"expert_parallel_size: auto is {config.expert_parallel_size} ({figures})"


def _set_size(config: RunConfig, size: int) -> RunConfig:
    return config.model_copy(update={"expert_parallel_size": size})


def _step_time_s(
    config: RunConfig, base: Path, batches: Batches, position: Position, ranks: World, device: torch.device
) -> float | None:
    """Return the median time of a step, by the slowest rank; None if a rank's memory was too small.

    Collective: after each part all ranks report whether it fitted. A rank that ran out of memory between the others'
    collectives leaves them waiting there until their deadline, which ends the run on NCCL.
    """
    sharding = sharding_of(config, ranks, device)
    step_time_s = _measure_step_s(
        partial(build_train_context, config, base, ranks, device, sharding), batches, position, ranks
    )
    if sharding is not None:  # not if a rank fails: leaving waits for the other ranks
        sharding.meshes.leave()
    return step_time_s


def _measure_step_s(
    build: Callable[[], TrainContext], batches: Batches, position: Position, ranks: World
) -> float | None:
    train_contexts: list[TrainContext] = []
    if _time_slowest_rank(lambda: train_contexts.append(build()), ranks) is None:
        return None
    seconds: list[float] = []
    for _ in range(WARMUP_STEPS + TIMED_STEPS):
        step_batch, local_batches = ranks.run_or_raise_on_all(partial(batches, position))
        totals = BatchTotals.of(ranks.sum(counts_of(local_batches)))
        on_device = [batch.to(train_contexts[0].device) for batch in local_batches]
        taken_s = _time_slowest_rank(partial(_take_step, on_device, totals, train_contexts[0]), ranks)
        if taken_s is None:
            return None
        seconds.append(taken_s)
        position = step_batch.next_position
    return statistics.median(seconds[WARMUP_STEPS:])


def _take_step(batches: list[MicroBatch], totals: BatchTotals, train_context: TrainContext) -> None:
    with suppress(NotFinite):  # the run itself reports it, with its rows
        train_step(batches, totals, train_context, learning_rate=0.0, max_grad_norm=0.0)


def _time_slowest_rank(work: Callable[[], object], ranks: World) -> float | None:
    """Return the seconds of the slowest rank; None if the memory of any was too small. Collective: one gather."""
    began = time.perf_counter()
    taken_s: float | None
    try:
        work()
        taken_s = time.perf_counter() - began
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        taken_s = None
    by_rank: list[float | None] = ranks.gather(taken_s)
    fitting = [rank_s for rank_s in by_rank if rank_s is not None]
    return max(fitting) if len(fitting) == len(by_rank) else None
