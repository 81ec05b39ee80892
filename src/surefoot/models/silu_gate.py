"""The product silu(gate) * up of gated layers and its gradients, with few passes over memory.

Independent of what is multiplied before and after it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import SiLUActivation

SILUS = (nn.SiLU, SiLUActivation)
"""transformers' classes for the names `swish` and `silu`."""


def multiply_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, of which gate and up alone are kept for the backward."""
    return _GatedProduct.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]


def compute_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, without a graph."""
    return F.silu(gate).mul_(up)


def differentiate(d_product: Tensor, gate: Tensor, up: Tensor, *, d_gate: Tensor, d_up: Tensor) -> Tensor:
    """Write the gradients by gate and up, and return the product. `d_product` is overwritten, and may be `d_gate`."""
    silu = F.silu(gate)
    torch.mul(d_product, silu, out=d_up)
    torch.ops.aten.silu_backward.grad_input(d_product.mul_(up), gate, grad_input=d_gate)
    return silu.mul_(up)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return compute_product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_silu = d_product * up
        return torch.ops.aten.silu_backward.grad_input(d_silu, gate, grad_input=d_silu), d_product * F.silu(gate)
