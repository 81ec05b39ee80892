"""The settings of odds-ratio preference optimisation, which trains on pairs as DPO does."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from surefoot.config.schema import Contradiction
from surefoot.methods.dpo.settings import PairConfig, PairLossSettings


class OrpoConfig(PairConfig):
    """Settings of a run with `method: orpo`: the likelihood of chosen answers, and their odds against the rejected."""

    learning_rate_share: ClassVar[float] = 0.1
    """8e-6 is the paper's for full fine-tuning of 7B (arXiv:2403.07691, app. C), near that of DPO with LoRA."""

    method: Literal["orpo"] = "orpo"
    """Odds-ratio preference optimisation: supervised fine-tuning on the chosen answers, plus `beta` times the log-odds
    ratio to the rejected ones. It needs no reference."""

    @property
    def loss_settings(self) -> PairLossSettings:
        """The loss of the odds, and the likelihood of the chosen answers."""
        return PairLossSettings({"orpo": 1.0}, self.beta, sft_weight=1.0)

    @property
    def needs_reference(self) -> bool:
        """False: the odds of two answers are compared with each other."""
        return False

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield conflicts of settings. `non_default`: names of those that differ from the default."""
        yield from super().contradictions(non_default)
        if self.train_on == "last_assistant":
            yield Contradiction(
                "train_on=last_assistant with method: orpo. Set assistant (the likelihood of the chosen answers), or "
                "all (with that of their questions)",
                "train_on",
            )
