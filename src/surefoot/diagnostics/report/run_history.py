"""The history of a run as rows for charts, read from its folder. Writes nothing."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from surefoot.diagnostics.monitor.event_log import Entry, read_history, this_run
from surefoot.diagnostics.monitor.explain import Explanation, explain
from surefoot.diagnostics.monitor.gpus import GpuSnapshot, read_snapshots
from surefoot.diagnostics.rules.step_times import RankTimes
from surefoot.errors import ConfigError
from surefoot.system.json_files import DamagedFile, is_count, is_number, read_object, read_objects
from surefoot.training.run_dir import ENVIRONMENT, saved_config
from surefoot.training.run_summary import COMPLETIONS, METRICS, SAMPLES, is_sample

Row = dict[str, Any]
T = TypeVar("T")
MOST_POINTS = 600
"""Most points of a line: longer runs are thinned out to keep the page small."""
MOST_COLUMNS = 120
"""Most columns of the heat map."""
MOST_CELLS = 4000
ROLLOUT_NAMES = (
    "step", "reward", "reward_std", "completion_length", "entropy", "clip_ratio", "importance_ratio", "kl",
)  # fmt: skip
STEPS_SHOWN, COMPLETIONS_SHOWN = 12, 8
"""Number of steps of completions.jsonl that are shown, and number of completions of each."""
EVALUATED = ("eval_loss", "eval_reward")
PREFERENCES = {"margin": "rewards/margins", "accuracy": "rewards/accuracies"}
"""Numbers of preference optimisation -> their metric; `eval_` is in front of those of held-out pairs."""
HELD_OUT = "held out"
PROGRAM = "Python, libraries, data"
"""Owner of the memory that a rank holds before it loads weights."""
LONG_PHASES = ("launch", "load", "tokenize", "save", "evaluate", "export")
"""Phases that the time line shows individually; the other phases are parts of steps."""
BESIDE_STEPS = ("launch", "load", "tokenize", "export")
"""Phases that belong to no step."""


@dataclass(frozen=True)
class RunHistory:
    """The content of a page."""

    explanation: Explanation
    steps: list[Row]
    """step, loss, learning_rate, grad_norm, tokens_per_second, step_time_s of each logged step."""
    evaluations: list[Row]
    """step, and eval_loss or eval_reward."""
    rollouts: list[Row]
    """step, and GRPO's reward, reward_std, completion_length, entropy, clip_ratio, importance_ratio, kl."""
    preferences: list[Row]
    """step, margin of the rewards, their accuracy if answers are pairs, and `of`: training or held out."""
    completions: list[Row]
    """The lines of completions.jsonl of a few steps."""
    samples: list[Row]
    """The lines of samples.jsonl."""
    expert_load: list[Row]
    """step, layer, load: rows of the busiest expert relative to the mean."""
    phases: list[Row]
    """step, phase, seconds: the mean over the ranks."""
    memory: list[Row]
    """step, rank, gib: anonymous memory at the end of the step."""
    ledger: list[Row]
    """rank, owner, mib: memory of each rank by owner, after its first step."""
    gpus: list[Row]
    """time_min, gpu, utilisation, power: both are shares, power relative to its limit."""
    events: list[Row]
    """rank, what, began_min, ended_min: minutes since the beginning."""
    findings: list[Row]
    """time_min, code, title."""
    summary: Row
    config: str
    settings: Row
    """Content of run.yaml; empty if it is damaged."""
    started_at: str
    """Date and time of the newest start, from environment.json; empty if unknown."""


def read_run_history(run_folder: Path) -> RunHistory:
    """Read the history of a run. Raises: ConfigError for a folder without a run, or for a run without a step."""
    explanation = explain(run_folder)
    entries = this_run(read_history(run_folder).entries)
    lines = _read_lines(run_folder / METRICS) or _read_ring_steps(entries)
    if not lines:
        raise ConfigError(f"{run_folder}: this run took no step, so there is nothing to show.")
    began_s = entries[0].time_s if entries else 0.0
    steps = [line for line in lines if "loss" in line and (line["loss"] is None or is_number(line["loss"]))]
    names = ("step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "step_time_s")
    return RunHistory(
        explanation=explanation,
        steps=_thin([{"loss": None, **_select_numbers(line, names)} for line in steps], MOST_POINTS),
        evaluations=_thin(
            [
                {"step": line["step"], name: line[name]}
                for line in lines
                for name in EVALUATED
                if is_number(line.get(name))
            ],
            MOST_POINTS,
        ),
        rollouts=_thin(
            [_select_numbers(line, ROLLOUT_NAMES) for line in steps if is_number(line.get("reward"))], MOST_POINTS
        ),
        preferences=_thin(
            [*_select_preferences(lines, "", "training"), *_select_preferences(lines, "eval_", HELD_OUT)], MOST_POINTS
        ),
        completions=_select_completions(run_folder / COMPLETIONS),
        samples=[line for line in _read_lines(run_folder / SAMPLES) if is_sample(line)],
        expert_load=_collect_expert_load(steps),
        phases=_collect_phases(entries),
        memory=_collect_memory(entries),
        ledger=_collect_ledger(entries),
        gpus=_collect_gpus(read_snapshots(run_folder), began_s),
        events=_thin(_collect_events(entries, began_s), MOST_POINTS),
        findings=[
            {"time_min": (line["time_s"] - began_s) / 60, "code": str(line["code"]), "title": str(line["title"])}
            for _, line in read_objects(run_folder / "findings.jsonl")
            if line is not None and is_number(line.get("time_s")) and "code" in line and "title" in line
        ],
        summary=_read_summary(run_folder / "summary.json"),
        config=_read_text(run_folder / "run.yaml"),
        settings=_read_settings(run_folder),
        started_at=_read_start(run_folder / ENVIRONMENT),
    )


def _select_preferences(lines: Sequence[Row], prefix: str, of: str) -> Iterator[Row]:
    """Yield the margins and accuracies of the lines that have them under names with this prefix."""
    for line in lines:
        values = {name: line.get(f"{prefix}{metric}") for name, metric in PREFERENCES.items()}
        if is_number(values["margin"]):
            yield {
                "step": line["step"],
                **{name: value for name, value in values.items() if is_number(value)},
                "of": of,
            }


def last_value(rows: Sequence[Row], field: str) -> object:
    """Return the last value of a field; None if no row has it."""
    return next((row[field] for row in reversed(rows) if row.get(field) is not None), None)


def _read_settings(run_folder: Path) -> Row:
    try:
        settings, _ = saved_config(run_folder)
    except ValueError:
        return {}
    items = settings.get("dataset")
    are_items = isinstance(items, list) and all(isinstance(item, dict) for item in items)
    return {**settings, "dataset": items if are_items else []}


def _read_start(path: Path) -> str:
    """Return `2026-11-28 01:20` of the time in environment.json."""
    try:
        return str(read_object(path).get("started_at", ""))[:16].replace("T", " ")
    except DamagedFile:
        return ""


def _select_completions(path: Path) -> list[Row]:
    """Return completions of steps from the first to the last, so that a reader sees how they change."""
    by_step: dict[int, list[Row]] = defaultdict(list)
    for line in filter(_is_completion, _read_lines(path)):
        by_step[line["step"]].append(line)
    return [line for lines in _thin(list(by_step.values()), STEPS_SHOWN) for line in lines[:COMPLETIONS_SHOWN]]


def _is_completion(line: Row) -> bool:
    """Return whether a line has all fields that the table of completions shows."""
    prompt = line.get("prompt")
    are_messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    has_text = isinstance(line.get("completion"), str) and (prompt is None or isinstance(prompt, str) or are_messages)
    return has_text and {"reward", "advantage", "tokens"} <= line.keys()


def _read_lines(path: Path) -> list[Row]:
    """Return the lines of a file that are objects with a step.

    Numbers that are not finite become None, because JSON in a browser needs it.
    """
    lines = (line for _, line in read_objects(path) if line is not None and is_count(line.get("step")))
    return [{name: _replace_non_finite(value) for name, value in line.items()} for line in lines]


def _replace_non_finite(value: Any) -> Any:
    return None if isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value) else value


def _select_numbers(line: Row, names: Sequence[str]) -> Row:
    """Return the named values that are numbers."""
    return {name: line[name] for name in names if is_number(line.get(name))}


def _read_ring_steps(entries: Sequence[Entry]) -> list[Row]:
    """Return the steps in the first rank's ring, for another trainer, which writes no metrics file."""
    first = min((entry.rank for entry in entries), default=0)
    return [
        {"step": entry.step, **{name: _replace_non_finite(value) for name, value in entry.values.items()}}
        for entry in entries
        if entry.kind == "step" and entry.rank == first
    ]


def _read_summary(path: Path) -> Row:
    try:
        return {name: _replace_non_finite(value) for name, value in read_object(path).items()}
    except DamagedFile:
        return {}


def _read_text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def _thin(items: Sequence[T], most: int) -> list[T]:
    """Return about `most` of the items at most, evenly spaced, with the first and the last."""
    stride = -(-len(items) // most)
    return list(items) if stride <= 1 else [*items[:-1:stride], items[-1]]


def _collect_expert_load(steps: Sequence[Row]) -> list[Row]:
    steps = [line for line in steps if isinstance(line.get("expert_load"), list)]
    steps = [line for line in steps if all(map(is_number, line["expert_load"]))]
    layers = max((len(line["expert_load"]) for line in steps), default=0)
    chosen = _thin(steps, max(1, min(MOST_COLUMNS, MOST_CELLS // max(1, layers))))
    return [
        {"step": line["step"], "layer": layer, "load": round(load, 2)}
        for line in chosen
        for layer, load in enumerate(line["expert_load"])
    ]


def _collect_phases(entries: Sequence[Entry]) -> list[Row]:
    ranks: dict[tuple[int, int], RankTimes] = {}
    for entry in entries:
        times = ranks.setdefault((entry.rank, entry.start), RankTimes(warmup_steps=0))
        times.add(entry.kind, entry.phase, entry.step, entry.time_s, entry.values)
    seconds: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for times in ranks.values():
        for step_times in times.steps:
            for phase, took_s in step_times.by_phase.items():
                if phase not in BESIDE_STEPS:
                    seconds[step_times.step][phase].append(took_s)
    return [
        {"step": step, "phase": phase, "seconds": round(sum(took) / len(took), 5)}
        for step, by_phase in _thin(sorted(seconds.items()), MOST_COLUMNS)
        for phase, took in by_phase.items()
    ]


def _collect_memory(entries: Sequence[Entry]) -> list[Row]:
    sizes: dict[int, dict[int, float]] = defaultdict(dict)
    for entry in entries:
        if entry.kind == "phase ended" and entry.step and entry.values.get("anonymous_bytes"):
            sizes[entry.rank][entry.step] = entry.values["anonymous_bytes"]
    return [
        {"step": step, "rank": str(rank), "gib": round(size / 2**30, 4)}
        for rank, by_step in sorted(sizes.items())
        for step, size in _thin(sorted(by_step.items()), MOST_POINTS // len(sizes) + 1)
    ]


def _collect_ledger(entries: Sequence[Entry]) -> list[Row]:
    """Return the memory of each rank by owner.

    Activations count with their peak; `other` is what has no known owner, such as caches.
    """
    newest = {entry.rank: entry for entry in entries if entry.kind == "memory"}
    rows = []
    for rank, entry in sorted(newest.items()):
        values = entry.values
        # The optimizer state exists from the next step on.
        in_steps = [
            later for later in entries if (later.rank, later.start) == (rank, entry.start) and later.step > entry.step
        ]
        used = [later.values["anonymous_bytes"] for later in in_steps if later.values.get("anonymous_bytes")]
        attributed = values["frozen"] + values["trained"] + values["optimizer"]
        activations = max(used, default=0.0) - min(used, default=0.0) - values["gradients"]
        program = _memory_before_load(entries, rank, entry.start)
        # Activations are then on the device, where `total` was counted.
        if any(later.kind == "device memory" for later in in_steps):
            peak = max((later.values["peak_memory_bytes"] for later in in_steps if later.kind == "step"), default=0.0)
            activations = peak - values["total"] - values["gradients"]
            program = 0.0
        remaining = max(0.0, values["total"] - attributed)
        owners = {
            "frozen parameters": values["frozen"],
            "trained parameters": values["trained"],
            "gradients": values["gradients"],
            "optimizer": values["optimizer"],
            "activations": max(0.0, activations),
            PROGRAM: min(program, remaining),
            "other": remaining - min(program, remaining),
        }
        rows += [{"rank": str(rank), "owner": owner, "mib": round(size / 2**20, 3)} for owner, size in owners.items()]
    return rows


def _memory_before_load(entries: Sequence[Entry], rank: int, start: int) -> float:
    """Return the bytes that a rank held before its weights: Python, torch and transformers. 0 if not recorded.

    The phase `load` begins several times: for config and tokenizer, and last for the weights.
    """
    began = [
        entry.values.get("anonymous_bytes", 0.0)
        for entry in entries
        if (entry.rank, entry.start, entry.kind, entry.phase) == (rank, start, "phase began", "load")
    ]
    return began[-1] if began else 0.0


def _collect_gpus(looks: Sequence[GpuSnapshot], began_s: float) -> list[Row]:
    samples: dict[int, list[Row]] = defaultdict(list)
    for time_s, gpus in looks:
        for gpu in gpus:
            samples[gpu.index].append(
                {
                    "time_min": round((time_s - began_s) / 60, 3),
                    "gpu": str(gpu.index),
                    "utilisation": gpu.utilisation,
                    "power": round(gpu.power_w / gpu.power_limit_w, 3) if gpu.power_w and gpu.power_limit_w else None,
                }
            )
    return [row for rows in samples.values() for row in _thin(rows, MOST_POINTS // len(samples))]


def _collect_events(entries: Sequence[Entry], began_s: float) -> list[Row]:
    """Return the long phases of each rank, and the time between its first and its last step."""
    spans: list[tuple[int, str, float, float]] = []
    open_s: dict[tuple[int, int, str], float] = {}
    training: dict[tuple[int, int], list[float]] = defaultdict(list)
    for entry in entries:
        key = (entry.rank, entry.start, entry.phase)
        if entry.kind == "phase began":
            open_s[key] = entry.time_s
        elif entry.kind == "phase ended" and key in open_s and entry.phase in LONG_PHASES:
            spans.append((entry.rank, entry.phase, open_s.pop(key), entry.time_s))
        elif entry.kind == "step":
            training[entry.rank, entry.start].append(entry.time_s)
    spans += [(rank, "steps", times[0], times[-1]) for (rank, _), times in training.items()]
    return [
        {
            "rank": str(rank),
            "what": name,
            "began_min": round((from_s - began_s) / 60, 4),
            "ended_min": round((to_s - began_s) / 60, 4),
        }
        for rank, name, from_s, to_s in spans
    ]
