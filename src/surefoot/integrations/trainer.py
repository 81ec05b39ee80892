"""Health for transformers' Trainer and what builds on it: TRL, LLaMA-Factory, axolotl, ms-swift.

    from surefoot.integrations import SurefootCallback
    trainer = SFTTrainer(..., callbacks=[SurefootCallback()])

Stalls, leaks, slowness and deaths are named as in Surefoot's own runs, on standard error and in findings.jsonl of the
trainer's output_dir, which `surefoot watch` and `surefoot explain` read. It changes nothing in the run.
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
from surefoot.findings import CATALOGUE, Finding
from surefoot.integrations.batches import Batches, Counted, Labels
from surefoot.launch.sidecar import SUPERVISED, SidecarSpec, end, ranks_elsewhere, start
from surefoot.system.console import say
from surefoot.training.memory_stats import peak_memory_bytes, sample_device_memory
from surefoot.training.run_summary import FindingLog

MOST_OVERFLOWS = 20
"""Logs in a row in which float16 overflowed: a scale that is lowered as often helps no more."""
SIGN_EVERY_S = 1.0
"""Between two signs of life in an evaluation."""


_LIVE: "WeakSet[SurefootCallback]" = WeakSet()
"""Those that record a training of this process."""

_LOADING = LoadPeak()
"""From when this is imported, which is before a model is loaded, until the first training begins."""

record_collectives()  # read when process groups are made, which is before a callback hears anything


class SurefootCallback(TrainerCallback):  # type: ignore[misc]
    """Records what the trainer does on this process, and watches all those of this machine from outside.

    The trainer tells no one where a forward ends, so `forward and backward` are one phase, with whatever it does in
    its training step: the rollouts of GRPO too. In a notebook, `close` ends the watch over a training that failed.
    """

    def __init__(self, webhook: str | None = None) -> None:
        """`webhook`: findings are posted there as well: `$NAME` of an environment variable with the address.

        Raises: ConfigError for an address itself, which would stand in the program, and for a name that is not set.
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
        """The newest step, until the trainer has logged what it was. The next phase has begun by then."""
        self._logged: dict[str, float] = {}
        self._batches: Batches | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module | None = None, **__: Any
    ) -> None:
        for other in list(_LIVE):  # of trainings that failed, in a process that went on
            other.close()
        _LIVE.add(self)
        folder = Path(args.output_dir).absolute()  # the program may go elsewhere
        self._log = FindingLog(folder, self._webhook, "tensorboard" in (args.report_to or []))
        self._told_not_finite = self._scales_losses = self._hides_losses = False
        self._overflows = 0
        self._rank, self._step = int(args.process_index), int(state.global_step) + 1
        if args.local_process_index == 0 and SUPERVISED not in os.environ:
            elsewhere = ranks_elsewhere(args.world_size)
            self._watcher = start(SidecarSpec(self._log, args.world_size, elsewhere))
        self._observers = rank_observers(folder, self._rank)
        if model is not None:
            self._batches = Batches(model)
            self._labels = Labels(self._batches.knows_ends)
            peak = _LOADING.end()
            if peak is not None:
                self._emit(_loaded(self._rank, model, peak))
        atexit.register(self.close)  # an exception ends the run without on_train_end; a kill leaves no last word
        self._step_began_s = time.perf_counter()
        self._begin("wait for data")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._batches is not None:
            self._batches.begin()
        self._begin("forward and backward")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._begin("optimizer")

    def on_step_end(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        self._end_phase()
        now = time.perf_counter()
        if self._batches is not None:
            self._describe(int(state.global_step), self._batches.take())
        on_device = sample_device_memory(_device(), self._rank, int(state.global_step)) if self._observers else None
        if on_device is not None:
            self._emit(on_device)
        self._ended = _step_ended(state, now - self._step_began_s)
        self._step, self._step_began_s = min(int(state.global_step) + 1, int(state.max_steps)), now
        if not control.should_log:
            self._tell_step()
        self._enter(_flagged(control) or _next(state, control))

    def on_epoch_end(self, _: TrainingArguments, __: TrainerState, control: TrainerControl, **___: Any) -> None:
        phase = _flagged(control)
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
        if "loss" in numbers:  # of the steps since the last log; told once, with the last of them
            self._logged, self._scales_losses = numbers, bool(args.fp16)
            self._hides_losses = bool(args.logging_nan_inf_filter)
            self._look_at(numbers, int(state.global_step))
            self._tell_step()
        elif "eval_loss" in numbers:
            self._emit(Evaluated(int(state.global_step), {"eval_loss": numbers["eval_loss"]}))

    def _describe(self, step: int, counted: Counted) -> None:
        """Tell of a step's batch, and, on the first process, of what is wrong with it."""
        trained = counted.trained or 0
        self._emit(BatchDescribed(self._rank, step, counted.tokens, trained, counted.rows, 0, counted.padding))
        if self._rank:
            return
        for finding in self._labels.add(step, counted):
            self._say(finding)
        if counted.not_finite and not self._told_not_finite:
            self._told_not_finite = True
            cause = f"the loss of step {step} is not finite on rank {self._rank}"
            self._say(Finding("SF401", cause, {"step": step, "rank": self._rank}, CATALOGUE["SF401"].fix))

    def _look_at(self, numbers: dict[str, float], step: int) -> None:
        """Say once that a number is none; on the process that logs."""
        odd = [name for name in ("loss", "grad_norm") if not math.isfinite(numbers.get(name, 0.0))]
        self._overflows = self._overflows + 1 if odd == ["grad_norm"] and self._scales_losses else 0
        if 0 < self._overflows < MOST_OVERFLOWS:
            return  # in float16 steps that overflow are left out, and the loss is scaled by less
        if not odd or self._told_not_finite or self._rank:
            return
        self._told_not_finite = True
        code = "SF401" if odd[0] == "loss" else "SF402"
        shown = {name: str(numbers[name]) for name in odd}
        cause = f"{' and '.join(odd)} of the steps up to {step}, as logged, {'are' if odd[1:] else 'is'} not finite"
        if code == "SF402" and self._hides_losses:
            cause += "; the loss may not be either: logging_nan_inf_filter shows others in its place"
        self._say(Finding(code, cause, {"step": step, **shown}, CATALOGUE[code].fix))

    def _say(self, finding: Finding) -> None:
        self._log.note(finding)
        say(finding.as_text())

    def on_evaluate(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        if self._observers:
            self._begin("save" if control.should_save else _next(state, control))
            self._step_began_s = time.perf_counter()

    def on_save(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        if self._observers:
            self._begin(_next(state, control))
            self._step_began_s = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end({})

    def close(self) -> None:
        """End the record and the watch over a training that came to no end of its own."""
        self._end({"status": "failed"})

    def _tell_step(self) -> None:
        """The newest step, with what was logged of it."""
        if self._ended is not None:
            loss, grad_norm, learning_rate = (
                self._logged.get(name, math.nan) for name in ("loss", "grad_norm", "learning_rate")
            )
            self._emit(replace(self._ended, loss=loss, grad_norm=grad_norm, learning_rate=learning_rate))
            self._ended, self._logged = None, {}

    def _begin(self, phase: Phase) -> None:
        self._tell_step()
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
        self._tell_step()
        self._end_phase()
        self._emit(RunEnded(summary))
        self._observers = []
        if self._batches is not None:
            self._batches.end()
            self._batches = None
        if self._watcher is not None:
            end(self._watcher)
            self._watcher = None


def _step_ended(state: TrainerState, took_s: float) -> StepEnded:
    """Without what the trainer logs of it later."""
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
        peak_memory_bytes=peak_memory_bytes(_device()),
    )


def _device() -> torch.device:
    """What this process trains on; asking does not make a context on a GPU that is not used."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _loaded(rank: int, model: nn.Module, peak: int) -> ModelLoaded:
    """Sizes of parameters: of those that are cut over ranks, as FSDP and DeepSpeed say it."""
    whole = kept = 0
    for parameter in model.parameters():
        count = int(getattr(parameter, "ds_numel", parameter.numel()))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole += count * parameter.element_size()
        kept += local.numel() * local.element_size() if local.device.type == "cpu" else 0
    return ModelLoaded(rank, whole, kept, peak)


def _flagged(control: TrainerControl) -> Phase | None:
    """What a trainer does next because a flag says so."""
    return "evaluate" if control.should_evaluate else "save" if control.should_save else None


def _next(state: TrainerState, control: TrainerControl) -> Phase:
    """After the last step a trainer may still load and write for long."""
    is_over = state.global_step >= state.max_steps or control.should_training_stop
    return "export" if is_over else "wait for data"
