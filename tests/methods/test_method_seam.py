"""A method of another installed package: one file, and no line of this one knows it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot.config.methods import BUILT_IN
from tests.support.data import counting_rows, write_jsonl
from tests.support.runs import assert_same_run, numbers

pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package that adds the method `margin`."""
    folder = tmp_path_factory.mktemp("packages")
    shutil.copy(Path(__file__).with_name("margin_method.py"), folder)
    about = folder / "surefoot_margin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: surefoot-margin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[surefoot.methods]\nmargin = margin_method:MarginConfig\n")
    return folder


@pytest.fixture
def settings(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    rows = [{**row, "label": 1 if number % 3 else -1} for number, row in enumerate(counting_rows(24))]
    return {
        "model": str(model_folder("qwen2_moe")), "dataset": str(write_jsonl(tmp_path / "rows.jsonl", rows)),
        "output_dir": str(tmp_path / "run"), "method": "margin", "margin": 6.0, "max_length": 128, "max_steps": 6,
        "global_batch_size": 24, "per_device_train_batch_size": 2, "learning_rate": 0.01, "lora_rank": 4,
        "device": "cpu", "report": False,
    }  # fmt: skip


def surefoot(verb: str, settings: dict[str, Any], packages: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    config = Path(f"{settings['output_dir']}.yaml")
    config.write_text(yaml.safe_dump(settings))
    named = [str(config)] if verb != "settings" else []
    return subprocess.run(
        [sys.executable, "-m", "surefoot", verb, *named, *more],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(packages)},
    )  # fmt: skip


def test_it_trains_the_same_on_one_rank_and_on_two_and_resumed(settings: dict[str, Any], packages: Path) -> None:
    one, two, parts = (Path(f"{settings['output_dir']}-{name}") for name in ("one", "two", "parts"))
    settings = {**settings, "lr_scheduler_type": "constant"}
    runs = [{"output_dir": str(one)}, {"output_dir": str(parts), "max_steps": 3}, {"output_dir": str(parts)}]
    program = "import json, sys, surefoot; [surefoot.train(run, screen=False) for run in json.load(sys.stdin)]"
    alone = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps([{**settings, **run} for run in runs]),
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(packages)},
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    ranks = surefoot("train", settings, packages, f"output_dir={two}", "nproc_per_node=2", "zero_stage=3")
    assert ranks.returncode == 0, ranks.stderr
    losses, on_two = ([line["loss"] for line in numbers(folder)] for folder in (one, two))
    assert losses[-1] < losses[0] - 0.05
    assert losses == pytest.approx(on_two, rel=1e-4)
    assert_same_run(one, parts)


def test_it_is_planned(settings: dict[str, Any], packages: Path) -> None:
    own = {name: value for name, value in settings.items() if name != "device"}
    done = surefoot("plan", own, packages, "--json", "device=h100")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"]


def test_its_settings_are_listed_and_checked(settings: dict[str, Any], packages: Path) -> None:
    listed = json.loads(surefoot("settings", settings, packages, "--json").stdout)
    assert listed["method"]["enum"] == [*BUILT_IN, "margin"]
    assert listed["margin"]["methods"] == ["margin"]
    assert listed["margin"]["default"] == 1.0
    assert listed["margin"]["description"]
    schema = json.loads(surefoot("settings", settings, packages, "--schema").stdout)
    assert "margin" in schema["properties"]
    refused = surefoot("train", {**settings, "eval_dataset": settings["dataset"]}, packages)
    assert refused.returncode == 2
    assert "eval_dataset" in refused.stderr
    assert "run.yaml:" in refused.stderr


@pytest.mark.parametrize(
    ("method", "changes", "owner"),
    [
        ("sft", {"margin": 6.0}, "margin"),
        pytest.param("margin", {"num_generations": 4}, "grpo", marks=pytest.mark.matrix),
        pytest.param("grpo", {"margin": 6.0}, "margin", marks=pytest.mark.matrix),
    ],
)
def test_a_setting_of_another_method_is_refused_with_its_name(
    settings: dict[str, Any], packages: Path, method: str, changes: dict[str, Any], owner: str
) -> None:
    own = {name: value for name, value in settings.items() if name != "margin"}
    refused = surefoot("train", {**own, "method": method, **changes}, packages)
    assert refused.returncode == 2
    assert next(iter(changes)) in refused.stderr
    assert f"method {owner}" in refused.stderr


def test_a_method_that_is_not_installed_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    refused = surefoot("train", settings, tmp_path)
    assert refused.returncode == 2
    assert "method='margin'" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nowhere", "nowhere"),
        pytest.param("MarginConfig = 3", "RunConfig", marks=pytest.mark.matrix),
        pytest.param(
            "class MarginConfig(RunConfig): method: str = 'margin'", "implementation", marks=pytest.mark.matrix
        ),
        pytest.param(
            "class MarginConfig(RunConfig): implementation: ClassVar[str] = 'x:Y'", "'margin'", marks=pytest.mark.matrix
        ),
        pytest.param(
            "class MarginConfig(RunConfig): method: str = 'margin'; implementation: ClassVar[str] = 'x:Y'",
            "x:Y",
            marks=pytest.mark.matrix,
        ),
        (
            "class MarginConfig(RunConfig): method: str = 'margin'; implementation: ClassVar[str] = 'json:loads'",
            "Method",
        ),
    ],
)
def test_a_package_whose_method_is_broken_spoils_its_own_runs_alone(
    settings: dict[str, Any], packages: Path, tmp_path: Path, code: str, reason: str
) -> None:
    broken = Path(shutil.copytree(packages, tmp_path / "packages"))
    imports = "from typing import ClassVar\nfrom surefoot.config import RunConfig\n"
    (broken / "margin_method.py").write_text(f"{imports}{code}\n")
    own = {name: value for name, value in settings.items() if name != "margin"}
    refused = surefoot("train", own, broken)
    assert refused.returncode == 2
    assert "method" in refused.stderr
    assert reason in refused.stderr
    assert "Traceback" not in refused.stderr
    other = surefoot("train", {**own, "method": "sft", "temperature": 0.5}, broken)
    assert "method grpo" in other.stderr, "a mistake of another run is named as ever"
    assert surefoot("settings", own, broken, "--schema").returncode == 0
