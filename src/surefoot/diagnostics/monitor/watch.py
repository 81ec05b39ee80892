"""`surefoot watch RUN`: ranks, phases, speed, memory and findings of a run, live in the terminal."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from surefoot.diagnostics.monitor.event_log import Entry, read_history
from surefoot.diagnostics.monitor.explain import Explanation, explain
from surefoot.diagnostics.monitor.gpus import read_looks
from surefoot.diagnostics.rules.accelerators import in_words
from surefoot.system.json_files import is_number, parse_object

GOING_ON = ("running", "unknown")
"""Of a run whose processes are of this machine, or of others."""
EVERY_S = 1.0
NEWEST = 8000
"""Records of each rank that are read each time, a few hundred steps."""
SHOWN = ("step", "loss", "grad_norm", "tokens_per_second")
STEPS = 20
"""Over which the time of a step is told."""


def watch(run_folder: Path, *, once: bool = False) -> None:
    """Show a run until it has ended or Ctrl-C; with `once` print what is known now. Raises: ConfigError for no run."""
    console = Console()
    told, view = _look(run_folder)
    if once:
        console.print(view)
        return
    with Live(view, console=console, auto_refresh=False) as live:
        while told.status in GOING_ON:
            time.sleep(EVERY_S)
            told, view = _look(run_folder)
            live.update(view, refresh=True)


def _look(run_folder: Path) -> tuple[Explanation, Group]:
    history = read_history(run_folder, newest=NEWEST)
    told = explain(run_folder, history)
    return told, _view(run_folder, told, history.entries)


def _view(run_folder: Path, told: Explanation, entries: Sequence[Entry]) -> Group:
    metrics = _last_metrics(run_folder / "metrics.jsonl")
    head = Text(f"{run_folder}: {'going on' if told.status in GOING_ON else told.status}", style="bold")
    table = Table(box=None, pad_edge=False)
    for title in ("rank", "step", "doing", "silent s", "step s", "memory GiB", "time in its last steps"):
        table.add_column(title, justify="left" if title in ("doing", "time in its last steps") else "right")
    for rank in told.ranks:
        mine = [entry for entry in entries if entry.rank == rank.rank and entry.start == rank.start]
        table.add_row(
            str(rank.rank),
            str(rank.step),
            rank.doing,
            f"{rank.silent_s:.0f}",
            _step_time(mine),
            _memory(mine),
            _shares(mine),
        )
    lines: list[Any] = [head]
    if metrics:
        load = metrics.get("expert_load")
        load = load if isinstance(load, list) and all(map(is_number, load)) else None
        parts = [
            f"loss {metrics['loss']:.4f}",
            f"grad {metrics['grad_norm']:.2f}",
            f"{metrics['tokens_per_second']:.0f} tok/s",
            *([f"busiest expert {max(load):.1f}x the mean"] if load else []),
        ]
        lines.append(Text(f"step {metrics['step']}: " + "  ".join(parts)))
    lines.append(table)
    looks = read_looks(run_folder)
    if looks:
        lines.append(Text(f"GPUs: {in_words(looks[-1])}"))
    lines += [Text(finding.as_text(), style="red" if finding.severity == "error" else "") for finding in told.findings]
    return Group(*lines)


def _last_metrics(path: Path) -> dict[str, Any]:
    """Return the newest whole line of a step; nothing where there is none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return {}
    for text in reversed(lines):
        line = parse_object(text)  # one that is being written holds none yet
        if line is not None and all(is_number(line.get(name)) for name in SHOWN):
            return line
    return {}


def _step_time(mine: Sequence[Entry]) -> str:
    taken_s = [entry.values["step_time_s"] for entry in mine if entry.kind == "step"][-STEPS:]
    return f"{median(taken_s):.2f}" if taken_s else ""


def _memory(mine: Sequence[Entry]) -> str:
    known = [entry.values["anonymous_bytes"] for entry in mine if "anonymous_bytes" in entry.values]
    return f"{known[-1] / 2**30:.2f}" if known else ""


def _shares(mine: Sequence[Entry]) -> str:
    """How the last steps' time is split over phases: `forward 40 % backward 35 %`, the largest first."""
    last = mine[-1].step if mine else 0
    spent: dict[str, float] = {}
    began: list[float] = []
    for entry in mine:
        if entry.kind == "phase began":
            began.append(entry.time_s)
        elif entry.kind == "phase ended" and began:
            taken_s = entry.time_s - began.pop()
            if entry.step and entry.step > last - STEPS and not began:
                spent[entry.phase] = spent.get(entry.phase, 0.0) + taken_s
    total = sum(spent.values())
    largest = sorted(spent.items(), key=lambda item: -item[1])[:4]
    return "  ".join(f"{phase} {taken_s / total:.0%}" for phase, taken_s in largest) if total else ""
