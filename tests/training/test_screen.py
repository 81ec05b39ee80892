"""What a person sees of a run, on terminals of several widths, elsewhere, and in train.log."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.events import (
    BatchDescribed,
    Evaluated,
    FindingMade,
    Heartbeat,
    Notice,
    PhaseBegan,
    PhaseEnded,
    RunStarted,
    StepEnded,
)
from surefoot.findings import Finding
from surefoot.training.screen import LogFile, Screen


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return what stands in each line, after all that was rewritten, without colours."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())
        return [line.split("\r\x1b[K")[-1] for line in text.split("\n")]


def step(number: int, **changes: Any) -> StepEnded:
    values = {
        "step": number, "total_steps": 200, "is_last": False, "epoch": 0.5, "loss": 1.23456, "grad_norm": 0.5,
        "learning_rate": 1e-4, "tokens": 10, "trained_tokens": 5, "tokens_per_second": 12345.6, "step_time_s": 1.0,
        "peak_memory_bytes": 3 << 30, "expert_load": (1.5, 1.9),
    }  # fmt: skip
    return StepEnded(**{**values, **changes})  # type: ignore[arg-type]


STARTED = RunStarted(
    Path("runs/first"),
    {"model": "m", "method": "sft", "tuning": "lora", "dtype": "float32", "device": "cpu", "global_batch_size": 16,
     "per_device_train_batch_size": 4},
    200, 1, 10_000, 1_000_000,
)  # fmt: skip


def test_an_evaluation_of_any_method_is_shown() -> None:
    shown = io.StringIO()
    for metrics in ({"eval_accuracy": 0.75, "eval_margin": 2.0}, {"eval_tokens": 9.0, "eval_reward": 0.5}, {}):
        Screen(1, shown).observe(Evaluated(3, metrics))
    assert shown.getvalue().splitlines() == [
        "step 3: eval_accuracy 0.7500", "step 3: eval_reward 0.5000", "step 3: evaluated"
    ]  # fmt: skip


def test_less_or_more_is_shown_as_asked() -> None:
    finding = FindingMade(Finding("SF407", "the loss rose", {}))
    events = [PhaseBegan(0, 0, "load"), PhaseEnded(0, 0, "load"), STARTED, step(1), step(2), finding]
    shown: dict[str, list[str]] = {}
    for verbosity in ("quiet", "normal", "verbose"):
        terminal = Terminal()
        screen = Screen(1, terminal, verbosity)  # type: ignore[arg-type]
        for event in events:
            screen.observe(event)
        shown[verbosity] = [line for line in terminal.lines() if line]
    assert shown["quiet"] == finding.finding.as_text().splitlines()
    assert not any("step 1/200" in line for line in shown["normal"]), "rewritten in place"
    assert [line.split()[0] for line in shown["verbose"][:5]] == ["load:", "model", "training", "step", "step"]


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_line_of_a_step_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    screen = Screen(1, terminal)
    screen.observe(STARTED)
    screen.observe(step(100))
    line = terminal.lines()[-1]
    assert len(line) < columns
    assert "step 100/200" in line
    assert "loss 1.2346" in line
    assert "ETA 0:00" in line
    assert ("expert load 1.9x" in line) == (columns == 200)
    assert columns < 200 or "━" in line


def test_other_lines_take_the_place_of_the_line_that_is_rewritten() -> None:
    terminal = Terminal()
    screen = Screen(1, terminal)
    for event in (PhaseBegan(0, 0, "load"), Heartbeat("tokenised 5 of 9"), STARTED, step(1), Notice("a note"), step(2)):
        screen.observe(event)
    screen.end_line()
    shown = terminal.lines()
    assert shown[:3] == [
        "model m, method sft, tuning lora, float32 on cpu; 16 sequences a step, at most 4 at a time on each rank",
        "training 0.01 M of 1.00 M parameters (1.00%), 200 steps, into runs/first",
        "a note",
    ]
    assert shown[3:] == [""]
    assert "loading the model" in terminal.getvalue()


def test_a_first_step_that_runs_is_shown() -> None:
    terminal = Terminal()
    screen = Screen(1, terminal)
    batch = BatchDescribed(0, 1, 900, 90, 4, 0, micro_batches=3)
    phases = ("forward", "forward", "backward", "forward")  # the first one begins the step
    for event in (STARTED, batch, *(PhaseBegan(0, 1, phase) for phase in phases)):
        screen.observe(event)
    assert terminal.lines()[-1] == "step 1 is running, part 2 of 3 (900 tokens, 0:00) ..."
    screen.observe(step(1))
    after = terminal.lines()[-1]
    for event in (replace(batch, step=2), PhaseBegan(0, 2, "forward")):
        screen.observe(event)
    assert terminal.lines()[-1] == after
    assert "step 1/200" in after


def test_the_remaining_time_is_that_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a machine that was busy for a while, resumed after step 100."""
    now = [0.0]
    monkeypatch.setattr("surefoot.training.screen.time.perf_counter", lambda: now[0])
    shown = io.StringIO()
    screen = Screen(1, shown)
    screen.observe(replace(STARTED, first_step=101))
    for number in range(101, 131):
        now[0] += 60 if number <= 110 else 2
        screen.observe(step(number))
    lines = [line.split("ETA ")[1] for line in shown.getvalue().splitlines() if "ETA" in line]
    assert lines[0] == "1:39:00"
    assert lines[-1] == "2:20"


def test_elsewhere_each_step_is_a_whole_line() -> None:
    shown = io.StringIO()
    screen = Screen(1, shown)
    for event in (PhaseBegan(0, 0, "load"), STARTED, step(1), step(2)):
        screen.observe(event)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 4
    assert re.fullmatch(
        r"step 2/200  loss 1\.2346  grad 0\.50  lr 1\.0e-04  expert load 1\.9x  12346 tok/s  3\.0 GiB  ETA \d+:\d\d",
        lines[-1],
    )


def test_a_log_is_begun_with_the_run_and_has_what_came_before(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "train.log", 1)
    log.observe(Notice("before"))
    assert not (tmp_path / "train.log").exists()
    for event in (STARTED, step(1), Notice("two\nlines")):
        log.observe(event)
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line)[:9] for line in lines] == [
        "before", "model m, ", "training ", "step 1/20", "two", "lines"
    ]  # fmt: skip


def test_a_run_writes_its_log(settings: dict[str, Any]) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    text = (run / "train.log").read_text()
    assert all(f"step {number}/4 " in text for number in (1, 2, 3, 4))
    assert "data: rows 40 read" in text
