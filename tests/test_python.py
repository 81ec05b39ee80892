"""The functions of the package: rows, callbacks, plans and checks without files."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.data.given_rows import load_given
from surefoot.errors import ConfigError, InputError, StoppedOnFinding
from surefoot.events import Event, StepEnded
from surefoot.findings import Finding
from surefoot.training.run_summary import FindingLog, read_result
from tests.support.data import counting_rows

PLANS = Path(__file__).parent.parent / "examples" / "plans"


@pytest.mark.parametrize("form", ["list", "datasets"])
def test_rows_of_python_are_trained_like_those_of_a_file(settings: dict[str, Any], tmp_path: Path, form: str) -> None:
    rows: Any = counting_rows(40)
    if form == "datasets":
        rows = pytest.importorskip("datasets").Dataset.from_list(rows)
    expected = surefoot.train(settings, screen=False)
    result = surefoot.train(settings, screen=False, dataset=rows, output_dir=str(tmp_path / "other"))
    assert result.train_loss == expected.train_loss
    losses = [line["loss"] for line in result.metrics if "loss" in line]
    assert len(losses) == 4
    assert losses == [line["loss"] for line in expected.metrics if "loss" in line]
    again = surefoot.train(settings, screen=False, dataset=rows, output_dir=str(tmp_path / "other"))
    assert again.steps == result.steps, "the same rows are the data of the run that is resumed"


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"messages": [{"role": "user", "content": object()}]}], r"dataset\[0\]"),
        ([{"text": "a"}, {"text": float("nan")}], r"dataset\[1\]"),
        ([], "dataset .*no rows"),
        ([{"text": "a"}, {"question": "b"}], r"dataset\.jsonl:2\b"),
    ],
)
def test_rows_that_cannot_be_trained_are_named(settings: dict[str, Any], rows: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        surefoot.train(settings, dataset=rows)


def test_the_checks_of_the_doctor_come_first(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAMES", "lo")  # a name that NCCL does not read
    for changes, is_shown in (({}, True), ({"screen": False}, False), ({"preflight": False}, False)):
        surefoot.train(settings, max_steps=1, overwrite_output_dir=True, **changes)
        assert ("doctor: SF710" in capsys.readouterr().err) == is_shown
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with pytest.raises(StoppedOnFinding) as raised:
        surefoot.train(settings, nproc_per_node=2, output_dir=f"{settings['output_dir']}2")
    assert raised.value.finding.code == "SF705"
    assert not Path(f"{settings['output_dir']}2").exists()


def test_callbacks_are_called_with_each_event(settings: dict[str, Any]) -> None:
    events: list[Event] = []
    surefoot.train(settings, screen=False, callbacks=[events.append])
    assert [event.step for event in events if isinstance(event, StepEnded)] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="torchrun"):
        surefoot.train(settings, screen=False, callbacks=[events.append], nproc_per_node=2, overwrite_output_dir=True)


@pytest.mark.long
def test_a_run_leaves_its_report(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUREFOOT_SUPERVISED")
    result = surefoot.train(settings, screen=False, report=True)
    assert (result.run_folder / "report.html").is_file()


def test_findings_of_the_supervisor_are_in_the_result(settings: dict[str, Any]) -> None:
    """It writes them down while the run goes on; each is in the result and in summary.json once."""
    log, late = FindingLog(Path(settings["output_dir"])), Finding("SF302", "it waits", {"rank": 0})

    def note(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step in (2, 3):
            log.note(late)

    result = surefoot.train(settings, callbacks=[note], screen=False)
    assert [finding.code for finding in result.findings] == ["SF302"]
    again = read_result(result.run_folder)
    assert again is not None
    assert again.findings == result.findings


def test_a_callback_that_cannot_be_called_is_refused(settings: dict[str, Any]) -> None:
    class Callback:
        """As other trainers have them."""

        def on_step_end(self) -> None: ...

    with pytest.raises(ConfigError, match=r"callbacks: a Callback cannot be called"):
        surefoot.train(settings, screen=False, callbacks=[Callback()])  # type: ignore[list-item]
    assert not Path(settings["output_dir"]).exists()


def test_an_exception_in_a_callback_ends_the_run(settings: dict[str, Any]) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, StepEnded):
            raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError):
        surefoot.train(settings, screen=False, callbacks=[stop])
    summary = json.loads((Path(settings["output_dir"]) / "summary.json").read_text())
    assert (summary["status"], "enough" in summary["error"]) == ("failed", True)


@pytest.mark.long
def test_a_plan_takes_settings_and_options() -> None:
    told = surefoot.plan(PLANS / "qwen1.5-moe-lora.yaml", device="h100", price=2, max_steps=500)
    assert (told.forecast.device.name, told.price, told.forecast.run.max_steps) == ("h100", 2.0, 500)
    mapping = {"model": str(PLANS / "qwen1.5-moe-a2.7b"), "dataset": "rows.jsonl", "output_dir": "o"}
    assert surefoot.plan(mapping, device="h100", nodes=2, nproc_per_node=8).forecast.run.nnodes == 2


def test_the_machine_and_a_run_on_it_are_checked(settings: dict[str, Any]) -> None:
    alone, with_run = surefoot.doctor(), surefoot.doctor(settings)
    assert len(with_run.checks) > len(alone.checks)
    assert not with_run.has_failed, with_run.as_text()


def test_a_run_of_another_program_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("swift sft --model Qwen/Qwen3-8B --dataset a.jsonl --learning_rate 1e-5\n")
    words = script.read_text().split()
    for source in (script, str(script), words):
        assert "learning_rate: 1e-05" in surefoot.import_run(source).as_yaml()  # type: ignore[arg-type]


def test_importing_the_package_imports_no_library() -> None:
    """`help(surefoot)` and errors of a config are there at once."""
    code = "import sys, surefoot; print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    assert surefoot.__doc__ is not None
    assert all(f"surefoot.{name}(" in surefoot.__doc__ for name in ("train", "plan", "doctor", "import_run", "load"))


def test_rewards_may_be_functions_of_a_module(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text("def one(completions, **_):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    one = importlib.import_module("own_rewards").one
    loaded = load_given(settings, (), {"method": "grpo", "reward_funcs": [one, {"func": one, "weight": 0.5}]})
    rewards = loaded.run.model_dump()["reward_funcs"]
    assert [reward["func"] for reward in rewards] == [f"{tmp_path}/own_rewards.py:one"] * 2
    with pytest.raises(ConfigError, match=r"<lambda> cannot be imported.*rewards\.py:"):
        load_given(settings, (), {"method": "grpo", "reward_funcs": [lambda **_: [1.0]]})
