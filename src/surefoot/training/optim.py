"""The optimizer and the learning-rate schedule."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from surefoot.config import RunConfig


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: RunConfig) -> torch.optim.AdamW:
    """Fused AdamW. Matrices and stacks of matrices are decayed; vectors (norms, biases) are not."""
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def learning_rate_at(step: int, total_steps: int, config: RunConfig) -> float:
    """The learning rate of optimizer step `step` (from 0): a pure function, so resuming needs no scheduler state."""
    peak, low = config.learning_rate, config.learning_rate * config.min_lr_ratio
    warmup = config.warmup_steps if config.warmup_steps is not None else round(config.warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(total_steps - warmup, 1)
    if config.lr_scheduler_type == "constant":
        return peak
    if config.lr_scheduler_type == "linear":
        return low + (peak - low) * (1 - progress)
    if config.lr_scheduler_type == "cosine":
        return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2
    decay_steps = max(round(config.decay_ratio * total_steps), 1)
    left = total_steps - step
    return peak if left > decay_steps else low + (peak - low) * left / decay_steps
