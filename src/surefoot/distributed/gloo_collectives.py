"""FSDP's two collectives over gloo, faster than gloo's own: its reduce-scatter is an all-reduce that drops parts.

Measured on one machine with 20 M float32: a reduce-scatter takes 44 ms instead of 96 with 2 ranks, 87 instead of 244
with 4.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Collective:
    """Allocation shared by both collectives, for `FSDPModule.set_custom_...`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for inputs and outputs."""
        return torch.empty(size, dtype=dtype, device=device)


class ReduceScatter(_Collective):
    """Reduce-scatter in which the ranks exchange parts, and each adds up its own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Shapes: input [ranks x N], output [N]. Collective: one all-to-all. Sums in the order of ranks."""
        assert op == dist.ReduceOp.SUM, op
        assert not async_op
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(-1, output_tensor.numel()), 0, out=output_tensor)


class AllGather(_Collective):
    """All-gather in which all ranks broadcast at once. (Sends and receives would not appear in the Flight Recorder.)"""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Shapes: input [N], output [ranks x N], may contain the input already. Collective: one broadcast per rank."""
        assert not async_op
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        parts = output_tensor.view(size, -1)
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        works = [dist.broadcast(parts[n], group=group, group_src=n, async_op=True) for n in range(size) if size > 1]
        for work in works:
            work.wait()
