"""Groups of completions of a prompt: scored by the reward functions, and converted to trajectories with advantages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import isnan, nan
from typing import Any

from surefoot.events import Heartbeat
from surefoot.methods.base import Interrupted, MethodContext
from surefoot.methods.grpo.advantage import (
    advantages,
    deviation,
    has_learning_signal,
    overlong_penalty,
    token_weights,
)
from surefoot.methods.grpo.batch import Trajectory, rank_slice
from surefoot.methods.grpo.rewards import RewardInputs, RewardResult, Rewards
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.rollout.types import Completion, Prompt, run_interruptible


@dataclass(frozen=True, kw_only=True)
class ScoredCompletion(Completion):
    """A completion with the results of the reward functions."""

    text: str
    """The completion as the functions read it."""
    rewards: list[float | None]
    """Value of each function."""
    failures: list[str]
    """Each begins with the name of its function."""
    reward: float
    """Weighted sum of `rewards`; NaN if a function with a weight failed, or if none of them scored the completion."""
    total: float
    """`reward` with the penalty for the completion's length."""


@dataclass(frozen=True)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    completions: list[ScoredCompletion]

    @property
    def totals(self) -> list[float]:
        """Reward of each completion with the penalty for its length; NaN without a reward."""
        return [completion.total for completion in self.completions]


class GroupScorer:
    """Scoring of completions, and conversion of groups to trajectories."""

    def __init__(self, config: GrpoConfig, context: MethodContext, rewards: Rewards) -> None:
        self._config = config
        self._context = context
        self._ranks = context.ranks
        self._rewards = rewards
        self.names = rewards.names
        """Names of the reward functions."""
        self.weighted_names = {name for name, item in zip(self.names, config.rewards, strict=True) if item.weight}
        """Names of the reward functions with a weight; the others are only logged."""

    def score_groups(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Group]:
        """Score this rank's `completions`, and return the groups of all ranks. Collective.

        Each group is scored as a whole, on one rank. Raises: Interrupted on all ranks if one got a stop signal.
        """
        each = self._config.num_generations
        with self._context.phase("collectives"):
            gathered = chain.from_iterable(self._ranks.gather([asdict(completion) for completion in completions]))
        all_completions = [Completion(**values) for values in gathered]
        by_prompt = [all_completions[begin : begin + each] for begin in range(0, len(all_completions), each)]
        local_range = rank_slice(len(prompts), self._context.data.layout)
        with self._context.phase("reward"):
            local_groups = [(prompts[number], by_prompt[number]) for number in local_range]
            local_scores = run_interruptible(self._ranks, lambda: self._score_local_groups(local_groups))
        with self._context.phase("collectives"):
            scores = chain.from_iterable(self._ranks.gather(local_scores))
        return [
            Group(
                prompt,
                [
                    ScoredCompletion(**vars(completion), **values)
                    for completion, values in zip(group_completions, group_scores, strict=True)
                ],
            )
            for prompt, group_completions, group_scores in zip(prompts, by_prompt, scores, strict=True)
        ]

    def is_masked(self, completion: ScoredCompletion) -> bool:
        """Return whether the loss leaves a completion out: it has no reward, or is truncated and the config says so."""
        return isnan(completion.total) or self.is_masked_as_truncated(completion)

    def is_masked_as_truncated(self, completion: Completion) -> bool:
        """Return whether the loss leaves a completion out because it is truncated."""
        return self._config.mask_truncated_completions and completion.finish == "length"

    def has_learning_signal(self, group: Group) -> bool:
        """Return whether rewards differ, apart from penalties for length, and a completion is trained on.

        DAPO keeps groups that are neither all right nor all wrong (arXiv:2503.14476, 3.2).
        """
        rewards = [completion.reward for completion in group.completions]
        return has_learning_signal(rewards) and not all(map(self.is_masked, group.completions))

    def has_gradient(self, group: Group) -> bool:
        """Return whether a group has a gradient, if only from penalties for length."""
        return has_learning_signal(group.totals) and not all(map(self.is_masked, group.completions))

    def build_trajectories(self, groups: Sequence[Group]) -> tuple[list[Trajectory], list[dict[str, Any]]]:
        """Return the trajectories to train on, and their lines of completions.jsonl. Masked ones have weight 0."""
        config = self._config
        group_advantages = advantages(
            [group.totals for group in groups], config.scale_rewards, config.advantage_estimator
        )
        rows = [
            (group.prompt, completion, advantage)
            for group, values in zip(groups, group_advantages, strict=True)
            for completion, advantage in zip(group.completions, values, strict=True)
        ]
        rewards = [(number, reward) for number, group in enumerate(groups) for reward in group.totals]
        trained_tokens = [0 if self.is_masked(completion) else len(completion.ids) for _, completion, _ in rows]
        weights = token_weights(config.loss_type, trained_tokens, config.max_completion_length)
        trajectories = [
            Trajectory(
                prompt.ids,
                completion.ids,
                completion.logprobs,
                0.0 if isnan(advantage) else advantage,
                weight,
                prompt.place,
                prompt.images,
                experts=completion.experts,
                group=group,
                reward=None if isnan(reward) else reward,
            )
            for (prompt, completion, advantage), weight, (group, reward) in zip(rows, weights, rewards, strict=True)
        ]
        return trajectories, [self._format_line(*row) for row in rows]

    def format_lines(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Return the lines of completions.jsonl for completions that are not trained on."""
        return [
            self._format_line(group.prompt, completion, nan) for group in groups for completion in group.completions
        ]

    def _format_line(self, prompt: Prompt, completion: ScoredCompletion, advantage: float) -> dict[str, Any]:
        return {
            "place": prompt.place,
            "prompt": prompt.columns.get("prompt"),
            "completion": completion.text,
            "tokens": len(completion.ids),
            "finish": completion.finish,
            "reward": None if isnan(completion.total) else completion.total,
            "rewards": dict(zip(self.names, completion.rewards, strict=True)),
            "advantage": None if isnan(advantage) else advantage,
            **({"failures": completion.failures} if completion.failures else {}),
        }

    def _score_local_groups(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[dict[str, Any]]]:
        """Return the fields that `ScoredCompletion` adds to a completion, as [group][completion]."""
        # As in TRL, reward functions read texts without special tokens.
        decode = self._context.tokenizer.decode
        inputs = [
            RewardInputs(
                prompt.columns,
                [str(decode(completion.ids, skip_special_tokens=True)) for completion in completions],
                [completion.ids for completion in completions],
            )
            for prompt, completions in groups
        ]

        def on_wait() -> None:
            if self._context.stop_requested():
                raise Interrupted
            self._context.emit(Heartbeat())

        scores = self._rewards.score(inputs, waiting=on_wait)
        return [
            [
                self._sum_up(text, len(ids), results)
                for text, ids, results in zip(group.texts, group.ids, group_scores, strict=True)
            ]
            for group, group_scores in zip(inputs, scores, strict=True)
        ]

    def _sum_up(self, text: str, length: int, results: Sequence[RewardResult]) -> dict[str, Any]:
        """Return the fields that `ScoredCompletion` adds. `results`: of each function."""
        config = self._config
        weighted = [(item.weight, result) for item, result in zip(config.rewards, results, strict=True) if item.weight]
        reward = nan
        if not any(result.failure for _, result in weighted) and any(
            result.reward is not None for _, result in weighted
        ):
            reward = sum(weight * result.reward for weight, result in weighted if result.reward is not None)
        return {
            "text": text,
            "rewards": [result.reward for result in results],
            "failures": [
                f"{name}: {result.failure}" for name, result in zip(self.names, results, strict=True) if result.failure
            ],
            "reward": reward,
            "total": reward + overlong_penalty(length, config.max_completion_length, config.soft_overlong_length),
        }


def compute_metrics(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float]:
    """Return means over completions, by name; no mean reward if none has one. `names`: of the reward functions."""
    completions = [completion for group in groups for completion in group.completions]
    unmasked = [completion.total for completion in completions if not isnan(completion.total)]
    spreads = [deviation(group.totals) for group in groups]
    metrics: dict[str, float] = {}
    if unmasked:
        metrics = {"reward": sum(unmasked) / len(unmasked), "reward_std": sum(spreads) / len(spreads)}
    metrics |= {
        "completion_length": sum(len(completion.ids) for completion in completions) / len(completions),
        "truncated_share": sum(completion.finish == "length" for completion in completions) / len(completions),
        "groups_without_spread": float(sum(not has_learning_signal(group.totals) for group in groups)),
        "rewards_failed": float(sum(bool(completion.failures) for completion in completions)),
    }
    for number, name in enumerate(names):
        rewards = [reward for completion in completions if (reward := completion.rewards[number]) is not None]
        if rewards:
            metrics[f"reward/{name}"] = sum(rewards) / len(rewards)
    return metrics
