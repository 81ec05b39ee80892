"""`expert_parallel_size: auto`: measured where there is a choice, and without a trace in the numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from surefoot.config import RunConfig, load_config
from surefoot.distributed.process_group import World
from surefoot.errors import ConfigError, ModelError
from surefoot.training import expert_parallel
from surefoot.training.expert_parallel import (
    check_experts,
    choose_expert_parallel,
    describe_choice,
    possible_sizes,
)
from tests.support.runs import settings_of


def measured(folder: Path) -> tuple[int, dict[str, float]]:
    """(the size that was kept, seconds of a step with each)."""
    about = json.loads((folder / "environment.json").read_text())
    return yaml.safe_load((folder / "run.yaml").read_text())["expert_parallel_size"], about["expert_parallel_size_s"]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.matrix
def test_what_was_only_measured_leaves_no_process_group_and_later_runs_share_what_there_is(
    tmp_path: Path, parallel_model: Any, parallel_data: Path, run_on: Any
) -> None:
    sizes = {"auto": "auto", "1": 1, "2": 2, "again": 1}
    run_on(
        2,
        [
            settings_of(
                parallel_model("qwen2_moe"), parallel_data, tmp_path / name, expert_parallel_size=size, max_steps=2
            )
            for name, size in sizes.items()
        ],
    )
    with_auto, with_1, with_2, again = (int((tmp_path / name / "process_groups.txt").read_text()) for name in sizes)
    kept, _ = measured(tmp_path / "auto")
    assert with_1 == with_auto
    assert (with_2 > with_1) == (kept == 1)  # with expert parallelism, experts have a mesh of their own
    assert again == with_2


@pytest.mark.matrix
def test_auto_times_each_size_and_keeps_the_fastest(
    tmp_path: Path, parallel_model: Any, parallel_data: Path, run_on: Any
) -> None:
    def job(name: str, model: str) -> dict[str, Any]:
        folder = tmp_path / name
        return settings_of(parallel_model(model), parallel_data, folder, expert_parallel_size="auto", max_steps=4)

    run_on(2, [job("moe", "qwen2_moe"), job("dense", "llama")])
    run_on(1, [job("alone", "qwen2_moe")])

    kept, seconds = measured(tmp_path / "moe")
    assert seconds.keys() == {"1", "2"}
    assert kept == int(min(seconds, key=lambda size: seconds[size]))
    assert measured(tmp_path / "dense") == (1, {})
    assert measured(tmp_path / "alone") == (1, {})
    assert losses(tmp_path / "moe") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


@pytest.mark.long
def test_sizes_that_do_not_fit_are_passed_over(
    tmp_path: Path, parallel_model: Any, parallel_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an accelerator runs out of memory in a way that a program sees; here the allocation is refused by hand."""
    fits: set[int] = {2}

    def time_of(config: RunConfig, *_: Any) -> float | None:
        assert isinstance(config.expert_parallel_size, int)
        return 1.0 if config.expert_parallel_size in fits else None

    settings = settings_of(parallel_model("qwen2_moe"), parallel_data, tmp_path, expert_parallel_size="auto")
    config, ranks = load_config(None, (), settings).run, World(0, 4, 0, None)
    monkeypatch.setattr(expert_parallel, "_step_time_s", time_of)
    arguments: Any = (parallel_model("qwen2_moe"), None, None, ranks, torch.device("cpu"))
    kept, seconds = choose_expert_parallel(config, *arguments)
    assert (kept.expert_parallel_size, seconds) == (2, {1: None, 2: 1.0, 4: None})
    assert re.search(r"auto is 2 \(1: .*memory, 2: 1.000 s.*, 4: .*memory\)$", describe_choice(kept, seconds))
    fits.clear()
    with pytest.raises(ModelError, match=r"\[1, 2, 4\].*zero_stage: 3"):
        choose_expert_parallel(config, *arguments)


@pytest.mark.parametrize(
    ("model", "ranks", "replicas", "sizes"),
    [
        ("qwen2_moe", 4, 1, [1, 2, 4]),
        ("qwen2_moe", 16, 1, [1, 2, 4, 8]),
        ("qwen2_moe", 4, 2, [1, 2]),
        ("few", 4, 1, [1, 2]),
        ("qwen2_moe", 3, 1, [1]),
        ("llama", 4, 1, [1]),
    ],
)
def test_sizes_divide_the_ranks_and_the_experts(
    tmp_path: Path, parallel_model: Any, model: str, ranks: int, replicas: int, sizes: list[int]
) -> None:
    settings = settings_of(parallel_model(model), tmp_path / "d.jsonl", tmp_path, dp_replicate_size=replicas)
    assert possible_sizes(load_config(None, (), settings).run, parallel_model(model), ranks) == sizes


def test_sizes_that_other_settings_rule_out_are_not_tried(tmp_path: Path, parallel_model: Any) -> None:
    """With as many ranks as share the experts each of them is whole on one, and cannot be offloaded."""
    settings = settings_of(parallel_model("qwen2_moe"), tmp_path / "d.jsonl", tmp_path)
    run = load_config(None, (), settings).run.model_copy(update={"offload": "cpu", "device": "cuda", "zero_stage": 3})
    assert possible_sizes(run, parallel_model("qwen2_moe"), 4) == [1, 2]


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ("llama", 2, r"expert_parallel_size=2, .*llama has no experts.*\(argument\)"),
        ("few", 4, "expert_parallel_size=4 .*6 experts .*few. .*1, 2, 3, 6, or auto"),
    ],
)
def test_a_size_that_does_not_fit_the_model_is_refused_without_weights(
    tmp_path: Path, parallel_model: Any, model: str, size: int, message: str
) -> None:
    settings = settings_of(parallel_model(model), tmp_path / "d.jsonl", tmp_path, expert_parallel_size=size)
    with pytest.raises(ConfigError, match=message):
        check_experts(load_config(None, (), settings), parallel_model(model))
