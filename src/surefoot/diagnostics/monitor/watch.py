"""`surefoot watch RUN`: a live view of a run's ranks, phases, speed, memory and findings in the terminal."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from surefoot.config import read_saved
from surefoot.diagnostics.monitor.event_log import Entry, read_history
from surefoot.diagnostics.monitor.explain import Explanation, explain
from surefoot.diagnostics.monitor.gpus import read_snapshots
from surefoot.diagnostics.rules.accelerators import in_words
from surefoot.errors import ConfigError
from surefoot.system.console import format_time_left
from surefoot.system.json_files import is_number, parse_object
from surefoot.training.run_dir import saved_config

MAY_RUN = ("running", "unknown")
"""Statuses of a run that may still run, on this machine or on others."""
EVERY_S = 1.0
PLAIN_EVERY_S = 30.0
"""Seconds between two states that are written where the output is no terminal."""
NEWEST = 8000
"""Number of records of each rank that are read each time, a few hundred steps."""
SHOWN = ("step", "loss", "grad_norm", "tokens_per_second")
STEPS = 20
"""Number of newest steps over which times are measured."""
BLOCKS, SPARKS = "▁▂▃▄▅▆▇█", 40
"""Heights of a sparkline, and its width in characters."""


def watch(run_folder: Path, *, once: bool = False) -> None:
    """Show a run until it ends or Ctrl-C; with `once` print its present state. Raises: ConfigError for no run."""
    console = Console()
    explanation, view = _read_view(run_folder)
    if once:
        console.print(view)
        return
    if not console.is_terminal:
        console.print(view)
        while explanation.status in MAY_RUN:
            time.sleep(PLAIN_EVERY_S)
            explanation, view = _read_view(run_folder)
            console.print(view)
        return
    with Live(view, console=console, auto_refresh=False) as live:
        while explanation.status in MAY_RUN:
            time.sleep(EVERY_S)
            explanation, view = _read_view(run_folder)
            live.update(view, refresh=True)


def _read_view(run_folder: Path) -> tuple[Explanation, Group]:
    history = read_history(run_folder, newest=NEWEST)
    explanation = explain(run_folder, history)
    return explanation, _build_view(run_folder, explanation, history.entries)


def _build_view(run_folder: Path, explanation: Explanation, entries: Sequence[Entry]) -> Group:
    steps = _read_steps(run_folder / "metrics.jsonl")
    metrics = steps[-1] if steps else None
    head = Text(f"{run_folder}: {'running' if explanation.status in MAY_RUN else explanation.status}", style="bold")
    table = Table(box=None, pad_edge=False)
    for title in ("rank", "step", "doing", "silent s", "step s", "memory GiB", "time in its last steps"):
        table.add_column(title, justify="left" if title in ("doing", "time in its last steps") else "right")
    for rank in explanation.ranks:
        rank_entries = [entry for entry in entries if entry.rank == rank.rank and entry.start == rank.start]
        table.add_row(
            str(rank.rank),
            str(rank.step),
            rank.doing,
            f"{rank.silent_s:.0f}",
            _format_step_time(rank_entries),
            _format_memory(rank_entries),
            _format_shares(rank_entries),
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
        left = _format_left(run_folder, steps) if explanation.status in MAY_RUN else ""
        lines.append(Text(f"step {metrics['step']}{left}: " + "  ".join(parts)))
        lines.append(Text(f"loss {_draw_sparkline([line['loss'] for line in steps])}"))
    lines.append(table)
    snapshots = read_snapshots(run_folder)
    if snapshots:
        lines.append(Text(f"GPUs: {in_words(snapshots[-1])}"))
    current = [finding for finding in explanation.findings if not explanation.is_earlier(finding)]
    num_earlier = len(explanation.findings) - len(current)
    lines += [Text(finding.as_text(), style="red" if finding.severity == "error" else "") for finding in current]
    if num_earlier:
        what = f"{num_earlier} finding{'s' * (num_earlier != 1)} of earlier starts"
        lines.append(Text(f"{what}: surefoot explain {run_folder}", style="dim"))
    lines += [Text(f"missing: {evidence}", style="dim") for evidence in explanation.missing]
    return Group(*lines)


def _read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of steps."""
    try:
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
    except OSError:
        return []
    objects = map(parse_object, lines)  # a line that is being written holds no object yet
    return [line for line in objects if line is not None and all(is_number(line.get(name)) for name in SHOWN)]


def _format_left(run_folder: Path, steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of steps of the run and the time that is left, `/200, 1:15 left`; empty if unknown."""
    newest = steps[-1]
    try:
        config = read_saved(saved_config(run_folder)[0])
        share = config.share_done(newest["step"], float(newest["epoch"]))
        times_s = [float(line["step_time_s"]) for line in steps[-STEPS:]]
    except (ConfigError, ValueError, KeyError, TypeError):
        return ""
    if not share > 0:
        return ""
    total = config.max_steps or round(newest["step"] / share)
    return f"/{total}, {format_time_left(median(times_s) * max(0, total - newest['step']))} left"


def _draw_sparkline(values: Sequence[float]) -> str:
    """Return values as a row of at most `SPARKS` blocks, each the median of its share of them."""
    count = min(SPARKS, len(values))
    cuts = [len(values) * number // count for number in range(count + 1)]
    points = [median(values[begin:end]) for begin, end in pairwise(cuts)]
    lowest, highest = min(points), max(points)
    span = highest - lowest or 1.0
    return "".join(BLOCKS[round((point - lowest) / span * (len(BLOCKS) - 1))] for point in points)


def _format_step_time(entries: Sequence[Entry]) -> str:
    taken_s = [entry.values["step_time_s"] for entry in entries if entry.kind == "step"][-STEPS:]
    return f"{median(taken_s):.2f}" if taken_s else ""


def _format_memory(entries: Sequence[Entry]) -> str:
    memory_bytes = [entry.values["anonymous_bytes"] for entry in entries if "anonymous_bytes" in entry.values]
    return f"{memory_bytes[-1] / 2**30:.2f}" if memory_bytes else ""


def _format_shares(entries: Sequence[Entry]) -> str:
    """Return the split of the last steps' time over phases: `forward 40 % backward 35 %`, the largest first."""
    last = entries[-1].step if entries else 0
    spent: dict[str, float] = {}
    began: list[float] = []
    for entry in entries:
        if entry.kind == "phase began":
            began.append(entry.time_s)
        elif entry.kind == "phase ended" and began:
            taken_s = entry.time_s - began.pop()
            if entry.step and entry.step > last - STEPS and not began:
                spent[entry.phase] = spent.get(entry.phase, 0.0) + taken_s
    total = sum(spent.values())
    largest = sorted(spent.items(), key=lambda item: -item[1])[:4]
    return "  ".join(f"{phase} {taken_s / total:.0%}" for phase, taken_s in largest) if total else ""
