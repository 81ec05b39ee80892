"""Products of rows with one stack of experts, its biases and its low-rank pair, and their gradients.

Independent of gates, of routing and of how modules name their stacks: `experts.py` and `composed_experts.py` put
these products together.

Shape suffixes: S rows sorted by expert, E experts, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.models.grouped_gemm import (
    STRIDE_ELEMENTS,
    Addends,
    Groups,
    LowRank,
    grouped_dot,
    grouped_linear,
    grouped_linear_dw,
    grouped_linear_dx,
    grouped_sum,
)
from surefoot.models.quantization.base import FLOAT, Stored, WeightFormat


@dataclass(frozen=True)
class StackKind:
    """How the stacks of a module are stored and adapted."""

    weight_format: WeightFormat
    is_transposed: bool
    """Whether a stack is stored as [E, in, out]."""
    scaling: float
    """Factor of the low-rank products."""


Pair = tuple[Tensor, Tensor]
"""A [E, R, in] and B [E, out, R] of a stack, in the type of the products."""


@dataclass(frozen=True)
class StackTensors:
    """The tensors of one stack. Shapes: a [E, R, in], b [E, out, R], bias [E, out]."""

    stored: Stored
    a: Tensor | None
    b: Tensor | None
    bias: Tensor | None


def computing_dtype(x: Tensor, stack: Tensor, weight_format: WeightFormat) -> torch.dtype:
    """Return the type of the products: that of autocast, else that of the weights, else that of the rows."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return stack.dtype if weight_format is FLOAT else x.dtype


class GroupedProjection:
    """One stack of experts, ready for the rows of one batch."""

    def __init__(
        self,
        kind: StackKind,
        tensors: StackTensors,
        groups: Groups,
        dtype: torch.dtype,
        pair: Pair | None,
    ) -> None:
        """Prepare the products in the computing type `dtype`; `pair`: A and B in it, or another's `pair`."""
        self._groups, self._scaling, self._tensors = groups, kind.scaling, tensors
        self.pair = _widen(pair, groups) if pair is not None else None
        self._bias = tensors.bias.to(dtype) if tensors.bias is not None else None
        self._is_transposed = kind.is_transposed
        by_weight, by_transpose = kind.weight_format.grouped_linear, kind.weight_format.grouped_linear_dx
        # A stack [E, in, out] holds the weights of linear layers in the other direction.
        self._multiply = by_transpose if kind.is_transposed else by_weight
        self._multiply_dx = by_weight if kind.is_transposed else by_transpose

    def forward(self, x_S: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the outputs [S, out] and, with a low-rank pair, its inner products [S, R]."""
        low_SR, low = None, None
        if self.pair is not None:
            low_SR = grouped_linear(x_S, self.pair[0], self._groups)
            low = LowRank(low_SR, self.pair[1].transpose(-2, -1), self._scaling)
        return self._multiply(x_S, self._tensors.stored, self._groups, Addends(self._bias, low)), low_SR

    def low_gradient(self, dy_S: Tensor) -> Tensor | None:
        """Return the gradient by the inner products of the pair, without its scaling."""
        return grouped_linear_dx(dy_S, self.pair[1], self._groups) if self.pair is not None else None

    def input_gradient(self, dy_S: Tensor, d_low_SR: Tensor | None) -> Tensor:
        """Return the gradient by the inputs, from that by the outputs and by the inner products of the pair."""
        low = None
        if self.pair is not None and d_low_SR is not None:
            low = LowRank(d_low_SR, self.pair[0], self._scaling)
        return self._multiply_dx(dy_S, self._tensors.stored, self._groups, Addends(low=low))

    def dot_bias(self, dy_S: Tensor) -> Tensor | None:
        """Return the products [S] of the rows with their biases."""
        return grouped_dot(dy_S, self._bias, self._groups) if self._bias is not None else None

    def parameter_gradients(
        self,
        needs: Sequence[bool],
        dy_S: Tensor,
        x_S: Tensor,
        low_SR: Tensor | None,
        d_low_SR: Tensor | None,
        factor_S1: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients by (weight, A, B, bias), where they are needed.

        `dy_S` and `d_low_SR` are the gradients by the outputs and by the inner products of the pair, but for a factor
        of each row.
        """

        def weigh(rows: Tensor) -> Tensor:
            return rows if factor_S1 is None else rows * factor_S1

        needs_weight, needs_a, needs_b, needs_bias = needs
        groups, scaling, a, b = self._groups, self._scaling, self._tensors.a, self._tensors.b
        gradients: list[Tensor | None] = [None] * len(needs)
        if needs_weight or needs_bias:
            weighed_S = weigh(dy_S)
            if needs_weight:
                sides = (x_S, weighed_S) if self._is_transposed else (weighed_S, x_S)
                gradients[0] = grouped_linear_dw(*sides, groups)
            gradients[3] = grouped_sum(weighed_S, groups) if needs_bias else None
            del weighed_S
        if needs_a and a is not None and d_low_SR is not None:
            d_a = grouped_linear_dw(weigh(d_low_SR), x_S, groups, scaling, a.dtype)
            gradients[1] = d_a[:, : a.shape[1]]
        if needs_b and b is not None and low_SR is not None:
            d_b = grouped_linear_dw(dy_S, weigh(low_SR), groups, scaling, b.dtype)
            gradients[2] = d_b[:, :, : b.shape[2]]
        return gradients


def _widen(pair: Pair, groups: Groups) -> Pair:
    """Return the pair, its rank padded with zeros where torch's kernel needs wider rows."""
    a, b = pair
    missing = -a.shape[1] % STRIDE_ELEMENTS if groups.kernel == "torch" else 0
    return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else (a, b)
