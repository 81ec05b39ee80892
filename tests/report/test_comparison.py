"""The page that compares runs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vl_convert

import surefoot as package
from surefoot.diagnostics.report.charts import PALETTE
from surefoot.diagnostics.report.comparison import write_comparison
from surefoot.errors import ConfigError
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import surefoot


@pytest.fixture(scope="module")
def runs(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("compared")
    settings: dict[str, Any] = {
        "model": str(model_folder("llama")), "dataset": str(write_jsonl(root / "rows.jsonl", counting_rows(20))),
        "max_steps": 4, "max_length": 128, "device": "cpu", "report": False, "lora_rank": 4,
    }  # fmt: skip
    for name, rate in (("low", 1e-4), ("high", 1e-2)):
        package.train(settings, screen=False, output_dir=str(root / name), learning_rate=rate)
    return [root / "low", root / "high"]


@pytest.mark.long
def test_runs_are_drawn_together_with_the_settings_that_differ(runs: list[Path], tmp_path: Path) -> None:
    done = surefoot("report", *map(str, runs), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "comparison.html").read_text()
    charts = json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)[0])
    assert {"loss", "gradient", "rate", "speed"} == set(charts)
    for spec in charts.values():
        vl_convert.vegalite_to_svg(spec)
        (layer,) = spec["layer"]
        assert layer["encoding"]["color"]["scale"] == {"domain": ["low", "high"], "range": PALETTE[:2]}
    losses = {
        name: [row["loss"] for row in charts["loss"]["layer"][0]["data"]["values"] if row["of"] == name]
        for name in ("low", "high")
    }
    assert [len(values) for values in losses.values()] == [4, 4]
    assert losses["low"][0] == losses["high"][0]
    assert losses["low"][-1] != losses["high"][-1]
    differing = text.partition("Settings that differ")[2].partition("</table>")[0]
    assert re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", differing) == [
        ("learning_rate", "0.0001", "0.01")
    ]


def test_runs_of_the_same_name_are_called_by_their_paths(runs: list[Path], tmp_path: Path) -> None:
    moved = tmp_path / "copies" / "low"
    shutil.copytree(runs[1], moved)
    text = write_comparison([runs[0], moved], tmp_path / "page.html").read_text()
    assert f"<th>{runs[0]}</th><th>{moved}</th>" in text


@pytest.mark.parametrize("case", ["twice", "missing", "folder"])
def test_what_cannot_be_compared_is_refused(runs: list[Path], tmp_path: Path, case: str) -> None:
    folders = {"twice": [runs[0], runs[0]], "missing": [runs[0], tmp_path / "none"], "folder": runs}[case]
    with pytest.raises(ConfigError):
        write_comparison(folders, tmp_path if case == "folder" else tmp_path / "page.html")
