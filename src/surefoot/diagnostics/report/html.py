"""The `report.html` of a run: one file that works offline, in light and dark mode, and on a phone."""

import hashlib
import json
import os
from contextlib import suppress
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from surefoot.diagnostics.report.charts import CURVES, charts
from surefoot.diagnostics.report.run_history import Row, RunHistory, read_run_history
from surefoot.errors import ConfigError, InputError, StorageError
from surefoot.system.atomic_io import cache_folder, write_text

REPORT = "report.html"
PROMPT_SHOWN, COMPLETION_SHOWN = 300, 2000
"""Number of characters shown of a prompt and of a completion."""

STYLE = """
:root { color-scheme: light dark; --line: #d5d5d5; --card: #fff; --page: #f5f5f4; --text: #1c1917; --soft: #57534e; }
@media (prefers-color-scheme: dark) {
  :root { --line: #44403c; --card: #1c1917; --page: #0c0a09; --text: #f5f5f4; --soft: #a8a29e; }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 1rem; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1280px; margin: auto; }
h1 { font-size: 1.2rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 0 0 .5rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 0 0 1rem;
  min-width: 0; }
.grid { display: grid; gap: 0 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.chart { width: 100%; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .5rem 1rem; margin: 0; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.error { border-left: 4px solid #dc2626; }
.earlier { opacity: .65; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; color: var(--soft); }
.warning { border-left: 4px solid #d97706; }
.info { border-left: 4px solid #2563eb; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
td { padding: .15rem .5rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }
th { text-align: left; font-weight: 600; padding: .15rem .5rem .15rem 0; }
td:first-child { color: var(--soft); white-space: nowrap; }
pre { overflow-x: auto; font-size: .8rem; }
"""
SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const curves = new Set(JSON.parse(document.getElementById("charts").dataset.curves));
const smoothing = document.getElementById("smoothing"), log = document.getElementById("log");
function smooth(rows, field, weight) {
  const last = {};
  return rows.map((row) => {
    const kind = row.of ?? "", before = last[kind] ?? { sum: 0, mass: 0 };
    const sum = weight * before.sum + (1 - weight) * row[field], mass = weight * before.mass + (1 - weight);
    last[kind] = { sum, mass };
    return { ...row, [field]: sum / mass };
  });
}
function adjust(spec, weight, isLog) {
  const copy = JSON.parse(JSON.stringify(spec));
  for (const layer of copy.layer) {
    const y = layer.encoding.y, rows = layer.data.values;
    if (layer.mark.type === "line" && weight > 0) layer.data.values = smooth(rows, y.field, weight);
    if (isLog && rows.every((row) => row[y.field] > 0)) y.scale = { type: "log", nice: false };
  }
  return copy;
}
function draw() {
  for (const [name, spec] of Object.entries(charts)) {
    const shown = curves.has(name) ? adjust(spec, Number(smoothing.value), log.checked) : spec;
    vegaEmbed("#" + name, shown, {
      actions: false, renderer: "svg", theme: dark.matches ? "dark" : undefined, config: { background: "transparent" },
    }).catch((error) => console.error(name, error));
  }
}
dark.addEventListener("change", draw);
smoothing.addEventListener("change", draw);
log.addEventListener("change", draw);
draw();
"""


def write_report(run_folder: Path) -> Path:
    """Write the page of a run into its folder; return the file.

    Raises: ConfigError for a folder without a run or without a step, or if vl-convert-python is missing; StorageError.
    """
    path = run_folder / REPORT
    write_text(path, _render_page(read_run_history(run_folder), _load_chart_script()))
    return path


def _load_chart_script() -> str:
    """Return Vega-Embed with all that it needs, as JavaScript that works offline.

    Bundling takes seconds and gives the same text for each version, so the text is kept in the cache. One that is
    damaged or belongs to another user is replaced; where nothing can be cached, each report bundles it again.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise ConfigError(
            "report.html needs the package vl-convert-python, which draws its charts: pip install vl-convert-python, "
            "or set report: false."
        ) from error
    try:
        path = cache_folder() / "report" / f"vega-embed-{version('vl-convert-python')}.js"
    except (InputError, PackageNotFoundError):  # without a home folder or a version there is no cache
        path = None
    script = _read_cached_script(path) if path else None
    if script is None:
        script = vl_convert.javascript_bundle()  # type: ignore[call-arg] # the argument that its type hints require is optional
        if path:
            with suppress(StorageError):
                write_text(path, f"// SHA-256 of what follows: {_sha256_of_text(script)}\n{script}")
    return script


def _read_cached_script(path: Path) -> str | None:
    """Return the cached script; None if it is missing, damaged or the file of another user."""
    try:
        if path.stat().st_uid not in (0, os.getuid()):
            return None
        header, _, script = path.read_bytes().decode("utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return script if header.endswith(_sha256_of_text(script)) else None


def _sha256_of_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _render_page(history: RunHistory, chart_script: str) -> str:
    drawn = charts(history)
    specs = json.dumps({name: spec for name, (_, spec) in drawn.items()}, allow_nan=False).replace("</", "<\\/")
    sections = "".join(
        f'<section><h2>{escape(title)}</h2><div class="chart" id="{name}"></div></section>'
        for name, (title, _) in drawn.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(history.explanation.run_folder.name)}: Surefoot run</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(str(history.explanation.run_folder))}</h1>
{_render_summary(history)}
{_render_findings(history)}
<section class="controls">
<label>smoothing <input type="range" id="smoothing" min="0" max="0.98" step="0.02" value="0"></label>
<label><input type="checkbox" id="log"> logarithmic</label>
<span>drag a curve to move it, Shift and the wheel zoom, a double click shows all</span>
</section>
<div class="grid">{sections}</div>
{_render_completions(history)}
<section><details><summary>run.yaml</summary><pre>{escape(history.config)}</pre></details></section>
</main>
<script type="application/json" id="charts" data-curves='{json.dumps(CURVES)}'>{specs}</script>
<script>{chart_script}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


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
            else {"last loss": _format_number(history.steps[-1]["loss"], ".4f") if history.steps else ""}
        ),
        "tokens/s": _format_number(summary.get("tokens_per_second"), ".0f"),
        "peak memory": _format_number(_convert_to_gib(summary.get("peak_memory_bytes")), ".2f", " GiB"),
        "ranks": len(history.explanation.ranks),
        "artifact": summary.get("artifact") or "",
    }
    terms = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in shown.items())
    return f"<section><dl>{terms}</dl></section>"


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


def _render_completions(history: RunHistory) -> str:
    """Return a table for each step, with prompts, completions, rewards and advantages."""
    tables = []
    for step in sorted({row["step"] for row in history.completions}):
        rows = "".join(
            f"<tr><td>{escape(_format_number(row['reward'], '.3g') or 'failed')}</td>"
            f"<td>{escape(_format_number(row['advantage'], '+.2f'))}</td><td>{row['tokens']}</td>"
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


def _format_number(value: Any, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else ""
