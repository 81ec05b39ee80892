"""RMSNorm in one kernel, for the modules of transformers that compute it from about eight operations.

A module is replaced only where torch computes the same, which is checked with random weights: some models
add 1 to the weight, or multiply by a gate. In low precision the result is rounded once instead of twice.

Independent of LoRA, training and sharding.
"""

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Names of the attribute that holds a norm's epsilon."""
SAME_WITHIN = 1e-5
ROWS = 4
"""Number of rows of the check."""


def fuse_norms(model: nn.Module) -> int:
    """Let the norms of a model that compute RMSNorm and nothing else use torch's kernel. Returns their number."""
    checked: dict[tuple[type[nn.Module], torch.Size, float], bool] = {}
    count = 0
    for module in model.modules():
        epsilon = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
        weights = dict(module.named_parameters())
        if epsilon is None or weights.keys() != {"weight"} or "forward" in vars(module):
            continue
        if len(inspect.signature(module.forward).parameters) != 1:  # a gate is its second argument
            continue
        key = type(module), weights["weight"].shape, epsilon
        if key not in checked:
            checked[key] = _is_rms_norm(module, weights["weight"].shape, epsilon)
        if checked[key]:
            module.fused_epsilon = epsilon  # type: ignore[assignment]
            module.forward = MethodType(_forward, module)
            count += 1
    return count


def _is_rms_norm(module: nn.Module, shape: torch.Size, epsilon: float) -> bool:
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).to(device) for size in ((ROWS, *shape), shape))
    try:
        with torch.no_grad():
            own = functional_call(module, {"weight": weight}, (x,))
    except (RuntimeError, ValueError):  # it takes other shapes
        return False
    fused = F.rms_norm(x, list(shape), weight, epsilon)
    return isinstance(own, Tensor) and own.shape == x.shape and torch.allclose(own, fused, SAME_WITHIN, SAME_WITHIN)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != self.weight.dtype:  # transformers' result has the wider type
        return type(self).forward(self, hidden_states)  # type: ignore[no-any-return]
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.fused_epsilon)
