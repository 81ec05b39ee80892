"""Linear layers with a low-rank pair, `lora_A [r, in]` and `lora_B [out, r]`, beside their frozen weight.

With DoRA each row of weight and pair together is scaled to a length that is trained, `lora_magnitude [out]`. The length
that a row has follows from the weight's own and from products of rank r, so that the sum of both is never built.

Independent of which layers of a model are adapted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from surefoot.models.dtensor_blocks import gather_full, load_full
from surefoot.models.lora_copies import PARTS, copy_of
from surefoot.models.quantization.base import (
    FrozenLinear,
    WeightFormat,
    format_of,
    is_stock_linear,
    multiply_frozen,
    stored_weight,
)
from surefoot.models.silu_gate import compute_product, differentiate, multiply_gate

MAGNITUDE = "lora_magnitude"
"""Name of the parameter with the lengths of a layer's rows."""


def create_parameter(*shape: int) -> nn.Parameter:
    """Return a parameter to train, in float32 regardless of the type of its base."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32))


class _LowRank(nn.Module):
    """A layer with `lora_A [r, in]` and `lora_B [out, r]` beside its weight."""

    weight: Tensor
    bias: Any
    lora_A: nn.Parameter  # noqa: N815 - PEFT's names
    lora_B: nn.Parameter  # noqa: N815
    lora_scaling: float
    lora_dropout: float
    lora_magnitude: nn.Parameter | None
    lora_squares: Tensor
    """Squared lengths of the rows of the weight, float32 [out], where there is a magnitude."""

    def _stored(self) -> list[Tensor]:
        """Return the tensors of the weight [out, in]."""
        return stored_weight(self, "weight")

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Compute the layer; with a `gate` its input is silu(gate) * input, which is not kept for the backward."""
        has_dropout = self.lora_dropout > 0 and self.training
        if gate is not None and (has_dropout or self.lora_magnitude is not None):  # these compute with it several times
            input, gate = multiply_gate(gate, input), None
        if self.lora_magnitude is not None and self.lora_scaling:  # not without the adapter, whose scaling is 0 then
            return self._forward_scaled(input, self.lora_magnitude, has_dropout=has_dropout)
        if has_dropout:
            a, b = self.lora_A.to(input.dtype), self.lora_B.to(input.dtype)
            low = F.linear(F.dropout(input, self.lora_dropout), a)
            return super().forward(input) + self.lora_scaling * F.linear(low, b)  # type: ignore[no-any-return]
        return self._multiply(input, self.bias, gate)

    def _forward_scaled(self, input: Tensor, magnitude: Tensor, *, has_dropout: bool) -> Tensor:
        """Scale each row of weight and pair to its length. With dropout, as in PEFT, the weight alone sees all inputs:
        what is added to its product is computed from dropped ones.
        """
        scale = (magnitude / self._row_lengths(input.dtype)).to(input.dtype)
        if not has_dropout:
            y = self._multiply(input, None) * scale
            return y if self.bias is None else y + self.bias
        dropped = F.dropout(input, self.lora_dropout)
        scaled = self._multiply(dropped, None) * scale
        rows = dropped.reshape(-1, dropped.shape[-1])
        unscaled = multiply_frozen(rows, None, format_of(self), self._stored()).view_as(scaled)
        return super().forward(input) + scaled - unscaled  # type: ignore[no-any-return]

    @torch.no_grad()
    def _row_lengths(self, dtype: torch.dtype) -> Tensor:
        """Return the lengths of the rows of weight and pair together, float32 [out], without gradient as in PEFT."""
        a, b = (copy_of(self, name, dtype) for name in PARTS)
        by_weight = format_of(self).linear(a, self._stored(), None).t().float()
        a, b = a.float(), b.float()
        added = 2 * self.lora_scaling * (by_weight * b).sum(1) + self.lora_scaling**2 * (b @ (a @ a.t()) * b).sum(1)
        return (self.lora_squares + added).clamp_min(torch.finfo(torch.float32).tiny).sqrt()

    def _multiply(self, input: Tensor, bias: Tensor | None, gate: Tensor | None = None) -> Tensor:
        copies = [copy_of(self, name, input.dtype) for name in PARTS]
        width = input.shape[-1]
        gate_rows = gate.reshape(-1, width) if gate is not None else None
        # The function's own output must not be a view: models add to it in place.
        rows = _LoraLinear.apply(  # type: ignore[no-untyped-call]
            input.reshape(-1, width), gate_rows, bias, self.lora_A, self.lora_B, copies, self.lora_scaling,
            format_of(self), *self._stored(),
        )  # fmt: skip
        return rows.view(*input.shape[:-1], rows.shape[-1])  # type: ignore[no-any-return]

    @torch.no_grad()
    def set_magnitude(self, device: torch.device) -> None:
        """Set the lengths of the rows to those of the weight, of which each rank gathers the whole. Collective.

        `device`: that of the forward.
        """
        assert self.lora_magnitude is not None
        stored = [gather_full(part) if isinstance(part, DTensor) else part for part in self._stored()]
        weight = format_of(self).read(stored, torch.float32)
        squares = weight.square().sum(1)
        self.lora_squares = squares.to(device)
        load_full(self.lora_magnitude, squares.sqrt())


class LoraLinear(_LowRank, FrozenLinear):
    """A linear layer with a low-rank pair."""


class LoraConv1D(_LowRank, Conv1D):  # type: ignore[misc]
    """A linear layer whose weight is stored as [in, out] (GPT-2), with a low-rank pair."""

    def _stored(self) -> list[Tensor]:
        return [self.weight.t()]


ADAPTED_CLASSES: dict[type[nn.Module], type[_LowRank]] = {nn.Linear: LoraLinear, Conv1D: LoraConv1D}
"""Classes of layers that LoRA can adapt, and what they become."""


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer of a class that LoRA can adapt or has adapted."""
    return can_adopt(layer) or type(layer) in (*ADAPTED_CLASSES.values(), FrozenLinear)


def can_adopt(layer: nn.Module) -> bool:
    """Return whether a layer is of a class that can be given a low-rank pair."""
    return is_stock_linear(layer) or type(layer) in ADAPTED_CLASSES


def takes_gate(layer: nn.Module) -> bool:
    """Return whether the forward of a layer takes a gate beside its input."""
    return isinstance(layer, _LowRank)


def adopt(layer: nn.Module, rank: int, scaling: float, dropout: float, *, has_magnitude: bool = False) -> None:
    """Give an existing layer its low-rank pair, and with DoRA its magnitude, in place, so that no name changes."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    out_features, in_features = reversed(weight.shape) if isinstance(layer, Conv1D) else weight.shape
    layer.__class__ = LoraLinear if is_stock_linear(layer) else ADAPTED_CLASSES[type(layer)]
    assert isinstance(layer, _LowRank)
    layer.lora_A = create_parameter(rank, in_features)
    layer.lora_B = create_parameter(out_features, rank)
    layer.lora_scaling, layer.lora_dropout = scaling, dropout
    layer.register_parameter(MAGNITUDE, create_parameter(out_features) if has_magnitude else None)
    if has_magnitude:
        layer.register_buffer("lora_squares", torch.empty(out_features, dtype=torch.float32), persistent=False)


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T with W and b frozen: one pass over y forward, and only dx, dA, dB backward.

    With a gate, x is silu(gate) * rows, which is computed again in the backward.
    `copies`: A and B in the type of x; their gradients have the type of A and B. The factor s is applied to x A^T and
    to dy B, by the products that compute these.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        gate: Tensor | None,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        copies: Sequence[Tensor],
        scaling: float,
        weight_format: WeightFormat,
        *stored: Tensor,
    ) -> Tensor:
        ctx.trained_dtype = a.dtype
        a, b = copies
        x = rows if gate is None else compute_product(gate, rows)
        low = _multiply_scaled(x, a.t(), scaling)
        y = weight_format.linear(x, stored, bias)
        y.addmm_(low, b.t())
        ctx.save_for_backward(rows, gate, low, a, b, *stored)
        ctx.scaling, ctx.weight_format = scaling, weight_format
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, low, a, b, *stored = ctx.saved_tensors
        d_low = _multiply_scaled(d_y, b, ctx.scaling)
        d_rows = d_gate = None
        if any(ctx.needs_input_grad[:2]):
            d_rows = ctx.weight_format.linear_dx(d_y, stored).addmm_(d_low, a)
        if gate is not None and d_rows is not None:
            d_gate, d_rows = d_rows, torch.empty_like(x)
            x = differentiate(d_gate, gate, x, d_gate=d_gate, d_up=d_rows)
        elif gate is not None:
            x = compute_product(gate, x)
        d_a = _multiply_into(ctx.trained_dtype, d_low.t(), x)
        # Thin products are faster with their short side as rows.
        d_b = _multiply_into(ctx.trained_dtype, low.t(), d_y).t()
        return d_rows, d_gate, None, d_a, d_b, None, None, None, *(None for _ in stored)


def _multiply_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return `scale * x @ y` from one kernel."""
    return x.new_empty(x.shape[0], y.shape[1]).addmm_(x, y, beta=0, alpha=scale)


def _multiply_into(dtype: torch.dtype, x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y in `dtype`; on CUDA the product itself writes that type."""
    if x.is_cuda and x.dtype != dtype:
        return torch.mm(x, y, out_dtype=dtype)
    return (x @ y).to(dtype)
