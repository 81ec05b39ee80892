"""Loop over steps: batch, step, events, evaluation, checkpoints, stop signals. Nothing else.

All methods share it; `LoopContext` holds their differences.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Literal

import torch

from surefoot.config import RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.sampler import StepBatch
from surefoot.distributed.process_group import World
from surefoot.errors import DataError, StoppedOnFinding, SurefootError
from surefoot.events import BatchDescribed, Evaluated, StepEnded
from surefoot.methods.base import LAST_WAIT_S, BatchTotals, Interrupted, TrainContext
from surefoot.system.process import StopSignal
from surefoot.training.async_checkpoint import Saver
from surefoot.training.checkpoint import TrainState, checkpoint_folder, list_checkpoints
from surefoot.training.expert_load import ExpertLoadCounter
from surefoot.training.lr_schedule import learning_rate_at
from surefoot.training.memory_stats import peak_memory_bytes, sample_device_memory, sample_memory
from surefoot.training.nan_check import not_finite_finding
from surefoot.training.phases import Emit, Phases
from surefoot.training.step import NotFinite, StepResult, counts_of, train_step

MEMORY_SAMPLE_STEPS = 500
"""Number of steps between two memory samples: old events are overwritten."""


@dataclass(frozen=True)
class LoopContext:
    """Everything the loop works with, assembled by `trainer.py`."""

    config: RunConfig
    run_folder: Path
    total_steps: int | None
    """Number of steps; None if it depends on data that are not counted yet. Progress is then a share of the rows."""
    batches: Callable[[TrainState], tuple[StepBatch, list[MicroBatch]]]
    """The step after a state, and its micro-batches; emits its own phases."""
    agrees_to_stop_before_batches: bool
    """Flag of the method, see `Method`."""
    evaluate: Callable[[int], Mapping[str, float]] | None
    """Metrics of the weights after a step on held-out samples, by name; None without such samples. Collective."""
    before_evaluation: Callable[[], None]
    """Function that waits for held-out samples that are still being prepared."""
    as_saved: Callable[[TrainState, float], TrainState]
    """State with the batch source's part of a checkpoint besides its position; waits that many seconds for it.
    Collective."""
    learner: TrainContext
    phases: Phases
    emit: Emit
    saver: Saver
    check_step: Callable[[int, Mapping[str, float]], None]
    """Check of the metrics of each step, which are equal on all ranks. Raises: StoppedOnFinding, on all of them."""
    expert_load_counter: ExpertLoadCounter
    """Expert load, reported for trained routers only."""

    @property
    def ranks(self) -> World:
        return self.learner.ranks

    def share(self, step: int, epoch: float) -> float:
        return self.config.share_done(step, epoch)

    def is_over(self, state: TrainState) -> bool:
        return self.config.is_over(state.step, state.epoch)

    def expected_steps(self, step: int, epoch: float) -> int:
        """Return the expected number of steps of the whole run, after `step` of them."""
        return self.total_steps or max(step, round(step / self.share(step, epoch)))


def fit(
    job: LoopContext, state: TrainState, stop: StopSignal
) -> tuple[TrainState, Literal["completed", "interrupted"]]:
    """Train from `state` to the end or to a stop signal; in both cases the last step is saved.

    Raises: StoppedOnFinding if the loss or a gradient is not finite; StorageError if the disk refuses a checkpoint.
    """
    config, first = job.config, state.step + 1
    with stop.deferred():
        if state.evaluation_is_due:
            state = _evaluate(job, state)
        while not job.is_over(state):
            job.phases.step = state.step + 1
            try:
                ready = _get_ready_or_save(job, state, stop)
                if ready is None:
                    break
                state = _run_step(job, state, ready)
                on_device = sample_device_memory(job.learner.device, job.ranks.rank, state.step)
                if on_device is not None:
                    job.emit(on_device)
                if (state.step - first) % MEMORY_SAMPLE_STEPS == 0:
                    job.emit(sample_memory(job.learner, state.step))
                is_last = job.is_over(state)
                if is_last or (config.eval_steps and state.step % config.eval_steps == 0):
                    state = _evaluate(job, state)
            except DataError:  # in rows that are prepared only now; the training so far is saved
                _save_if_new(job, state)
                raise
            if config.save_steps and not is_last and state.step % config.save_steps == 0:
                _save_state(job, state)
            _report_saves(job)
        stop.note_last_save()
        ended_early = not job.is_over(state) or state.evaluation_is_due
        if ended_early or config.save_steps:
            _save_if_new(job, state)
    return state, "interrupted" if ended_early else "completed"


@dataclass(frozen=True)
class _ReadyStep:
    """Inputs of a step that all ranks agreed on."""

    rows: StepBatch
    batches: list[MicroBatch]
    """Batches of this rank."""
    totals: BatchTotals
    began: float


def _get_ready_or_save(job: LoopContext, state: TrainState, stop: StopSignal) -> _ReadyStep | None:
    """Run `_get_ready`; if rollouts end in a finding, save the training so far. Collective."""
    try:
        return _get_ready(job, state, stop)
    except StoppedOnFinding:
        _save_if_new(job, state)
        raise


def _get_ready(job: LoopContext, state: TrainState, stop: StopSignal) -> _ReadyStep | None:
    """Read this rank's part of the next step and agree on its size; return None if any rank received a stop signal.

    Collective: one sum of five numbers, and before it one of the stop signals if making batches takes long. Raises:
    DataError on all ranks if any could not read its rows.
    """
    if job.agrees_to_stop_before_batches and job.ranks.sum([stop.received is not None])[0]:
        return None
    began = time.perf_counter()
    rows: StepBatch | None = None
    batches: list[MicroBatch] = []
    error: SurefootError | None = None
    try:
        rows, batches = job.batches(state)  # may be collective, so it precedes work that can fail on one rank alone
        job.saver.raise_error()
    except Interrupted:
        return None
    except SurefootError as caught:
        if caught.is_agreed:
            raise
        error = caught
    local_counts = [*counts_of(batches), stop.received is not None, error is not None]
    with job.phases("collectives"):
        tokens, trained, weight, stops, errors = job.ranks.sum(local_counts)
    if errors:
        job.ranks.raise_failures(error)
    if stops:
        return None
    assert rows is not None
    job.emit(_describe_batch(job, state.step + 1, batches))
    return _ReadyStep(rows, batches, BatchTotals(round(tokens), round(trained), weight), began)


def _describe_batch(job: LoopContext, step: int, batches: Sequence[MicroBatch]) -> BatchDescribed:
    real = [batch for batch in batches if not batch.is_dummy]
    visions = [batch.vision for batch in real if batch.vision is not None and not batch.vision.is_blank]
    return BatchDescribed(
        rank=job.ranks.rank,
        step=step,
        tokens=sum(batch.num_tokens for batch in real),
        trained=sum(batch.num_trained for batch in real),
        sequences=sum(batch.num_sequences for batch in real),
        fillers=len(batches) - len(real),
        images=sum(len(vision.grid) for vision in visions),
        patches=sum(len(vision.pixels) for vision in visions),
    )


def _run_step(job: LoopContext, state: TrainState, ready: _ReadyStep) -> TrainState:
    config = job.config
    rows, batches = ready.rows, ready.batches
    # Dropout depends on (seed, step, rank) alone, so a resumed run needs no saved generator. Only dropout depends on
    # the number of ranks.
    torch.manual_seed(((config.seed * 1_000_003 + state.step) * 4099 + job.ranks.rank) % (1 << 63))
    begin, end = job.share(state.step, state.epoch), job.share(state.step + 1, rows.epoch)
    learning_rate = learning_rate_at(state.step, begin, end, state.warmup_end, config)
    try:
        result = train_step(
            [batch.to(job.learner.device) for batch in batches],
            ready.totals,
            job.learner,
            learning_rate=learning_rate,
            max_grad_norm=config.max_grad_norm,
        )
    except NotFinite as error:
        job.saver.wait()
        finding = not_finite_finding(
            job.learner,
            error,
            [batch.to(job.learner.device) for batch in batches],
            step=state.step + 1,
            learning_rate=learning_rate,
            last_good=next(iter(reversed(list_checkpoints(job.run_folder))), None),
        )
        raise StoppedOnFinding(finding, is_agreed=True) from error
    step_time_s = time.perf_counter() - ready.began
    state = replace(
        state,
        step=state.step + 1,
        tokens=state.tokens + result.totals.tokens,
        trained_tokens=state.trained_tokens + result.totals.trained,
        loss_sum=state.loss_sum + result.loss,
        position=rows.next,
        epoch=rows.epoch,
        warmup_end=end if state.step + 1 == config.warmup_steps else state.warmup_end,
    )
    objective = job.learner.objective
    metrics = {**rows.about, **objective.metrics}
    job.emit(_build_step_event(job, state, result, metrics, learning_rate, step_time_s))
    job.check_step(state.step, metrics)
    if objective.expert_counts is not None:
        num_tokens = objective.counted_tokens(result.totals)
        for event in job.expert_load_counter.add(state.step, objective.expert_counts, num_tokens):
            job.emit(event)
    return state


def _build_step_event(
    job: LoopContext,
    state: TrainState,
    result: StepResult,
    metrics: Mapping[str, float],
    learning_rate: float,
    step_time_s: float,
) -> StepEnded:
    counts = job.learner.objective.expert_counts
    load = None
    if counts is not None and counts.any():  # a step of GRPO may train no token
        load = tuple([round(value, 3) for value in (counts.amax(1) / counts.float().mean(1)).tolist()])
    return StepEnded(
        step=state.step,
        total_steps=job.expected_steps(state.step, state.epoch),
        is_last=job.is_over(state),
        epoch=state.epoch,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=learning_rate,
        tokens=state.tokens,
        trained_tokens=state.trained_tokens,
        tokens_per_second=result.totals.tokens / step_time_s,
        step_time_s=step_time_s,
        peak_memory_bytes=peak_memory_bytes(job.learner.device),
        aux_loss=None if result.aux_loss is None else result.aux_loss / job.config.router_aux_loss_coef,
        expert_load=load,
        metrics=metrics,
    )


def _evaluate(job: LoopContext, state: TrainState) -> TrainState:
    """Evaluate if there are held-out samples. The returned state records whether the evaluation was interrupted."""
    done = replace(state, evaluation_is_due=False)
    if job.evaluate is None:
        return done
    with job.phases("data_wait"):
        job.ranks.run_or_raise_on_all(job.before_evaluation)
    try:
        with job.phases("evaluate"):
            metrics = job.evaluate(state.step)
    except Interrupted:  # all ranks received the stop, and stop before the next step
        return replace(state, evaluation_is_due=True)
    except StoppedOnFinding:
        _save_if_new(job, state)
        raise
    job.emit(Evaluated(state.step, metrics))
    return done


def _save_state(job: LoopContext, state: TrainState) -> None:
    saved = job.as_saved(state, inf)  # the next step would wait for it in any case
    with job.phases("save"):
        job.saver.save(job.learner.parameters, job.learner.optimizer, saved)


def _save_if_new(job: LoopContext, state: TrainState) -> None:
    """Save the state unless it is saved already, and wait until it is on disk. Collective."""
    with job.phases("save"):
        job.saver.wait()
        folder = checkpoint_folder(job.run_folder, state.step)
        if state.step and job.ranks.broadcast_from_rank0(lambda: folder not in list_checkpoints(job.run_folder)):
            saved = job.as_saved(state, LAST_WAIT_S)
            job.saver.save(job.learner.parameters, job.learner.optimizer, saved)
            job.saver.wait()
    _report_saves(job)


def _report_saves(job: LoopContext) -> None:
    saved = job.saver.completed()
    if saved is not None:
        job.emit(saved)
