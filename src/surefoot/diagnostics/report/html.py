"""The `report.html` of a run."""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from surefoot.config.methods import known_fields
from surefoot.diagnostics.report.charts import charts
from surefoot.diagnostics.report.page import Page, format_number, load_chart_script, render_table
from surefoot.diagnostics.report.run_history import Row, RunHistory, last_value, read_run_history
from surefoot.system.atomic_io import write_text
from surefoot.system.console import format_time_left

REPORT = "report.html"
PROMPT_SHOWN, COMPLETION_SHOWN = 300, 2000
"""Number of characters shown of a prompt and of a completion."""


def write_report(run_folder: Path, target: Path | None = None) -> Path:
    """Write the page of a run to `target`, by default into its folder; return the file.

    Raises: ConfigError for a folder without a run or without a step, or if vl-convert-python is missing; StorageError.
    """
    path = target or run_folder / REPORT
    write_text(path, page_of(run_folder).render(load_chart_script()))
    return path


def page_of(run_folder: Path) -> Page:
    """Return the page of a run. Raises: ConfigError for a folder without a run or without a step."""
    history = read_run_history(run_folder)
    return Page(
        title=f"{history.explanation.run_folder.name}: Surefoot run",
        head=f"<h1>{escape(str(history.explanation.run_folder))}</h1>{_render_summary(history)}"
        f"{_render_benchmarks(history.summary)}{_render_findings(history)}",
        charts=charts(history),
        tail=f"{_render_samples(history)}{_render_completions(history)}{_render_settings(history)}",
    )


def _render_settings(history: RunHistory) -> str:
    """Return a table of the settings that are not the defaults, and the whole run.yaml."""
    own = {name: [_write_value(value)] for name, value in history.settings.items() if not _is_default(name, value)}
    return (
        f"<section><h2>Settings that are not the defaults</h2>{render_table(own, ['value'])}"
        f"<details><summary>all settings (run.yaml)</summary><pre>{escape(history.config)}</pre></details></section>"
    )


def _write_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_default(name: str, value: Any) -> bool:
    field = known_fields().get(name)
    return field is not None and not field.is_required() and to_jsonable_python(field.default) == value


def _render_benchmarks(summary: Mapping[str, Any]) -> str:
    """Return a table of the scores of `surefoot evaluate`."""
    scores = summary.get("benchmarks")
    if not isinstance(scores, dict) or not scores:
        return ""
    rows = {
        f"{task} {metric}": [format_number(value, ".4f")]
        for task, metrics in scores.items()
        if isinstance(metrics, dict)
        for metric, value in metrics.items()
    }
    return f"<section><h2>Benchmarks</h2>{render_table(rows, ['score'])}</section>"


def _render_summary(history: RunHistory) -> str:
    summary, settings = history.summary, history.settings
    shown: Row = {
        "status": history.explanation.status,
        "model": Path(str(settings.get("model", ""))).name,
        "method": f"{settings.get('method', '')}, {settings.get('tuning', '')}",
        "data": ", ".join(Path(str(item.get("path", ""))).name for item in settings.get("dataset", [])),
        "started": history.started_at,
        "steps": history.steps[-1]["step"] if history.steps else 0,
        **(
            {"first and last reward": " and ".join(f"{history.rollouts[end]['reward']:.3f}" for end in (0, -1))}
            if history.rollouts
            else {"last loss": format_number(history.steps[-1]["loss"], ".4f") if history.steps else ""}
        ),
        "held-out loss": format_number(last_value(history.evaluations, "eval_loss"), ".4f"),
        "duration": _measure_duration(history),
        "tokens/s": format_number(summary.get("tokens_per_second"), ".0f"),
        "peak memory": format_number(_convert_to_gib(summary.get("peak_memory_bytes")), ".2f", " GiB"),
        "ranks": len(history.explanation.ranks),
        "artifact": _name_within(summary.get("artifact"), history.explanation.run_folder),
    }
    terms = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in shown.items()
        if value != ""
    )
    return f"<section><dl>{terms}</dl></section>"


def _measure_duration(history: RunHistory) -> str:
    """Return the time from the run's beginning to the last event that was recorded; empty if none was."""
    ends_min = [row["ended_min"] for row in history.events]
    return format_time_left(60 * max(ends_min)) if ends_min else ""


def _name_within(path: Any, run_folder: Path) -> str:
    """Return a path of the summary, relative to the run folder that the page names if it lies there."""
    if not path:
        return ""
    absolute = Path(str(path)).absolute()
    return str(absolute.relative_to(run_folder.absolute()) if absolute.is_relative_to(run_folder.absolute()) else path)


def _render_findings(history: RunHistory) -> str:
    cards = []
    for finding in history.explanation.findings:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in finding.evidence.items()
        )
        is_earlier = history.explanation.is_earlier(finding)
        kinds, when = f"{finding.severity}{' earlier' * is_earlier}", " (in an earlier start)" * is_earlier
        cards.append(
            f'<section class="{kinds}"><h2>{finding.code} {escape(finding.title)}{when}</h2>'
            f"<p>{escape(finding.cause)}</p><p><b>What to do:</b> {escape(finding.fix)}</p>"
            f"<details><summary>evidence</summary><table>{rows}</table></details></section>"
        )
    return "".join(cards)


def _render_samples(history: RunHistory) -> str:
    """Return the samples of the first step, with what is trained marked."""
    samples = [
        f"<details{' open' * (number == 0)}><summary>{escape(str(row['place']))}, {row['tokens']} tokens</summary>"
        f"<pre class='sample'>{''.join(_render_part(text, is_trained) for text, is_trained in row['parts'])}</pre>"
        "</details>"
        for number, row in enumerate(history.samples)
    ]
    return f"<section><h2>Samples of the first step; marked: trained</h2>{''.join(samples)}</section>" * bool(samples)


def _render_part(text: str, is_trained: Any) -> str:
    shown = escape(_truncate(text))
    return f"<mark>{shown}</mark>" if is_trained else shown


def _render_completions(history: RunHistory) -> str:
    """Return a table for each step, with prompts, completions, rewards and advantages."""
    tables = []
    for step in sorted({row["step"] for row in history.completions}):
        rows = "".join(
            f"<tr><td>{escape(format_number(row['reward'], '.3g') or 'failed')}</td>"
            f"<td>{escape(format_number(row['advantage'], '+.2f'))}</td><td>{row['tokens']}</td>"
            f"<td>{escape(_shorten_prompt(row['prompt']))}</td><td>{escape(_truncate(row['completion']))}</td></tr>"
            for row in history.completions
            if row["step"] == step
        )
        tables.append(
            f"<details><summary>completions of step {step}</summary><table><tr><th>reward</th><th>advantage</th>"
            f"<th>tokens</th><th>prompt</th><th>completion</th></tr>{rows}</table></details>"
        )
    return f"<section><h2>Completions</h2>{''.join(tables)}</section>" if tables else ""


def _truncate(text: str) -> str:
    remaining = len(text) - COMPLETION_SHOWN
    return text if remaining <= 0 else f"{text[:COMPLETION_SHOWN]} ... ({remaining} more characters)"


def _shorten_prompt(prompt: Any) -> str:
    """Return the end of a prompt: of its last message, or of its text."""
    text = prompt[-1].get("content", "") if isinstance(prompt, list) and prompt else prompt or ""
    return str(text)[-PROMPT_SHOWN:]


def _convert_to_gib(value: Any) -> float | None:
    return value / 2**30 if isinstance(value, int | float) else None
