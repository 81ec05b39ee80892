"""Weight formats: how the frozen weights of a model are stored, and what a product with them is.

A weight `[.., out, in]` is stored as one or more tensors. The first has the weight's name and all of its dimensions but
the last; the others have that name with an ending, and its first dimension. Row by row (expert by expert in a stack)
they depend on the same rows of the weight alone, so a rank that holds a part of a weight stores that part: sharding
needs to know nothing of formats.

Independent of LoRA, of files and of ranks. The default products read a weight back into a float type, a few experts at
a time; a format with kernels of its own overrides them.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surefoot.models.grouped_gemm import (
    NOTHING,
    Addends,
    Groups,
    grouped_linear,
    grouped_linear_dx,
    multiply_in_turn,
    multiply_parts,
)

SAME_AS_LINEAR = frozenset({"FalconLinear"})
"""Names of subclasses of torch's linear layer that compute the same as it."""
PART_BYTES = 1 << 27
"""Most bytes of experts that are read back at a time where one kernel multiplies several."""
Stored = Sequence[Tensor]
"""The tensors of one stored weight, in the order of `WeightFormat.endings`."""


class WeightFormat(ABC):
    """A way to store frozen weights.

    Shapes: x [S, in] -> y [S, out] for linear layers; for stacks of experts the rows S are sorted by expert.
    """

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of the names of a weight's tensors; the first is empty."""
        return ("",)

    def check_package(self) -> None:  # noqa: B027 - most need none
        """Raise ModelError if a package that computes with it is missing."""

    def check(self, name: str, shape: torch.Size) -> None:  # noqa: B027 - most store any
        """Raise ModelError for a weight whose shape cannot be stored. `name`: of the weight, for the message."""

    @abstractmethod
    def store(self, weight: Tensor) -> Stored:
        """Return the tensors that stand for a weight [.., out, in], or for some of its rows or experts."""

    def shape_of(self, first: Tensor) -> torch.Size:
        """Return the shape [.., out, in] of the weight whose first tensor this is."""
        return first.shape

    @abstractmethod
    def read(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """Return the weight [.., out, in], or the part of it that is stored, for products, exports and tests."""

    @property
    def fingerprint(self) -> str:
        """A digest of the bytes that stand for a fixed weight: equal where the same weights are stored alike."""
        probe = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
        stored = [tensor.contiguous().view(torch.uint8).numpy() for tensor in self.store(probe)]
        return hashlib.sha256(b"".join(part.tobytes() for part in stored)).hexdigest()[:16]

    def linear(self, x: Tensor, stored: Stored, bias: Tensor | None) -> Tensor:
        """Compute `y = x W^T + bias`."""
        weight = self.read(stored, x.dtype)
        return torch.addmm(bias, x, weight.t()) if bias is not None else x @ weight.t()

    def linear_dx(self, dy: Tensor, stored: Stored) -> Tensor:
        """Compute the gradient of `linear` by x: [S, out] -> [S, in]."""
        return dy @ self.read(stored, dy.dtype)

    def grouped_linear(self, x: Tensor, stored: Stored, groups: Groups, addends: Addends = NOTHING) -> Tensor:
        """Compute `y[s] = W[expert of s] x[s]`, plus addends."""
        if groups.takes_parts:
            parts = ((first, part.transpose(-2, -1)) for first, part in self._read_parts(stored, x.dtype))
            return multiply_parts(x, parts, groups, addends)
        out_features = stored[0].shape[1]
        return multiply_in_turn(
            x, lambda expert: self._read_expert(stored, expert, x.dtype).t(), out_features, groups, addends
        )

    def grouped_linear_dx(self, dy: Tensor, stored: Stored, groups: Groups, addends: Addends = NOTHING) -> Tensor:
        """Compute the gradient of `grouped_linear` by x, plus addends."""
        if groups.takes_parts:
            return multiply_parts(dy, self._read_parts(stored, dy.dtype), groups, addends)
        in_features = self.shape_of(stored[0])[2]
        return multiply_in_turn(
            dy, lambda expert: self._read_expert(stored, expert, dy.dtype), in_features, groups, addends
        )

    def _read_parts(self, stored: Stored, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of the first expert of each part of a stack, and the part, of at most `PART_BYTES`."""
        num_experts, *widths = self.shape_of(stored[0])
        count = max(1, PART_BYTES // (prod(widths) * dtype.itemsize))
        for first in range(0, num_experts, count):
            yield first, self.read([tensor[first : first + count] for tensor in stored], dtype)

    def _read_expert(self, stored: Stored, expert: int, dtype: torch.dtype) -> Tensor:
        return self.read([tensor[expert] for tensor in stored], dtype)


class FloatFormat(WeightFormat):
    """Weights as they are, in a float type. The only format whose weights can be trained."""

    def store(self, weight: Tensor) -> Stored:
        return (weight,)

    def read(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        return stored[0].to(dtype)

    def linear(self, x: Tensor, stored: Stored, bias: Tensor | None) -> Tensor:
        weight = stored[0]  # as it is: under autocast the product casts it
        return torch.addmm(bias, x, weight.t()) if bias is not None else x @ weight.t()

    def linear_dx(self, dy: Tensor, stored: Stored) -> Tensor:
        return dy @ stored[0]

    def grouped_linear(self, x: Tensor, stored: Stored, groups: Groups, addends: Addends = NOTHING) -> Tensor:
        return grouped_linear(x, self.read(stored, x.dtype), groups, addends)

    def grouped_linear_dx(self, dy: Tensor, stored: Stored, groups: Groups, addends: Addends = NOTHING) -> Tensor:
        return grouped_linear_dx(dy, self.read(stored, dy.dtype), groups, addends)


FLOAT = FloatFormat()


def format_of(module: nn.Module) -> WeightFormat:
    """Return the format of a module's weights."""
    return getattr(module, "weight_format", FLOAT)


def stored_weight(module: nn.Module, name: str) -> list[Tensor]:
    """Return the tensors of a weight of a module."""
    return [getattr(module, name + ending) for ending in format_of(module).endings]


def count_weights(model: nn.Module) -> dict[Tensor, int]:
    """Return how many weights each parameter of a model stands for: those of a stored weight count with its first."""
    counts: dict[Tensor, int] = {parameter: parameter.numel() for parameter in model.parameters()}
    for module in model.modules():
        for name in getattr(module, "stored_weights", ()):
            first, *others = stored_weight(module, name)
            counts |= {first: format_of(module).shape_of(first).numel(), **dict.fromkeys(others, 0)}
    return counts


def is_stock_linear(module: nn.Module) -> bool:
    """Return whether a module is torch's linear layer, or of a class that computes the same."""
    return type(module) is nn.Linear or type(module).__name__ in SAME_AS_LINEAR


def keep_stored(module: nn.Module, name: str, weight_format: WeightFormat) -> None:
    """Replace a weight of a module by its stored tensors, frozen. On the meta device nothing is read."""
    for ending, tensor in zip(weight_format.endings, weight_format.store(getattr(module, name).detach()), strict=True):
        setattr(module, name + ending, nn.Parameter(tensor, requires_grad=False))
    module.weight_format = weight_format  # type: ignore[assignment]
    module.stored_weights = (*getattr(module, "stored_weights", ()), name)  # type: ignore[assignment]
    if is_stock_linear(module):
        module.__class__ = FrozenLinear


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is stored in a format of `WeightFormat` and not trained."""

    def forward(self, input: Tensor) -> Tensor:
        if format_of(self) is FLOAT:
            return F.linear(input, self.weight, self.bias)
        # The function's own output must not be a view: models add to it in place.
        inputs = input.reshape(-1, input.shape[-1])
        rows = multiply_frozen(inputs, self.bias, format_of(self), stored_weight(self, "weight"))
        return rows.view(*input.shape[:-1], rows.shape[-1])


def multiply_frozen(rows: Tensor, bias: Tensor | None, weight_format: WeightFormat, stored: Stored) -> Tensor:
    """Compute `y = x W^T + bias` for rows [S, in], of which only the gradient by x is computed."""
    y: Tensor = _FrozenLinear.apply(rows, bias, weight_format, *stored)  # type: ignore[no-untyped-call]
    return y


class _FrozenLinear(torch.autograd.Function):
    """y = x W^T + b, of which only the gradient by x is computed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor | None, weight_format: WeightFormat, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.weight_format = weight_format
        return weight_format.linear(rows, stored, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
        stored = ctx.saved_tensors
        return (ctx.weight_format.linear_dx(d_rows, stored), None, None, *(None for _ in stored))
