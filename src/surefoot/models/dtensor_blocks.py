"""Local blocks of tensors that ranks share: their position, writing values into them and gathering them.

A tensor is a DTensor if ranks share it, and a plain tensor if each rank has all of it. A rank's part is always a block:
one offset and one shape.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that this rank holds. `local` shares memory with it."""

    local: Tensor
    offset: tuple[int, ...]
    shape: torch.Size
    """Shape of the full tensor."""
    copies: int = 1
    """Number of ranks of its mesh that hold this same block."""
    is_first_copy: bool = True
    is_everywhere: bool = True
    """Whether it is a plain tensor, which each rank of the run has in full."""

    @property
    def span(self) -> tuple[slice, ...]:
        """Position of the block in the full tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.local.shape, strict=True))


def block_of(tensor: Tensor) -> LocalShard:
    """Return this rank's part of a tensor that is sharded along its first dimension, or not at all."""
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.detach(), (0,) * tensor.dim(), tensor.shape)
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    begin, size, copies, is_first = 0, tensor.shape[0] if tensor.dim() else 1, 1, True
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    cuts = []
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            assert placement.dim == 0
            # A strided shard comes first in the mesh, but the tensor was sharded along the other dimension before.
            cuts.append((isinstance(placement, _StridedShard), tensor.device_mesh.size(dim), coordinate[dim]))
        else:
            copies *= tensor.device_mesh.size(dim)
            is_first = is_first and coordinate[dim] == 0
    for _, ranks, index in sorted(cuts, key=lambda cut: cut[0]):
        each = -(-size // ranks)
        first = min(index * each, size)
        begin, size = begin + first, min(each, size - first)
    assert size == (local.shape[0] if local.dim() else 1)
    return LocalShard(local, (begin, *(0,) * (tensor.dim() - 1)), tensor.shape, copies, is_first, False)


def load_full(tensor: Tensor, gather_full: Tensor) -> None:
    """Fill a tensor, or this rank's part of it, from the full value."""
    block = block_of(tensor)
    with torch.no_grad():
        block.local.copy_(gather_full[block.span] if gather_full.dim() else gather_full)


def gather_full(tensor: Tensor) -> Tensor:
    """Return the full tensor on the CPU. Collective over the ranks that share it: one all-reduce per mesh dimension."""
    block = block_of(tensor)
    if not isinstance(tensor, DTensor):
        return block.local.cpu()
    value = torch.zeros(block.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
    if block.is_first_copy:
        value[block.span] = block.local
    for dim in range(tensor.device_mesh.ndim):
        _all_reduce_value(value, tensor.device_mesh.get_group(dim))
    return value.cpu()


def _all_reduce_value(value: Tensor, group: Any) -> None:
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(value, group=group)
