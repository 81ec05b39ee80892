"""A run's model, built without storage: its sizes, and the trace of one of its steps.

A deep model is traced from a few of its layers, if they repeat.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from surefoot.config.schema import REGULAR_EXPRESSION, Checkpointing
from surefoot.errors import ModelError, one_line
from surefoot.methods.base import PlannedLoss
from surefoot.models.build import BuiltModel, build_without_storage
from surefoot.models.frozen_parts import FrozenParts
from surefoot.models.lora import IN_LAYER, LoraSettings
from surefoot.models.mixing_probe import OTHER_TYPES
from surefoot.models.pretrained import BAD_CONFIG
from surefoot.models.sample_masks import NeedsOwnAttentionError
from surefoot.planner.expert_dispatch import shard_experts
from surefoot.planner.sizes import Sizes, check_fields, count_sizes
from surefoot.planner.trace import ATTENTION, Trace, make_shaped_batch, trace_step
from surefoot.planner.vision_tower import ImageBatch, add_images

FEW_LAYERS = 2
"""Least number of layers that are traced. A model whose layers repeat is extrapolated linearly from one period of their
kinds and shapes, of so many layers at least, and one more, both with the layers that are left over at the end."""


@dataclass(frozen=True)
class ModelSpec:
    """A model to build without storage."""

    base: Path
    """Folder of its config.json."""
    lora: LoraSettings | None
    dtype: torch.dtype
    frozen: FrozenParts
    has_score: bool = False
    """Whether it has a score head in place of its output layer."""

    def build(
        self,
        *,
        checkpointing: Checkpointing = False,
        layers: int | None = None,
        has_own_attention: bool = False,
        is_run: bool = True,
    ) -> BuiltModel:
        """Build the model, or its first `layers` decoder layers. Call it in a FakeTensorMode.

        `has_own_attention`: whether it computes with masks that attention over packed samples does not build. `is_run`:
        whether forwards of it will run.
        """
        return build_without_storage(
            self.base,
            lora=self.lora,
            dtype=self.dtype,
            gradient_checkpointing=checkpointing,
            packed_attention=None if has_own_attention else ATTENTION,
            layers=layers,
            frozen=self.frozen,
            has_score=self.has_score,
            is_run=is_run,
        )


@dataclass(frozen=True)
class StepSpec:
    """One rank's micro-batches of a step, each of `rows` sequences of `length` tokens."""

    loss: PlannedLoss
    rows: int
    length: int
    images: ImageBatch | None
    checkpointing: Checkpointing
    is_accumulated: bool
    """Whether the gradients of several micro-batches are summed."""


@contextmanager
def _raise_as_model_error(base: Path) -> Iterator[None]:
    """Raise errors of a model that cannot be built, counted or traced as a ModelError that names its config."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{base / 'config.json'}: cannot forecast this model: its code decides by values ({error}), and a forecast "
            "computes without any. Measure a few steps with max_steps instead."
        ) from error
    except BAD_CONFIG as error:
        advice = " Its code may work in float32: try dtype: float32." if OTHER_TYPES.search(str(error)) else ""
        raise ModelError(f"{base / 'config.json'}: cannot forecast this model: {one_line(error)}.{advice}") from error


@lru_cache(maxsize=8)
def sizes_of(spec: ModelSpec) -> Sizes:
    """Return the sizes of a model. Raises: ModelError for a config that no model can be built from."""
    with _raise_as_model_error(spec.base), torch.device("meta"):
        check_fields(spec.base)
        return count_sizes(spec.build(is_run=False))


@lru_cache(maxsize=64)
def trace_of(spec: ModelSpec, step: StepSpec, gradient_share: float, expert_parallel: int, *, is_on_gpu: bool) -> Trace:
    """Trace micro-batches whose sequences have full length and whose tokens are all trained: the largest possible.

    With GRPO the tokens of the longest completions are trained; each follows its own prompt, as on a GPU.
    """

    def trace_layers(layers: int | None) -> Trace:
        try:
            return trace_with(layers, has_own_attention=False)
        except NeedsOwnAttentionError:
            return trace_with(layers, has_own_attention=True)

    def trace_with(layers: int | None, *, has_own_attention: bool) -> Trace:
        with _raise_as_model_error(spec.base), FakeTensorMode():
            built = spec.build(checkpointing=step.checkpointing, layers=layers, has_own_attention=has_own_attention)
            if expert_parallel > 1:
                shard_experts(built.model, expert_parallel)
            vision = add_images(built, step.images) if step.images is not None else None
            batch = make_shaped_batch([step.length] * step.rows, step.rows * step.loss.tokens_per_sequence, vision)
            return trace_step(
                built,
                batch,
                step.loss(built, batch),
                is_on_gpu=is_on_gpu,
                is_accumulated=step.is_accumulated,
                gradient_share=gradient_share,
            )

    sizes = sizes_of(spec)
    targets = (*spec.lora.targets, *(f".{name}." for name in spec.lora.modules_to_save)) if spec.lora else ()
    if sizes.layer_period is None or any(IN_LAYER.search(name) or REGULAR_EXPRESSION.search(name) for name in targets):
        return trace_layers(None)  # targets may be in single layers
    few = sizes.layer_period * ceil(FEW_LAYERS / sizes.layer_period)
    rest = sizes.num_layers % sizes.layer_period
    fewer, more = few + rest, few + sizes.layer_period + rest
    if sizes.num_layers <= more:
        return trace_layers(None)
    return trace_layers(fewer).with_layers(trace_layers(more), fewer, more, sizes.num_layers)
