"""Gates between the two projections of an expert, with their gradients.

Independent of how experts store their weights.

Shapes: gate_up [S, 2I] (without a gate [S, I]) -> activation [S, I].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import _default_apply_gate

from surefoot.models.silu_gate import SILUS, compute_product, differentiate


class SwiGLU:
    """The gate silu(gate) * up over concatenated halves."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return compute_product(*gate_up.chunk(2, dim=-1))

    def backward(self, d_act: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Return (activation, gradient by gate_up); `d_act` is overwritten."""
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        return differentiate(d_act, gate, up, d_gate=d_gate, d_up=d_up), d_gate_up


class ModuleGate:
    """The gate that the model defines, differentiated by autograd."""

    def __init__(self, apply_gate: Callable[[Tensor], Tensor]) -> None:
        self.forward = apply_gate

    def backward(self, d_act: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            act = self.forward(leaf)
            (d_gate_up,) = torch.autograd.grad(act, leaf, d_act)
        return act.detach(), d_gate_up


def select_gate(module: Any) -> SwiGLU | ModuleGate:
    """Return the gate of a module of experts; of experts without a gate, their activation."""
    activation = getattr(module, "act_fn", None)
    if not getattr(module, "has_gate", True):
        return ModuleGate(module.act_fn)
    apply_gate = module._apply_gate
    is_plain = apply_gate.__func__ is _default_apply_gate and module.is_concatenated
    return SwiGLU() if isinstance(activation, SILUS) and is_plain else ModuleGate(apply_gate)
