"""Finding for a rank that runs out of memory: phase, batch, memory by owner, and other users of the GPU."""

import re
import resource
from collections import deque
from dataclasses import dataclass
from statistics import median

import torch

from surefoot.events import BatchDescribed, Event, MemorySampled, PhaseBegan
from surefoot.findings import CATALOGUE, Finding
from surefoot.system.allocators import EXPANDABLE, HOST_ALLOCATOR_ERROR, allocator_settings

REQUESTED_SIZE = re.compile(r"[Tt]ried to allocate (?P<shown>(?P<number>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB))")
UNIT_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
LARGE_TIMES = 1.5
"""Multiple of the usual tokens from which on a batch is large."""
OTHERS_BYTES = 4 << 30
"""Memory outside PyTorch's allocator from which on it is reported: a CUDA context and NCCL take one or two GiB."""


@dataclass(frozen=True)
class DeviceNow:
    """Memory of a GPU at a failed allocation, in bytes."""

    total: int
    free: int
    """Free memory, for any process."""
    reserved: int
    """Memory reserved by this process."""
    allocated: int
    """Part of the reserved memory that is in tensors."""

    @staticmethod
    def read() -> "DeviceNow | None":
        """Read the memory of this process's GPU; None if it uses none."""
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return None
        try:
            free, total = torch.cuda.mem_get_info()
        except RuntimeError:  # the failure before may have left the device unusable
            return None
        return DeviceNow(total, free, torch.cuda.memory_reserved(), torch.cuda.memory_allocated())


class MemoryWatch:
    """Observer that remembers the events needed for the finding."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began = PhaseBegan(rank, 0, "load")
        self._batch: BatchDescribed | None = None
        self._tokens: deque[int] = deque(maxlen=200)
        """Tokens of the batches before it."""
        self._memory: MemorySampled | None = None

    @property
    def step(self) -> int:
        """Step of its current phase; 0 before the first step."""
        return self._began.step

    def observe(self, event: Event) -> None:
        if isinstance(event, PhaseBegan):
            self._began = event
        elif isinstance(event, BatchDescribed):
            self._tokens.extend([self._batch.tokens] if self._batch is not None else [])
            self._batch = event
        elif isinstance(event, MemorySampled):
            self._memory = event

    def finding(self, error: BaseException, device: DeviceNow | None) -> Finding:
        """Build the finding. `error`: an error with `is_out_of_memory`; `device`: its memory at that time."""
        phase, step, message = self._began.phase, self._began.step, str(error)
        requested = REQUESTED_SIZE.search(message)
        where = f"in {phase} of step {step}" if step else f"in {phase}, before the first step"
        owner = "the host" if HOST_ALLOCATOR_ERROR in message else "its GPU"
        cause = f"rank {self._rank} got no more memory of {owner}, {where}"
        fix = CATALOGUE["SF209"].fix
        cause += f": it requested {requested['shown']}" if requested else ""
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if owner == "the host" and limit != resource.RLIM_INFINITY:
            cause += f", and its address space is limited to {limit / 2**30:.1f} GiB"
            fix = f"Remove that limit (ulimit -v unlimited) before the run. {fix}"
        evidence: dict[str, object] = {"rank": self._rank, "step": step, "phase": phase}
        if step and self._batch is not None and self._batch.step == step:
            usual = median(self._tokens) if self._tokens else self._batch.tokens
            evidence |= {"tokens_of_its_batch": self._batch.tokens, "usual_tokens": round(usual)}
            if self._batch.tokens >= LARGE_TIMES * usual:
                cause += f", for a batch of {self._batch.tokens} tokens, where {usual:.0f} are usual"
        if self._memory is not None:
            names = ("frozen", "trained", "gradients", "optimizer")
            evidence |= {f"{name}_gib": round(getattr(self._memory, name) / 2**30, 2) for name in names}
        if device is not None:
            unused, others = device.reserved - device.allocated, device.total - device.free - device.reserved
            evidence |= {
                "device_gib": round(device.total / 2**30, 1), "free_gib": round(device.free / 2**30, 2),
                "in_tensors_gib": round(device.allocated / 2**30, 2), "kept_unused_gib": round(unused / 2**30, 2),
                "outside_gib": round(others / 2**30, 2),
            }  # fmt: skip
            if others >= OTHERS_BYTES:
                cause += f"; {others / 2**30:.1f} GiB of it are held outside PyTorch, by other processes or libraries"
                fix = f"See who else uses that GPU (nvidia-smi): a server, or a run that did not end. {fix}"
            if requested and unused >= float(requested["number"]) * UNIT_BYTES[requested["unit"]]:
                cause += f"; {unused / 2**30:.1f} GiB are unused, in pieces that are smaller than the request"
                if EXPANDABLE not in allocator_settings():
                    fix = f"Set PYTORCH_ALLOC_CONF={EXPANDABLE}. {fix}"
        if phase == "rollout":
            fix = f"Lower rollout_batch_size, so that fewer completions are generated at once. {fix}"
        return Finding("SF209", cause, {**evidence, "error": message.splitlines()[0][:300] if message else ""}, fix)
