"""Tensors that are alive while a model's code runs: their bytes, their peaks, and what the ops cost."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from surefoot.errors import ModelError
from surefoot.planner.op_costs import ATTENTION_OPS, count_flops, count_moved_bytes, list_tensors

DEADLINE_S: ContextVar[float] = ContextVar("deadline_s", default=math.inf)
"""Time of `time.monotonic` at which traces are given up."""
READ_DEVICE = torch.ops.prim.device.default
CAST, COPY = torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default
Moment = tuple[int, int, int]
"""Bytes that are alive at once: (all tensors but gradients, unsharded gradients, logits among the former)."""
LOGITS = "logits"


@contextmanager
def limit_trace_time(seconds: float) -> Iterator[None]:
    """Give traces up after so many seconds: they raise ModelError."""
    token = DEADLINE_S.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        DEADLINE_S.reset(token)


@dataclass(frozen=True)
class _Block:
    """Output and cost of the forward of a block that keeps nothing for a backward."""

    output: Any
    """Its output, with a function that makes such a tensor in the place of each tensor."""
    flops: int
    moved: int
    """Bytes that ops other than matrix products read and write."""
    extra: int
    """The most bytes that were alive in it beyond those before it."""


class LiveTensors(TorchDispatchMode):
    """Counter of the bytes of tensors that are alive, except those in `excluded`."""

    def __init__(self, excluded: Sequence[Tensor], gradient_share: float = 1.0, vocabulary: int = 0) -> None:
        """`vocabulary`: width of logits."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.flops = self.moved = self.gradients = 0
        self._gradient_share, self._vocabulary_size = gradient_share, vocabulary
        self._num_entered, self._is_backward = 0, False
        self._peaks: dict[tuple[bool, int], tuple[float, Moment]] = {}
        """(in the backward?, number of layers entered in it or in the forward) -> the most bytes alive then."""
        self.kind = "other"
        self.by_kind: dict[str, int] = defaultdict(int)
        self._alive: dict[int, Any] = {}
        self._highest = 0
        self._blocks: dict[Hashable, _Block] = {}
        self._excluded_storages = [tensor.untyped_storage() for tensor in excluded]
        self._excluded_keys = {storage._cdata for storage in self._excluded_storages}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > DEADLINE_S.get():
            raise ModelError("the model's code takes too long to trace")
        if func is READ_DEVICE:  # more than half of all calls; FakeTensorMode takes long to find it
            return args[0].fake_device
        if func is CAST and len(args) == 2 and not kwargs:  # FakeTensorMode takes it apart anew each time
            if args[0].dtype == args[1]:
                return args[0]
            func, args, kwargs = COPY, args[:1], {"dtype": args[1]}
        output = func(*args, **(kwargs or {}))
        for tensor in list_tensors(output):
            self._track_tensor(tensor)
        if func in ATTENTION_OPS or func.overloadpacket in flop_registry:
            self.flops += count_flops(func, args, kwargs or {}, output)
        elif not func.is_view:
            self.moved += count_moved_bytes(func, (args, kwargs), output)
        return output

    def run_block(self, key: Hashable, forward: Callable[[], Any]) -> Any:
        """Run the forward of a block that keeps nothing for a backward: of those with equal keys the first alone.

        The others return tensors of the same shapes and are taken to cost the same.
        """
        flops, moved, before = self.flops, self.moved, self.now
        block = self._blocks.get(key)
        if block is not None:
            self._record_peak(before + block.extra)
            output = tree_map_only(partial, lambda make: make(), block.output)
            self.flops, self.moved = flops + block.flops, moved + block.moved
            return output
        self._highest = before
        output = forward()
        makers = tree_map_only(Tensor, lambda like: partial(torch.empty, like.shape, dtype=like.dtype), output)
        self._blocks[key] = _Block(makers, self.flops - flops, self.moved - moved, self._highest - before)
        return output

    def begin_backward(self) -> None:
        """Begin the backward; layers whose forward is entered from now on are recomputed."""
        self._num_entered, self._is_backward = 0, True

    def enter_layer(self, *, is_backward: bool = False) -> None:
        """Count the start of a decoder layer's forward, or the end of the last one's; or the start of its backward."""
        if is_backward == self._is_backward:
            self._num_entered += 1

    def forward_moments(self) -> tuple[Moment, ...]:
        """Return the first four of `Trace.moments`."""
        after = self._last_progress(False)
        return self._moments_at(False, (0, 1, after - 1, after))

    def backward_moments(self) -> tuple[Moment, ...]:
        """Return the last four of `Trace.moments`."""
        count = self._last_progress(True)
        return self._moments_at(True, (0, min(1, count), max(count - 1, 0), count))

    def _last_progress(self, is_backward: bool) -> int:
        return max((progress for in_backward, progress in self._peaks if in_backward == is_backward), default=0)

    def _moments_at(self, is_backward: bool, progresses: tuple[int, ...]) -> tuple[Moment, ...]:
        nothing: tuple[float, Moment] = (0.0, (0, 0, 0))
        return tuple(self._peaks.get((is_backward, progress), nothing)[1] for progress in progresses)

    def keep_gradient(self, parameter: Tensor) -> None:
        """Count the tensor in `parameter.grad` as a gradient from now on."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        tracked = self._alive.pop(storage._cdata, None)
        if tracked is not None:
            self.add_gradient(parameter.grad)
            self._subtract(storage.nbytes(), tracked[1])

    def add_gradient(self, gradient: Tensor) -> None:
        """Count a tensor that is not tracked as a gradient from now on."""
        storage = gradient.untyped_storage()
        self._excluded_storages.append(storage)
        self._excluded_keys.add(storage._cdata)
        self.gradients += storage.nbytes()

    def _track_tensor(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._excluded_keys or key in self._alive or not size:
            return
        kind = LOGITS if tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary_size else self.kind
        self._alive[key] = (ref(storage, lambda _: self._on_storage_freed(key, size, kind)), kind)
        self.now += size
        self.by_kind[kind] += size
        self._highest = max(self._highest, self.now)
        self._record_peak(self.now)

    def _record_peak(self, alive: int) -> None:
        total = alive + self._gradient_share * self.gradients
        progress = self._is_backward, self._num_entered
        if progress not in self._peaks or total > self._peaks[progress][0]:
            self._peaks[progress] = (total, (alive, self.gradients, self.by_kind[LOGITS]))

    def _on_storage_freed(self, key: int, size: int, kind: str) -> None:
        if self._alive.pop(key, None) is not None:
            self._subtract(size, kind)

    def _subtract(self, size: int, kind: str) -> None:
        self.now -= size
        self.by_kind[kind] -= size
