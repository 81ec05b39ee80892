"""The settings of direct preference optimisation, and the conflicts among them."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from surefoot.config.preference import PreferenceConfig
from surefoot.config.schema import PAIR, Contradiction, RowKind

LossType = Literal[
    "sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop", "cpo", "simpo",
]  # fmt: skip
REFERENCE_FREE = frozenset(("cpo", "simpo"))
"""Losses without a reference."""
SMOOTHED = {"robust": 0.5, "exo_pair": 1.0}
"""Losses that use `label_smoothing`, which must be less than this."""


@dataclass(frozen=True)
class PairLossSettings:
    """The loss of a pair, with its parameters."""

    weights: Mapping[str, float]
    """Weight of each loss by its name."""
    beta: float
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    ld_alpha: float | None = None
    sft_weight: float = 0.0


class PairConfig(PreferenceConfig):
    """Settings of a run on pairs of a chosen and a rejected answer."""

    implementation: ClassVar[str] = "surefoot.methods.dpo.method:Dpo"
    row: ClassVar[RowKind] = PAIR

    @property
    @abstractmethod
    def loss_settings(self) -> PairLossSettings:
        """The loss of a pair."""


class DpoConfig(PairConfig):
    """Settings of a run with `method: dpo`."""

    learning_rate_share: ClassVar[float] = 0.1
    """2e-5 with LoRA for 8B, in the range of TRL's default (1e-6) and published recipes with LoRA (5e-6 to 5e-5)."""

    method: Literal["dpo"] = "dpo"
    """Direct preference optimisation: the chosen of two answers becomes likelier than the rejected one."""
    loss_type: LossType | Annotated[list[LossType], Field(min_length=1)] = "sigmoid"
    """Loss of a pair, or a list of losses that are added with `loss_weights`. `cpo` and `simpo` need no reference; the
    others measure how far an answer's likelihood has moved from that under the model that training began with."""
    loss_weights: list[Annotated[float, Field(ge=0, le=1e6)]] | None = None
    """Weight of each of several losses. Default: 1 for each."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a preference is the wrong way round (robust, exo_pair)."""
    discopop_tau: float = Field(default=0.05, gt=0)
    """Temperature by which discopop blends its two parts."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """Margin by which simpo wants the chosen answer's mean log-probability times beta to exceed the rejected one's."""
    ld_alpha: float | None = Field(default=None, ge=0, le=1)
    """Weight of the tokens of the longer answer beyond the length of the shorter one, which takes away a preference for
    long answers (LD-DPO). Default: 1, as in DPO."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen answers' mean negative log-likelihood, which is added (TRL's `rpo_alpha`, `cpo_alpha`)."""

    @property
    def loss_types(self) -> list[LossType]:
        """The losses, one or several."""
        return self.loss_type if isinstance(self.loss_type, list) else [self.loss_type]

    @property
    def loss_settings(self) -> PairLossSettings:
        """The loss of a pair."""
        weights: dict[str, float] = {}
        for loss, weight in zip(self.loss_types, self.loss_weights or [1.0] * len(self.loss_types), strict=True):
            weights[loss] = weights.get(loss, 0.0) + weight
        names = (setting.name for setting in fields(PairLossSettings) if setting.name != "weights")
        return PairLossSettings(weights, **{name: getattr(self, name) for name in names})

    @property
    def needs_reference(self) -> bool:
        """Whether any of the losses compares with the reference."""
        return not REFERENCE_FREE.issuperset(self.loss_types)

    @property
    def reference_settings(self) -> dict[str, Any]:
        """`ld_alpha`, which weighs the tokens of an answer."""
        return {"ld_alpha": self.ld_alpha}

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield conflicts of settings. `non_default`: names of those that differ from the default."""
        yield from super().contradictions(non_default)
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_types):
            yield Contradiction(
                f"loss_weights has {len(self.loss_weights)} numbers for {len(self.loss_types)} losses. Give one for "
                "each",
                "loss_weights",
                "loss_type",
            )
        yield from self._check_parameters(non_default)
        if self.train_on != "assistant":
            yield Contradiction(
                f"train_on={self.train_on} with method: dpo: the answers alone are compared. Drop it", "train_on"
            )

    def _check_parameters(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield parameters of losses that the run does not have, and values that those it has cannot take."""
        owners = {"label_smoothing": tuple(SMOOTHED), "discopop_tau": ("discopop",), "simpo_gamma": ("simpo",)}
        for name, losses in owners.items():
            if name in non_default and not set(losses) & set(self.loss_types):
                yield Contradiction(
                    f"{name}={getattr(self, name)} is of loss_type {' and '.join(losses)} alone, and the run has "
                    f"{', '.join(self.loss_types)}. Drop it, or set loss_type: {losses[0]}",
                    name,
                    "loss_type",
                )
        for loss, limit in SMOOTHED.items():
            if loss in self.loss_types and self.label_smoothing >= limit:
                yield Contradiction(
                    f"label_smoothing={self.label_smoothing}: {loss} needs less than {limit}. Lower it",
                    "label_smoothing",
                )
        if "exo_pair" in self.loss_types and not self.label_smoothing:
            yield Contradiction(
                "label_smoothing=0 with exo_pair, which takes its logarithm. Set label_smoothing: 0.001",
                "label_smoothing",
                "loss_type",
            )


LOSS_TYPES: tuple[str, ...] = get_args(LossType)
"""Names of all losses."""
