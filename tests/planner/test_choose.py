"""Settings that are `auto` fit the memory of the device, by the same forecast that `surefoot plan` prints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import RunConfig, load_config
from surefoot.errors import ConfigError, ModelError
from surefoot.planner import choose
from surefoot.planner.choose import choose_for_memory, choose_on_this_machine, list_choices
from surefoot.planner.command import plan
from surefoot.planner.devices import get_device
from surefoot.planner.forecast import RESERVED_SHARE, Forecast, forecast
from surefoot.planner.live_tensors import limit_trace_time
from surefoot.planner.suggest import _list_checkpointing

PLANS = Path(__file__).parents[2] / "examples" / "plans"
GIB = 1 << 30


@pytest.fixture
def three_lines(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {PLANS / 'qwen3-30b-a3b'}\ndataset: rows.jsonl\noutput_dir: out\n", encoding="utf-8")
    return str(path)


@pytest.mark.matrix
def test_three_lines_for_a_large_mixture_fit_one_large_card(three_lines: str) -> None:
    told = plan(three_lines, ["device=h100"])
    assert told.forecast.fits
    assert told.forecast.run.gradient_checkpointing is True
    assert told.forecast.device_peak[1] < 70 * GIB
    assert not told.findings
    assert "gradient_checkpointing: true" in told.as_text().splitlines()[0]
    assert told.as_dict()["gradient_checkpointing"] is True
    assert "rows.jsonl does not exist" in told.as_text()
    assert told.as_dict()["missing_data"] == told.missing_data
    assert not plan(three_lines, ["device=h100", "gradient_checkpointing=false"]).forecast.fits
    with_room = plan(three_lines, ["device=b200"])
    assert with_room.forecast.run.gradient_checkpointing is False, "recomputing would only take time"


@pytest.mark.matrix
def test_as_many_sequences_at_a_time_as_fit(three_lines: str) -> None:
    told = plan(three_lines, ["device=h200", "per_device_train_batch_size=auto", "global_batch_size=64"])
    run = told.forecast.run
    assert told.forecast.fits
    assert told.forecast.sequences_per_step == 64
    rows = run.rows_at_a_time
    assert rows & (rows - 1) == 0
    more = [f"per_device_train_batch_size={2 * rows}", "global_batch_size=64"]
    larger = plan(
        three_lines, ["device=h200", *more, f"gradient_checkpointing={str(run.gradient_checkpointing).lower()}"]
    )
    assert not larger.forecast.fits or 2 * rows * 2048 > choose.MOST_TOKENS
    few = plan(three_lines, ["device=b200", "per_device_train_batch_size=auto", "global_batch_size=2"])
    assert few.forecast.run.rows_at_a_time == 2, "a step has no more"


@pytest.mark.matrix
def test_what_fits_nowhere_gets_what_needs_least_and_is_told(three_lines: str) -> None:
    told = plan(three_lines, ["device=rtx3090", "per_device_train_batch_size=auto", "global_batch_size=8"])
    assert not told.forecast.fits
    assert (told.forecast.run.gradient_checkpointing, told.forecast.run.rows_at_a_time) == (True, 1)
    assert "the least, but" in str(told.chosen)
    assert {finding.code for finding in told.findings} == {"SF719"}


def small(config: dict[str, Any], tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndataset: d.jsonl\noutput_dir: o\n", encoding="utf-8")
    return load_config(path, [f"{name}={value}" for name, value in config.items()]).run


def unplanned(_: RunConfig) -> Forecast:
    raise AssertionError("planned")


def test_on_the_cpu_nothing_is_recomputed_or_planned_unless_told(tmp_path: Path) -> None:
    run, line = choose_for_memory(small({}, tmp_path), unplanned, is_on_gpu=False)
    assert (run.gradient_checkpointing, run.rows_at_a_time, line) == (False, 4, None)
    run, line = choose_for_memory(small({"gradient_checkpointing": "true"}, tmp_path), unplanned, is_on_gpu=True)
    assert (run.gradient_checkpointing, line) == (True, None)


def test_layers_that_cannot_be_recomputed_are_not(model_folder: Any, tmp_path: Path) -> None:
    base, card = model_folder("qwen2"), replace(get_device("h100"), memory_bytes=1 << 20)
    asked = []

    def forecast_run(run: RunConfig) -> Forecast:
        asked.append(run.gradient_checkpointing)
        return forecast(run, base, card)

    values = {"per_device_train_batch_size": "auto", "global_batch_size": 4}
    run, line = choose_for_memory(small(values, tmp_path), forecast_run, is_on_gpu=True, choices=[False])
    assert (run.gradient_checkpointing, asked) == (False, [False])
    assert "the least, but" in str(line)


@pytest.mark.long
def test_experts_are_kept_where_that_fits(model_folder: Any, tmp_path: Path) -> None:
    card, base = get_device("h100"), model_folder("qwen2_moe")
    run = small({"max_length": 20_000, "per_device_train_batch_size": 1}, tmp_path)
    choices = list_choices(base)
    assert choices == [False, True, "selective"]
    needed = [
        forecast(run.model_copy(update={"gradient_checkpointing": choice}), base, card).device_peak[1]
        for choice in choices
    ]
    assert needed[0] > needed[2] > needed[1]
    kept = forecast(run.model_copy(update={"gradient_checkpointing": False}), base, card)
    assert _list_checkpointing(kept) == [False, "selective", True]
    for choice, peak in zip(choices, needed, strict=True):
        least = replace(card, memory_bytes=int(peak / (1 - RESERVED_SHARE)) + 1)
        chosen, line = choose_for_memory(
            run, lambda candidate, on=least: forecast(candidate, base, on), is_on_gpu=True, choices=choices
        )
        assert chosen.gradient_checkpointing == choice, line


def test_a_model_that_cannot_be_forecast_gets_what_needs_least(tmp_path: Path) -> None:
    """A setting that nobody gave must not refuse a run."""

    def refuse(_: RunConfig) -> Forecast:
        raise ModelError("cannot be traced")

    values = {"per_device_train_batch_size": "auto", "global_batch_size": 8}
    run, line = choose_for_memory(small(values, tmp_path), refuse, is_on_gpu=True)
    assert (run.gradient_checkpointing, run.rows_at_a_time) == (True, 1)
    assert "cannot be traced" in str(line)


def test_a_trace_is_given_up_in_time(model_folder: Any, tmp_path: Path) -> None:
    run, card = small({"max_length": 77}, tmp_path), get_device("h100")
    with limit_trace_time(-1.0), pytest.raises(ModelError, match="too long"):
        forecast(run.model_copy(update={"gradient_checkpointing": False}), model_folder("qwen2"), card)
    assert forecast(run.model_copy(update={"gradient_checkpointing": False}), model_folder("qwen2"), card).fits


@pytest.mark.matrix
def test_a_run_on_a_gpu_is_planned_for_that_gpu(
    model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, base = get_device("h100"), model_folder("qwen2")
    run = small({"max_length": 100_000, "per_device_train_batch_size": 1}, tmp_path)
    run = run.model_copy(update={"device": "cuda", "dtype": "bfloat16"})
    recomputed, kept = (
        forecast(run.model_copy(update={"gradient_checkpointing": recompute}), base, card).device_peak[1]
        for recompute in (True, False)
    )
    assert recomputed < kept
    for room, recomputes in ((card.memory_bytes, False), ((recomputed + kept) // 2, True)):
        found = replace(card, memory_bytes=int(room / (1 - RESERVED_SHARE)) + 1)
        monkeypatch.setattr(choose, "detect_gpu", lambda found=found: found)
        chosen, line = choose_on_this_machine(run, base)
        assert chosen.gradient_checkpointing is recomputes, line


@pytest.mark.parametrize(
    ("values", "named"),
    [({}, "global_batch_size"), ({"global_batch_size": 8, "gradient_accumulation_steps": 2}, "gradient_accumulation")],
)
def test_a_step_has_its_size_without_the_machine(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        small({"per_device_train_batch_size": "auto", **values}, tmp_path)
