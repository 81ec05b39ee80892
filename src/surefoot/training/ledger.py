"""To whom the memory of a rank belongs."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.events import MemorySampled
from surefoot.training.step import Learner


def sample_memory(learner: Learner, step: int) -> MemorySampled:
    """Count this rank's own shards, after a step: the optimizer's state exists from the first one on."""
    trained = _bytes(learner.parameters.values())
    frozen = [parameter for parameter in learner.model.parameters() if not parameter.requires_grad]
    states = learner.optimizer.state.values()
    return MemorySampled(
        rank=learner.ranks.rank,
        step=step,
        frozen=_bytes(frozen) + _bytes(learner.model.buffers()),
        trained=trained,
        gradients=trained,  # of the same types and sizes
        optimizer=_bytes(value for state in states for value in state.values() if isinstance(value, Tensor)),
        total=torch.cuda.memory_allocated(learner.device) if learner.device.type == "cuda" else None,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the parts that lie on this rank."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
