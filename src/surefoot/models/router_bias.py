"""Correction biases of routers, which balance the load of experts without a loss.

A router adds the bias to its scores to choose experts, not to weigh them, so no gradient reaches it. After a step each
bias moves by a fixed amount towards an even load. The counts are those of the global batch and exact, so the biases are
the same on any topology.

Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.models.dtensor_blocks import block_of
from surefoot.models.routing import router_names

LEAVES = ("e_score_correction_bias", "expert_bias")
"""Names of correction biases in transformers' models."""


def is_router_bias(name: str) -> bool:
    """Return whether a tensor of this name is a router's correction bias."""
    return name.rpartition(".")[2] in LEAVES


class RouterBiases:
    """The correction biases of a model's routers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._names = [_find_bias(model, router) for router in router_names(model)]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.tensors: dict[str, Tensor] = {name: tensors[name] for name in self._names if name is not None}
        """Biases by the names of the model's parameters and buffers."""

    @torch.no_grad()
    def update(self, counts: Tensor | None, rate: float) -> None:
        """Add `rate` to the biases of experts with less than the mean load, and subtract it from those with more.

        Shapes: counts int64 [routers, E], the rows of each expert over the global batch.
        """
        if counts is None or len(counts) != len(self._names):
            raise ModelError(
                f"router_bias_update_rate: {0 if counts is None else len(counts)} of the {len(self._names)} routers of "
                "this model report their choices. Set router_bias_update_rate: 0."
            )
        for name, rows in zip(self._names, counts, strict=True):
            if name is None:
                continue
            block = block_of(self.tensors[name])
            change = rate * torch.sign(rows.sum() - rows * len(rows))
            block.local.add_(change.view(block.shape)[block.span].to(block.local))


def _find_bias(model: PreTrainedModel, router: str) -> str | None:
    """Return the name of a router's bias, which the router or the block around it holds; None if it has none."""
    block = router.rpartition(".")[0]
    for owner, recurse in ((router, True), (block, False)):
        module = model.get_submodule(owner)
        for name in _names_of_tensors(module, recurse=recurse):
            if is_router_bias(name):
                return f"{owner}.{name}"
    return None


def _names_of_tensors(module: nn.Module, *, recurse: bool) -> list[str]:
    named = (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse))
    return [name for name, _ in named]
