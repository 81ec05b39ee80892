"""What a run's folder tells of its course, as rows for charts. Reads, writes nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.event_log import Entry, read_history, this_run
from surefoot.diagnostics.monitor.explain import Explanation, explain
from surefoot.diagnostics.monitor.gpus import Look, read_looks
from surefoot.diagnostics.rules.speed import RankTimes
from surefoot.errors import ConfigError
from surefoot.system.json_files import DamagedFile, is_count, is_number, read_object, read_objects
from surefoot.training.run_summary import COMPLETIONS, METRICS

Row = dict[str, Any]
MOST_POINTS = 600
"""Of a line: longer runs are thinned out, so that the page stays small."""
MOST_COLUMNS = 120
"""Of the heat map."""
MOST_CELLS = 4000
ROLLOUT_NAMES = (
    "step", "reward", "reward_std", "completion_length", "entropy", "clip_ratio", "importance_ratio", "kl",
)  # fmt: skip
STEPS_SHOWN, COMPLETIONS_SHOWN = 12, 8
"""Of completions.jsonl: steps at even distances, the first and the last among them, and completions of each."""
EVALUATED = ("eval_loss", "eval_reward")
LONG_PHASES = ("launch", "load", "tokenise", "save", "evaluate", "export")
"""Shown one by one on the time line; the others make up the steps."""


BESIDE_STEPS = ("launch", "load", "tokenise", "export")


@dataclass(frozen=True)
class RunHistory:
    """What a page shows."""

    told: Explanation
    steps: list[Row]
    """step, loss, learning_rate, grad_norm, tokens_per_second, step_time_s; of logged steps."""
    evaluations: list[Row]
    """step, and eval_loss or eval_reward."""
    rollouts: list[Row]
    """step, and of GRPO reward, reward_std, completion_length, entropy, clip_ratio, importance_ratio, kl."""
    completions: list[Row]
    """The lines of completions.jsonl of a few steps."""
    expert_load: list[Row]
    """step, layer, load: the busiest expert's rows over the mean."""
    phases: list[Row]
    """step, phase, seconds: the mean over the ranks."""
    memory: list[Row]
    """step, rank, gib: anonymous memory at the end of the step."""
    ledger: list[Row]
    """rank, owner, mib: to whom the memory of each rank belongs, after its first step."""
    gpus: list[Row]
    """time_min, gpu, utilisation, power: both shares, power of its limit."""
    events: list[Row]
    """rank, what, began_min, ended_min: since the beginning."""
    findings: list[Row]
    """time_min, code, title."""
    summary: Row
    config: str


def read_story(run_folder: Path) -> RunHistory:
    """Raises: ConfigError for a folder that holds no run, or one that came to no step."""
    told = explain(run_folder)
    entries = this_run(read_history(run_folder).entries)
    lines = _lines(run_folder / METRICS) or _recorded_steps(entries)
    if not lines:
        raise ConfigError(f"{run_folder}: this run came to no step, so there is nothing to show.")
    began_s = entries[0].time_s if entries else 0.0
    steps = [line for line in lines if "loss" in line and (line["loss"] is None or is_number(line["loss"]))]
    names = ("step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "step_time_s")
    return RunHistory(
        told=told,
        steps=_thinned([{"loss": None, **_numbers(line, names)} for line in steps], MOST_POINTS),
        evaluations=_thinned(
            [
                {"step": line["step"], name: line[name]}
                for line in lines
                for name in EVALUATED
                if _numbers(line, [name])
            ],
            MOST_POINTS,
        ),
        rollouts=_thinned(
            [_numbers(line, ROLLOUT_NAMES) for line in steps if is_number(line.get("reward"))], MOST_POINTS
        ),
        completions=_completions(run_folder / COMPLETIONS),
        expert_load=_expert_load(steps),
        phases=_phases(entries),
        memory=_memory(entries),
        ledger=_ledger(entries),
        gpus=_gpus(read_looks(run_folder), began_s),
        events=_thinned(_events(entries, began_s), MOST_POINTS),
        findings=[
            {"time_min": (line["time_s"] - began_s) / 60, "code": str(line["code"]), "title": str(line["title"])}
            for _, line in read_objects(run_folder / "findings.jsonl")
            if line is not None and is_number(line.get("time_s")) and "code" in line and "title" in line
        ],
        summary=_summary(run_folder / "summary.json"),
        config=_text(run_folder / "run.yaml"),
    )


def _completions(path: Path) -> list[Row]:
    """Of steps from the first to the last, so that a reader sees how answers change."""
    of_step: dict[int, list[Row]] = {}
    for line in filter(_is_completion, _lines(path)):
        of_step.setdefault(line["step"], []).append(line)
    shown = _thinned([{"step": step} for step in of_step], STEPS_SHOWN)
    return [line for row in shown for line in of_step[row["step"]][:COMPLETIONS_SHOWN]]


def _is_completion(line: Row) -> bool:
    """Return whether a line has what the table of completions shows."""
    prompt = line.get("prompt")
    are_messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    has_text = isinstance(line.get("completion"), str) and (prompt is None or isinstance(prompt, str) or are_messages)
    return has_text and {"reward", "advantage", "tokens"} <= line.keys()


def _lines(path: Path) -> list[Row]:
    """Return the lines of a file that are objects with a step; numbers that are not finite become None, as a browser
    needs it.
    """
    lines = (line for _, line in read_objects(path) if line is not None and is_count(line.get("step")))
    return [{name: _finite(value) for name, value in line.items()} for line in lines]


def _finite(value: Any) -> Any:
    return None if isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value) else value


def _numbers(line: Row, names: Sequence[str]) -> Row:
    """Return those of the named values that are numbers."""
    return {name: line[name] for name in names if is_number(line.get(name))}


def _recorded_steps(entries: Sequence[Entry]) -> list[Row]:
    """Of another trainer, which writes no metrics file: what the first rank's ring knows."""
    first = min((entry.rank for entry in entries), default=0)
    return [
        {"step": entry.step, **{name: value if math.isfinite(value) else None for name, value in entry.values.items()}}
        for entry in entries
        if entry.kind == "step" and entry.rank == first
    ]


def _summary(path: Path) -> Row:
    try:
        return {name: _finite(value) for name, value in read_object(path).items()}
    except DamagedFile:
        return {}


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def _thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` of the rows, evenly chosen, with the last."""
    every = -(-len(rows) // most)
    return list(rows) if every <= 1 else [*rows[:-1:every], rows[-1]]


def _expert_load(steps: Sequence[Row]) -> list[Row]:
    steps = [line for line in steps if isinstance(line.get("expert_load"), list)]
    steps = [line for line in steps if all(map(is_number, line["expert_load"]))]
    layers = max((len(line["expert_load"]) for line in steps), default=0)
    chosen = _thinned(steps, max(1, min(MOST_COLUMNS, MOST_CELLS // max(1, layers))))
    return [
        {"step": line["step"], "layer": layer, "load": round(load, 2)}
        for line in chosen
        for layer, load in enumerate(line["expert_load"])
    ]


def _phases(entries: Sequence[Entry]) -> list[Row]:
    ranks: dict[tuple[int, int], RankTimes] = {}
    for entry in entries:
        times = ranks.setdefault((entry.rank, entry.start), RankTimes(warmup_steps=0))
        times.add(entry.kind, entry.phase, entry.step, entry.time_s, entry.values)
    seconds: dict[int, dict[str, list[float]]] = {}
    for times in ranks.values():
        for one in times.steps:
            for phase, took_s in one.by_phase.items():
                if phase in BESIDE_STEPS:
                    continue
                seconds.setdefault(one.step, {}).setdefault(phase, []).append(took_s)
    chosen = _thinned([{"step": step} for step in sorted(seconds)], MOST_COLUMNS)
    return [
        {"step": row["step"], "phase": phase, "seconds": round(sum(took) / len(took), 5)}
        for row in chosen
        for phase, took in seconds[row["step"]].items()
    ]


def _memory(entries: Sequence[Entry]) -> list[Row]:
    last: dict[tuple[int, int], float] = {}
    for entry in entries:
        if entry.kind == "phase ended" and entry.step and entry.values.get("anonymous_bytes"):
            last[entry.rank, entry.step] = entry.values["anonymous_bytes"]
    ranks = sorted({rank for rank, _ in last})
    return [
        {"step": row["step"], "rank": str(rank), "gib": round(row["bytes"] / 2**30, 4)}
        for rank in ranks
        for row in _thinned(
            [{"step": step, "bytes": size} for (one, step), size in sorted(last.items()) if one == rank],
            MOST_POINTS // len(ranks) + 1,
        )
    ]


def _ledger(entries: Sequence[Entry]) -> list[Row]:
    """With what activations took at most, and what belongs to nobody who is known: Python, libraries, caches."""
    newest = {entry.rank: entry for entry in entries if entry.kind == "memory"}
    rows = []
    for rank, entry in sorted(newest.items()):
        values = entry.values
        mine = [one for one in entries if one.rank == rank and one.start == entry.start]
        in_steps = [one for one in mine if one.step > entry.step]  # the optimizer's state is there from then on
        used = [one.values["anonymous_bytes"] for one in in_steps if one.values.get("anonymous_bytes")]
        known = values["frozen"] + values["trained"] + values["optimizer"]
        activations = max(used, default=0.0) - min(used, default=0.0) - values["gradients"]
        if any(one.kind == "device memory" for one in in_steps):  # they lie where `total` was counted
            peak = max((one.values["peak_memory_bytes"] for one in in_steps if one.kind == "step"), default=0.0)
            activations = peak - values["total"] - values["gradients"]
        owners = {
            "frozen parameters": values["frozen"],
            "trained parameters": values["trained"],
            "gradients": values["gradients"],
            "optimizer": values["optimizer"],
            "activations": max(0.0, activations),
            "other": max(0.0, values["total"] - known),
        }
        rows += [{"rank": str(rank), "owner": owner, "mib": size / 2**20} for owner, size in owners.items()]
    return rows


def _gpus(looks: Sequence[Look], began_s: float) -> list[Row]:
    rows: list[Row] = [
        {
            "time_min": round((time_s - began_s) / 60, 3),
            "gpu": str(gpu.index),
            "utilisation": gpu.utilisation,
            "power": round(gpu.power_w / gpu.power_limit_w, 3) if gpu.power_w and gpu.power_limit_w else None,
        }
        for time_s, gpus in looks
        for gpu in gpus
    ]
    names = sorted({row["gpu"] for row in rows})
    return [
        row
        for name in names
        for row in _thinned([row for row in rows if row["gpu"] == name], MOST_POINTS // len(names))
    ]


def _events(entries: Sequence[Entry], began_s: float) -> list[Row]:
    """The long phases of each rank, and the time between its first and its last step."""
    rows: list[Row] = []
    open_s: dict[tuple[int, int, str], float] = {}
    training: dict[tuple[int, int], list[float]] = {}
    for entry in entries:
        key = (entry.rank, entry.start, entry.phase)
        if entry.kind == "phase began":
            open_s[key] = entry.time_s
        elif entry.kind == "phase ended" and key in open_s and entry.phase in LONG_PHASES:
            rows.append(_span(entry.rank, entry.phase, open_s.pop(key), entry.time_s, began_s))
        elif entry.kind == "step":
            training.setdefault((entry.rank, entry.start), []).append(entry.time_s)
    rows += [_span(rank, "steps", times[0], times[-1], began_s) for (rank, _), times in training.items()]
    return rows


def _span(rank: int, what: str, from_s: float, to_s: float, began_s: float) -> Row:
    return {
        "rank": str(rank), "what": what,
        "began_min": round((from_s - began_s) / 60, 4), "ended_min": round((to_s - began_s) / 60, 4),
    }  # fmt: skip
