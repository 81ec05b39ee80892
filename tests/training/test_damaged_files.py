"""Whatever the files of a run hold besides its checkpoints, it goes on from these, and what reads them says so."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import surefoot
from surefoot.diagnostics.monitor.explain import explain
from surefoot.diagnostics.monitor.watch import watch
from surefoot.diagnostics.report.html import write_report
from surefoot.errors import CheckpointError, ConfigError
from surefoot.events import CompletionsMade, RunStarted
from surefoot.findings import Finding
from surefoot.system.json_files import read_object
from surefoot.training.checkpoint import list_checkpoints
from surefoot.training.metrics import CompletionsFile, drop_lines_from
from surefoot.training.run_summary import FindingLog, drop_findings_before, read_result, steps_done, write_end
from tests.support.checkpoints import read_json

LINES = ("metrics.jsonl", "completions.jsonl", "eval_completions.jsonl", "findings.jsonl")
OBJECTS = ("summary.json", "environment.json", "run.yaml")
GARBAGE: dict[str, bytes] = {
    "bad bytes": b"\xff\xfe\x80\n" * 50,
    "zeros": bytes(4096),
    "numbers": b'1\nnull\n[]\n"x"\ntrue\n',
    "no step": b'{"loss": 1}\n{"code": "SF601"}\n{"time_s": "x"}\n',
    "wrong types": b'{"step": "3", "loss": {}}\n{"step": true}\n{"step": -1}\n{"step": 1e999}\n{"step": [1]}\n',
    "wrong numbers": b'{"step": 1, "loss": "x", "expert_load": 3, "reward": {}, "completion": 5, "eval_loss": []}\n',
    "odd findings": b'{"code": ["SF601"], "cause": {}, "evidence": 3, "fix": null, "confidence": "x", "time_s": 1e9}\n',
    "deep": b'{"a":' * 50_000 + b"\n" + b"[" * 50_000 + b"\n",
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n",
    "a cut line": b'{"step": 1, "loss": 1.',
    "a surrogate": b'{"step": 1, "loss": 1.0, "x": "\\ud800"}\n{"status": "\\ud800"}',
    "much": (bytes(range(256)) * 4096) * 100,
}


@pytest.fixture(scope="module")
def finished(model_folder: Callable[[str], Path], data_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, which may go on."""
    run = tmp_path_factory.mktemp("finished") / "run"
    surefoot.train(base_settings(model_folder("qwen2_moe"), data_file, run), screen=False)
    return run


def base_settings(model: Path, data: Path, run: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model), "dataset": str(data), "eval_dataset": str(data), "output_dir": str(run),
        "max_length": 128, "max_steps": 2, "learning_rate": 1e-2, "lora_rank": 4, "device": "cpu", "report": False,
        "lr_scheduler_type": "constant", "save_steps": 1, **changes,
    }  # fmt: skip


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def longer(model_folder: Callable[[str], Path], data_file: Path, run: Path) -> dict[str, Any]:
    """The settings with which that run takes a third step."""
    return base_settings(model_folder("qwen2_moe"), data_file, run, max_steps=3)


@pytest.mark.long
@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_run_goes_on_whatever_its_files_hold(run: Path, longer: dict[str, Any], content: bytes) -> None:
    for name in (*LINES, *OBJECTS):
        (run / name).write_bytes(content)
    result = surefoot.train(longer, screen=False)
    assert (result.status, result.steps) == ("completed", 3)
    assert "SF601" not in [finding.code for finding in result.findings]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line][-1] == 3
    assert yaml.safe_load((run / "run.yaml").read_text())["max_steps"] == 3
    assert read_json(run / "environment.json")["surefoot"] == surefoot.__version__
    assert read_result(run) == result


@pytest.mark.parametrize("name", [*LINES, *OBJECTS])
@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_run_is_explained_whatever_its_files_hold(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    told = explain(run)
    assert told.as_text()
    json.dumps(told.as_dict())
    write_report(run)
    assert steps_done(run) in (0, 1, 2)
    write_end(run, findings=[], error="the end")
    watch(run, once=True)
    drop_findings_before(run, 0.0)


def test_good_lines_among_damaged_ones_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 1, "loss": 0.1}\n', b'{"step": 2,   "loss": NaN}\n', b'{"step": 4}\n']
    path.write_bytes(good[0] + b"\xff\n" + b"\n" + good[1] + b'{"step": "3"}\n' + good[2] + b'{"step": 5, "lo')
    drop_lines_from(path, 4)
    assert path.read_bytes() == good[0] + good[1]
    assert "2 lines" in caplog.text
    caplog.clear()
    path.write_bytes(good[0] + b'{"step": 2, "lo')
    drop_lines_from(path, 4)
    assert path.read_bytes() == good[0]
    assert caplog.text == "", "a kill cuts the last line"


def test_a_finding_after_a_cut_line_is_not_lost(run: Path) -> None:
    (run / "findings.jsonl").write_text('{"code": "SF10')
    FindingLog(run).note(Finding("SF101", "rank 0 was killed", {"rank": 0}, "See why."))
    told = explain(run)
    assert [finding.code for finding in told.findings] == ["SF101"]
    assert [text.partition(" ")[0] for text in told.missing] == ["findings.jsonl:1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "done"}, {"steps": "2"}, {"steps": -1}, {"train_loss": "1"}, {"peak_memory_bytes": None},
        {"examples": []}, {"examples": {"read": "x"}}, {"artifact": 3}, {"artifact": "\0"}, {"findings": [3]},
        {"findings": [{"code": "SF999"}]}, {"findings": None}, {"error": {}}, {"more": 1}, {"examples_are_complete": 1},
    ],
)  # fmt: skip
def test_a_summary_with_wrong_types_is_none(run: Path, changes: dict[str, Any]) -> None:
    path = run / "summary.json"
    summary = read_json(path)
    assert read_result(run) is not None
    path.write_text(json.dumps({**summary, **changes}))
    assert read_result(run) is None


def test_a_run_without_its_run_yaml_is_compared_by_its_checkpoint(run: Path, longer: dict[str, Any]) -> None:
    (run / "run.yaml").write_text("!!bool 7")
    with pytest.raises(CheckpointError, match="learning_rate: 0.01 -> 0.02"):
        surefoot.train(longer, screen=False, learning_rate=0.02)
    for path in list_checkpoints(run):
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="run.yaml is unreadable"):
        surefoot.train(longer, screen=False)


def test_a_folder_without_a_sound_checkpoint_is_no_run(run: Path, longer: dict[str, Any]) -> None:
    (run / "environment.json").write_text("{")
    for path in list_checkpoints(run):
        (path / "manifest.json").write_text("{}")
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigError, match="output_dir=.*: adapter, checkpoints, "):
        surefoot.train(longer, screen=False, overwrite_output_dir=True)
    assert sorted(run.rglob("*")) == before


@pytest.mark.long
def test_the_commands_say_what_they_can(
    run: Path, longer: dict[str, Any], tmp_path: Path, here: Callable[..., Any]
) -> None:
    for name in (*LINES, *OBJECTS):
        (run / name).write_bytes(GARBAGE["bad bytes"])
    (tmp_path / "longer.yaml").write_text(yaml.safe_dump(longer))
    surefoot.export(run, tmp_path / "adapter", step=1)
    explained = here("explain", str(run))
    trained = here("train", str(tmp_path / "longer.yaml"))
    for done in (explained, trained):
        assert (done.returncode, "Traceback" in done.stderr + done.stdout) == (0, False), done.stderr
    assert f"{run}/run.yaml " in trained.stderr
    assert "step-00000002" in trained.stderr


def test_a_completion_is_not_lost_to_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text('{"step": 1, "prompt": "x"}\n{"step": 1, "pro')
    observer = CompletionsFile(path, tmp_path / "evaluations.jsonl")
    observer.observe(RunStarted(tmp_path, {}, 4, 2, 1, 1))
    observer.observe(CompletionsMade(2, 1, ({"prompt": "y"},)))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_reading_a_file_takes_no_memory_beyond_its_size(tmp_path: Path) -> None:
    """The largest size that is allowed may be more than the machine has."""
    (tmp_path / "state.json").write_text('{"step": 1}')
    tracemalloc.start()
    try:
        assert read_object(tmp_path / "state.json", max_bytes=1 << 40) == {"step": 1}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
