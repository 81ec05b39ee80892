"""Progress of a run for a person: lines on the screen, one of which is rewritten in place, and those of train.log."""

import io
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.progress_bar import ProgressBar

from surefoot.events import (
    BatchDescribed,
    CheckpointSaved,
    DataCounted,
    Evaluated,
    Event,
    FindingMade,
    Heartbeat,
    Notice,
    PhaseBegan,
    PhaseEnded,
    RunStarted,
    StepEnded,
)
from surefoot.system.atomic_io import raise_storage_error
from surefoot.system.console import CLEAR_LINE, format_time_left, write

LINE_EVERY_S = 5.0
STEPS_OF_ETA = 20
"""Number of steps, the last ones, whose mean time the remaining ones are expected to take."""
SHOWN_ROUNDLY = 10_000_000
"""Number of parameters from which on one digit after the decimal point of millions is enough."""
LEAST_BAR, MOST_BAR = 8, 30
"""Columns of the bar; it is left out where fewer are free."""
LEAST_NEEDED = ("experts", "grad", "memory", "elapsed", "lr", "speed", "left")
"""Parts of the line in the order in which they are left out of a narrow terminal."""
STARTING = {"load": "loading the model ...", "tokenize": "preparing data ..."}
"""Phases before the first step -> what is shown on a terminal meanwhile."""

OUTSIDE_OF_TRAINING = {"load", "tokenize", "evaluate", "save", "export", "rollout", "sync"}
"""Phases whose time is shown with `verbosity: verbose`."""


class Screen:
    """Progress for a person: a line per logged step, rewritten in place and cut to its width on a terminal."""

    def __init__(
        self,
        logging_steps: int,
        stream: TextIO | None = None,
        verbosity: Literal["quiet", "normal", "verbose"] = "normal",
    ) -> None:
        self._every = logging_steps
        self._stream = stream if stream is not None else sys.stderr
        self._verbosity = verbosity
        self._is_live = self._stream.isatty() and verbosity == "normal"
        self._console = Console(file=self._stream)
        """The terminal's width and colours; text is written to the stream itself, where a lost reader is no error."""
        self._began = time.perf_counter()
        self._first_step = 1
        self._ends_of_steps = deque([(0, self._began)], maxlen=STEPS_OF_ETA + 1)
        """(step, time at which it ended) of the last steps; the first entry is the one before the run's first step."""
        self._has_started = False
        self._running: BatchDescribed | None = None
        """The batch of the first step until that step ends: it may take minutes, and later ones take as long."""
        self._num_backwards = 0
        """Number of backward passes of the first step that have begun."""
        self._last_line = self._phase_began = self._began

    def observe(self, event: Event) -> None:
        if self._verbosity == "quiet" and not isinstance(event, FindingMade):
            return
        if isinstance(event, PhaseBegan):
            self._phase_began = time.perf_counter()
            if self._is_live and not self._has_started and event.phase in STARTING:
                self._write(STARTING[event.phase][: self._console.width - 1], end="")
            self._num_backwards += event.phase == "backward"
            if event.phase == "forward" and self._running is not None:
                self._show_first_step(self._running)
        elif isinstance(event, PhaseEnded):
            if self._verbosity == "verbose" and event.phase in OUTSIDE_OF_TRAINING:
                self._write_line(f"{event.phase}: {time.perf_counter() - self._phase_began:.1f} s")
        elif isinstance(event, Heartbeat):
            if event.text:
                self._show_passing(event.text)
        elif isinstance(event, DataCounted):
            rows = ", ".join(f"{count} {name}" for name, count in event.rows.items())
            held_out = f"; {event.held_out} held out for evaluation" if event.held_out is not None else ""
            pending = "" if event.is_complete else " (so far; the rest is being prepared)"
            self._write_line(f"data: rows {rows}{held_out}{pending}")
        elif isinstance(event, RunStarted):
            self._began, self._first_step, self._has_started = time.perf_counter(), event.first_step, True
            self._ends_of_steps = deque([(event.first_step - 1, self._began)], maxlen=STEPS_OF_ETA + 1)
            self._write_line(_describe_run(event.config))
            self._write_line(_describe_size(event))
        elif isinstance(event, BatchDescribed):
            self._running, self._num_backwards = event if event.step == self._first_step else None, 0
        elif isinstance(event, StepEnded):
            self._running = None
            self._ends_of_steps.append((event.step, time.perf_counter()))
            if event.is_logged(self._every):
                self._write(self._format_progress(event), end="\n" if event.is_last or not self._is_live else "")
        elif isinstance(event, Evaluated):
            first = next(iter(event.metrics), None)
            name = next((metric for metric in ("eval_loss", "eval_reward") if metric in event.metrics), first)
            self._write_line(f"step {event.step}: {f'{name} {event.metrics[name]:.4f}' if name else 'evaluated'}")
        elif isinstance(event, CheckpointSaved):
            self._write_line(f"step {event.step}: checkpoint {event.path.name} ({event.save_time_s:.1f} s)")
        elif isinstance(event, Notice):
            self._write_line(event.text)
        elif isinstance(event, FindingMade):
            self._write_line(event.finding.as_text())

    def end_line(self) -> None:
        """End a line that was being rewritten in place."""
        if self._is_live:
            self._write("", end="")

    def _show_first_step(self, batch: BatchDescribed) -> None:
        number = min(self._num_backwards + 1, batch.micro_batches)  # a forward is repeated to find the cause of a NaN
        part = f", part {number} of {batch.micro_batches}" if batch.micro_batches > 1 else ""
        elapsed = format_time_left(time.perf_counter() - self._began)
        self._show_passing(f"step {batch.step} is running{part} ({batch.tokens} tokens, {elapsed}) ...")

    def _show_passing(self, text: str) -> None:
        """Show progress in place on a terminal; elsewhere write a line every few seconds, none if it is quick."""
        now = time.perf_counter()
        if self._is_live:
            self._write(text[: self._console.width - 1], end="")
        elif now - self._last_line > LINE_EVERY_S:
            self._write_line(text)
            self._last_line = now

    def _format_progress(self, event: StepEnded) -> str:
        (before, began), (step, now) = self._ends_of_steps[0], self._ends_of_steps[-1]
        left_s = (now - began) / (step - before) * (event.total_steps - step)
        is_reward = "reward" in event.metrics
        parts = {
            "step": f"step {event.step}/{event.total_steps}",
            "loss": f"reward {event.metrics['reward']:.3f}" if is_reward else f"loss {event.loss:.4f}",
            "margin": f"margin {margin:.3f}" if (margin := event.metrics.get("rewards/margins")) is not None else "",
            "grad": f"grad {event.grad_norm:.2f}",
            "lr": f"lr {event.learning_rate:.1e}",
            "experts": f"expert load {max(event.expert_load):.1f}x" if event.expert_load else "",
            "speed": f"{event.tokens_per_second:.0f} tok/s",
            "memory": f"{event.peak_memory_bytes / 2**30:.1f} GiB",
            "elapsed": format_time_left(now - self._began) if self._is_live else "",
            "left": f"ETA {format_time_left(left_s)}",
        }
        line = _join(parts)
        for name in LEAST_NEEDED if self._is_live else ():
            if len(line) < self._console.width:
                break
            parts[name] = ""
            line = _join(parts)
        free = self._console.width - len(line) - 3
        if not self._is_live or free < LEAST_BAR:
            return line
        with self._console.capture() as captured:
            bar = ProgressBar(event.total_steps, event.step, width=min(free, MOST_BAR))
            self._console.print(bar, end="")
        return f"{captured.get().rstrip()}  {line}"

    def _write_line(self, text: str) -> None:
        self._write(text, end="\n")

    def _write(self, text: str, end: str) -> None:
        write(self._stream, f"{CLEAR_LINE if self._is_live else ''}{text}{end}")


def _join(parts: Mapping[str, str]) -> str:
    return "  ".join(filter(None, parts.values()))


def _describe_run(config: Mapping[str, Any]) -> str:
    """Return the model, what is trained, where, and the arithmetic of a batch."""
    size, each = config.get("global_batch_size"), config.get("per_device_train_batch_size")
    batch = ""
    if size and each:
        batch = f"; {size} sequence{'s' * (size != 1)} a step, at most {min(each, size)} at a time on each rank"
    return (
        f"model {config.get('model')}, method {config.get('method')}, tuning {config.get('tuning')}, "
        f"{config.get('dtype')} on {config.get('device')}{batch}"
    )


def _describe_size(event: RunStarted) -> str:
    """Return the number of parameters and steps, and where the run is written."""
    share = event.trainable_parameters / event.all_parameters
    digits = 1 if event.all_parameters >= SHOWN_ROUNDLY else 2
    steps = f"{event.total_steps} step{'s' * (event.total_steps != 1)}, " if event.total_steps is not None else ""
    trained, total = event.trainable_parameters / 1e6, event.all_parameters / 1e6
    return f"training {trained:.2f} M of {total:.{digits}f} M parameters ({share:.2%}), {steps}into {event.run_folder}"


class LogFile:
    """Writer of the lines of the screen to a file, each with its time; what precedes the first step is written with it.

    Until the run begins its folder may hold another run, which is deleted.
    """

    def __init__(self, path: Path, logging_steps: int) -> None:
        self._path = path
        self._lines = io.StringIO()
        self._screen = Screen(logging_steps, self._lines)
        self._pending: list[str] = []
        self._has_begun = False

    def observe(self, event: Event) -> None:
        self._screen.observe(event)
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        self._pending += [f"{now} {line}\n" for line in self._lines.getvalue().splitlines()]
        self._lines.seek(0)
        self._lines.truncate()
        self._has_begun = self._has_begun or isinstance(event, RunStarted)
        if self._pending and self._has_begun:
            with raise_storage_error(self._path), open(self._path, "a", encoding="utf-8") as file:
                file.writelines(self._pending)
            self._pending.clear()
