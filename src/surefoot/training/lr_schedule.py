"""Learning-rate schedule."""

import math

from surefoot.config import RunConfig
from surefoot.config.schema import EPSILON


def learning_rate_at(step: int, begin: float, end: float, warmup_end: float, config: RunConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0), from share `begin` to share `end` of the run.

    Shares are of the steps if `max_steps` gives the length, else of the rows: so training can start before the steps
    are counted. `warmup_end`: the share at which `warmup_steps` were done.
    A pure function, so resuming needs no scheduler state.
    """
    peak, low = config.learning_rate, config.learning_rate * config.min_lr_ratio
    if config.warmup_steps is not None:
        if step < config.warmup_steps:
            return peak * (step + 1) / config.warmup_steps
    elif begin < config.warmup_ratio - EPSILON:
        return peak * min(end / config.warmup_ratio, 1.0)
    else:
        warmup_end = config.warmup_ratio
    progress = max(begin - warmup_end, 0.0) / max(1.0 - warmup_end, EPSILON)
    if config.lr_scheduler_type == "constant":
        return peak
    if config.lr_scheduler_type == "linear":
        return low + (peak - low) * (1 - progress)
    if config.lr_scheduler_type == "cosine":
        return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2
    return low + (peak - low) * min((1.0 - begin) / config.decay_ratio, 1.0)
