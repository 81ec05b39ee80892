"""One optimizer step. Independent of where batches come from, of files, and of logging."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from surefoot.data.collate import MicroBatch
from surefoot.methods.base import BatchTotals, TrainContext
from surefoot.models.dtensor_blocks import LocalShard, block_of

CLIP_EPSILON = 1e-6
"""Epsilon of torch.nn.utils.clip_grad_norm_."""
PIECE = 1 << 18
"""Number of elements of a gradient that are converted to float64 at a time."""
CHECKED = 1 << 24
"""Number of elements that are checked for finite values at a time."""
LARGEST_SQUARE = torch.finfo(torch.float32).max
"""Largest squared norm: AdamW keeps squares of gradients in float32, so a larger one counts as infinite."""


def counts_of(batches: Sequence[MicroBatch]) -> list[float]:
    """Return the counts of one rank's batches that, summed over the ranks, are those of `BatchTotals`."""
    names = ("num_tokens", "num_trained", "trained_weight", "num_sequences")
    return [sum(getattr(batch, name) for batch in batches) for name in names]


@dataclass(frozen=True)
class StepResult:
    """Result of one step. Losses are before the update, the norm is before clipping."""

    loss: float
    aux_loss: float | None
    grad_norm: float
    totals: BatchTotals


class NotFinite(Exception):
    """Error for a NaN or infinite loss or gradient, raised on every rank; the weights were not changed.

    `what` is `loss` or `gradient`.
    """

    def __init__(self, what: str, value: float, parameters: list[str], *, is_here: bool) -> None:
        super().__init__(what, value)
        self.what, self.value, self.parameters = what, value, parameters
        self.is_here = is_here
        """Whether this rank's own share is not finite."""


def train_step(
    batches: Sequence[MicroBatch],
    totals: BatchTotals,
    train_context: TrainContext,
    *,
    learning_rate: float,
    max_grad_norm: float,
) -> StepResult:
    """Run forward and backward over this rank's part of the global batch, clip, update.

    The loss is normalised by the weight of the trained tokens of the whole global batch, so splitting it into other
    micro-batches or over other ranks changes nothing but rounding. The host waits for the device once, after the
    last backward.
    Collective: those of the forward and backward, one sum of three numbers. Raises: NotFinite before the weights are
    changed, on all ranks.
    """
    objective, parameters, phase = train_context.objective, train_context.parameters, train_context.phase
    main: list[Tensor] = []
    aux: list[Tensor] = []
    with phase("forward"), train_context.forward_context():
        batches = objective.begin_step(batches)
    for number, batch in enumerate(batches, 1):
        train_context.before_micro_batch(number == len(batches))
        with phase("forward"), train_context.forward_context():
            terms = objective.loss(batch, totals)
        with phase("backward"):
            terms.total.backward()
        main.append(terms.main.detach())
        if terms.aux is not None:
            aux.append(terms.aux.detach())
    for parameter in parameters.values():
        if parameter.grad is None:  # unused in this step: with a zero gradient its state exists like all others
            parameter.grad = torch.zeros_like(parameter)
    with phase("backward"):  # here the host waits for the device, and its remaining work is mostly this phase
        local = _sum_here(main, aux, parameters)
    with phase("collectives"):
        objective.end_step()
        loss, aux_loss, squares = train_context.ranks.sum(local)
    grad_norm = squares**0.5
    if not isfinite(loss + aux_loss):
        raise NotFinite("loss", loss + aux_loss, [], is_here=not isfinite(local[0] + local[1]))
    if not isfinite(grad_norm):
        names = list_not_finite((name, p.grad) for name, p in parameters.items() if p.grad is not None)
        raise NotFinite("gradient", grad_norm, names, is_here=not isfinite(local[2]))
    with phase("optimizer"):
        if max_grad_norm and grad_norm > max_grad_norm:
            gradients = [block.local for block in _list_gradients(parameters)]
            torch._foreach_mul_(gradients, max_grad_norm / (grad_norm + CLIP_EPSILON))
        for group in train_context.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)
        train_context.optimizer.step()
        train_context.optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, aux_loss if aux else None, grad_norm, totals)


def _list_gradients(parameters: Mapping[str, nn.Parameter]) -> list[LocalShard]:
    """Return the parts of all gradients that this rank holds."""
    return [block_of(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]


def _sum_here(main: Sequence[Tensor], aux: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]) -> list[float]:
    """Return this rank's share of the loss, of the auxiliary loss and of the squared gradient norm.

    The host waits here for the device.
    """
    device = main[0].device
    squares = _sum_of_squares(_list_gradients(parameters), device)
    losses = [torch.stack(list(terms)).sum() if terms else main[0].new_zeros(()) for terms in (main, aux)]
    sums: list[float] = torch.stack([*(loss.to(squares.dtype) for loss in losses), squares]).tolist()
    return sums


def _sum_of_squares(blocks: Sequence[LocalShard], device: torch.device) -> Tensor:
    """Return this rank's share of the squared norm. In the sum over the ranks, a block with copies counts once."""
    by_copies: dict[tuple[int, torch.device], list[Tensor]] = {}
    for block in blocks:
        if block.local.numel():
            by_copies.setdefault((block.copies, block.local.device), []).append(block.local)
    total = torch.zeros((), dtype=_get_sum_dtype(device), device=device)
    for (copies, origin), gradients in by_copies.items():
        norms = torch.stack(_compute_norms(gradients, origin)).to(_get_sum_dtype(origin))
        # Gradients may be in host memory (offload) while the loss is not.
        total += (norms.square().sum() / copies).to(device, total.dtype)
    return total.masked_fill(total > LARGEST_SQUARE, float("inf"))


def _compute_norms(gradients: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return norms whose squares add up to the squared norm of the gradients.

    A CPU adds the squares of a tensor one after the other. In float32, 28 million of them add up to 0.3 % too little.
    Other devices add in a tree, for which float32 is exact enough whatever the type of the gradients.
    """
    if device.type != "cpu":
        return list(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))
    pieces = (gradient.reshape(-1).split(PIECE) for gradient in gradients)
    return [norm for parts in pieces for norm in torch._foreach_norm(parts, 2, dtype=torch.float64)]


def _get_sum_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which squares are summed: float64, except on MPS, which does not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def list_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return names of tensors of which this rank holds a value that is not finite.

    A tensor is checked in pieces, because the check needs memory of its own.
    """
    return [
        name
        for name, tensor in tensors
        if not all(bool(torch.isfinite(piece).all()) for piece in block_of(tensor).local.reshape(-1).split(CHECKED))
    ]
