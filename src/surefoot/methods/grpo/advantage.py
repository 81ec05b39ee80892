"""From rewards to advantages and to each token's weight in the loss. Pure; plain floats, NaN for what is masked."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan, sqrt
from typing import Literal

SCALE_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""

Scale = Literal["group", "batch", "none"]


def overlong_penalty(length: int, max_length: int, soft_length: int) -> float:
    """0, falling to -1 over the last `soft_length` tokens before `max_length` (DAPO, arXiv:2503.14476, eq. 13)."""
    if not soft_length:
        return 0.0
    return -min(max(length - (max_length - soft_length), 0) / soft_length, 1.0)


def has_learning_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, so that it teaches something. Masked ones say nothing."""
    seen = [reward for reward in rewards if not isnan(reward)]
    return len(seen) > 1 and max(seen) > min(seen)


def advantages(groups: Sequence[Sequence[float]], scale: Scale) -> list[list[float]]:
    """Each reward less the mean of its group, over a standard deviation; NaN where the reward is masked.

    GRPO (arXiv:2402.03300, sec. 4.1) divides by the group's; `batch` (arXiv:2508.08221) by that of all rewards, `none`
    (Dr. GRPO, arXiv:2503.20783) by nothing. Deviations are those of samples (n - 1).
    """
    whole = deviation([reward for group in groups for reward in group])
    result = []
    for group in groups:
        mean = _mean(group)
        divisor = {"group": deviation(group), "batch": whole, "none": 1.0 - SCALE_EPSILON}[scale] + SCALE_EPSILON
        result.append([(reward - mean) / divisor for reward in group])
    return result


@dataclass(frozen=True)
class Trained:
    """What the loss needs to know of a completion's length."""

    length: int
    is_masked: bool
    """It is generated and counted, but not in the loss."""


def token_weights(loss_type: str, completions: Sequence[Trained], max_length: int) -> list[float]:
    """What each token of a completion weighs in the loss of the step, over all ranks; 0 where it is masked.

    grpo, gspo: mean over a completion's tokens, then over completions (arXiv:2402.03300; 2507.18071, eq. 5).
    dapo, bnpo, cispo: mean over all trained tokens (arXiv:2503.14476, eq. 8; bnpo: TRL; 2506.13585, eq. 4).
    dr_grpo: sum over tokens, over completions times `max_length` (arXiv:2503.20783).
    """
    trained = sum(one.length for one in completions if not one.is_masked)
    count = len(completions)

    def weight(one: Trained) -> float:
        if one.is_masked:
            return 0.0
        if loss_type in ("grpo", "gspo"):
            return 1 / (one.length * count)
        return 1 / (count * max_length) if loss_type == "dr_grpo" else 1 / trained

    return [weight(one) for one in completions]


def _mean(rewards: Sequence[float]) -> float:
    seen = [reward for reward in rewards if not isnan(reward)]
    return sum(seen) / len(seen) if seen else nan


def deviation(rewards: Sequence[float]) -> float:
    """Of samples (n - 1), without those that are masked; 0 where fewer than two are known."""
    seen = [reward for reward in rewards if not isnan(reward)]
    if len(seen) < 2:
        return 0.0
    mean = sum(seen) / len(seen)
    return sqrt(sum((reward - mean) ** 2 for reward in seen) / (len(seen) - 1))
