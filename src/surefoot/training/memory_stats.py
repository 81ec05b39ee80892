"""Memory use of a rank by owner."""

import resource
import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.events import DeviceMemorySampled, MemorySampled
from surefoot.methods.base import TrainContext


def sample_memory(train_context: TrainContext, step: int) -> MemorySampled:
    """Sum the sizes of this rank's own shards, after a step: the optimizer's state exists from the first step on."""
    trained = _sum_local_bytes(train_context.parameters.values())
    frozen = [parameter for parameter in train_context.model.parameters() if not parameter.requires_grad]
    states = train_context.optimizer.state.values()
    return MemorySampled(
        rank=train_context.ranks.rank,
        step=step,
        frozen=_sum_local_bytes(frozen) + _sum_local_bytes(train_context.model.buffers()),
        trained=trained,
        gradients=trained,  # of the same types and sizes
        optimizer=_sum_local_bytes(value for state in states for value in state.values() if isinstance(value, Tensor)),
        total=torch.cuda.memory_allocated(train_context.device) if train_context.device.type == "cuda" else None,
    )


def sample_device_memory(device: torch.device, rank: int, step: int) -> DeviceMemorySampled | None:
    """Return the allocator's counters; None on a CPU."""
    if device.type != "cuda":
        return None
    counts = torch.cuda.memory_stats(device)
    return DeviceMemorySampled(
        rank=rank,
        step=step,
        allocated=counts["allocated_bytes.all.current"],
        reserved=counts["reserved_bytes.all.current"],
        inactive=counts["inactive_split_bytes.all.current"],
        retries=counts["num_alloc_retries"],
        free=torch.cuda.mem_get_info(device)[0],
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: the allocator's on CUDA, the process's resident set elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _sum_local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the local parts of tensors."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
