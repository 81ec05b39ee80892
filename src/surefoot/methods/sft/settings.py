"""The settings of supervised fine-tuning, which are those common to all methods."""

from typing import ClassVar, Literal

from surefoot.config.schema import RunConfig


class SftConfig(RunConfig):
    """Settings of a run with `method: sft`."""

    implementation: ClassVar[str] = "surefoot.methods.sft.method:Sft"

    method: Literal["sft"] = "sft"
    """Supervised fine-tuning."""
