"""Interrupted runs end like uninterrupted ones, bit for bit; damaged or foreign checkpoints are named."""

import errno
import fcntl
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import surefoot
from surefoot.diagnostics.monitor.explain import explain
from surefoot.errors import CheckpointError, ConfigError, DataError, ModelError, StorageError
from surefoot.events import CompletionsMade, StepEnded
from surefoot.findings import Finding
from surefoot.methods.token_loss import TokenLoss
from surefoot.system.json_files import DamagedFile
from surefoot.system.process import StopSignal
from surefoot.training import async_checkpoint
from surefoot.training.checkpoint import find_newest, list_checkpoints, verify
from surefoot.training.export import export
from surefoot.training.metrics import CompletionsFile
from surefoot.training.run_summary import FindingLog
from surefoot.training.sharded_tensors import ShardedTensors
from tests.support.checkpoints import read_json, reseal, save_steps
from tests.support.data import counting_rows, write_jsonl
from tests.support.kills import kill_and_resume, start, wait_for_lines
from tests.support.processes import surefoot as command
from tests.support.runs import SignalAfter, assert_same_run, numbers, train_with

pytestmark = pytest.mark.slow

EXACT = {
    "lora_dropout": 0.1,
    "target_modules": ["attention", "mlp"],
    "packing": True,
    "router_aux_loss_coef": 0.1,
    "global_batch_size": 3,
    "per_device_train_batch_size": 2,
    "max_steps": 9,
    "save_steps": 2,
    "save_total_limit": None,
}


@pytest.mark.long
def test_full_fine_tuning_resumes_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    del settings["lora_rank"]
    settings = {**settings, "tuning": "full", "learning_rate": 1e-3, "max_steps": 6}
    whole = surefoot.train({**settings, "output_dir": str(tmp_path / "whole")}, screen=False).run_folder
    train_with(settings, SignalAfter(3, signal.SIGTERM))
    resumed = surefoot.train(settings, screen=False).run_folder
    assert numbers(whole) == numbers(resumed)
    weights = [load_file(run / "model" / "model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_resumes_bit_for_bit(settings: dict[str, Any], tmp_path: Path, number: int) -> None:
    whole = surefoot.train({**settings, **EXACT, "output_dir": str(tmp_path / "whole")}, screen=False)
    stopped = train_with({**settings, **EXACT}, SignalAfter(5, number))
    assert (stopped.status, stopped.steps, stopped.artifact) == ("interrupted", 5, None)
    assert json.loads((stopped.run_folder / "summary.json").read_text())["status"] == "interrupted"
    assert list_checkpoints(stopped.run_folder)[-1].name == "step-00000005"
    resumed = surefoot.train({**settings, **EXACT}, screen=False)
    assert (resumed.status, resumed.steps) == ("completed", 9)
    assert_same_run(whole.run_folder, resumed.run_folder)


@pytest.mark.long
def test_kill_9_at_any_moment_then_resume_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    """A save at every step, so that many of the kills fall into one."""
    settings = {**settings, **EXACT, "max_steps": 60, "save_steps": 1, "save_total_limit": 2}
    whole = surefoot.train({**settings, "output_dir": str(tmp_path / "whole")}, screen=False)
    resumed = kill_and_resume(settings, tmp_path, (3, 14, 27, 41))
    assert_same_run(whole.run_folder, resumed)


def test_sigterm_during_a_save_lets_it_finish(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = async_checkpoint.write_blocks

    def interrupted(*args: Any, **options: Any) -> None:
        original(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(async_checkpoint, "write_blocks", interrupted)
    result = surefoot.train(settings, screen=False, save_steps=2, max_steps=40)
    assert result.status == "interrupted"
    assert 2 <= result.steps < 40, "training goes on beside the save until it sees the signal"
    saved = list_checkpoints(result.run_folder)
    assert [path.name for path in saved][-1] == f"step-{result.steps:08d}"
    assert find_newest(result.run_folder) == (saved[-1], [])
    verify(result.run_folder / "checkpoints" / "step-00000002")


@pytest.mark.long
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, **EXACT}
    whole = surefoot.train({**settings, "output_dir": str(tmp_path / "whole")}, screen=False)
    train_with(settings, SignalAfter(7, signal.SIGTERM))
    run = Path(settings["output_dir"])
    saved = list_checkpoints(run)
    assert [path.name for path in saved][-2:] == ["step-00000006", "step-00000007"]
    weights = next((saved[-1] / "model").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 0xFF
    weights.write_bytes(content)
    (saved[-2] / "state.json").unlink()
    (saved[-3] / "manifest.json").write_text("{")
    result = surefoot.train(settings, screen=False)
    assert [finding.code for finding in result.findings] == ["SF601"] * 3
    assert str(weights) in result.findings[0].cause
    assert "checksum" in result.findings[0].cause
    assert "state.json is missing" in result.findings[1].cause
    assert "manifest.json is unreadable" in result.findings[2].cause
    assert_same_run(whole.run_folder, run)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over_in_silence(settings: dict[str, Any]) -> None:
    run = surefoot.train(settings, screen=False, save_steps=2).run_folder
    for path in list_checkpoints(run):
        (path / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="all 2 .*damaged; .*step-00000004"):
        surefoot.train(settings, screen=False)
    assert len(list_checkpoints(run)) == 2


def test_an_adapter_does_not_go_on_beside_other_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    model = shutil.copytree(settings["model"], tmp_path / "model")
    settings = {**settings, "model": str(model), "lr_scheduler_type": "constant"}
    surefoot.train(settings, max_steps=1, screen=False)
    (path,) = model.glob("*.safetensors")
    weights = load_file(path)
    save_file({name: value * 1.5 for name, value in weights.items()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="step-00000001 .*other frozen weights: .*/model "):
        surefoot.train(settings, max_steps=2, screen=False)
    save_file(weights, path, metadata={"format": "pt"})
    assert surefoot.train(settings, max_steps=2, screen=False).steps == 2


def test_overwriting_deletes_the_old_run_only_when_the_new_one_is_ready(settings: dict[str, Any]) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    summary = (run / "summary.json").read_bytes()
    with pytest.raises(DataError):
        surefoot.train(settings, screen=False, overwrite_output_dir=True, dataset="typo.jsonl")
    with pytest.raises(ConfigError, match="overwrite_output_dir .*init_adapter="):
        surefoot.train(settings, screen=False, overwrite_output_dir=True, init_adapter=run / "adapter")
    template, kept = run / "adapter" / "chat_template.jinja", run / "checkpoints" / "held-out.jsonl"
    shutil.copy(settings["dataset"], kept)
    for name, value in (("chat_template", template), ("eval_dataset", kept), ("image_dir", run / "adapter")):
        with pytest.raises(ConfigError, match=f"overwrite_output_dir .*{name}="):
            surefoot.train(settings, screen=False, overwrite_output_dir=True, **{name: str(value)})
    assert kept.is_file()
    assert (run / "adapter").is_dir()
    assert list_checkpoints(run)
    assert (run / "summary.json").read_bytes() == summary, "a failed start does not hide what was achieved"
    (run / "evidence").mkdir()
    surefoot.train(settings, screen=False, overwrite_output_dir=True, seed=3)
    assert yaml.safe_load((run / "run.yaml").read_text())["seed"] == 3
    assert not (run / "evidence").exists()


def test_a_start_that_fails_keeps_what_a_failed_one_achieved(settings: dict[str, Any], tmp_path: Path) -> None:
    data = Path(shutil.copy(settings["dataset"], tmp_path / "rows.jsonl"))
    settings = {**settings, "dataset": str(data)}
    run = surefoot.train(settings, screen=False).run_folder
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "failed", "error": "the first"}))
    data.unlink()
    with pytest.raises(DataError):
        surefoot.train(settings, screen=False)
    again = json.loads((run / "summary.json").read_text())
    assert "rows.jsonl" in again["error"]
    assert {**again, "error": ""} == {**summary, "status": "failed", "error": ""}


def test_a_signal_is_not_lost_where_nothing_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that reads slowly, and a handler that runs in the middle of a write to it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(writing, "wb", buffering=0) as full:
        while full.write(b"x" * 65536):
            pass
        os.set_blocking(writing, True)
        with io.TextIOWrapper(io.BufferedWriter(io.FileIO(os.dup(writing), "wb")), "utf-8") as stream:
            monkeypatch.setattr("sys.stderr", stream)
            stop = StopSignal()
            with stop.watching(), stop.deferred():
                signal.raise_signal(signal.SIGINT)
                assert stop.received == "SIGINT"
            os.set_blocking(reading, False)
            assert set(os.read(reading, 1 << 20)) == {ord("x")}
    os.close(reading)


@pytest.mark.parametrize(("step_time_s", "told"), [(None, "is done;"), (12.34, "is done (the last step took 12.3 s);")])
def test_a_user_who_stops_a_run_is_told_how_long_a_step_takes(
    step_time_s: float | None, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = StopSignal()
    stop.step_time_s = step_time_s
    with stop.watching(), stop.deferred():
        signal.raise_signal(signal.SIGINT)
    assert told in capfd.readouterr().err


def test_the_loop_measures_its_steps_for_a_user_who_stops_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[StopSignal] = []
    monkeypatch.setattr(StopSignal, "note_last_save", lambda stop: stops.append(stop))
    result = surefoot.train(settings, screen=False)
    last = next(line for line in reversed(result.metrics) if "learning_rate" in line)
    assert stops[0].step_time_s == pytest.approx(last["step_time_s"], abs=0.5)


def test_overwriting_keeps_what_this_start_found(settings: dict[str, Any], tmp_path: Path) -> None:
    """TensorBoard's files too: the run failed at its end where they were deleted under it."""
    rows = [*counting_rows(8), {"messages": [{"role": "user", "content": "no answer"}]}]
    data = write_jsonl(tmp_path / "some.jsonl", rows)
    changes = {"dataset": str(data), "eval_dataset": str(data), "on_bad_row": "skip", "report_to": ["tensorboard"]}
    folder = surefoot.train(settings, **changes, screen=False).run_folder
    first = (folder / "findings.jsonl").read_text()
    again = surefoot.train(settings, **changes, overwrite_output_dir=True, screen=False)
    assert again.status == "completed"
    second = (folder / "findings.jsonl").read_text()
    assert first != second
    assert len(first.splitlines()) == len(second.splitlines()) == len(again.findings) > 0
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def test_naming_a_run_folder_says_which_checkpoint_to_name(settings: dict[str, Any], tmp_path: Path) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    other = {**settings, "output_dir": str(tmp_path / "other"), "resume_from_checkpoint": str(run)}
    with pytest.raises(CheckpointError, match=f"run folder.*{list_checkpoints(run)[-1].name}"):
        surefoot.train(other, screen=False)


def test_naming_a_damaged_checkpoint_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    path = list_checkpoints(run)[-1]
    os.truncate(next((path / "optimizer").glob("*.safetensors")), 100)
    with pytest.raises(DamagedFile, match=r"optimizer/.*\.safetensors"):
        verify(path)
    with pytest.raises(CheckpointError, match=f"resume_from_checkpoint=.*{path.name} is damaged"):
        surefoot.train(settings, screen=False, output_dir=tmp_path / "new", resume_from_checkpoint=path)
    with pytest.raises(CheckpointError, match="resume_from_checkpoint=.*/none: "):
        surefoot.train(settings, screen=False, resume_from_checkpoint=tmp_path / "none")


def test_a_newer_format_is_not_read(settings: dict[str, Any]) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    reseal(list_checkpoints(run)[-1], format_version=99)
    with pytest.raises(CheckpointError, match="version 99; .* 3 and 4. .*newer version"):
        surefoot.train(settings, screen=False)


def test_an_explicit_checkpoint_continues_in_another_folder(settings: dict[str, Any], tmp_path: Path) -> None:
    run = surefoot.train(settings, screen=False, save_steps=2).run_folder
    moved = surefoot.train(
        settings, screen=False, output_dir=tmp_path / "new", resume_from_checkpoint=run / "checkpoints/step-00000002"
    )
    assert [line["step"] for line in numbers(moved.run_folder)] == [3, 4]
    assert numbers(moved.run_folder) == numbers(run)[2:]


def test_checkpoints_of_later_steps_are_left_behind_by_a_run_that_goes_on_from_before(settings: dict[str, Any]) -> None:
    """Else the limit of kept ones would take what is saved now for the oldest, and a restart would find the others."""
    settings = {**settings, "max_steps": 6, "save_steps": 1}
    run = surefoot.train(settings, screen=False, save_total_limit=10).run_folder
    before, named = numbers(run), run / "checkpoints/step-00000002"
    again = {**settings, "save_total_limit": 2, "resume_from_checkpoint": str(named)}
    said: list[str] = []

    class Hears(SignalAfter):
        def observe(self, event: Any) -> None:
            super().observe(event)
            said.append(getattr(event, "text", ""))

    train_with(again, Hears(4, signal.SIGTERM))
    assert any(re.match("set aside in checkpoints/.*: step-00000003", text) for text in said)
    assert [path.name for path in list_checkpoints(run)] == ["step-00000003", "step-00000004"]
    assert len(list((run / "checkpoints").glob("left-step-0000000?-*"))) == 4
    surefoot.train({**again, "resume_from_checkpoint": "auto"}, screen=False)
    assert numbers(run) == before


def test_a_signal_in_an_evaluation_is_heard_before_the_next_batch(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation may be long, and who sends the signal kills soon."""
    held_out = write_jsonl(tmp_path / "held_out.jsonl", counting_rows(60)[40:])
    settings = {**settings, "eval_dataset": str(held_out), "eval_steps": 2, "per_device_train_batch_size": 2}
    whole = surefoot.train({**settings, "output_dir": str(tmp_path / "whole")}, screen=False).run_folder
    seen: list[int] = []
    original = TokenLoss.__call__

    def signals(self: TokenLoss, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            seen.append(len(seen))
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    with monkeypatch.context() as during:
        during.setattr(TokenLoss, "__call__", signals)
        stopped = surefoot.train(settings, screen=False)
    assert (stopped.status, stopped.steps, len(seen)) == ("interrupted", 2, 2)
    assert numbers(surefoot.train(settings, screen=False).run_folder) == numbers(whole)


def test_what_a_run_is_not_through_with_is_said(settings: dict[str, Any]) -> None:
    run = surefoot.train(settings, screen=False, max_steps=2, save_steps=0).run_folder
    shutil.rmtree(run / "adapter")
    with pytest.raises(ModelError, match="no checkpoint yet: .*save_steps"):
        export(run, run / "new", merge=False, step=None)
    with pytest.raises(ModelError, match="no checkpoint yet: .*save_steps"):
        surefoot.load(str(run))


def test_a_completed_run_is_not_trained_again(settings: dict[str, Any]) -> None:
    first = surefoot.train(settings, screen=False)
    before = {
        path: path.read_bytes() for path in first.run_folder.iterdir() if path.name in ("metrics.jsonl", "summary.json")
    }
    again = surefoot.train(settings, screen=False)
    assert again == first
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_changed_config_is_named_field_by_field(settings: dict[str, Any], tmp_path: Path) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    with pytest.raises(CheckpointError, match="differs in learning_rate: 0.01 -> 0.5; seed: 42 -> 7"):
        surefoot.train(settings, screen=False, learning_rate=0.5, seed=7)
    path = list_checkpoints(run)[-1]
    for number, left in enumerate((["checkpoints"], ["checkpoints", "adapter"])):
        folder = shutil.copytree(run, tmp_path / str(number), ignore=lambda *_, left=left: left)
        with pytest.raises(CheckpointError, match="to delete that run") as caught:
            surefoot.train(settings, screen=False, seed=7, output_dir=folder)
        assert ("only logs so far" in str(caught.value)) == ("adapter" in left)
    with pytest.raises(CheckpointError, match="step-00000004 .*other settings: seed: 42 -> 7"):
        surefoot.train(settings, screen=False, seed=7, output_dir=tmp_path / "new", resume_from_checkpoint=path)
    with pytest.raises(CheckpointError, match="output_dir=.*resume_from_checkpoint is false"):
        surefoot.train(settings, screen=False, resume_from_checkpoint=False)
    replaced = surefoot.train(settings, screen=False, seed=7, overwrite_output_dir=True)
    assert replaced.status == "completed"


def test_changed_data_are_noticed(settings: dict[str, Any], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", counting_rows(20))
    settings = {**settings, "dataset": str(data)}
    train_with(settings, SignalAfter(2, signal.SIGTERM))
    write_jsonl(data, counting_rows(21))
    with pytest.raises(CheckpointError, match=r"step-00000002 .*other data: .*/data\.jsonl "):
        surefoot.train(settings, screen=False)


def test_a_checkpoint_of_another_model_is_refused_by_name(
    settings: dict[str, Any], tmp_path: Path, model_folder: Any
) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    path = list_checkpoints(run)[-1]
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "base_fingerprint": ""}))  # as an earlier version left it
    reseal(path, config={**read_json(path / "manifest.json")["config"], "model": str(model_folder("llama"))})
    with pytest.raises(CheckpointError, match=r"\d+ tensors .*; model.layers.0.mlp"):
        surefoot.train(
            settings,
            screen=False,
            model=model_folder("llama"),
            output_dir=tmp_path / "new",
            resume_from_checkpoint=path,
        )


def test_a_folder_with_other_files_is_not_touched(settings: dict[str, Any]) -> None:
    folder = Path(settings["output_dir"])
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="files that are no run: thesis.tex"):
        surefoot.train(settings, screen=False)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    for overwrite in (False, True):
        shutil.rmtree(folder)
        (folder / "model").mkdir(parents=True)
        (folder / "run.yaml").write_text("the user's own")
        with pytest.raises(ConfigError, match="output_dir=.*: model, run.yaml"):
            surefoot.train(settings, screen=False, overwrite_output_dir=overwrite)
        assert (folder / "model").is_dir()
    shutil.rmtree(folder)
    folder.write_text("a file")
    with pytest.raises(ConfigError, match="output_dir=.* is a file"):
        surefoot.train(settings, screen=False)


def test_a_run_that_failed_before_its_first_step_can_be_corrected(settings: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        surefoot.train(settings, screen=False, max_length=40)
    assert surefoot.train(settings, screen=False).status == "completed"


def test_the_saved_config_names_what_was_chosen(settings: dict[str, Any]) -> None:
    saved = yaml.safe_load((surefoot.train(settings, screen=False).run_folder / "run.yaml").read_text())
    assert (saved["device"], saved["dtype"], saved["global_batch_size"]) == ("cpu", "float32", 4)
    with pytest.raises(CheckpointError, match="dtype: float32 -> bfloat16"):
        surefoot.train(settings, screen=False, dtype="bfloat16", max_steps=4)


def test_two_processes_cannot_share_a_run_folder(settings: dict[str, Any]) -> None:
    class Second:
        error: Exception | None = None

        def observe(self, event: Any) -> None:
            if isinstance(event, StepEnded) and event.step == 1:
                try:
                    surefoot.train(settings, screen=False)
                except ConfigError as error:
                    Second.error = error

    train_with(settings, Second())
    assert f"output_dir={settings['output_dir']} is in use" in str(Second.error)


def test_a_disk_that_fills_during_a_save_loses_nothing(settings: dict[str, Any]) -> None:
    """The file system refuses files beyond 30 kB once step 2 is written; a checkpoint is larger than that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    first = Path(settings["output_dir"], "checkpoints", "step-00000002")

    class DiskFills:
        def observe(self, event: Any) -> None:
            if isinstance(event, StepEnded) and event.step == 3:
                deadline = time.monotonic() + 30
                while not first.is_dir():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))

    try:
        with pytest.raises(StorageError, match="step-00000004: .*MiB free"):
            train_with({**settings, "save_steps": 2}, DiskFills())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run = Path(settings["output_dir"])
    newest, findings = find_newest(run)
    assert newest is not None
    assert newest.name == "step-00000002"
    assert findings == []
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    resumed = surefoot.train({**settings, "save_steps": 2}, screen=False)
    assert resumed.status == "completed"
    assert [line["step"] for line in numbers(run)] == [1, 2, 3, 4]


def test_old_checkpoints_are_deleted_beyond_the_limit(settings: dict[str, Any]) -> None:
    run = surefoot.train(settings, screen=False, max_steps=6, save_steps=1, save_total_limit=2).run_folder
    assert [path.name for path in list_checkpoints(run)] == ["step-00000005", "step-00000006"]


def test_a_checkpoint_that_is_being_deleted_is_none(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rmtree = shutil.rmtree

    def half(path: Path, **_: Any) -> None:
        if path.name == "notes":
            rmtree(path)
        (path / "manifest.json").unlink(missing_ok=True)

    with monkeypatch.context() as patched:
        patched.setattr(async_checkpoint.shutil, "rmtree", half)
        surefoot.train(settings, save_steps=1, max_steps=4, save_total_limit=2, screen=False)
    folder = Path(settings["output_dir"])
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000003", "step-00000004"]
    assert list((folder / "checkpoints").glob(".step-0000000[12].tmp"))
    surefoot.train(settings, save_steps=1, max_steps=4, save_total_limit=2, screen=False)
    assert not list((folder / "checkpoints").glob(".step-*"))


def test_a_save_that_fails_in_any_way_is_an_error_of_the_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(async_checkpoint, "write_blocks", broken)
    with pytest.raises(StorageError, match="step-00000002: .*RuntimeError: broken on purpose"):
        surefoot.train(settings, save_steps=2, screen=False)
    assert list_checkpoints(Path(settings["output_dir"])) == []


def test_a_file_system_without_locks_is_not_taken_for_a_folder_in_use(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="output_dir=.*No locks available"):
        surefoot.train(settings, screen=False)


def test_lines_that_cannot_be_written_end_the_run_with_their_file() -> None:
    with pytest.raises(StorageError, match="/dev/full: .*No space left on device"):
        CompletionsFile(Path("/dev/full"), Path("/dev/full")).observe(CompletionsMade(1, 0, ({"place": "x:1"},)))


def test_half_a_character_is_written_as_json_would_escape_it(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    CompletionsFile(path, path).observe(CompletionsMade(1, 0, ({"prompt": "\ud800 é"},)))
    assert json.loads(path.read_text("utf-8"))["prompt"] == "\ud800 é"


@pytest.mark.long
def test_the_command_line_reports_an_interruption(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "max_steps": 100000, "save_steps": 0}
    process = start(settings, tmp_path)
    wait_for_lines(Path(settings["output_dir"]) / "metrics.jsonl", 2, process)
    process.terminate()
    assert process.wait(30) == 1
    summary = json.loads((Path(settings["output_dir"]) / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert len(list_checkpoints(Path(settings["output_dir"]))) == 1
    assert command("export", settings["output_dir"], str(tmp_path / "adapter")).returncode == 0


def _show(master: int, is_closed: threading.Event) -> None:
    """A terminal until it is closed: what is written to it is read, or who writes would wait."""
    with suppress(OSError):  # nobody has it open: nohup writes to a file
        while not is_closed.is_set():
            if select.select([master], [], [], 0.05)[0]:
                os.read(master, 1 << 16)
    is_closed.wait()
    os.close(master)


@pytest.mark.long
@pytest.mark.parametrize("nproc_per_node", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_run_whose_terminal_closes_saves_and_one_under_nohup_goes_on(
    settings: dict[str, Any], tmp_path: Path, nproc_per_node: int
) -> None:
    """A real terminal: the kernel sends SIGHUP to what is in its foreground, and refuses what is written to it."""
    settings = {**settings, "max_steps": 100000, "save_steps": 0, "nproc_per_node": nproc_per_node}
    run = Path(settings["output_dir"])
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    for nohup in ([], ["nohup"]):
        before = len(numbers(run)) if nohup else 0
        master, terminal = os.openpty()
        process = subprocess.Popen(
            [*nohup, sys.executable, "-m", "surefoot", "train", str(tmp_path / "run.yaml")],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, cwd=tmp_path,
            preexec_fn=lambda: (fcntl.ioctl(0, termios.TIOCSCTTY, 0), signal.signal(signal.SIGHUP, signal.SIG_DFL)),
        )  # fmt: skip
        os.close(terminal)
        shows = threading.Event()
        reader = threading.Thread(target=_show, args=(master, shows), daemon=True)
        reader.start()
        wait_for_lines(run / "metrics.jsonl", before + 3, process)
        shows.set()
        reader.join()
        if not nohup:
            assert process.wait(60) == 1
        else:
            wait_for_lines(run / "metrics.jsonl", len(numbers(run)) + 5, process)
            assert process.poll() is None
            process.terminate()
            assert process.wait(60) == 1
        assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
        saved = list_checkpoints(run)[-1].name
        assert saved == f"step-{numbers(run)[-1]['step']:08d}"


def test_training_goes_on_while_a_checkpoint_is_written(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is written is the state at the save, not the one training has come to since."""
    base = {**settings, "save_steps": 2, "lr_scheduler_type": "constant"}
    surefoot.train({**base, "output_dir": str(tmp_path / "quick"), "max_steps": 2}, screen=False)
    original, metrics = async_checkpoint.write_blocks, Path(base["output_dir"]) / "metrics.jsonl"
    waited: list[Path] = []

    def after_two_more_steps(path: Path, *args: Any, **options: Any) -> None:
        if "step-00000002" in str(path):
            deadline = time.monotonic() + 30
            while len(metrics.read_text().splitlines()) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            waited.append(path)
        original(path, *args, **options)

    monkeypatch.setattr(async_checkpoint, "write_blocks", after_two_more_steps)
    surefoot.train({**base, "max_steps": 5}, screen=False)
    assert len(waited) == 2
    folder = "checkpoints/step-00000002/model"
    written, wanted = (ShardedTensors(Path(run) / folder) for run in (base["output_dir"], tmp_path / "quick"))
    assert all(torch.equal(written.read(name), wanted.read(name)) for name in wanted.shapes)


def test_a_run_that_is_beyond_its_new_end_says_so(settings: dict[str, Any]) -> None:
    settings |= {"lr_scheduler_type": "constant", "save_steps": 2}
    surefoot.train(settings, max_steps=4, screen=False)
    with pytest.raises(ConfigError, match="max_steps=2, .* step 4 "):
        surefoot.train(settings, max_steps=2, screen=False)
    assert json.loads((Path(settings["output_dir"]) / "summary.json").read_text())["status"] == "completed"


def test_a_run_of_another_length_is_told_how_to_go_on_from_it(settings: dict[str, Any]) -> None:
    settings |= {"lr_scheduler_type": "cosine"}
    surefoot.train(settings, max_steps=2, screen=False)
    with pytest.raises(CheckpointError, match="max_steps: 2 -> 5.*init_adapter: .*/adapter"):
        surefoot.train(settings, max_steps=5, screen=False)


def test_the_newest_of_failed_starts_is_on_record(settings: dict[str, Any]) -> None:
    folder = Path(settings["output_dir"])
    for name in ("foo", "bar"):
        with pytest.raises(ModelError, match=name):
            surefoot.train(settings, target_modules=[name], screen=False)
    assert "'bar'" in json.loads((folder / "summary.json").read_text())["error"]


def test_a_finding_of_an_earlier_start_is_told_as_one(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings |= {"lr_scheduler_type": "constant"}
    folder = surefoot.train(settings, max_steps=1, screen=False).run_folder
    FindingLog(folder).note(Finding("SF101", "rank 0 was killed", {"rank": 0}, "See why."))
    assert "earlier start" not in explain(folder).as_text()
    surefoot.train(settings, max_steps=2, screen=False)
    told = explain(folder)
    assert (told.status, "SF101" in told.as_text()) == ("completed", True)
    assert "earlier start" in told.as_text()
    (said,) = told.as_dict()["findings"]
    assert said["is_of_earlier_start"]
    again = Finding("SF101", "rank 0 does it again", {"rank": 0}, "See why.")
    monkeypatch.setattr("surefoot.diagnostics.monitor.explain.find_in_history", lambda _: [again])
    first, second = explain(folder).as_dict()["findings"]
    assert (first["is_of_earlier_start"], second["is_of_earlier_start"]) == (True, False)
    assert second["cause"] == again.cause


@pytest.mark.parametrize("name", [".lock", "findings.jsonl", "metrics.jsonl", "summary.json"])
def test_a_link_in_a_run_folder_is_not_written_through(settings: dict[str, Any], tmp_path: Path, name: str) -> None:
    """A run folder from elsewhere may hold a link to ~/.bashrc."""
    (tmp_path / "bashrc").write_text("mine")
    folder = Path(settings["output_dir"])
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "bashrc")
    with pytest.raises(ConfigError, match=f"{name} .*/bashrc,"):
        surefoot.train(settings, screen=False)
    assert (tmp_path / "bashrc").read_text() == "mine"


def test_a_linked_folder_of_checkpoints_is_used_and_an_overwriting_run_is_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    shutil.move(run / "checkpoints", tmp_path / "other")
    (run / "checkpoints").symlink_to(tmp_path / "other")
    assert surefoot.train(settings, screen=False).status == "completed"
    with pytest.raises(ConfigError, match="checkpoints is a link to .*other, and overwrite_output_dir "):
        surefoot.train(settings, screen=False, overwrite_output_dir=True)
    assert list_checkpoints(run)
    assert (run / "checkpoints").is_symlink(), "neither the checkpoints nor the link to them are lost"


def test_an_old_checkpoint_that_is_a_link_is_pruned_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", range(1, 3), None, lambda _: None)
    oldest = list_checkpoints(tmp_path / "run")[0]
    shutil.move(oldest, tmp_path / "elsewhere")
    oldest.symlink_to(tmp_path / "elsewhere")
    save_steps(tmp_path / "run", range(3, 4), 2, lambda _: None)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002", "step-00000003"]
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()


def test_a_finished_run_that_was_copied_names_its_own_artifact(settings: dict[str, Any], tmp_path: Path) -> None:
    run = surefoot.train(settings, screen=False, max_steps=2).run_folder
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    again = surefoot.train(settings, screen=False, max_steps=2, output_dir=str(copy))
    assert again.artifact == copy / "adapter"
    shutil.rmtree(run)
    assert surefoot.train(settings, screen=False, max_steps=2, output_dir=str(copy)).artifact == copy / "adapter"
