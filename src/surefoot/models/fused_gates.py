"""Gated layers, down(silu(gate) * up), that keep less for the backward, with the same numbers bit for bit.

autograd keeps silu(gate) beside gate and up, and a low-rank pair of the projection that follows keeps their product,
too. Both are computed again in the backward here: of four tensors as wide as the layer two are kept.

A module is changed only where its own forward computes that and nothing else, which is checked with stand-ins for its
projections.

Independent of experts, training and sharding.
"""

import inspect
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from surefoot.models.lora_linear import takes_gate
from surefoot.models.silu_gate import SILUS, multiply_gate

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PROBE_SHAPE = (1, 3, 8)
"""A row of tokens, as models call these layers with."""
PROBE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Some layers compute their gate in float32, or bound it in float16."""
LARGE = 1e3
"""Factor of a token whose values a layer might bound."""


def fuse_gates(model: nn.Module) -> int:
    """Let the gated layers of a model keep gate and up alone. Returns their number."""
    checked: dict[tuple[type[nn.Module], type[nn.Module]], bool] = {}
    count = 0
    for module in model.modules():
        children = dict(module.named_children())
        if not children.keys() >= set(PROJECTIONS) or "forward" in vars(module):
            continue
        others = {name: child for name, child in children.items() if name not in PROJECTIONS}
        if len(others) != 1 or not isinstance(activation := next(iter(others.values())), SILUS):
            continue
        if len(inspect.signature(module.forward).parameters) != 1:
            continue
        key = type(module), type(activation)
        if key not in checked:
            checked[key] = all(_is_plain(type(module), others, dtype) for dtype in PROBE_TYPES)
        if checked[key]:
            module.forward = MethodType(_forward, module)
            count += 1
    return count


def _is_plain(cls: type[nn.Module], others: dict[str, nn.Module], dtype: torch.dtype) -> bool:
    """Return whether the forward of a class is down(silu(gate) * up) in a type of numbers."""
    with unset_fake_temporarily():  # a model without storage has the same classes
        x = torch.randn(PROBE_SHAPE, generator=torch.Generator().manual_seed(0), device="cpu")
        x[:, -1] *= LARGE
        gate, up = x.roll(1, dims=-1).to(dtype), x.flip(-1).to(dtype)
        stand_ins = {"gate_proj": lambda _: gate, "up_proj": lambda _: up, "down_proj": torch.neg}
        try:
            output = cls.forward(SimpleNamespace(**others, **stand_ins), x.to(dtype))
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return False
        return isinstance(output, Tensor) and output.dtype == dtype and torch.equal(output, -(F.silu(gate) * up))


def _forward(self: Any, *states: Tensor, **named_states: Tensor) -> Tensor:
    """Compute the layer for its one argument, which each model names otherwise."""
    (x,) = (*states, *named_states.values())
    if torch.compiler.is_compiling():  # what is compiled keeps as little
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    gate, up = self.gate_proj(x), self.up_proj(x)
    if gate.dtype != up.dtype:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    if takes_gate(self.down_proj):
        return self.down_proj(up, gate)  # type: ignore[no-any-return]
    return self.down_proj(multiply_gate(gate, up))  # type: ignore[no-any-return]
