"""Learning-rate schedules. "Extension points" in ARCHITECTURE.md lists what a new one needs besides its function."""

import math
from collections.abc import Callable
from typing import NamedTuple

from surefoot.config import RunConfig
from surefoot.config.schema import EPSILON


class Moment(NamedTuple):
    """A step of a run, after its warm-up. Its fields are fractions from 0 to 1."""

    progress: float
    """The finished share of what follows the warm-up."""
    done: float
    """The finished share of the whole run."""
    warmup_end: float
    """The share of the whole run at which the warm-up ended."""


def _restart(moment: Moment, config: RunConfig) -> float:
    return (1 + math.cos(math.pi * (config.lr_cycles * moment.progress % 1.0))) / 2


SCHEDULES: dict[str, Callable[[Moment, RunConfig], float]] = {
    "constant": lambda _moment, _config: 1.0,
    "linear": lambda moment, _config: 1 - moment.progress,
    "cosine": lambda moment, _config: (1 + math.cos(math.pi * moment.progress)) / 2,
    "cosine_with_restarts": _restart,
    "polynomial": lambda moment, config: max(1 - moment.progress, 0.0) ** config.lr_power,
    "inverse_sqrt": lambda moment, _config: math.sqrt(min(moment.warmup_end / max(moment.done, EPSILON), 1.0)),
    "wsd": lambda moment, config: min((1.0 - moment.done) / config.decay_ratio, 1.0),
}
"""Name -> function that returns the height between the lowest learning rate (0) and the peak (1)."""


def learning_rate_at(step: int, done_before: float, done_after: float, warmup_end: float, config: RunConfig) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    `done_before` and `done_after`: finished fraction of the run before and after the step, in steps with `max_steps`
    and else in rows, because the number of steps may be unknown. `warmup_end`: the fraction at which `warmup_steps`
    were done, which a checkpoint keeps. A pure function: a schedule has no other state.
    """
    peak = float(config.learning_rate)
    if config.warmup_steps is not None:
        if step < config.warmup_steps:
            return peak * (step + 1) / config.warmup_steps
    elif done_before < config.warmup_ratio - EPSILON:
        return peak * min(done_after / config.warmup_ratio, 1.0)
    else:
        warmup_end = config.warmup_ratio
    progress = max(done_before - warmup_end, 0.0) / max(1.0 - warmup_end, EPSILON)
    lowest = peak * config.min_lr_ratio
    moment = Moment(progress, done_before, warmup_end)
    return lowest + (peak - lowest) * SCHEDULES[config.lr_scheduler_type](moment, config)
