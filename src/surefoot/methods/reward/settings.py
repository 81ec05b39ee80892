"""The settings of the training of reward models."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from surefoot.config.preference import AnswerConfig
from surefoot.config.schema import RATED_PAIR, Contradiction, RowKind


class RewardConfig(AnswerConfig):
    """Settings of a run with `method: reward`."""

    implementation: ClassVar[str] = "surefoot.methods.reward.method:Reward"
    row: ClassVar[RowKind] = RATED_PAIR
    has_score: ClassVar[bool] = True
    learning_rate_share: ClassVar[float] = 0.5
    """1e-4 with LoRA for 8B, which is TRL's default and that of LLaMA-Factory's examples."""

    method: Literal["reward"] = "reward"
    """A reward model: in place of the output layer, a head that gives an answer one number, the reward. The chosen of
    two answers gets a higher one than the rejected (Bradley-Terry)."""
    center_rewards_coefficient: float = Field(default=0.0, ge=0, le=1e4)
    """Weight of the squared sum of the two rewards of a pair, which keeps rewards around zero (arXiv:2312.09244);
    0.01 is usual. The order of answers does not depend on it."""

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield conflicts of settings. `non_default`: names of those that differ from the default."""
        yield from super().contradictions(non_default)
        if self.train_on != "assistant":
            yield Contradiction(
                f"train_on={self.train_on} with method: reward: no token is trained, an answer gets one reward. "
                "Drop it",
                "train_on",
            )
