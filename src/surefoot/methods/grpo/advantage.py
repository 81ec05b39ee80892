"""Advantages from rewards, and each token's weight in the loss. Pure: plain floats, NaN for a masked reward."""

from collections.abc import Sequence
from math import isnan, nan, sqrt
from typing import Literal

SCALE_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""

Scale = Literal["group", "batch", "none"]
Estimator = Literal["grpo", "rloo", "reinforce_plus_plus"]


def overlong_penalty(length: int, max_length: int, soft_length: int) -> float:
    """Return 0, falling to -1 over the last `soft_length` tokens before `max_length`.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    if not soft_length:
        return 0.0
    return -min(max(length - (max_length - soft_length), 0) / soft_length, 1.0)


def has_learning_signal(rewards: Sequence[float]) -> bool:
    """Return whether a group's unmasked rewards differ: equal rewards have no gradient."""
    unmasked = _drop_masked(rewards)
    return len(unmasked) > 1 and max(unmasked) > min(unmasked)


def advantages(groups: Sequence[Sequence[float]], scale: Scale, estimator: Estimator = "grpo") -> list[list[float]]:
    """Return each reward minus that of its group, over a standard deviation; NaN if the reward is masked.

    GRPO (arXiv:2402.03300, sec. 4.1) divides by the group's; `batch` (arXiv:2508.08221) by that of all rewards, `none`
    (Dr. GRPO, arXiv:2503.20783) by nothing. Deviations are those of samples (n - 1).
    `rloo` compares with the mean of the others in the group (arXiv:2402.14740, eq. 8), which is the difference from the
    mean of the group times n / (n - 1). `reinforce_plus_plus` takes the deviation of all differences of the step from
    their groups (arXiv:2501.03262, eq. 10).
    """
    centered = [[reward - _average(group) for reward in group] for group in groups]
    spread = centered if estimator == "reinforce_plus_plus" else groups
    batch_deviation = deviation([value for group in spread for value in group])
    result = []
    for group, differences in zip(groups, centered, strict=True):
        deviations = {"group": deviation(group), "batch": batch_deviation, "none": 1.0 - SCALE_EPSILON}
        factor = 1 / (deviations[scale] + SCALE_EPSILON)
        count = len(_drop_masked(group))
        if estimator == "rloo":
            factor *= count / (count - 1) if count > 1 else 0.0
        result.append([difference * factor for difference in differences])
    return result


def token_weights(loss_type: str, trained_tokens: Sequence[int], max_length: int) -> list[float]:
    """Return the weight of each completion's tokens in the loss of the step, over all ranks; 0 if it is masked.

    `trained_tokens`: number of tokens of each completion; 0 if it is masked, that is left out of the loss.
    grpo, gspo, sapo, rloo: mean over a completion's tokens, then over completions (arXiv:2402.03300; 2507.18071, eq. 5;
    2511.20347, eq. 5; of rloo, each token has the loss of the completion).
    dapo, bnpo, cispo: mean over all trained tokens (arXiv:2503.14476, eq. 8; bnpo: TRL; 2506.13585, eq. 4).
    dr_grpo: sum over tokens, over completions times `max_length` (arXiv:2503.20783).
    """
    count, total = len(trained_tokens), sum(trained_tokens)

    def compute_weight(length: int) -> float:
        if not length:
            return 0.0
        if loss_type in ("grpo", "gspo", "sapo", "rloo"):
            return 1 / (length * count)
        return 1 / (count * max_length) if loss_type == "dr_grpo" else 1 / total

    return [compute_weight(length) for length in trained_tokens]


def deviation(rewards: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1) of unmasked rewards; 0 for fewer than two."""
    unmasked = _drop_masked(rewards)
    if len(unmasked) < 2:
        return 0.0
    mean = _average(unmasked)
    return sqrt(sum((reward - mean) ** 2 for reward in unmasked) / (len(unmasked) - 1))


def _average(rewards: Sequence[float]) -> float:
    unmasked = _drop_masked(rewards)
    return sum(unmasked) / len(unmasked) if unmasked else nan


def _drop_masked(rewards: Sequence[float]) -> list[float]:
    return [reward for reward in rewards if not isnan(reward)]
