"""What the callback hears of transformers' Trainer, in its ring."""

import json
import math
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from surefoot.diagnostics.monitor.event_log import Entry, read_history
from surefoot.diagnostics.monitor.explain import explain
from surefoot.diagnostics.monitor.process_stats import LoadPeak
from surefoot.errors import ConfigError
from surefoot.integrations import SurefootCallback
from surefoot.integrations.batches import ENDLESS_STEPS, MOST_FORWARDS, Batches, Counted, Labels


@pytest.fixture
def trainer(model_folder: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Makes a trainer of two epochs of three steps that evaluates and saves after each."""
    made: list[SurefootCallback] = []
    mask = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8), "attention_mask": mask} for _ in range(6)]

    def make(*others: TrainerCallback, **changes: Any) -> Trainer:
        made.append(SurefootCallback())
        settings = {
            "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 2, "num_train_epochs": 2,
            "use_cpu": True, "eval_strategy": "epoch", "save_strategy": "epoch", "report_to": [], "disable_tqdm": True,
        }  # fmt: skip
        arguments = TrainingArguments(**{**settings, **changes})
        return Trainer(
            AutoModelForCausalLM.from_pretrained(model_folder("llama")), arguments,
            train_dataset=rows, eval_dataset=rows, callbacks=[made[-1], *others],
        )  # fmt: skip

    yield make
    for callback in made:
        callback.close()


def phases(entries: list[Entry]) -> list[str]:
    """In their order, repetitions left out."""
    return [phase for phase, _ in groupby(entry.phase for entry in entries if entry.kind == "phase began")]


@pytest.mark.filterwarnings("ignore")  # of transformers, about its own settings
def test_evaluations_and_saves_after_an_epoch_are_phases_of_their_own(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer().train()
    found = read_history(tmp_path / "out").entries
    step = ["data_wait", "forward_backward", "optimizer"]
    first, second = (
        [*step * 3, "data_wait", "evaluate", "save"],
        [*step * 3, "export", "evaluate", "save", "export"],
    )
    assert phases(found) == [*first, *second]
    assert [entry.step for entry in found if entry.kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert (found[-1].kind, found[-1].values["failed"]) == ("run ended", 0.0)
    batches = [(entry.step, entry.values) for entry in found if entry.kind == "batch"]
    assert [step for step, _ in batches] == [1, 2, 3, 4, 5, 6]
    counted = {"tokens": 16.0, "trained": 16.0, "sequences": 2.0, "fillers": 0.0, "padding": 10.0}
    assert [values for _, values in batches] == [counted] * 6, "what evaluations compute is no batch of a step"


class _Breaks(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_failed_is_not_watched_when_the_next_begins(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    broken = trainer(_Breaks())
    with pytest.raises(RuntimeError, match="on purpose"):
        broken.train()
    broken.remove_callback(_Breaks)
    broken.train()
    assert not broken.model._forward_hooks
    found = read_history(tmp_path / "out").entries
    ends = [(entry.start, entry.values["failed"]) for entry in found if entry.kind == "run ended"]
    assert [failed for _, failed in ends] == [1.0, 0.0]
    assert len({start for start, _ in ends}) == 2


class _LooksAside(TrainerCallback):  # type: ignore[misc]
    """Uses the model for something else in the second step, as a generation of completions does."""

    def __init__(self) -> None:
        self.model: Any = None

    def on_pre_optimizer_step(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 1:
            with torch.no_grad():
                self.model(input_ids=torch.ones(1, 4, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore")
def test_padding_is_told_of_steps_that_only_train(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    aside = _LooksAside()
    made = trainer(aside)
    aside.model = made.model
    made.train()
    found = [entry.values for entry in read_history(tmp_path / "out").entries if entry.kind == "batch"]
    assert [values["padding"] for values in found] == [10.0, 0.0, 10.0, 10.0, 10.0, 10.0]
    assert {values["tokens"] for values in found} == {16.0}


def test_a_model_that_is_used_on_after_a_failure_is_not_counted_for_ever() -> None:
    model = torch.nn.Identity()
    batches = Batches(model)
    for _ in range(MOST_FORWARDS + 5):
        batches._count(model, (), {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2)}, None)
    assert len(batches._counts) == MOST_FORWARDS
    batches.begin()
    assert batches.take() == Counted()


@pytest.mark.filterwarnings("ignore")
def test_numbers_that_are_none_are_named_once(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    made = trainer(logging_steps=1)  # with the filter that shows other losses in the place of these
    with torch.no_grad():
        made.model.model.norm.weight.fill_(math.nan)
    made.train()
    (line,) = (tmp_path / "out" / "findings.jsonl").read_text().splitlines()
    finding = json.loads(line)
    assert (finding["code"], finding["evidence"]) == ("SF401", {"step": 1, "rank": 0})


def test_what_is_logged_is_looked_at_where_the_model_returns_no_loss(tmp_path: Path) -> None:
    def said(name: str, *logs: dict[str, float], **settings: Any) -> list[tuple[str, dict[str, Any], bool]]:
        callback = SurefootCallback()
        arguments = TrainingArguments(output_dir=str(tmp_path / name), report_to=[], use_cpu=True)
        for setting, value in settings.items():
            setattr(arguments, setting, value)
        state, control = TrainerState(), TrainerControl()
        callback.on_train_begin(arguments, state, control)
        for step, one in enumerate(logs, 1):
            state.global_step = step
            callback.on_log(arguments, state, control, logs=one)
        callback.close()
        path = tmp_path / name / "findings.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [(one["code"], one["evidence"], "logging_nan_inf_filter" in one["cause"]) for one in found]

    odd = {"loss": 0.0, "grad_norm": math.nan}
    assert said("filtered", odd, odd) == [("SF402", {"step": 1, "grad_norm": "nan"}, True)]
    assert said("plain", odd, logging_nan_inf_filter=False) == [("SF402", {"step": 1, "grad_norm": "nan"}, False)]
    assert said("loss", {"loss": math.nan}) == [("SF401", {"step": 1, "loss": "nan"}, False)]
    assert said("fp16", *[odd] * 19, {"loss": 1.0, "grad_norm": 1.0}, *[odd] * 19, fp16=True) == []
    assert said("never", *[odd] * 25, fp16=True) == [("SF402", {"step": 20, "grad_norm": "nan"}, True)]


def test_labels_that_teach_nothing_or_no_end_are_named_once() -> None:
    def codes(*steps: Counted, knows_ends: bool = True) -> list[tuple[int, str]]:
        labels = Labels(knows_ends)
        return [(step, finding.code) for step, one in enumerate(steps, 1) for finding in labels.add(step, one)]

    sound = Counted(tokens=100, rows=2, trained=40, ends=2)
    assert codes(*[sound] * 100) == []
    assert codes(*[Counted(100, 2)] * 100) == [], "the model is given no labels"
    masked = Counted(100, 2, trained=0)
    assert codes(masked, masked, sound, masked, masked, masked, masked) == [(6, "SF501")]
    assert codes(*[Counted(100, 2, trained=40, ends=2, doubled=2)] * 5) == [(3, "SF503")]
    assert codes(*[Counted(100, 2, trained=40, ends=2, doubled=1)] * 5) == []
    endless = Counted(100, 2, trained=40)
    assert codes(*[endless] * 70) == [(ENDLESS_STEPS, "SF510")]
    assert codes(*[endless] * 49, sound, *[endless] * 49) == []
    assert codes(*[endless] * 70, knows_ends=False) == []


@pytest.mark.filterwarnings("ignore")
def test_labels_are_counted_in_a_real_training(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    made = trainer(max_steps=4, eval_strategy="no")
    begin, end = 5, 7
    made.model.config.bos_token_id, made.model.generation_config.eos_token_id = begin, [end]
    row = {"input_ids": torch.tensor([begin, begin, 9, end]), "labels": torch.tensor([-100, -100, 9, end])}
    made.train_dataset = [row] * 6
    made.train()
    found = [entry.values["trained"] for entry in read_history(tmp_path / "out").entries if entry.kind == "batch"]
    assert found == [4.0] * 4
    (line,) = (tmp_path / "out" / "findings.jsonl").read_text().splitlines()
    assert json.loads(line)["code"] == "SF503"


@pytest.mark.filterwarnings("ignore")
def test_what_was_evaluated_is_recorded_and_no_step_loses_its_loss(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    made = trainer(logging_steps=1)
    made.train()
    found = read_history(tmp_path / "out").entries
    assert [entry.step for entry in found if entry.kind == "evaluated"] == [3, 6]
    losses = {entry.step: entry.values["loss"] for entry in found if entry.kind == "step"}
    logged = {one["step"]: one["loss"] for one in made.state.log_history if "loss" in one}
    assert losses == pytest.approx(logged)
    assert list(losses) == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore")
def test_a_loss_is_told_with_the_step_at_which_it_is_logged(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    made = trainer(logging_steps=2, eval_strategy="no")
    made.train()
    found = read_history(tmp_path / "out").entries
    losses = {entry.step: entry.values["loss"] for entry in found if entry.kind == "step"}
    logged = {one["step"]: one["loss"] for one in made.state.log_history if "loss" in one}
    assert {step: loss for step, loss in losses.items() if not math.isnan(loss)} == pytest.approx(logged)
    assert list(losses) == [1, 2, 3, 4, 5, 6]


class _Stops(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        control.should_training_stop = state.global_step == 2


@pytest.mark.filterwarnings("ignore")
def test_after_an_early_stop_no_data_are_waited_for(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer(_Stops(), eval_strategy="steps", eval_steps=2).train()
    assert phases(read_history(tmp_path / "out").entries)[-1] == "export"


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_failed_is_over_when_another_one_begins(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(_Breaks()).train()
    trainer(output_dir=str(tmp_path / "second")).train()
    last = read_history(tmp_path / "out").entries[-1]
    assert (last.kind, last.values["failed"]) == ("run ended", 1.0)
    assert [explain(tmp_path / name).status for name in ("out", "second")] == ["failed", "completed"]


@pytest.mark.filterwarnings("ignore")
def test_a_program_that_goes_to_another_folder_is_recorded(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    made = trainer(output_dir="out", logging_steps=1, logging_nan_inf_filter=False)
    with torch.no_grad():
        made.model.model.norm.weight.fill_(math.nan)
    made.add_callback(_Goes())
    made.train()
    assert read_history(tmp_path / "out").entries[-1].kind == "run ended"
    assert (tmp_path / "out" / "findings.jsonl").is_file()
    assert not (tmp_path / "elsewhere" / "out" / "evidence").exists()
    assert not (tmp_path / "elsewhere" / "out" / "events").exists()


def test_what_a_model_took_at_its_load_is_recorded(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.integrations.trainer._LOADING", LoadPeak())
    made = trainer()
    size = sum(parameter.numel() * 4 for parameter in made.model.parameters())
    made.callback_handler.on_train_begin(made.args, made.state, made.control)
    (loaded,) = [entry for entry in read_history(tmp_path / "out").entries if entry.kind == "model loaded"]
    assert (loaded.values["whole"], loaded.values["kept"]) == (size, size)
    assert loaded.values["peak"] > 50 << 20


class _Goes(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: Any, **__: Any) -> None:
        os.chdir("/tmp" if not Path("elsewhere").is_dir() else "elsewhere")


def test_an_address_is_no_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("https://hooks.example.invalid/SECRET", "$NOT_SET_ANYWHERE"):
        with pytest.raises(ConfigError, match="`\\$NAME`") as told:
            SurefootCallback(webhook=given)
        assert "SECRET" not in str(told.value)
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9")
    SurefootCallback(webhook="$HOOK")


def counted(model: torch.nn.Module, **inputs: torch.Tensor) -> Counted:
    batches = Batches(model)
    batches._count(model, (), inputs, None)
    batches.end()
    return batches.take()


def test_padding_is_no_beginning_and_classes_are_no_tokens() -> None:
    model = torch.nn.Identity()
    model.config = SimpleNamespace(bos_token_id=2, eos_token_id=3)
    ids = torch.tensor([[2, 2, 5], [2, 5, 3]])
    assert counted(model, input_ids=ids).doubled == 1
    assert counted(model, input_ids=ids, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]])).doubled == 0
    assert not Batches(model).knows_ends
    model.generation_config = SimpleNamespace(eos_token_id=None)
    assert counted(model, input_ids=ids, labels=ids).ends == 1


def test_what_cannot_be_counted_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Identity()
    odd: Any = torch.ones(2, 2, dtype=torch.int64).to_sparse()
    model.config = SimpleNamespace(bos_token_id=2)
    batches = Batches(model)
    batches._count(model, (), {"input_ids": odd}, None)
    assert "counted" in caplog.text
    assert not model._forward_hooks
    batches.begin()
    assert batches.take() == Counted()
