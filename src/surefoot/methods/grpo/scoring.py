"""Groups of completions of a prompt: scored by the reward functions, and converted to trajectories with advantages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import Any

from surefoot.events import Heartbeat
from surefoot.methods.base import Interrupted, MethodContext
from surefoot.methods.grpo.advantage import (
    Trained,
    advantages,
    deviation,
    has_learning_signal,
    overlong_penalty,
    token_weights,
)
from surefoot.methods.grpo.batch import Trajectory, rank_slice
from surefoot.methods.grpo.rewards import RewardInputs, RewardResult, Rewards
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.grpo.types import Completion, Prompt, run_interruptible


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion with the results of the reward functions."""

    completion: Completion
    text: str
    rewards: list[float | None]
    """Reward of each function."""
    failures: list[str]
    is_scored: bool
    """Whether none of the functions with a weight failed on it, and at least one scored it."""


@dataclass(frozen=True)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    answers: list[ScoredCompletion]
    rewards: list[float]
    """Weighted reward of each completion, before the penalty for its length; NaN without a reward."""
    totals: list[float]
    """Reward of each completion with the penalty."""


class GroupScorer:
    """Scoring of completions, and conversion of groups to trajectories."""

    def __init__(self, config: GrpoConfig, context: MethodContext, rewards: Rewards) -> None:
        self._config = config
        self._context = context
        self._ranks = context.ranks
        self._rewards = rewards

    @property
    def names(self) -> list[str]:
        """Names of the reward functions."""
        return self._rewards.names

    @property
    def weighted_names(self) -> set[str]:
        """Names of the reward functions with a weight; the others are only logged."""
        return {name for name, item in zip(self.names, self._config.rewards, strict=True) if item.weight}

    def score_groups(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Group]:
        """Score this rank's `completions`, and return the groups of all ranks. Collective.

        Each group is scored as a whole, on one rank. Raises: Interrupted on all ranks if one got a stop signal.
        """
        each = self._config.num_generations
        with self._context.phase("collectives"):
            gathered = self._ranks.gather([asdict(completion) for completion in completions])
        all_completions = [Completion(**values) for rank_values in gathered for values in rank_values]
        by_prompt = [all_completions[begin : begin + each] for begin in range(0, len(all_completions), each)]
        local_range = rank_slice(len(prompts), self._context.data.layout)
        with self._context.phase("reward"):
            local_groups = [(prompts[number], by_prompt[number]) for number in local_range]
            local_scores = run_interruptible(self._ranks, lambda: self._score_local_groups(local_groups))
        with self._context.phase("collectives"):
            scores = [group_scores for rank_scores in self._ranks.gather(local_scores) for group_scores in rank_scores]
        groups = []
        for prompt, group_completions, group_scores in zip(prompts, by_prompt, scores, strict=True):
            pairs = zip(group_completions, group_scores, strict=True)
            answers = [ScoredCompletion(completion, *values) for completion, values in pairs]
            rewards = [self._sum_rewards(answer) for answer in answers]
            penalties = [self._compute_penalty(answer.completion) for answer in answers]
            totals = [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]
            groups.append(Group(prompt, answers, rewards, totals))
        return groups

    def is_left_out(self, completion: Completion) -> bool:
        """Return whether a completion is left out of the loss because it is truncated."""
        return self._config.mask_truncated_completions and completion.finish == "length"

    def has_learning_signal(self, group: Group) -> bool:
        """Return whether rewards differ, apart from penalties for length, and a completion is trained on.

        DAPO keeps groups that are neither all right nor all wrong (arXiv:2503.14476, 3.2).
        """
        return has_learning_signal(group.rewards) and self._has_trained(group)

    def has_gradient(self, group: Group) -> bool:
        """Return whether a group has a gradient, if only from penalties for length."""
        return has_learning_signal(group.totals) and self._has_trained(group)

    def _has_trained(self, group: Group) -> bool:
        pairs = zip(group.answers, group.totals, strict=True)
        return any(not isnan(total) and not self.is_left_out(answer.completion) for answer, total in pairs)

    def build_trajectories(self, groups: Sequence[Group]) -> tuple[list[Trajectory], list[dict[str, Any]]]:
        """Return the trajectories to train on, and their lines of completions.jsonl.

        Completions without a reward are masked, and truncated ones if the config says so.
        """
        config = self._config
        group_advantages = advantages([group.totals for group in groups], config.scale_rewards)
        rows = [
            (group.prompt, answer, total, advantage)
            for group, values in zip(groups, group_advantages, strict=True)
            for answer, total, advantage in zip(group.answers, group.totals, values, strict=True)
        ]
        lengths = [
            Trained(len(answer.completion.ids), isnan(advantage) or self.is_left_out(answer.completion))
            for _, answer, _, advantage in rows
        ]
        weights = token_weights(config.loss_type, lengths, config.max_completion_length)
        trajectories = [
            Trajectory(
                prompt.ids,
                answer.completion.ids,
                answer.completion.logprobs,
                0.0 if isnan(advantage) else advantage,
                weight,
                prompt.place,
                prompt.images,
                experts=answer.completion.experts,
            )
            for (prompt, answer, _, advantage), weight in zip(rows, weights, strict=True)
        ]
        return trajectories, [self._format_line(*row) for row in rows]

    def format_lines(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Return the lines of completions.jsonl for completions that are not trained on."""
        return [
            self._format_line(group.prompt, answer, total, nan)
            for group in groups
            for answer, total in zip(group.answers, group.totals, strict=True)
        ]

    def _format_line(self, prompt: Prompt, answer: ScoredCompletion, total: float, advantage: float) -> dict[str, Any]:
        return {
            "place": prompt.place,
            "prompt": prompt.columns.get("prompt"),
            "completion": answer.text,
            "tokens": len(answer.completion.ids),
            "finish": answer.completion.finish,
            "reward": None if isnan(total) else total,
            "rewards": dict(zip(self.names, answer.rewards, strict=True)),
            "advantage": None if isnan(advantage) else advantage,
            **({"failures": answer.failures} if answer.failures else {}),
        }

    def _score_local_groups(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[list[Any]]]:
        """Return the fields of `ScoredCompletion` after the completion itself, as [group][completion][field]."""
        texts = [[self._decode(completion) for completion in completions] for _, completions in groups]
        inputs = [
            RewardInputs(prompt.columns, group_texts, [completion.ids for completion in completions])
            for (prompt, completions), group_texts in zip(groups, texts, strict=True)
        ]

        def on_wait() -> None:
            if self._context.is_told_to_stop():
                raise Interrupted
            self._context.emit(Heartbeat())

        scores = self._rewards.score(inputs, waiting=on_wait)
        return [
            [
                [
                    text,
                    [result.reward for result in results],
                    self._format_failures(results),
                    self._is_scored(results),
                ]
                for text, results in zip(group_texts, group_scores, strict=True)
            ]
            for group_texts, group_scores in zip(texts, scores, strict=True)
        ]

    def _decode(self, completion: Completion) -> str:
        """Return the text that reward functions read: without special tokens, as in TRL."""
        return str(self._context.tokenizer.decode(completion.ids, skip_special_tokens=True))

    def _format_failures(self, results: Sequence[RewardResult]) -> list[str]:
        """Return the failures on a completion, each with the name of its function."""
        pairs = zip(self.names, results, strict=True)
        return [f"{name}: {result.failure}" for name, result in pairs if result.failure]

    def _is_scored(self, results: Sequence[RewardResult]) -> bool:
        pairs = zip(self._config.rewards, results, strict=True)
        weighted = [result for item, result in pairs if item.weight]
        return not any(result.failure for result in weighted) and any(result.reward is not None for result in weighted)

    def _sum_rewards(self, answer: ScoredCompletion) -> float:
        if not answer.is_scored:
            return nan
        pairs = zip(self._config.rewards, answer.rewards, strict=True)
        return sum(item.weight * reward for item, reward in pairs if reward is not None)

    def _compute_penalty(self, completion: Completion) -> float:
        config = self._config
        return overlong_penalty(len(completion.ids), config.max_completion_length, config.soft_overlong_length)


def compute_metrics(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float]:
    """Return means over completions, by name; no mean reward if none has one. `names`: of the reward functions."""
    answers = [answer for group in groups for answer in group.answers]
    unmasked = [total for group in groups for total in group.totals if not isnan(total)]
    spreads = [deviation(group.totals) for group in groups]
    metrics: dict[str, float] = {}
    if unmasked:
        metrics = {"reward": sum(unmasked) / len(unmasked), "reward_std": sum(spreads) / len(spreads)}
    metrics |= {
        "completion_length": sum(len(answer.completion.ids) for answer in answers) / len(answers),
        "truncated_share": sum(answer.completion.finish == "length" for answer in answers) / len(answers),
        "groups_without_spread": float(sum(not has_learning_signal(group.totals) for group in groups)),
        "rewards_failed": float(sum(bool(answer.failures) for answer in answers)),
    }
    for number, name in enumerate(names):
        rewards = [reward for answer in answers if (reward := answer.rewards[number]) is not None]
        if rewards:
            metrics[f"reward/{name}"] = sum(rewards) / len(rewards)
    return metrics
