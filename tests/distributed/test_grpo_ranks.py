"""GRPO on two ranks, through the launcher: what fails on one of them, or gives nothing to learn on any."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.grpo import GRPO
from tests.support.processes import FAULTS
from tests.support.runs import settings_of

pytestmark = pytest.mark.matrix
REWARDS = """
import os, time

def hangs(completions, **columns):
    if bad(columns):
        time.sleep(600)
    return spread(completions)

def raises(completions, **columns):
    if bad(columns):
        raise ValueError("no reward for this one")
    return spread(completions)

def nan(completions, **columns):
    return [float("nan")] * len(completions) if bad(columns) else spread(completions)

def count(completions, **columns):
    return spread(completions)[: 1 if bad(columns) else None]

def dies(completions, **columns):
    if bad(columns):
        os._exit(9)
    return spread(completions)

def same(completions, **columns):
    return [1.0] * len(completions)

def bad(columns):
    return int(columns["number"][0]) % 3 == 0

def spread(completions):
    return [float(index) for index in range(len(completions))]
"""


@pytest.fixture
def train(parallel_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Any]:
    """(reward function, changes of the settings, variables) -> what the command did; the run is in `run`."""
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = [{"prompt": [{"role": "user", "content": f"Count to {number}"}], "number": number} for number in range(12)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(reward: str, environment: dict[str, str] | None = None, **changes: Any) -> Any:
        settings = settings_of(
            parallel_model("llama"), data, tmp_path / "run", **{
                **GRPO, "reward_funcs": [f"{tmp_path}/mine.py:{reward}"], "reward_timeout_s": 1, "max_steps": 3,
                "nproc_per_node": 2, "zero_stage": 3, "report": False, "eval_fraction": None, **changes,
            },
        )  # fmt: skip
        config = tmp_path / "run.json"
        config.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
        return subprocess.run(
            [sys.executable, "-m", "surefoot", "train", str(config)],
            env={**os.environ, "PYTHONPATH": str(FAULTS), **(environment or {})},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    return start


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


@pytest.mark.parametrize("fault", ["hangs", "raises", "nan", "count", "dies"])
def test_a_reward_that_fails_on_some_prompts_masks_their_completions(
    train: Callable[..., Any], tmp_path: Path, fault: str
) -> None:
    done = train(fault)
    assert done.returncode == 0, done.stderr[-3000:]
    samples = lines(tmp_path, "completions.jsonl")
    assert {one["reward"] is None for one in samples} == {True, False}
    failed = sum(line.get("rewards_failed", 0) for line in lines(tmp_path, "metrics.jsonl"))
    assert failed == sum(one["reward"] is None for one in samples)
    assert [one["code"] for one in lines(tmp_path, "findings.jsonl")] == ["SF802"]


def test_groups_without_spread_teach_nothing_and_end_nothing(train: Callable[..., Any], tmp_path: Path) -> None:
    done = train("same", dynamic_sampling=True, max_steps=12)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = lines(tmp_path, "metrics.jsonl")
    assert [line["grad_norm"] for line in metrics] == [0.0] * 12
    assert [one["code"] for one in lines(tmp_path, "findings.jsonl")] == ["SF804"]


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("late_after", [pytest.param("0", id="at once"), pytest.param("8", id="after some tokens")])
def test_one_rank_that_is_late_ends_both(
    train: Callable[..., Any], tmp_path: Path, rank: str, zero_stage: int, late_after: str
) -> None:
    """The first forward of a rollout needs all ranks at stage 2 too, however early one of them wants to end."""
    late = {"LATE_RANK": rank, "LATE_AFTER": late_after}
    done = train("nan", late, zero_stage=zero_stage, rollout_batch_size=1, stop=None)
    assert done.returncode == 3, done.stderr[-3000:]
    (found,) = lines(tmp_path, "findings.jsonl")
    assert found["code"] == "SF801"
    assert any("prompts.jsonl:" in place for place in found["evidence"]["prompts_by_rank"][rank])
    assert "Traceback" not in done.stderr
