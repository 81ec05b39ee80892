"""Checks of rewards and of the engine's logprobs, which return findings. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from surefoot.findings import Finding
from surefoot.methods.grpo.scoring import ScoredCompletion

DRIFT_STEPS = 3
"""Number of steps in a row beyond the tolerance after which a finding is due."""
MAX_STALE_DIFFERENCE = 1.0
"""Largest mean difference that a few steps of training cause; beyond it, the engine's weights are not older ones."""
FLAT_ROLLOUTS = 10
"""Number of rollouts in a row without a learning signal after which a finding is due."""
MOSTLY_TRUNCATED = 0.9
"""Share of truncated completions at which truncation is reported as the reason for equal rewards."""


class FailureDetector:
    """Detector of reward functions that fail, in training or in evaluations. Each function is reported once."""

    def __init__(self, *, is_evaluation: bool = False) -> None:
        self._is_evaluation = is_evaluation
        self._reported: set[str] = set()

    def add(self, step: int, completions: Sequence[ScoredCompletion]) -> list[Finding]:
        """Return the finding about a rollout in which a function fails that has not been reported yet."""
        failed = [completion for completion in completions if completion.failures]
        failures = [failure for completion in failed for failure in completion.failures]
        unreported = _count_by_function(failures).keys() - self._reported
        if not unreported:
            return []
        self._reported |= unreported
        masked = sum(isnan(completion.reward) for completion in failed)
        if masked == len(failed):
            consequence = "these are left out of"
        elif masked:
            consequence = f"{masked} of these are left out of"
        else:
            consequence = "the function has no weight: none is left out of"
        of, where = ("the evaluation after step", "its means") if self._is_evaluation else ("step", "the loss")
        cause = (
            f"reward functions failed on {len(failed)} of {len(completions)} completions of {of} {step}; "
            f"{consequence} {where}. The first: {failures[0].splitlines()[0]}"
        )
        evidence = {"step": step, **_count_by_function(failures, "failed_"), "first": failures[0]}
        return [Finding("SF802", cause, evidence)]


def no_rewards(
    step: int, num_completions: int, completions: Sequence[ScoredCompletion], weighted_names: set[str]
) -> Finding:
    """Return the finding that none of the completions of a step has a reward.

    `completions`: also those that were replaced. `weighted_names`: of the functions that have a weight.
    """
    failures = [
        failure
        for completion in completions
        for failure in completion.failures
        if failure.partition(":")[0] in weighted_names
    ]
    why = f"The first: {failures[0].splitlines()[0]}" if failures else "Each function returned None for each of them"
    return Finding(
        "SF803",
        f"none of the {num_completions} completions of step {step} has a reward, so there is nothing to learn from. "
        f"{why}",
        {
            "step": step,
            **_count_by_function(failures, "failed_"),
            "first": failures[0] if failures else "none failed",
        },
    )


def _count_by_function(failures: Sequence[str], prefix: str = "") -> Counter[str]:
    return Counter(prefix + failure.partition(":")[0] for failure in failures)


@dataclass
class EngineDriftDetector:
    """Detector of differences between the engine's logprobs and training's, which should have the same weights."""

    tolerance: float
    """Largest mean difference, in nats, that is still usual."""
    steps: int = 0
    """Number of steps in a row beyond the tolerance."""

    def add(self, step: int, metrics: Mapping[str, float]) -> Finding | None:
        """Return the finding after `DRIFT_STEPS` steps in a row beyond the tolerance. `metrics`: means over tokens."""
        difference = metrics.get("logprob_difference")
        if difference is None:
            return None
        is_stale = bool(metrics.get("staleness", 0.0))  # older weights differ, but only so far
        tolerance = max(self.tolerance, MAX_STALE_DIFFERENCE) if is_stale else self.tolerance
        if is_stale and difference <= tolerance:
            return None  # shows neither that the engine has the weights nor that it lacks them
        self.steps = 0 if difference <= tolerance else self.steps + 1
        if self.steps < DRIFT_STEPS:
            return None
        return Finding(
            "SF805",
            f"in {self.steps} steps in a row up to step {step}, inconclusive ones not counted, the engine gave "
            f"completions other probabilities than training: logprobs differ by {difference:.3g} on average, where at "
            f"most {tolerance:g} is usual",
            {
                "step": step,
                "mean_difference": float(f"{difference:.4g}"),
                "importance_ratio": float(f"{metrics.get('importance_ratio', 1.0):.4g}"),
                "tolerance": tolerance,
            },
            confidence=0.8,
        )


@dataclass
class NoSignalDetector:
    """Detector of rollouts without a learning signal: rewards equal within each group, or completions left out."""

    rollouts: int = 0
    """Number of rollouts in a row without a learning signal."""
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
        cause = f"in the last {self.rollouts} rollouts, up to step {step}, nothing was learned: "
        fix = ""
        if is_truncated:
            cause += (
                "all completions of the last one that have a learning signal were cut at max_completion_length, and "
                "mask_truncated_completions leaves them out of the loss"
            )
            fix = "Raise max_completion_length, or set mask_truncated_completions: false."
        else:
            cause += (
                "all completions of each prompt had the same reward (the last rewards range from "
                f"{min(rewards):g} to {max(rewards):g})"
            )
            if truncated_share >= MOSTLY_TRUNCATED:
                cause += f"; {truncated_share:.0%} of the last completions were cut at max_completion_length"
                fix = "Raise max_completion_length: a reward function cannot tell unfinished answers apart."
        evidence = {
            "step": step,
            "rollouts": self.rollouts,
            "lowest_reward": min(rewards),
            "highest_reward": max(rewards),
            "truncated_share": round(truncated_share, 2),
        }
        return [Finding("SF804", cause, evidence, fix)]
