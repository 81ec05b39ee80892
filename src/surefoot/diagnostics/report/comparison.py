"""A page that compares runs: their curves in the same charts, their results, and the settings that differ."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from surefoot.diagnostics.report.charts import Spec, draw_comparison
from surefoot.diagnostics.report.page import Page, format_number, load_chart_script, render_table
from surefoot.diagnostics.report.run_history import Row, RunHistory, last_value, read_run_history
from surefoot.errors import ConfigError
from surefoot.system.atomic_io import write_text

CURVES_COMPARED: Mapping[str, tuple[str, Callable[[RunHistory], list[Row]], str]] = {
    "loss": ("Loss", lambda run: run.steps, "loss"),
    "eval_loss": ("Loss of held-out rows", lambda run: run.evaluations, "eval_loss"),
    "reward": ("Reward", lambda run: run.rollouts, "reward"),
    "length": ("Tokens of a completion", lambda run: run.rollouts, "completion_length"),
    "kl": ("Divergence from the reference", lambda run: run.rollouts, "kl"),
    "gradient": ("Norm of the gradient", lambda run: run.steps, "grad_norm"),
    "rate": ("Learning rate", lambda run: run.steps, "learning_rate"),
    "speed": ("Tokens per second", lambda run: run.steps, "tokens_per_second"),
}
"""Name of a chart -> its title, the rows that it draws, and their value."""
OF_EVERY_RUN = ("output_dir", "run_name")
"""Settings that differ in any two runs."""


def write_comparison(run_folders: Sequence[Path], target: Path) -> Path:
    """Write a page that compares runs; return the file.

    Raises: ConfigError for a folder without a run or without a step, or if vl-convert-python is missing; StorageError.
    """
    if target.is_dir():
        raise ConfigError(f"--to {target}: this is a folder. Give the name of a file.")
    runs = dict(zip(_labels(run_folders), map(read_run_history, run_folders), strict=True))
    names = list(runs)
    page = Page(
        title=f"{', '.join(names)}: Surefoot runs",
        head=f"<h1>{escape(', '.join(names))}</h1>"
        f"<section><h2>Results</h2>{render_table(_results(runs), names)}</section>"
        f"<section><h2>Settings that differ</h2>{render_table(_differences(runs), names)}</section>",
        charts=_charts(runs),
    )
    write_text(target, page.render(load_chart_script()))
    return target


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the names of the folders, or their paths if two have the same name."""
    names = [folder.resolve().name for folder in folders]
    paths = [str(folder) for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"{max(paths, key=paths.count)} is given twice. A comparison needs different runs.")
    return names if len(set(names)) == len(names) else paths


def _charts(runs: Mapping[str, RunHistory]) -> dict[str, tuple[str, Spec]]:
    """Return the charts in which at least one run has values."""
    drawn = {}
    for name, (title, rows_of, field) in CURVES_COMPARED.items():
        rows = [
            {"step": row["step"], field: row[field], "of": label}
            for label, run in runs.items()
            for row in rows_of(run)
            if row.get(field) is not None
        ]
        if rows:
            drawn[name] = (title, draw_comparison(rows, field, list(runs)))
    return drawn


def _results(runs: Mapping[str, RunHistory]) -> dict[str, list[str]]:
    """Return the rows of the table of results; those that no run has are left out."""
    shown: dict[str, Callable[[RunHistory], str]] = {
        "status": lambda run: run.explanation.status,
        "started": lambda run: run.started_at,
        "steps": lambda run: str(run.steps[-1]["step"]) if run.steps else "0",
        "mean training loss": lambda run: format_number(run.summary.get("train_loss"), ".4f"),
        "last loss": lambda run: format_number(run.steps[-1]["loss"], ".4f") if run.steps else "",
        "last held-out loss": lambda run: format_number(last_value(run.evaluations, "eval_loss"), ".4f"),
        "last reward": lambda run: format_number(last_value(run.rollouts, "reward"), ".3f"),
        "tokens/s": lambda run: format_number(run.summary.get("tokens_per_second"), ".0f"),
        "findings": lambda run: " ".join(finding.code for finding in run.explanation.findings),
    }
    rows = {name: [text_of(run) for run in runs.values()] for name, text_of in shown.items()}
    return {name: cells for name, cells in rows.items() if any(cells)}


def _differences(runs: Mapping[str, RunHistory]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs, with the value in each."""
    names = {name: None for run in runs.values() for name in run.settings}
    rows = {name: [str(run.settings.get(name, "")) for run in runs.values()] for name in names}
    return {name: cells for name, cells in rows.items() if len(set(cells)) > 1 and name not in OF_EVERY_RUN}
