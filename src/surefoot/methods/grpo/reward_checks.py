"""Checks of rewards and of the engine's logprobs, which return findings. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.findings import CATALOGUE, Finding

FAR_STEPS = 3
STALE_NATS = 1.0
"""Largest mean difference that a few steps of training cause; beyond it, the engine's weights are not older ones."""
FLAT_ROLLOUTS = 10
"""Number of rollouts in a row without a learning signal after which a finding is due."""


def failing_rewards(
    step: int, failed: int, left_out: int, completions: int, failures: Sequence[str], *, is_evaluation: bool
) -> Finding:
    """Return the finding about completions without a reward, because a function failed on them.

    `left_out`: number of them that are left out of the loss or the means; fewer if the function has no weight.
    """
    of, what = ("the evaluation after step", "its means") if is_evaluation else ("step", "the loss")
    these = (
        "these" if left_out == failed else f"{left_out} of these" if left_out else "the function has no weight: none"
    )
    return Finding(
        "SF802",
        f"reward functions failed on {failed} of {completions} completions of {of} {step}; {these} "
        f"{'are' if left_out else 'is'} left out of {what}. The first: {failures[0].splitlines()[0]}",
        {"step": step, **_count_by_function(failures), "first": failures[0]},
        CATALOGUE["SF802"].fix,
    )


def no_rewards(step: int, completions: int, failures: Sequence[str]) -> Finding:
    """Return the finding that no completion of a step has a reward."""
    why = f"The first: {failures[0].splitlines()[0]}" if failures else "Each function returned None for each of them"
    return Finding(
        "SF803",
        f"none of the {completions} completions of step {step} has a reward, so there is nothing to learn from. {why}",
        {"step": step, **_count_by_function(failures), "first": failures[0] if failures else "none failed"},
        CATALOGUE["SF803"].fix,
    )


def _count_by_function(failures: Sequence[str]) -> dict[str, int]:
    return {f"failed_{name}": count for name, count in Counter(f.partition(":")[0] for f in failures).items()}


@dataclass
class EngineDriftDetector:
    """Detector of differences between the engine's logprobs and training's, which should have the same weights."""

    tolerance: float
    """Largest mean difference, in nats, that is still usual."""
    steps: int = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> Finding | None:
        """Return the finding after `FAR_STEPS` steps in a row beyond the tolerance. `metrics`: means over tokens."""
        difference = metrics.get("logprob_difference")
        if difference is None:
            return None
        is_stale = bool(metrics.get("staleness", 0.0))  # older weights differ, but only so far
        tolerance = max(self.tolerance, STALE_NATS) if is_stale else self.tolerance
        if is_stale and difference <= tolerance:
            return None  # shows neither that the engine has the weights nor that it lacks them
        self.steps = 0 if difference <= tolerance else self.steps + 1
        if self.steps < FAR_STEPS:
            return None
        return Finding(
            "SF805",
            f"in {self.steps} steps that could tell, one after the other, up to step {step}, the engine gave "
            f"completions other probabilities than training: logprobs differ by {difference:.3g} on average, where at "
            f"most {tolerance:g} is usual",
            {
                "step": step,
                "mean_difference": float(f"{difference:.4g}"),
                "importance_ratio": float(f"{metrics.get('importance_ratio', 1.0):.4g}"),
                "tolerance": tolerance,
            },
            CATALOGUE["SF805"].fix,
            confidence=0.8,
        )


MOSTLY = 0.9
"""Share of truncated completions at which truncation is reported as the reason for equal rewards."""


@dataclass
class NoSignalDetector:
    """Detector of rollouts without a learning signal: rewards equal within each group, or completions left out."""

    rollouts: int = 0
    is_reported: bool = False

    def add(
        self,
        step: int,
        *,
        has_learning_signal: bool,
        is_truncated: bool,
        truncated_share: float,
        rewards: Sequence[float],
    ) -> list[Finding]:
        """Return the finding once, when it is due.

        `is_truncated`: whether all completions with a learning signal are left out of the loss as truncated.
        `truncated_share`: share of truncated completions.
        """
        self.rollouts = 0 if has_learning_signal else self.rollouts + 1
        if self.rollouts < FLAT_ROLLOUTS or self.is_reported:
            return []
        self.is_reported = True
        evidence = {
            "step": step,
            "rollouts": self.rollouts,
            "lowest_reward": min(rewards),
            "highest_reward": max(rewards),
            "truncated_share": round(truncated_share, 2),
        }
        if is_truncated:
            cause = (
                f"in the last {self.rollouts} rollouts, up to step {step}, nothing was learned: all completions of the "
                "last that could teach were cut at max_completion_length, and mask_truncated_completions leaves them "
                "out"
            )
            return [Finding("SF804", cause, evidence, "Raise max_completion_length, or take the mask away.")]
        cause = (
            f"in the last {self.rollouts} rollouts, up to step {step}, all completions of each prompt had the same "
            f"reward (the last rewards lie from {min(rewards):g} to {max(rewards):g}), so nothing was learned from them"
        )
        if truncated_share >= MOSTLY:
            cause += f"; {truncated_share:.0%} of the last completions were cut at max_completion_length"
            fix = "Raise max_completion_length: answers that do not come to their end are all the same to a reward."
            return [Finding("SF804", cause, evidence, fix)]
        return [Finding("SF804", cause, evidence, CATALOGUE["SF804"].fix)]
