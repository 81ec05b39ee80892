"""Loop over steps: batch, step, events, evaluation, checkpoints, stop signals. Nothing else.

All methods share it: where batches come from and what a loss is, a `Method` says.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import torch

from surefoot.config import RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.sampler import StepBatch
from surefoot.distributed.process_group import World
from surefoot.errors import DataError, StoppedOnFinding, SurefootError
from surefoot.events import BatchDescribed, Emit, Evaluated, StepEnded
from surefoot.methods.base import LAST_WAIT_S, BatchTotals, Interrupted, Method, TrainContext
from surefoot.methods.training_data import RunData
from surefoot.system.process import StopSignal
from surefoot.training.async_checkpoint import Saver
from surefoot.training.checkpoint import TrainState, checkpoint_folder, list_checkpoints
from surefoot.training.expert_load import ExpertLoadCounter
from surefoot.training.lr_schedule import learning_rate_at
from surefoot.training.memory_stats import peak_memory_bytes, sample_device_memory, sample_memory
from surefoot.training.nan_check import not_finite_finding
from surefoot.training.phases import Phases
from surefoot.training.step import NotFinite, StepResult, counts_of, train_step

MEMORY_SAMPLE_STEPS = 500
"""Number of steps between two memory samples: old events are overwritten."""


@dataclass(frozen=True)
class LoopContext:
    """Everything the loop works with, assembled by `trainer.py`."""

    config: RunConfig
    method: Method
    data: RunData
    total_steps: int | None
    """Number of steps; None if it depends on data that are not counted yet."""
    train_context: TrainContext
    phases: Phases
    emit: Emit
    saver: Saver
    expert_load_counter: ExpertLoadCounter
    """Expert load, reported for trained routers only."""
    code_files: Mapping[str, str]
    """SHA-256 of the files of the user's code, by path."""

    @property
    def ranks(self) -> World:
        return self.train_context.ranks

    def is_over(self, state: TrainState) -> bool:
        return self.config.is_over(state.step, state.epoch)

    def expected_steps(self, state: TrainState) -> int:
        """Return the expected number of steps of the whole run."""
        share = self.config.share_done(state.step, state.epoch)
        return self.total_steps or max(state.step, round(state.step / share))


def fit(
    loop: LoopContext, state: TrainState, stop: StopSignal
) -> tuple[TrainState, Literal["completed", "interrupted"]]:
    """Train from `state` to the end or to a stop signal; in both cases the last step is saved.

    Raises: StoppedOnFinding if the loss or a gradient is not finite; StorageError if the disk refuses a checkpoint.
    """
    config, first = loop.config, state.step + 1
    with stop.deferred():
        if state.evaluation_is_due:
            state = _evaluate(loop, state)
        while not loop.is_over(state):
            loop.phases.step = state.step + 1
            try:
                batch = _next_batch_or_save(loop, state, stop)
                if batch is None:
                    break
                epoch = state.epoch
                state = _run_step(loop, state, batch)
                stop.step_time_s = time.perf_counter() - batch.began
                on_device = sample_device_memory(loop.train_context.device, loop.ranks.rank, state.step)
                if on_device is not None:
                    loop.emit(on_device)
                if (state.step - first) % MEMORY_SAMPLE_STEPS == 0:
                    loop.emit(sample_memory(loop.train_context, state.step))
                is_last = loop.is_over(state)
                if is_last or config.evaluates_after(state.step, epoch, state.epoch):
                    state = _evaluate(loop, state)
            except DataError:  # in rows that are prepared only now; the training so far is saved
                _save_if_new(loop, state)
                raise
            if not is_last and config.saves_after(state.step, epoch, state.epoch):
                _save_state(loop, state)
            _report_saves(loop)
        stop.note_last_save()
        ended_early = not loop.is_over(state) or state.evaluation_is_due
        if ended_early or config.planned_checkpoints != 0:
            _save_if_new(loop, state)
    return state, "interrupted" if ended_early else "completed"


@dataclass(frozen=True)
class _AgreedBatch:
    """The global batch of a step, which every rank has its part of."""

    step_batch: StepBatch
    micro_batches: list[MicroBatch]
    """Part of this rank."""
    totals: BatchTotals
    began: float
    """Time when reading it began, in seconds."""


def _next_batch_or_save(loop: LoopContext, state: TrainState, stop: StopSignal) -> _AgreedBatch | None:
    """Run `_next_batch`; if rollouts end in a finding, save the training so far. Collective."""
    try:
        return _next_batch(loop, state, stop)
    except StoppedOnFinding:
        _save_if_new(loop, state)
        raise


def _next_batch(loop: LoopContext, state: TrainState, stop: StopSignal) -> _AgreedBatch | None:
    """Read this rank's part of the next step and agree on its size; return None if any rank received a stop signal.

    Collective: one sum of five numbers, and before it one of the stop signals if making batches takes long. Raises:
    DataError on all ranks if any could not read its rows.
    """
    if loop.method.agrees_to_stop_before_batches and loop.ranks.sum([stop.received is not None])[0]:
        return None
    began = time.perf_counter()
    step_batch: StepBatch | None = None
    micro_batches: list[MicroBatch] = []
    error: SurefootError | None = None
    try:
        # May be collective, so it precedes work that can fail on one rank alone.
        step_batch, micro_batches = loop.method.batches(state.position, state.step, state.epoch)
        loop.saver.raise_error()
    except Interrupted:
        return None
    except SurefootError as caught:
        if caught.is_agreed:
            raise
        error = caught
    local_counts = [*counts_of(micro_batches), stop.received is not None, error is not None]
    with loop.phases("collectives"):
        *counts, stops, errors = loop.ranks.sum(local_counts)
    if errors:
        loop.ranks.raise_failures(error)
    if stops:
        return None
    assert step_batch is not None
    loop.emit(_describe_batch(loop, state.step + 1, micro_batches))
    return _AgreedBatch(step_batch, micro_batches, BatchTotals.of(counts), began)


def _describe_batch(loop: LoopContext, step: int, batches: Sequence[MicroBatch]) -> BatchDescribed:
    real = [batch for batch in batches if not batch.is_dummy]
    visions = [batch.vision for batch in real if batch.vision is not None and not batch.vision.is_blank]
    return BatchDescribed(
        rank=loop.ranks.rank,
        step=step,
        tokens=sum(batch.num_tokens for batch in real),
        trained=sum(batch.num_trained for batch in real),
        sequences=sum(batch.num_sequences for batch in real),
        fillers=len(batches) - len(real),
        images=sum(vision.num_images for vision in visions),
        patches=sum(vision.num_patches for vision in visions),
        micro_batches=len(batches),
    )


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step's dropout: a resumed run needs no saved generator.

    Nothing but dropout depends on the number of ranks.
    """
    return ((seed * 1_000_003 + step) * 4099 + rank) % (1 << 63)


def _run_step(loop: LoopContext, state: TrainState, batch: _AgreedBatch) -> TrainState:
    config, step_batch = loop.config, batch.step_batch
    torch.manual_seed(_dropout_seed(config.seed, state.step, loop.ranks.rank))
    begin, end = config.share_done(state.step, state.epoch), config.share_done(state.step + 1, step_batch.epoch)
    learning_rate = learning_rate_at(state.step, begin, end, state.warmup_end, config)
    try:
        result = train_step(
            [micro_batch.to(loop.train_context.device) for micro_batch in batch.micro_batches],
            batch.totals,
            loop.train_context,
            learning_rate=learning_rate,
            max_grad_norm=config.max_grad_norm,
        )
    except NotFinite as error:
        loop.saver.wait()
        finding = not_finite_finding(
            loop.train_context,
            error,
            [micro_batch.to(loop.train_context.device) for micro_batch in batch.micro_batches],
            step=state.step + 1,
            learning_rate=learning_rate,
            last_good=next(iter(reversed(list_checkpoints(loop.config.run_folder))), None),
        )
        raise StoppedOnFinding(finding, is_agreed=True) from error
    step_time_s = time.perf_counter() - batch.began
    state = replace(
        state,
        step=state.step + 1,
        tokens=state.tokens + result.totals.tokens,
        trained_tokens=state.trained_tokens + result.totals.trained,
        loss_sum=state.loss_sum + result.loss,
        position=step_batch.next_position,
        epoch=step_batch.epoch,
        warmup_end=end if state.step + 1 == config.warmup_steps else state.warmup_end,
    )
    objective = loop.train_context.objective
    if config.router_bias_update_rate and loop.train_context.router_biases is not None:
        loop.train_context.router_biases.update(objective.expert_counts, config.router_bias_update_rate)
    metrics = {**step_batch.metrics, **objective.metrics}
    loop.emit(_build_step_event(loop, state, result, metrics, learning_rate, step_time_s))
    loop.method.check_step(state.step, metrics)
    if objective.expert_counts is not None:
        num_tokens = objective.counted_tokens(result.totals)
        for event in loop.expert_load_counter.add(state.step, objective.expert_counts, num_tokens):
            loop.emit(event)
    return state


def _build_step_event(
    loop: LoopContext,
    state: TrainState,
    result: StepResult,
    metrics: Mapping[str, float],
    learning_rate: float,
    step_time_s: float,
) -> StepEnded:
    counts = loop.train_context.objective.expert_counts
    load = None
    if counts is not None and counts.any():  # a step of GRPO may train no token
        load = tuple([round(value, 3) for value in (counts.amax(1) / counts.float().mean(1)).tolist()])
    return StepEnded(
        step=state.step,
        total_steps=loop.expected_steps(state),
        is_last=loop.is_over(state),
        epoch=state.epoch,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=learning_rate,
        tokens=state.tokens,
        trained_tokens=state.trained_tokens,
        tokens_per_second=result.totals.tokens / step_time_s,
        step_time_s=step_time_s,
        peak_memory_bytes=peak_memory_bytes(loop.train_context.device),
        aux_loss=None if result.aux_loss is None else result.aux_loss / loop.config.router_aux_loss_coef,
        expert_load=load,
        metrics=metrics,
    )


def _evaluate(loop: LoopContext, state: TrainState) -> TrainState:
    """Evaluate if there are held-out samples. The returned state records whether the evaluation was interrupted."""
    done = replace(state, evaluation_is_due=False)
    if loop.data.held_out is None:
        return done
    with loop.phases("data_wait"):
        loop.ranks.run_or_raise_on_all(loop.data.finish)
    try:
        with loop.phases("evaluate"):
            metrics = loop.method.evaluate(state.step)
    except Interrupted:  # all ranks received the stop, and stop before the next step
        return replace(state, evaluation_is_due=True)
    except StoppedOnFinding:
        _save_if_new(loop, state)
        raise
    loop.emit(Evaluated(state.step, metrics))
    return done


def _save(loop: LoopContext, state: TrainState) -> None:
    loop.saver.save(loop.train_context.saved_tensors, loop.train_context.optimizer, state)


def _save_state(loop: LoopContext, state: TrainState) -> None:
    saved = _with_pending(loop, state, inf)  # the next step would wait for it in any case
    with loop.phases("save"):
        _save(loop, saved)


def _save_if_new(loop: LoopContext, state: TrainState) -> None:
    """Save the state unless it is saved already, and wait until it is on disk. Collective."""
    with loop.phases("save"):
        loop.saver.wait()
        folder = checkpoint_folder(loop.config.run_folder, state.step)
        if state.step and loop.ranks.broadcast_from_rank0(
            lambda: folder not in list_checkpoints(loop.config.run_folder)
        ):
            saved = _with_pending(loop, state, LAST_WAIT_S)
            _save(loop, saved)
            loop.saver.wait()
    _report_saves(loop)


def _with_pending(loop: LoopContext, state: TrainState, wait_s: float) -> TrainState:
    """Return the state with what a checkpoint keeps of data and method; wait at most `wait_s` for it. Collective."""
    pending = loop.method.pending(state.position, state.step, wait_s)
    data_seen = dict(loop.data.train.shard_digests)
    return replace(state, pending=pending, data_seen=data_seen, reward_files=dict(loop.code_files))


def _report_saves(loop: LoopContext) -> None:
    saved = loop.saver.completed()
    if saved is not None:
        loop.emit(saved)
