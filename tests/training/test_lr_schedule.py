"""Learning-rate schedules as plain maths."""

import math
from typing import Any, get_args

import pytest
import torch
from transformers import get_scheduler

from surefoot.config import DatasetItem, RunConfig
from surefoot.config.schema import LearningRateSchedule
from surefoot.methods.sft.settings import SftConfig
from surefoot.training.lr_schedule import SCHEDULES, learning_rate_at


def config(**changes: object) -> RunConfig:
    return SftConfig(model="m", dataset=[DatasetItem(path="d")], output_dir="o", learning_rate=1.0, **changes)  # type: ignore[arg-type]


def rates(total: int, **changes: object) -> list[float]:
    settings = config(**changes)
    ends = min((settings.warmup_steps or 0) / total, 1.0)
    return [learning_rate_at(k, k / total, (k + 1) / total, ends, settings) for k in range(total)]


def test_constant_and_warmup() -> None:
    assert rates(4, lr_scheduler_type="constant") == [1.0] * 4
    assert rates(4, lr_scheduler_type="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(10, lr_scheduler_type="constant", warmup_ratio=0.2)[:3] == [0.5, 1.0, 1.0]


def test_linear_cosine_and_wsd() -> None:
    assert rates(4, lr_scheduler_type="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(4, lr_scheduler_type="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert rates(4) == pytest.approx([(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)])
    assert rates(10, lr_scheduler_type="wsd", decay_ratio=0.4) == pytest.approx([1.0] * 6 + [1.0, 0.75, 0.5, 0.25])
    low = rates(10, lr_scheduler_type="wsd", decay_ratio=0.4, min_lr_ratio=0.2, warmup_ratio=0.2)
    assert low == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4])


@pytest.mark.parametrize(
    ("schedule", "changes", "kwargs"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", {"lr_cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"lr_power": 2.0}, {"power": 2.0, "lr_end": 0.0}),
        ("inverse_sqrt", {}, {}),
    ],
)
def test_schedules_after_the_warm_up_are_those_of_transformers(
    schedule: str, changes: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup, total = 5, 50
    theirs = get_scheduler(schedule, optimizer, warmup, total, scheduler_specific_kwargs=kwargs).lr_lambdas[0]
    ours = rates(total, lr_scheduler_type=schedule, warmup_steps=warmup, **changes)
    assert ours[warmup:] == pytest.approx([theirs(step) for step in range(warmup, total)], abs=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_are_never_negative_nor_above_the_peak(schedule: str) -> None:
    for warmup in (0, 3, 50):
        assert all(0 <= rate <= 1 for rate in rates(20, lr_scheduler_type=schedule, warmup_steps=warmup))


def test_every_schedule_of_the_settings_is_there() -> None:
    assert set(SCHEDULES) == set(get_args(LearningRateSchedule))
