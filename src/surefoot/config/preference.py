"""Settings that all methods on preferences share, and those of the ones that compare answers with a reference."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from surefoot.config.schema import Contradiction, RunConfig


class AnswerConfig(RunConfig):
    """Settings of a run that learns which answers are better, with dropout off."""

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield conflicts of settings. `non_default`: names of those that differ from the default."""
        yield from super().contradictions(non_default)
        unavailable = {
            "lora_dropout": self.lora_dropout > 0 and self.tuning == "lora",
            "router_aux_loss_coef": self.router_aux_loss_coef > 0,
            "compile": self.compile,
        }
        for name in (name for name, is_set in unavailable.items() if is_set):
            yield Contradiction(
                f"{name}={getattr(self, name)} is not available with method: {self.method}. Drop it", name
            )


class PreferenceConfig(AnswerConfig):
    """Settings of a run that compares answers with a reference: the model as training began."""

    beta: float = Field(default=0.1, gt=0, le=1e4)
    """Scale of the log-ratios, in the loss and in the rewards that are logged. With ipo the strength of the
    regularisation, with orpo the weight of the odds ratio."""
    precompute_ref_log_probs: bool = False
    """Whether to compute the reference's likelihoods of all answers before the first step and keep them in the cache,
    which is faster over several epochs. Without, the model without its adapter computes them in each step; where it is
    not the model that training began with (full fine-tuning, `init_adapter`, trained routers), this is always so."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares likelihoods with those under the model that training began with."""
        return True

    @property
    def keeps_reference(self) -> bool:
        """The same as `needs_reference`."""
        return self.needs_reference

    @property
    def stores_reference(self) -> bool:
        """Whether the reference's likelihoods are computed before the first step."""
        return self.needs_reference and (self.precompute_ref_log_probs or not self.starts_from_base)

    @property
    def reference_settings(self) -> dict[str, Any]:
        """Settings that change the likelihoods that are kept of the reference, as JSON values."""
        return {}

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield conflicts of settings. `non_default`: names of those that differ from the default."""
        yield from super().contradictions(non_default)
        if self.precompute_ref_log_probs and not self.needs_reference:
            yield Contradiction(
                "precompute_ref_log_probs=True: this loss needs no reference. Drop it", "precompute_ref_log_probs"
            )
