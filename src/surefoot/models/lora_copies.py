"""Copies of low-rank pairs in the type of a model's products, made for a layer at once when its forward begins.

Pairs are trained in float32 beside weights in bfloat16, and each is multiplied several times in a micro-batch: with a
cast for each, a layer of experts launches dozens of small kernels. The copies live as long as the forward, or as what
it saves for the backward.

Independent of files, of experts and of how layers multiply.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from surefoot.models.decoder_layers import decoder_layers
from surefoot.models.vision import tower_blocks

PARTS = ("lora_A", "lora_B")
ALIGNMENT = 64
"""Number of elements of which each copy begins at a multiple, as kernels want."""
COPIES = "lora_copies"
"""Name of a module's attribute with its copies, by the name of the parameter."""


def copies_of_pair(module: nn.Module, stack: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return the low-rank pair of a stack of a module in `dtype`, as its layer has copied it or cast; None without."""
    a, b = (f"{stack}_{part}" for part in PARTS)
    return (copy_of(module, a, dtype), copy_of(module, b, dtype)) if hasattr(module, a) else None


def copy_of(module: nn.Module, name: str, dtype: torch.dtype) -> Tensor:
    """Return a low-rank parameter of a module in `dtype`: the copy of its layer, or a cast of its own."""
    copy: Tensor | None = module.__dict__.get(COPIES, {}).get(name)
    parameter: Tensor = getattr(module, name)
    return copy if copy is not None and copy.dtype == dtype else parameter.detach().to(dtype)


class PairCopies:
    """The hooks of a model's layers that copy their pairs, in the type of its products, when a forward begins."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._handles: list[RemovableHandle] = []
        self._checkpoints: dict[nn.Module, Any] = {}
        for layer in (*decoder_layers(model), *tower_blocks(model)):
            for gathering, owners in _owners_by_gathering(layer):
                self._add(gathering, _Copier(owners, dtype))

    def _add(self, gathering: nn.Module, copier: "_Copier") -> None:
        self._handles.append(gathering.register_forward_pre_hook(copier.copy))
        self._handles.append(gathering.register_forward_hook(copier.release, always_call=True))
        if getattr(gathering, "gradient_checkpointing", False):  # transformers recomputes such a layer without hooks
            checkpoint: Any = gathering._gradient_checkpointing_func
            self._checkpoints[gathering] = checkpoint
            gathering._gradient_checkpointing_func = partial(copier.checkpoint, checkpoint)  # type: ignore[assignment]

    def remove(self) -> None:
        """Let each layer cast its own pairs."""
        for handle in self._handles:
            handle.remove()
        for layer, checkpoint in self._checkpoints.items():
            layer._gradient_checkpointing_func = checkpoint


def _owners_by_gathering(layer: nn.Module) -> Iterator[tuple[nn.Module, dict[nn.Module, list[str]]]]:
    """Yield the modules in whose forward parameters of a layer are gathered, with the owners of those and their names.

    These are the layer, and parts of it that FSDP gathers on their own.
    """
    groups: dict[nn.Module, dict[nn.Module, list[str]]] = {}

    def collect(module: nn.Module, gathering: nn.Module) -> None:
        gathering = module if isinstance(module, FSDPModule) else gathering
        if names := [name for name, _ in module.named_parameters(recurse=False) if name.endswith(PARTS)]:
            groups.setdefault(gathering, {})[module] = names
        for child in module.children():
            collect(child, gathering)

    collect(layer, layer)
    yield from groups.items()


class _Copier:
    """A copier of the low-rank parameters that one forward gathers."""

    def __init__(self, owners: dict[nn.Module, list[str]], dtype: torch.dtype) -> None:
        self._owners, self._dtype = owners, dtype

    @torch.no_grad()
    def copy(self, *_: Any) -> None:
        """Copy them, with one kernel for all where the device has one."""
        parameters = [_on_this_rank(getattr(owner, name)) for owner, names in self._owners.items() for name in names]
        if all(parameter.dtype == self._dtype for parameter in parameters):
            return
        sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
        space = torch.empty(sum(sizes), dtype=self._dtype, device=parameters[0].device)
        views = [
            part[: prod(parameter.shape)].view(parameter.shape)
            for part, parameter in zip(space.split(sizes), parameters, strict=True)
        ]
        torch._foreach_copy_(views, parameters)
        copies = iter(views)
        for owner, names in self._owners.items():
            owner.__dict__[COPIES] = {name: next(copies) for name in names}

    def checkpoint(self, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
        """Run the forward of a layer by its `checkpoint`, so that the recomputation has copies too."""
        return checkpoint(partial(self._run, forward), *args)

    def _run(self, forward: Callable[..., Any], *args: Any) -> Any:
        if any(COPIES in owner.__dict__ for owner in self._owners):  # the first forward: the hook has made them
            return forward(*args)
        self.copy()
        try:
            return forward(*args)
        finally:
            self.release()

    def release(self, *_: Any) -> None:
        """Forget the copies: what the backward needs, it has."""
        for owner in self._owners:
            owner.__dict__.pop(COPIES, None)


def _on_this_rank(parameter: Tensor) -> Tensor:
    """Return a parameter, or with expert parallelism its experts of this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
