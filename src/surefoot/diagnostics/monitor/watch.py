"""`surefoot watch RUN`: a live view of a run's ranks, phases, speed, memory and findings in the terminal."""

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
from surefoot.diagnostics.monitor.gpus import read_snapshots
from surefoot.diagnostics.rules.accelerators import in_words
from surefoot.system.json_files import is_number, parse_object

MAY_RUN = ("running", "unknown")
"""Statuses of a run that may still run, on this machine or on others."""
EVERY_S = 1.0
NEWEST = 8000
"""Number of records of each rank that are read each time, a few hundred steps."""
SHOWN = ("step", "loss", "grad_norm", "tokens_per_second")
STEPS = 20
"""Number of newest steps over which times are measured."""


def watch(run_folder: Path, *, once: bool = False) -> None:
    """Show a run until it ends or Ctrl-C; with `once` print its present state. Raises: ConfigError for no run."""
    console = Console()
    explanation, view = _read_view(run_folder)
    if once:
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
    metrics = _read_last_metrics(run_folder / "metrics.jsonl")
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
        lines.append(Text(f"step {metrics['step']}: " + "  ".join(parts)))
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


def _read_last_metrics(path: Path) -> dict[str, Any]:
    """Return the newest complete line of a step; empty if there is none."""
    try:
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
    except OSError:
        return {}
    for text in reversed(lines):
        line = parse_object(text)  # a line that is being written holds no object yet
        if line is not None and all(is_number(line.get(name)) for name in SHOWN):
            return line
    return {}


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
