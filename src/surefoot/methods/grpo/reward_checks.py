"""What is wrong with rewards, as findings. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.findings import CATALOGUE, Finding

FAR_STEPS = 3
STALE_NATS = 1.0
"""Mean difference that a few steps of training do not make: beyond it, completions of older weights are of others."""
FLAT_ROLLOUTS = 10
"""In a row, in which no group has spread."""


def failing_rewards(
    step: int, failed: int, left_out: int, completions: int, failures: Sequence[str], *, is_evaluation: bool
) -> Finding:
    """Some completions have no reward, since a function failed on them; not `left_out` where that has no weight."""
    of, what = ("the evaluation after step", "its means") if is_evaluation else ("step", "the loss")
    these = (
        "these" if left_out == failed else f"{left_out} of these" if left_out else "the function has no weight: none"
    )
    return Finding(
        "SF802",
        f"reward functions failed on {failed} of {completions} completions of {of} {step}; {these} "
        f"{'are' if left_out else 'is'} left out of {what}. The first: {failures[0].splitlines()[0]}",
        {"step": step, **_by_function(failures), "first": failures[0]},
        CATALOGUE["SF802"].fix,
    )


def no_rewards(step: int, completions: int, failures: Sequence[str]) -> Finding:
    """No completion of a step has a reward."""
    why = f"The first: {failures[0].splitlines()[0]}" if failures else "Each function returned None for each of them"
    return Finding(
        "SF803",
        f"none of the {completions} completions of step {step} has a reward, so there is nothing to learn from. {why}",
        {"step": step, **_by_function(failures), "first": failures[0] if failures else "none failed"},
        CATALOGUE["SF803"].fix,
    )


def _by_function(failures: Sequence[str]) -> dict[str, int]:
    return {f"failed_{name}": count for name, count in Counter(f.partition(":")[0] for f in failures).items()}


@dataclass
class EngineDrift:
    """Watches how far an engine's logprobs lie from training's, where both should have the same weights."""

    tolerance: float
    """Mean difference, in nats, that is still usual."""
    steps: int = 0

    def add(self, step: int, measured: Mapping[str, float]) -> Finding | None:
        """The finding, where it was too far in `FAR_STEPS` steps in a row. `measured`: means of the step's tokens."""
        difference = measured.get("logprob_difference")
        if difference is None:
            return None
        is_stale = bool(measured.get("staleness", 0.0))  # older weights give other numbers, but not any
        tolerance = max(self.tolerance, STALE_NATS) if is_stale else self.tolerance
        if is_stale and difference <= tolerance:
            return None  # tells neither that the weights are there nor that they are not
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
                "importance_ratio": float(f"{measured.get('importance_ratio', 1.0):.4g}"),
                "tolerance": tolerance,
            },
            CATALOGUE["SF805"].fix,
            confidence=0.8,
        )


MOSTLY = 0.9
"""Of the completions, cut before their end, from which on that is why they are all the same."""


@dataclass
class FlatRewards:
    """Watches for rollouts that teach nothing: rewards that are equal within each group, or completions left out."""

    rollouts: int = 0
    has_told: bool = False

    def add(
        self,
        step: int,
        *,
        has_learning_signal: bool,
        is_truncated: bool,
        truncated_share: float,
        rewards: Sequence[float],
    ) -> list[Finding]:
        """The finding, once, when it is due.

        `is_truncated`: what could teach is left out of the loss as truncated; `truncated_share`: of all completions.
        """
        self.rollouts = 0 if has_learning_signal else self.rollouts + 1
        if self.rollouts < FLAT_ROLLOUTS or self.has_told:
            return []
        self.has_told = True
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
