"""Gated layers, down(silu(gate) * up), that keep less for the backward, with the same numbers bit for bit.

autograd keeps silu(gate) beside gate and up, and a low-rank pair of the projection that follows keeps their product,
too. Both are computed again in the backward here: of four tensors as wide as the layer two are kept.

A module is changed only where its own forward computes that and nothing else, which is checked with stand-ins for its
projections.

Independent of experts, training and sharding.
"""

from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from surefoot.models.lora_linear import takes_gate
from surefoot.models.silu_gate import SILUS, multiply_gate

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PROBE_SHAPE = (3, 8)


def fuse_gates(model: nn.Module) -> int:
    """Let the gated layers of a model keep gate and up alone. Returns their number."""
    checked: dict[type[nn.Module], bool] = {}
    count = 0
    for module in model.modules():
        children = dict(module.named_children())
        if not children.keys() >= set(PROJECTIONS) or "forward" in vars(module):
            continue
        others = {name: child for name, child in children.items() if name not in PROJECTIONS}
        if not others or not all(isinstance(child, SILUS) for child in others.values()):
            continue
        if type(module) not in checked:
            checked[type(module)] = _is_plain(type(module), others)
        if checked[type(module)]:
            module.forward = MethodType(_forward, module)
            count += 1
    return count


def _is_plain(cls: type[nn.Module], others: dict[str, nn.Module]) -> bool:
    """Return whether the forward of a class is down(silu(gate) * up)."""
    with unset_fake_temporarily():  # a model without storage has the same classes
        x = torch.randn(PROBE_SHAPE, generator=torch.Generator().manual_seed(0))
        gate, up = x.roll(1, dims=-1), x.flip(-1)
        stand_ins = {"gate_proj": lambda _: gate, "up_proj": lambda _: up, "down_proj": torch.neg}
        try:
            found = cls.forward(SimpleNamespace(**others, **stand_ins), x)
        except (AttributeError, RuntimeError, TypeError, ValueError):  # it has other parts or arguments
            return False
        return isinstance(found, Tensor) and torch.equal(found, -(F.silu(gate) * up))


def _forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
    if options or torch.compiler.is_compiling():  # what is compiled keeps as little
        return type(self).forward(self, *arguments, **options)  # type: ignore[no-any-return]
    gate, up = self.gate_proj(*arguments), self.up_proj(*arguments)
    if takes_gate(self.down_proj):
        return self.down_proj(up, gate)  # type: ignore[no-any-return]
    return self.down_proj(multiply_gate(gate, up))  # type: ignore[no-any-return]
