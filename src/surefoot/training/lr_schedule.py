"""Learning-rate schedules. "Extension points" in ARCHITECTURE.md lists what a new one needs besides its function."""

import math
from collections.abc import Callable

from surefoot.config import RunConfig
from surefoot.config.schema import EPSILON

SCHEDULES: dict[str, Callable[[float, float, RunConfig], float]] = {
    "constant": lambda _progress, _done, _config: 1.0,
    "linear": lambda progress, _done, _config: 1 - progress,
    "cosine": lambda progress, _done, _config: (1 + math.cos(math.pi * progress)) / 2,
    "wsd": lambda _progress, done, config: min((1.0 - done) / config.decay_ratio, 1.0),
}
"""Name -> function of (progress since the warm-up, progress of the whole run, config), both from 0 to 1. It returns the
height between the lowest learning rate (0) and the peak (1)."""


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
    return lowest + (peak - lowest) * SCHEDULES[config.lr_scheduler_type](progress, done_before, config)
