"""The page of a run: made at its end, whole in one file, and drawn by a real browser."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
import vl_convert

import surefoot as package
from surefoot.diagnostics.drill import settings_of
from surefoot.diagnostics.monitor.event_log import Entry
from surefoot.diagnostics.report.charts import CURVES, PALETTE
from surefoot.diagnostics.report.html import write_report
from surefoot.diagnostics.report.page import SCRIPT
from surefoot.diagnostics.report.run_history import _collect_ledger
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.training.run_summary import FindingLog, read_result
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import surefoot

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHARTS = {"loss", "gradient", "rate", "speed", "phases", "memory", "ledger", "experts", "timeline"}
MOST_BYTES = 1_500_000
EVIL = "</script><script>throw 'not escaped'</script>"


@pytest.fixture(scope="module")
def run_folder(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with experts, evaluations and a finding."""
    root = tmp_path_factory.mktemp("report")
    data = write_jsonl(root / "rows.jsonl", counting_rows(60))
    settings: dict[str, Any] = {**settings_of(model_folder("mixtral"), data), "output_dir": str(root / "run")}
    more = {"max_steps": 30, "eval_fraction": 0.2, "eval_steps": 10, "save_steps": 10, "report": True}
    folder = package.train({**settings, **more}, screen=False).run_folder
    with open(folder / "metrics.jsonl", "a") as metrics:  # as a run that broke leaves it
        metrics.write('{"step": 31, "loss": NaN, "grad_norm": Infinity}\n{"step": 32, "lo')
    FindingLog(folder).note(Finding("SF302", f"it waits {EVIL}", {"rank": 0, "evil": EVIL}, "Wait less."))
    with open(folder / "findings.jsonl", "a") as findings:
        findings.write(json.dumps({"time_s": 1.0, **Finding("SF101", "a rank died", {}).as_dict()}) + "\n")
    return folder


@pytest.mark.long
def test_the_page_is_one_small_file(run_folder: Path) -> None:
    path = write_report(run_folder)
    text = path.read_text()
    assert path == run_folder / "report.html"
    assert len(text) < MOST_BYTES
    assert EVIL not in text
    outside = re.sub(r"<script[ >].*?</script>", "", text, flags=re.S)
    assert not re.search(r'(src|href)="(?!data:)', outside), "it loads nothing from elsewhere"
    assert not re.search(r"<script[^>]* src=", text)
    written = re.search(r'id="charts"[^>]*>(.*?)</script>', text, re.S)
    assert written is not None
    assert "NaN" not in written[1]
    charts = json.loads(written[1])
    assert set(charts) == CHARTS
    for spec in charts.values():
        vl_convert.vegalite_to_svg(spec)
    owners = {row["owner"]: row["mib"] for row in charts["ledger"]["layer"][0]["data"]["values"] if row["rank"] == "0"}
    assert owners["other"] < 0.15 * sum(owners.values()), "nearly all memory has a name"
    colors = charts["phases"]["layer"][0]["encoding"]["color"]["scale"]
    assert dict(zip(colors["domain"], colors["range"], strict=True))["optimizer"] == PALETTE[5], "in every report"
    of_time = charts["timeline"]["layer"][0]["encoding"]["color"]["scale"]
    both = set(of_time["domain"]) & set(colors["domain"])
    assert both, "evaluations and saves"
    shared = [
        {name: color for name, color in zip(c["domain"], c["range"], strict=True) if name in both}
        for c in (colors, of_time)
    ]
    assert shared[0] == shared[1], "a phase has one colour in both charts"
    assert re.findall(r"<h2>(SF\d+) [^<]*\(in an earlier start\)</h2>", text) == ["SF101"]
    for shown in ("mixtral", "sft, lora", "rows.jsonl", "adapter"):
        assert f"<dd>{shown}</dd>" in text
    shown = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", text))
    assert re.fullmatch(r"\d+:\d\d", shown["duration"])
    assert float(shown["held-out loss"]) == pytest.approx(read_result(run_folder).evaluation["eval_loss"], abs=1e-3)
    own = re.search(r"<h2>Settings that are not the defaults</h2><table>(.*?)</table>", text, re.S)
    assert own is not None
    values = dict(re.findall(r"<tr><td>(\w+)</td><td>(.*?)</td></tr>", own[1]))
    assert values["eval_fraction"] == "0.2"
    assert not values.keys() & {"adam_beta1", "seed", "zero_stage"}, "defaults"


PAGE = """
const page = JSON.parse(require("fs").readFileSync(0, "utf8")), shown = {};
const control = (values) => ({ addEventListener() {}, ...values });
const elements = { charts: { textContent: page.charts, dataset: { curves: page.curves } },
  smoothing: control({ value: page.smoothing }), log: control({ checked: page.log }) };
globalThis.document = { getElementById: (id) => elements[id] ?? (elements[id] = {}),
  body: { dataset: { live: page.update } } };
globalThis.EventSource = class { set onmessage(handle) { handle({ data: page.update }); } };
globalThis.matchMedia = () => control({ matches: false });
globalThis.vegaEmbed = (id, spec) => { shown[id.slice(1)] = spec; return { catch() {} }; };
(0, eval)(page.script);
console.log(JSON.stringify(shown));
"""
"""The script of a page, with what it needs of a browser."""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_curves_are_smoothed_and_drawn_in_a_logarithmic_scale() -> None:
    rows = [{"step": step, "loss": value, "of": of} for of in ("a", "b") for step, value in enumerate((4.0, 2.0, 1.0))]
    layer = {"mark": {"type": "line"}, "data": {"values": rows}, "encoding": {"y": {"field": "loss"}}}
    points = {**layer, "mark": {"type": "point"}}
    specs = {"loss": {"layer": [layer, points]}, "memory": {"layer": [layer]}}

    def draw(smoothing: float, *, log: bool, update: str | None = None) -> dict[str, Any]:
        page = {"charts": json.dumps(specs), "curves": json.dumps(CURVES), "script": SCRIPT, "smoothing": smoothing}
        page["update"] = update
        done = subprocess.run(
            ["node", "-e", PAGE], input=json.dumps({**page, "log": log}), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    assert draw(0, log=False) == specs
    update = {"head": "", "grid": "", "charts": {"speed": specs["memory"]}}
    assert draw(0, log=False, update=json.dumps(update))["speed"] == specs["memory"], (
        "a live page draws what it is sent"
    )
    shown = draw(0.5, log=True)
    assert shown["memory"] == specs["memory"]
    line, dots = shown["loss"]["layer"]
    values = [row["loss"] for row in line["data"]["values"]]
    assert values == pytest.approx([4, 8 / 3, 12 / 7] * 2), "each line by itself, without a bias to 0"
    assert dots["data"] == points["data"]
    assert (line["encoding"]["y"]["scale"]["type"], dots["encoding"]["y"]["scale"]["type"]) == ("log", "log")


@pytest.fixture(scope="module")
def grpo_folder(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of GRPO, whose data try to break out of the page."""
    root = tmp_path_factory.mktemp("report-grpo")
    rows = [{"prompt": [{"role": "user", "content": f"{number} {EVIL}"}]} for number in range(8)]
    return package.train(
        {
            "model": str(model_folder("llama")),
            "method": "grpo",
            "dataset": str(write_jsonl(root / "rows.jsonl", rows)),
            "output_dir": str(root / "run"),
            "reward_funcs": [{"func": "regex", "args": {"pattern": "[aeiou]"}}],
            "num_generations": 4,
            "global_batch_size": 8,
            "max_completion_length": 6,
            "beta": 0.1,
            "max_steps": 5,
            "device": "cpu",
        },
        screen=False,
    ).run_folder


def test_the_page_of_grpo_shows_rewards_and_completions(grpo_folder: Path) -> None:
    text = write_report(grpo_folder).read_text()
    written = re.search(r'id="charts"[^>]*>(.*?)</script>', text, re.S)
    assert written is not None
    assert {"reward", "length", "entropy", "importance", "kl"} <= set(json.loads(written[1]))
    assert EVIL not in text
    tables = re.findall(r"<summary>completions of step (\d)</summary><table>(.*?)</table>", text, re.S)
    assert [step for step, _ in tables] == ["1", "2", "3", "4", "5"]
    assert [rows.count("<tr>") for _, rows in tables] == [9] * 5


def test_of_a_long_run_a_few_steps_and_the_beginnings_of_answers_are_shown(grpo_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    shutil.copytree(grpo_folder, folder)
    line = json.loads((folder / "completions.jsonl").read_text().splitlines()[0])
    made = [{**line, "step": step, "completion": "x" * 5000} for step in range(1, 101) for _ in range(32)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    text = write_report(folder).read_text()
    shown = [int(step) for step in re.findall(r"<summary>completions of step (\d+)</summary>", text)]
    assert (shown[0], shown[-1]) == (1, 100)
    assert 10 <= len(shown) <= 13
    assert len(re.findall(r"x \.\.\. \(3000\b", text)) == 8 * len(shown)
    assert len(text) < 1.5e6


def test_samples_of_the_first_step_are_shown_with_what_is_trained(run_folder: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (run_folder / "samples.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 4
    for line in lines:
        trained = "".join(text for text, is_trained in line["parts"] if is_trained)
        assert trained
        assert "user" not in trained
        assert f"<mark>{escape(trained.strip())}" in write_report(run_folder, tmp_path / "page.html").read_text()
    folder = shutil.copytree(run_folder, tmp_path / "run")
    evil = {"step": 1, "place": EVIL, "tokens": 3, "parts": [[EVIL, True]]}
    (folder / "samples.jsonl").write_text(json.dumps(evil) + '\n{"step": 1, "parts": [["x"]]}\n{"step": 1}\n')
    text = write_report(folder).read_text()
    assert EVIL not in text
    assert text.count("<mark>") == 1
    (folder / "samples.jsonl").unlink()
    assert "<mark>" not in write_report(folder).read_text()


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed (apt-get install chromium)")
def test_a_browser_draws_the_charts_of_grpo(grpo_folder: Path) -> None:
    assert CHROMIUM is not None
    path = write_report(grpo_folder)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=60
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    for name in ("reward", "length", "entropy"):
        drawn = re.search(rf'id="{name}".*?</section>', done.stdout, re.S)
        assert drawn is not None
        assert "mark-line" in drawn[0], name


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed (apt-get install chromium)")
@pytest.mark.parametrize(("scheme", "width"), [("0", 1200), ("1", 390)], ids=["dark", "phone"])
def test_a_browser_draws_every_chart_without_an_error(run_folder: Path, scheme: str, width: int) -> None:
    assert CHROMIUM is not None
    path = write_report(run_folder)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=10000"]
    more = [f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},2000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *options, *more, f"file://{path}"], capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr, done.stderr
    drawn = {}
    for name, rest in re.findall(r'<div class="chart[^>]* id="(\w+)".*?>(.*?)</section>', done.stdout, re.S):
        marks = re.findall(
            r'class="mark-(?:line|rect|symbol|area) role-mark[^"]*".*?<path [^>]*?d="([^"]+)"', rest, re.S
        )
        drawn[name] = max((len(shape) for shape in marks), default=0)
    assert set(drawn) == CHARTS
    assert all(size > 10 for size in drawn.values()), drawn
    assert "SF302" in done.stdout


def test_without_the_package_for_charts_the_verb_says_what_to_install(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r"pip install vl-convert-python.*report: false"):
        write_report(run_folder)


@pytest.mark.long
def test_the_script_of_the_charts_is_bundled_once(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = []
    bundle = vl_convert.javascript_bundle
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda: bundled.append(1) or bundle())
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    page = write_report(run_folder).read_text()
    assert write_report(run_folder).read_text() == page
    assert len(bundled) == 1
    (cached,) = (tmp_path / "cache" / "report").iterdir()
    cached.write_text(cached.read_text()[:-1])  # damaged
    assert write_report(run_folder).read_text() == page
    assert len(bundled) == 2
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "file"))
    assert write_report(run_folder).read_text() == page


def test_a_run_that_took_no_step_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    with pytest.raises(ConfigError, match="no step"):
        write_report(tmp_path)


@pytest.mark.long
def test_the_page_is_made_at_the_end_and_by_its_verb(run_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    settings = json.dumps({"output_dir": str(tmp_path / "run"), "max_steps": 2})
    config.write_text((run_folder / "run.yaml").read_text())
    overrides = [f"{name}={value}" for name, value in json.loads(settings).items()]
    assert surefoot("train", str(config), *overrides).returncode == 0
    page = tmp_path / "run" / "report.html"
    made = page.stat().st_mtime_ns
    again = surefoot("report", str(tmp_path / "run"))
    assert (again.returncode, again.stdout.strip()) == (0, str(page))
    assert page.stat().st_mtime_ns > made
    nothing = surefoot("report", str(tmp_path / "nowhere"))
    assert nothing.returncode == 2
    assert str(tmp_path / "nowhere") in nothing.stderr


def test_activations_on_a_gpu_are_those_of_the_gpu() -> None:
    def entry(kind: str, step: int, **values: float) -> Entry:
        return Entry(0, 1, 7, float(step), kind, "", step, values)

    gib = float(1 << 30)
    owners = {"frozen": 8 * gib, "trained": gib, "gradients": gib, "optimizer": gib}
    entries = [
        entry("memory", 1, **owners, total=10.5 * gib),
        entry("phase began", 2, anonymous_bytes=3 * gib),
        entry("device memory", 2, allocated=10 * gib),
        entry("step", 2, peak_memory_bytes=70 * gib),
    ]
    sizes = {row["owner"]: row["mib"] / 1024 for row in _collect_ledger(entries)}
    assert sizes["activations"] == 70 - 10.5 - 1
    assert sizes["other"] == 0.5
    on_cpu = [one for one in entries if one.kind != "device memory"]
    assert {row["owner"]: row["mib"] for row in _collect_ledger(on_cpu)}["activations"] == 0
