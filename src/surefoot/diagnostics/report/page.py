"""The frame of a page of charts: one file that works offline, in light and dark mode, and on a phone."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from surefoot.diagnostics.report.charts import CURVES, Spec
from surefoot.errors import ConfigError, InputError, StorageError
from surefoot.system.atomic_io import cache_folder, write_text

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
.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: #bbf7d0; color: #14532d; border-radius: 2px; }
@media (prefers-color-scheme: dark) { mark { background: #14532d; color: #bbf7d0; } }
"""
SCRIPT = """
let charts = JSON.parse(document.getElementById("charts").textContent);
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
const text = "system-ui, sans-serif";
const look = {
  background: "transparent", view: { stroke: null },
  axis: {
    gridOpacity: .2, domainOpacity: .4, tickOpacity: .4, labelFont: text, titleFont: text, labelFontSize: 12,
    titleFontSize: 12, titleFontWeight: "normal",
  },
  legend: { labelFont: text, labelFontSize: 12 },
};
function draw() {
  for (const [name, spec] of Object.entries(charts)) {
    const shown = curves.has(name) ? adjust(spec, Number(smoothing.value), log.checked) : spec;
    vegaEmbed("#" + name, shown, {
      actions: false, renderer: "svg", theme: dark.matches ? "dark" : undefined, config: look,
    }).catch((error) => console.error(name, error));
  }
}
dark.addEventListener("change", draw);
smoothing.addEventListener("change", draw);
log.addEventListener("change", draw);
draw();
if (document.body.dataset.live) {
  new EventSource("events").onmessage = (event) => {
    const page = JSON.parse(event.data);
    document.getElementById("head").innerHTML = page.head;
    document.getElementById("grid").innerHTML = page.grid;
    charts = page.charts;
    draw();
  };
}
"""


@dataclass(frozen=True)
class Page:
    """The content of a page."""

    title: str
    head: str
    """HTML above the charts."""
    charts: Mapping[str, tuple[str, Spec]]
    """Name -> (title, specification)."""
    tail: str = ""
    """HTML below the charts."""

    def render(self, chart_script: str, *, is_live: bool = False) -> str:
        """Return the HTML. `chart_script`: from `load_chart_script`; `is_live`: whether the page asks for updates."""
        specs = json.dumps(self._specs(), allow_nan=False).replace("</", "<\\/")
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(self.title)}</title>
<style>{STYLE}</style>
</head>
<body{' data-live="true"' * is_live}>
<main>
<div id="head">{self.head}</div>
<section class="controls">
<label>smoothing <input type="range" id="smoothing" min="0" max="0.98" step="0.02" value="0"></label>
<label><input type="checkbox" id="log"> logarithmic</label>
<span>drag a curve to move it, Shift and the wheel zoom, a double click shows all</span>
</section>
<div class="grid" id="grid">{self._grid()}</div>
{self.tail}
</main>
<script type="application/json" id="charts" data-curves='{json.dumps(CURVES)}'>{specs}</script>
<script>{chart_script}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""

    def update(self) -> dict[str, Any]:
        """Return what a live page replaces."""
        return {"head": self.head, "grid": self._grid(), "charts": self._specs()}

    def _specs(self) -> dict[str, Spec]:
        return {name: spec for name, (_, spec) in self.charts.items()}

    def _grid(self) -> str:
        return "".join(
            f'<section><h2>{escape(title)}</h2><div class="chart" id="{name}"></div></section>'
            for name, (title, _) in self.charts.items()
        )


def render_table(rows: Mapping[str, list[str]], header: list[str]) -> str:
    """Return an HTML table: a row for each name, with its cells."""
    top = "".join(f"<th>{escape(text)}</th>" for text in ["", *header])
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows.items()
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def format_number(value: Any, form: str, unit: str = "") -> str:
    """Return a number in a format with its unit; an empty text for anything else."""
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else ""


def load_chart_script() -> str:
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
