"""The settings of Kahneman-Tversky optimisation."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from surefoot.config.preference import PreferenceConfig
from surefoot.config.schema import LABELLED_ANSWER, Contradiction, RowKind


class KtoConfig(PreferenceConfig):
    """Settings of a run with `method: kto`."""

    implementation: ClassVar[str] = "surefoot.methods.kto.method:Kto"
    row: ClassVar[RowKind] = LABELLED_ANSWER
    learning_rate_share: ClassVar[float] = 0.1
    """The same as for DPO; the paper's rate is 5e-6 in full for 8B (arXiv:2402.01306, sec. 4.1), TRL's default 1e-6."""

    method: Literal["kto"] = "kto"
    """Kahneman-Tversky optimisation: answers that are desired become likelier, and others less likely."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """`kto`: an answer's log-ratio is compared with the divergence from the reference, which the answers of other
    questions show. `apo_zero_unpaired`: with zero."""
    desirable_weight: float = Field(default=1.0, ge=0, le=1e4)
    """Weight of the losses of desired answers. With rare ones, raise it until (weight x number) is near that of others,
    within a factor of 4/3."""
    undesirable_weight: float = Field(default=1.0, ge=0, le=1e4)
    """Weight of the losses of answers that are not desired."""

    @property
    def has_divergence(self) -> bool:
        """Whether the loss compares with the divergence from the reference."""
        return self.loss_type == "kto"

    @property
    def reference_settings(self) -> dict[str, Any]:
        """`loss_type`, which decides whether mismatched answers are computed."""
        return {"loss_type": self.loss_type}

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield conflicts of settings. `non_default`: names of those that differ from the default."""
        yield from super().contradictions(non_default)
        if not self.desirable_weight and not self.undesirable_weight:
            yield Contradiction(
                "desirable_weight=0 and undesirable_weight=0: no answer would have a loss. Raise one",
                "desirable_weight",
                "undesirable_weight",
            )
        if self.train_on != "assistant":
            yield Contradiction(
                f"train_on={self.train_on} with method: kto: the answers alone are compared. Drop it", "train_on"
            )
