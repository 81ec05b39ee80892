"""The settings of supervised fine-tuning, which are those common to all methods."""

from typing import ClassVar, Literal

from pydantic import Field

from surefoot.config.schema import RunConfig


class SftConfig(RunConfig):
    """Settings of a run with `method: sft`."""

    implementation: ClassVar[str] = "surefoot.methods.sft.method:Sft"

    method: Literal["sft"] = "sft"
    """Supervised fine-tuning."""
    neftune_noise_alpha: float | None = Field(default=None, gt=0)
    """NEFTune: uniform noise of at most alpha / sqrt(tokens of the sample x width) on the input embeddings, 5 to 15 in
    its paper. Default: none."""
