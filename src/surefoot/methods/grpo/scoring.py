"""Completions of the same prompt: judged by the reward functions, and made into what is trained on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.distributed.process_group import World
from surefoot.events import Event, Heartbeat, Phase
from surefoot.methods.base import Interrupted
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
    """A completion with what was said of it."""

    completion: Completion
    text: str
    rewards: list[float | None]
    """Of each function."""
    failures: list[str]
    is_scored: bool
    """Whether no function failed on it and one judged it, of those with a weight."""


@dataclass(frozen=True)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    answers: list[ScoredCompletion]
    rewards: list[float]
    """Of each, before the penalty for its length; NaN where it has none."""
    totals: list[float]
    """With it."""


class GroupScorer:
    """Says what completions are worth, and what is trained on of them."""

    def __init__(
        self,
        config: GrpoConfig,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        *,
        is_told_to_stop: Callable[[], bool],
        ranks: World,
        phase: Callable[[Phase], AbstractContextManager[None]],
        emit: Callable[[Event], None],
    ) -> None:
        """See `RolloutSource`."""
        self._config = config
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._is_told_to_stop = is_told_to_stop
        self._ranks = ranks
        self._phase = phase
        self._emit = emit

    @property
    def names(self) -> list[str]:
        """Of the reward functions."""
        return self._rewards.names

    @property
    def weighty(self) -> set[str]:
        """The names of those with a weight; the others only watch."""
        return {name for name, item in zip(self.names, self._config.rewards, strict=True) if item.weight}

    def groups(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Group]:
        """The same on all ranks; `completions`: those of this one. Each group is judged whole, on one. Collective.

        Raises: Interrupted on all ranks where one is told to stop.
        """
        each = self._config.num_generations
        with self._phase("communicate"):
            gathered = self._ranks.gather([asdict(completion) for completion in completions])
        everyone = [Completion(**one) for part in gathered for one in part]
        of_prompts = [everyone[begin : begin + each] for begin in range(0, len(everyone), each)]
        mine = rank_slice(len(prompts), self._ranks.rank, self._ranks.size)
        with self._phase("reward"):
            ours = [(prompts[number], of_prompts[number]) for number in mine]
            judged = run_interruptible(self._ranks, lambda: self._judged(ours))
        with self._phase("communicate"):
            said = [one for part in self._ranks.gather(judged) for one in part]
        groups = []
        for prompt, made, of_group in zip(prompts, of_prompts, said, strict=True):
            answers = [ScoredCompletion(completion, *of_one) for completion, of_one in zip(made, of_group, strict=True)]
            rewards = [self._reward(answer) for answer in answers]
            penalties = [self._penalty(answer.completion) for answer in answers]
            totals = [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]
            groups.append(Group(prompt, answers, rewards, totals))
        return groups

    def is_left_out(self, completion: Completion) -> bool:
        """Of the loss, because it has no end."""
        return self._config.mask_truncated_completions and completion.finish == "length"

    def has_learning_signal(self, group: Group) -> bool:
        """More than its lengths: DAPO keeps groups that are neither all right nor all wrong (arXiv:2503.14476, 3.2)."""
        return has_learning_signal(group.rewards) and self._has_trained(group)

    def moves(self, group: Group) -> bool:
        """Whether it has a gradient, be it that of its lengths."""
        return has_learning_signal(group.totals) and self._has_trained(group)

    def _has_trained(self, group: Group) -> bool:
        pairs = zip(group.answers, group.totals, strict=True)
        return any(not isnan(total) and not self.is_left_out(answer.completion) for answer, total in pairs)

    def trajectories(self, groups: Sequence[Group]) -> tuple[list[Trajectory], list[dict[str, Any]]]:
        """What is trained on, and the lines of completions.jsonl that tell of it.

        Masked: completions without a reward, or cut where that is asked for.
        """
        config = self._config
        by_group = advantages([group.totals for group in groups], config.scale_rewards)
        everyone = [
            (group.prompt, answer, total, advantage)
            for group, of_group in zip(groups, by_group, strict=True)
            for answer, total, advantage in zip(group.answers, group.totals, of_group, strict=True)
        ]
        lengths = [
            Trained(len(answer.completion.ids), isnan(advantage) or self.is_left_out(answer.completion))
            for _, answer, _, advantage in everyone
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
            for (prompt, answer, _, advantage), weight in zip(everyone, weights, strict=True)
        ]
        return trajectories, [self._line(*one) for one in everyone]

    def lines(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Those of completions that nothing learns from."""
        return [
            self._line(group.prompt, answer, total, nan)
            for group in groups
            for answer, total in zip(group.answers, group.totals, strict=True)
        ]

    def _line(self, prompt: Prompt, answer: ScoredCompletion, total: float, advantage: float) -> dict[str, Any]:
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

    def _judged(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[list[Any]]]:
        """[group][completion]: the text, the rewards, the failures and whether they count, see `ScoredCompletion`."""
        texts = [[self._text_of(completion) for completion in made] for _, made in groups]
        asked = [
            RewardInputs(prompt.columns, of_group, [completion.ids for completion in made])
            for (prompt, made), of_group in zip(groups, texts, strict=True)
        ]

        def wait() -> None:
            if self._is_told_to_stop():
                raise Interrupted
            self._emit(Heartbeat())

        scores = self._rewards.score(asked, waiting=wait)
        return [
            [
                [text, [one.reward for one in of_one], self._failures(of_one), self._is_scored(of_one)]
                for text, of_one in zip(of_group, scored, strict=True)
            ]
            for of_group, scored in zip(texts, scores, strict=True)
        ]

    def _text_of(self, completion: Completion) -> str:
        """What reward functions read: without special tokens, as in TRL."""
        return str(self._tokenizer.decode(completion.ids, skip_special_tokens=True))

    def _failures(self, scored: Sequence[RewardResult]) -> list[str]:
        """Of each function that failed on a completion, with its name."""
        return [f"{name}: {one.failure}" for name, one in zip(self.names, scored, strict=True) if one.failure]

    def _is_scored(self, scored: Sequence[RewardResult]) -> bool:
        pairs = zip(self._config.rewards, scored, strict=True)
        counted = [one for item, one in pairs if item.weight]
        return not any(one.failure for one in counted) and any(one.reward is not None for one in counted)

    def _reward(self, answer: ScoredCompletion) -> float:
        if not answer.is_scored:
            return nan
        pairs = zip(self._config.rewards, answer.rewards, strict=True)
        return sum(item.weight * reward for item, reward in pairs if reward is not None)

    def _penalty(self, completion: Completion) -> float:
        config = self._config
        return overlong_penalty(len(completion.ids), config.max_completion_length, config.soft_overlong_length)


def measured_of(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float]:
    """Means over completions, by name; without rewards where none is known. `names`: of the reward functions."""
    answers = [answer for group in groups for answer in group.answers]
    known = [total for group in groups for total in group.totals if not isnan(total)]
    spreads = [deviation(group.totals) for group in groups]
    about = {"reward": sum(known) / len(known), "reward_std": sum(spreads) / len(spreads)} if known else {}
    about |= {
        "completion_length": sum(len(answer.completion.ids) for answer in answers) / len(answers),
        "truncated_share": sum(answer.completion.finish == "length" for answer in answers) / len(answers),
        "groups_without_spread": float(sum(not has_learning_signal(group.totals) for group in groups)),
        "rewards_failed": float(sum(bool(answer.failures) for answer in answers)),
    }
    for number, name in enumerate(names):
        of_one = [reward for answer in answers if (reward := answer.rewards[number]) is not None]
        if of_one:
            about[f"reward/{name}"] = sum(of_one) / len(of_one)
    return about
