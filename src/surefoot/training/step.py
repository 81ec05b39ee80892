"""One optimizer step. Knows nothing of where batches come from, of files, or of what is logged."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.data.loader import MicroBatch


@dataclass(frozen=True)
class Totals:
    """Counts over the whole global batch, which every micro-batch's loss is normalised by."""

    tokens: int
    trained: int
    weight: float
    """Sum of the trained tokens' weights: `trained`, where rows ask for no other."""


@dataclass(frozen=True)
class LossParts:
    """A micro-batch's share of the step's loss: the shares of all micro-batches add up."""

    main: Tensor
    aux: Tensor | None = None
    """Load-balancing loss times its coefficient."""

    @property
    def total(self) -> Tensor:
        return self.main if self.aux is None else self.main + self.aux


class Objective(Protocol):
    """What is minimised: SFT here, GRPO later."""

    @property
    def expert_counts(self) -> Tensor | None:
        """Rows each expert got in the last step, int64 [layers, E]; None for a dense model."""

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """See the whole global batch before its first forward."""

    def loss(self, batch: MicroBatch, totals: Totals) -> LossParts:
        """A micro-batch's share of the loss, with its graph."""

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(mean loss, trained tokens) over held-out batches, without graph."""


@dataclass(frozen=True)
class StepResult:
    """What one step did. Losses are before the update, the norm is before clipping."""

    loss: float
    aux_loss: float | None
    grad_norm: float
    totals: Totals


class NotFinite(Exception):
    """The loss or a gradient is NaN or infinite; the weights were not touched. `what` is `loss` or `gradient`."""

    def __init__(self, what: str, value: float, parameters: list[str]) -> None:
        super().__init__(what, value)
        self.what, self.value, self.parameters = what, value, parameters


def train_step(
    batches: Sequence[MicroBatch],
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    *,
    learning_rate: float,
    max_grad_norm: float,
    forward_context: Callable[[], AbstractContextManager[object]],
) -> StepResult:
    """Forward and backward over the global batch, clip, update.

    The loss is normalised by the weight of the trained tokens of the whole global batch, so cutting it into
    other micro-batches changes nothing but rounding. The device is waited for once, after the last backward.
    Raises: NotFinite before the weights are touched.
    """
    totals = Totals(
        sum(batch.num_tokens for batch in batches),
        sum(batch.num_trained for batch in batches),
        sum(batch.trained_weight for batch in batches),
    )
    main, aux = [], []
    with forward_context():
        objective.begin_step(batches)
    for batch in batches:
        with forward_context():
            parts = objective.loss(batch, totals)
        parts.total.backward()
        main.append(parts.main.detach())
        aux += [] if parts.aux is None else [parts.aux.detach()]
    for parameter in parameters.values():
        if (
            parameter.grad is None
        ):  # had no part in this step: a zero gradient, so that its state exists like all others
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    loss, aux_loss, grad_norm = torch.stack(
        [
            torch.stack(main).sum().float(),
            torch.stack(aux).sum().float() if aux else main[0].new_zeros(()).float(),
            norm.float(),
        ]
    ).tolist()
    if not _is_finite(loss + aux_loss):
        raise NotFinite("loss", loss + aux_loss, [])
    if not _is_finite(grad_norm):
        raise NotFinite("gradient", grad_norm, _not_finite_gradients(parameters))
    if max_grad_norm:
        torch.nn.utils.clip_grads_with_norm_(list(parameters.values()), max_grad_norm, norm, foreach=True)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, aux_loss if aux else None, grad_norm, totals)


def _is_finite(value: float) -> bool:
    return value - value == 0


def _not_finite_gradients(parameters: dict[str, nn.Parameter]) -> list[str]:
    return [name for name, p in parameters.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
