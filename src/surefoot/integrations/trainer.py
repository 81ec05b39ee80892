"""Run monitoring for transformers' Trainer and trainers built on it: TRL, LLaMA-Factory, axolotl, ms-swift.

    from surefoot.integrations import SurefootCallback
    trainer = SFTTrainer(..., callbacks=[SurefootCallback()])

Stalls, leaks, slowness and deaths are reported as in Surefoot's own runs, on standard error and in findings.jsonl of
the trainer's output_dir, which `surefoot watch` and `surefoot explain` read. It changes nothing in the run.
"""

import atexit
import math
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surefoot.diagnostics.monitor.evidence_server import record_collectives
from surefoot.diagnostics.monitor.observers import rank_observers
from surefoot.diagnostics.monitor.process_stats import LoadPeak
from surefoot.errors import ConfigError
from surefoot.events import (
    BatchDescribed,
    Evaluated,
    Event,
    ModelLoaded,
    Observer,
    Phase,
    PhaseBegan,
    PhaseEnded,
    RunEnded,
    StepEnded,
)
from surefoot.findings import Finding
from surefoot.findings.reported import ReportedFindings
from surefoot.integrations.batches import BatchCounter, BatchCounts, LabelChecker
from surefoot.launch.sidecar import SUPERVISED, end, ranks_elsewhere, start
from surefoot.launch.watcher import WatchSpec
from surefoot.system.console import say
from surefoot.training.memory_stats import peak_memory_bytes, sample_device_memory
from surefoot.training.run_summary import FindingLog

MOST_OVERFLOWS = 20
"""Number of consecutive logs with a float16 overflow: after lowering the scale as often, more no longer helps."""
SIGN_EVERY_S = 1.0
"""Seconds between two heartbeats in an evaluation."""


_LIVE: "WeakSet[SurefootCallback]" = WeakSet()
"""Callbacks that record a training of this process."""

_LOADING = LoadPeak()
"""Peak memory from this import, which precedes loading a model, until the first training begins."""

record_collectives()  # read when process groups are created, which is before any callback is called


class SurefootCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that records the trainer's work on this process, and watches all processes of this machine from outside.

    The trainer does not report where a forward ends, so `forward_backward` are one phase, with everything in its
    training step: the rollouts of GRPO too. In a notebook, `close` ends the watch over a training that failed.
    """

    def __init__(self, webhook: str | None = None) -> None:
        """`webhook`: findings are also posted there: `$NAME` of an environment variable with the address.

        Raises: ConfigError for an address itself, which would be in the program text, and for a name that is not set.
        """
        if webhook is not None and not (webhook.startswith("$") and webhook[1:] in os.environ):
            raise ConfigError("webhook: give `$NAME` of an environment variable that is set and holds the address.")
        self._webhook = webhook
        self._observers: list[Observer] = []
        self._watcher: subprocess.Popen[bytes] | None = None
        self._rank = 0
        self._step = 0
        self._phase: Phase | None = None
        self._step_began_s = 0.0
        self._sign_of_life_s = 0.0
        self._ended: StepEnded | None = None
        """Newest step, until the trainer has logged its numbers. The next phase has begun by then."""
        self._logged: dict[str, float] = {}
        self._batches: BatchCounter | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module | None = None, **__: Any
    ) -> None:
        for other in list(_LIVE):  # callbacks of trainings that failed, in a process that went on
            other.close()
        _LIVE.add(self)
        folder = Path(args.output_dir).absolute()  # the program may change its working directory
        self._log = FindingLog(folder, self._webhook, "tensorboard" in (args.report_to or []))
        self._reported = ReportedFindings(lambda finding: "SF401" if finding.code == "SF402" else finding.code)
        self._scales_losses = self._hides_losses = False
        self._overflows = 0
        self._rank, self._step = int(args.process_index), int(state.global_step) + 1
        if args.local_process_index == 0 and SUPERVISED not in os.environ:
            elsewhere = ranks_elsewhere(args.world_size)
            self._watcher = start(WatchSpec(self._log, args.world_size, elsewhere))
        self._observers = rank_observers(folder, self._rank)
        if model is not None:
            self._batches = BatchCounter(model)
            self._labels = LabelChecker(self._batches.has_end_tokens)
            peak = _LOADING.end()
            if peak is not None:
                self._emit(_measure_model(self._rank, model, peak))
        atexit.register(self.close)  # an exception ends the run without on_train_end; a kill leaves no report
        self._step_began_s = time.perf_counter()
        self._begin("data_wait")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._batches is not None:
            self._batches.begin()
        self._begin("forward_backward")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._begin("optimizer")

    def on_step_end(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        self._end_phase()
        now = time.perf_counter()
        if self._batches is not None:
            self._describe(int(state.global_step), self._batches.take())
        on_device = sample_device_memory(_get_device(), self._rank, int(state.global_step)) if self._observers else None
        if on_device is not None:
            self._emit(on_device)
        self._ended = _build_step_event(state, now - self._step_began_s)
        self._step, self._step_began_s = min(int(state.global_step) + 1, int(state.max_steps)), now
        if not control.should_log:
            self._emit_step()
        self._enter(_get_flagged_phase(control) or _get_next_phase(state, control))

    def on_epoch_end(self, _: TrainingArguments, __: TrainerState, control: TrainerControl, **___: Any) -> None:
        phase = _get_flagged_phase(control)
        if phase is not None and self._observers:
            self._begin(phase)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        now = time.monotonic()
        if self._observers and (self._phase != "evaluate" or now - self._sign_of_life_s > SIGN_EVERY_S):
            self._sign_of_life_s = now
            self._begin("evaluate")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *__: Any, logs: dict[str, float] | None = None, **___: Any
    ) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
        if "loss" in numbers:  # of the steps since the last log; reported once, with the last of them
            self._logged, self._scales_losses = numbers, bool(args.fp16)
            self._hides_losses = bool(args.logging_nan_inf_filter)
            self._check_finite(numbers, int(state.global_step))
            self._emit_step()
        elif "eval_loss" in numbers:
            self._emit(Evaluated(int(state.global_step), {"eval_loss": numbers["eval_loss"]}))

    def _describe(self, step: int, counted: BatchCounts) -> None:
        """Report a step's batch, and, on the first process, problems with it."""
        trained = counted.trained or 0
        self._emit(BatchDescribed(self._rank, step, counted.tokens, trained, counted.rows, 0, counted.padding))
        if self._rank:
            return
        for finding in self._labels.add(step, counted):
            self._report(finding)
        if counted.not_finite:
            cause = f"the loss of step {step} is not finite on rank {self._rank}"
            self._report(Finding("SF401", cause, {"step": step, "rank": self._rank}))

    def _check_finite(self, numbers: dict[str, float], step: int) -> None:
        """Report that a number is not finite; on the process that logs."""
        names = [name for name in ("loss", "grad_norm") if not math.isfinite(numbers.get(name, 0.0))]
        self._overflows = self._overflows + 1 if names == ["grad_norm"] and self._scales_losses else 0
        if 0 < self._overflows < MOST_OVERFLOWS:
            return  # float16 steps that overflow are skipped, and the loss is scaled by less
        if not names or self._rank:
            return
        code = "SF401" if names[0] == "loss" else "SF402"
        shown = {name: str(numbers[name]) for name in names}
        cause = f"{' and '.join(names)} of the steps up to {step}, as logged, {'are' if names[1:] else 'is'} not finite"
        if code == "SF402" and self._hides_losses:
            cause += "; the loss may not be either: logging_nan_inf_filter shows others in its place"
        self._report(Finding(code, cause, {"step": step, **shown}))

    def _report(self, finding: Finding) -> None:
        """Report a finding once; losses and gradients that are not finite are one problem."""
        for new in self._reported.select_new([finding]):
            self._log.note(new)
            say(new.as_text())

    def on_evaluate(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        self._go_on("save" if control.should_save else _get_next_phase(state, control))

    def on_save(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        self._go_on(_get_next_phase(state, control))

    def _go_on(self, phase: Phase) -> None:
        """Begin the phase after an evaluation or a save, whose time does not count for the next step."""
        if self._observers:
            self._begin(phase)
            self._step_began_s = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end({})

    def close(self) -> None:
        """End the record and the watch over a training that did not end by itself."""
        self._end({"status": "failed"})

    def _emit_step(self) -> None:
        """Report the newest step, with the numbers that were logged of it."""
        if self._ended is not None:
            loss, grad_norm, learning_rate = (
                self._logged.get(name, math.nan) for name in ("loss", "grad_norm", "learning_rate")
            )
            self._emit(replace(self._ended, loss=loss, grad_norm=grad_norm, learning_rate=learning_rate))
            self._ended, self._logged = None, {}

    def _begin(self, phase: Phase) -> None:
        self._emit_step()
        self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        self._end_phase()
        self._phase = phase
        self._emit(PhaseBegan(self._rank, self._step, phase))

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._emit(PhaseEnded(self._rank, self._step, self._phase))
            self._phase = None

    def _emit(self, event: Event) -> None:
        for observer in self._observers:
            observer.observe(event)

    def _end(self, summary: dict[str, str]) -> None:
        atexit.unregister(self.close)
        _LIVE.discard(self)
        self._emit_step()
        self._end_phase()
        self._emit(RunEnded(summary))
        self._observers = []
        if self._batches is not None:
            self._batches.end()
            self._batches = None
        if self._watcher is not None:
            end(self._watcher)
            self._watcher = None


def _build_step_event(state: TrainerState, took_s: float) -> StepEnded:
    """Return the step's event, without the numbers that the trainer logs later."""
    return StepEnded(
        step=int(state.global_step),
        total_steps=int(state.max_steps),
        is_last=bool(state.global_step >= state.max_steps),
        epoch=float(state.epoch or 0.0),
        loss=math.nan,
        grad_norm=math.nan,
        learning_rate=math.nan,
        tokens=int(getattr(state, "num_input_tokens_seen", 0) or 0),
        trained_tokens=0,
        tokens_per_second=math.nan,
        step_time_s=took_s,
        peak_memory_bytes=peak_memory_bytes(_get_device()),
    )


def _get_device() -> torch.device:
    """Return the device that this process trains on, without creating a context on an unused GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _measure_model(rank: int, model: nn.Module, peak: int) -> ModelLoaded:
    """Return sizes of parameters; for sharded ones, those that FSDP and DeepSpeed report."""
    full_bytes = host_bytes = 0
    for parameter in model.parameters():
        count = int(getattr(parameter, "ds_numel", parameter.numel()))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        full_bytes += count * parameter.element_size()
        host_bytes += local.numel() * local.element_size() if local.device.type == "cpu" else 0
    return ModelLoaded(rank, full_bytes, host_bytes, peak)


def _get_flagged_phase(control: TrainerControl) -> Phase | None:
    """Return the phase that a trainer's flags request next."""
    return "evaluate" if control.should_evaluate else "save" if control.should_save else None


def _get_next_phase(state: TrainerState, control: TrainerControl) -> Phase:
    """Return the phase after a step: after the last one a trainer may still load and write for long."""
    is_over = state.global_step >= state.max_steps or control.should_training_stop
    return "export" if is_over else "data_wait"
