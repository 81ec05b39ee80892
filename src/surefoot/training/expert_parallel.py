"""`expert_parallel_size: auto`: a few steps with each size that is possible, and the fastest is kept.

Which is faster depends on the network between the ranks, on the number of tokens and on how many experts there are, so
it is measured and not guessed. Losses are the same with any of them.
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
from surefoot.models.experts import experts_of, is_fused_experts
from surefoot.training.step import NotFinite, counts_of, train_step
from surefoot.training.train_setup import build_learner, sharding_of

WARMUP_STEPS = 1
TIMED_STEPS = 3

Seconds = dict[int, float | None]
"""Of a step, by size; None where it did not fit into memory."""
Batches = Callable[[Position], tuple[StepBatch, list[MicroBatch]]]


def choose_expert_parallel(
    config: RunConfig, base: Path, batches: Batches, position: Position, ranks: World, device: torch.device
) -> tuple[RunConfig, Seconds]:
    """The config with a number for `expert_parallel_size: auto`, and the seconds a step took with each size.

    Each size trains a learner of its own on the steps from `position`, and is given up afterwards. Nothing is measured
    where only one size is possible. Collective. Raises: ModelError where the memory is too small for each of them.
    """
    if config.expert_parallel_size != "auto":
        return config, {}
    sizes = possible_sizes(config, base, ranks.size)
    if len(sizes) == 1:
        return _with(config, 1), {}
    seconds: Seconds = {}
    for size in sizes:
        seconds[size] = _step_time_s(_with(config, size), base, batches, position, ranks, device)
        gc.collect()  # sharded modules refer to themselves
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    fitting = {size: step_time_s for size, step_time_s in seconds.items() if step_time_s is not None}
    if not fitting:
        raise ModelError(
            f"expert_parallel_size: auto: the accelerator's memory is too small with each of {sizes}. "
            "Set zero_stage: 3, gradient_checkpointing: true or a smaller per_device_train_batch_size."
        )
    return _with(config, min(fitting, key=lambda size: fitting[size])), seconds


def check_experts(loaded: LoadedConfig, base: Path) -> None:
    """Raises: ConfigError where `expert_parallel_size` does not fit the model's experts. Reads no weights."""
    size = loaded.run.expert_parallel_size
    if size == "auto" or size == 1:
        return
    counts = _expert_counts(base)
    where = loaded.where("expert_parallel_size")
    if not counts:
        raise ConfigError(
            f"expert_parallel_size={size}, but {loaded.run.model} has no experts to share out. "
            f"Set expert_parallel_size: 1 ({where})."
        )
    if any(count % size for count in counts):
        fitting = ", ".join(str(n) for n in range(1, min(counts) + 1) if not any(count % n for count in counts))
        raise ConfigError(
            f"expert_parallel_size={size} does not divide the {' or '.join(map(str, sorted(counts)))} experts of "
            f"{loaded.run.model}. Use one of {fitting}, or auto ({where})."
        )


def _expert_counts(base: Path) -> set[int]:
    """How many experts the layers of a model have."""
    return {experts_of(module) for module in meta_model(base).modules() if is_fused_experts(module)}


def possible_sizes(config: RunConfig, base: Path, num_ranks: int) -> list[int]:
    """The values of `expert_parallel_size` that divide both the ranks and all the experts of a model."""
    counts = _expert_counts(base)
    ranks = num_ranks // config.dp_replicate_size
    most = min(counts, default=1)
    sizes = [size for size in range(1, most + 1) if all(number % size == 0 for number in (ranks, *counts))]
    return [size for size in sizes if _is_laid_out(_with(config, size), num_ranks)]


def _is_laid_out(config: RunConfig, num_ranks: int) -> bool:
    """Whether its other settings allow it: what each rank has whole is not offloaded."""
    try:
        Layout.of(config, num_ranks)
    except ConfigError:
        return False
    return True


def describe_choice(config: RunConfig, seconds: Seconds) -> str:
    """What was measured, for people."""
    figures = ", ".join(
        f"{size}: {'out of memory' if step_time_s is None else f'{step_time_s:.3f} s a step'}"
        for size, step_time_s in seconds.items()
    )
    return f"expert_parallel_size: auto is {config.expert_parallel_size} ({figures})"


def _with(config: RunConfig, size: int) -> RunConfig:
    return config.model_copy(update={"expert_parallel_size": size})


def _step_time_s(
    config: RunConfig, base: Path, batches: Batches, position: Position, ranks: World, device: torch.device
) -> float | None:
    """The median time of a step, by the slowest rank; None where a rank's memory was too small.

    Collective: after each part all ranks say whether it fitted. One that ran out of memory between the others'
    collectives leaves them waiting there until their deadline, which ends the run on NCCL.
    """
    sharding = sharding_of(config, ranks, device)
    step_time_s = _measured_s(partial(build_learner, config, base, ranks, device, sharding), batches, position, ranks)
    if sharding is not None:  # not where a rank fails: leaving waits for the others
        sharding.meshes.leave()
    return step_time_s


def _measured_s(build: Callable[[], TrainContext], batches: Batches, position: Position, ranks: World) -> float | None:
    learners: list[TrainContext] = []
    if _slowest_s(lambda: learners.append(build()), ranks) is None:
        return None
    seconds: list[float] = []
    for _ in range(WARMUP_STEPS + TIMED_STEPS):
        rows, step = _prepared_step(learners[0], batches, position)
        taken_s = _slowest_s(step, ranks)
        if taken_s is None:
            return None
        seconds.append(taken_s)
        position = rows.next
    return statistics.median(seconds[WARMUP_STEPS:])


def _slowest_s(work: Callable[[], object], ranks: World) -> float | None:
    """The seconds that the slowest rank took; None where the memory of any was too small. Collective: one gather."""
    began = time.perf_counter()
    taken_s: float | None
    try:
        work()
        taken_s = time.perf_counter() - began
    except torch.OutOfMemoryError:
        taken_s = None
    by_rank: list[float | None] = ranks.gather(taken_s)
    fitting = [one for one in by_rank if one is not None]
    return max(fitting) if len(fitting) == len(by_rank) else None


def _prepared_step(learner: TrainContext, batches: Batches, position: Position) -> tuple[StepBatch, Callable[[], None]]:
    """(the rows of a step, the step itself). Collective: two agreements."""
    rows, mine = learner.ranks.run_or_raise_on_all(lambda: batches(position))
    tokens, trained, weight = learner.ranks.sum(counts_of(mine))
    totals = BatchTotals(round(tokens), round(trained), weight)
    on_device = [batch.to(learner.device) for batch in mine]

    def step() -> None:
        with suppress(NotFinite):  # for the run to find, with its rows
            train_step(on_device, totals, learner, learning_rate=0.0, max_grad_norm=0.0)

    return rows, step
