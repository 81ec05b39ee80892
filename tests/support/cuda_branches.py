"""The code that runs on a GPU, run on the CPU: stand-ins for its kernels with their checks, and counts of waits."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from surefoot.models import (
    attention,
    grouped_gemm,
    image_attention,
    image_waits,
    lora_linear,
    triton_grouped_gemm,
    varlen_attention,
)
from surefoot.models.grouped_gemm import NOTHING, Addends, Groups, grouped_linear_dw, grouped_linear_dx

HOPPER, AMPERE = (9, 0), (8, 0)
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "masked_scatter_backward",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
)
"""Operations whose result, or its shape, the host must know."""


def flash_attention_2(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, ends_k: Tensor, longest: int, longest_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute what torch's `varlen_attn` does, with the checks of its kernel. Shapes: [T, heads, D]."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend(query, key, value, ends, ends_k, longest, longest_k, scale, window_size, enable_gqa)

    return OneKernel.apply(attend, query, key, value)  # type: ignore[no-any-return,no-untyped-call]


class OneKernel(torch.autograd.Function):
    """A computation whose forward and backward are one kernel each on a GPU: a copy stands for each in counts."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with not_counted(), torch.enable_grad():
            ctx.leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
            ctx.result = compute(*ctx.leaves)
        return ctx.result.detach().clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor | None, ...]:
        with not_counted():
            trained = [leaf for leaf in ctx.leaves if leaf.requires_grad]
            gradients = iter(torch.autograd.grad(ctx.result, trained, d_result.detach()))
        by_inputs = [next(gradients) if leaf.requires_grad else None for leaf in ctx.leaves]
        d_result.clone()
        return None, *by_inputs


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute what torch's `rms_norm` does."""
    inputs = [x, weight] if weight is not None else [x]
    return OneKernel.apply(lambda x, weight=None: _rms_norm(x, shape, weight, eps), *inputs)  # type: ignore[no-any-return,no-untyped-call]


_rms_norm = F.rms_norm


def _attend(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, ends_k: Tensor, longest: int, longest_k: int, scale: float,
    window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    assert ends.dtype == ends_k.dtype == torch.int32
    assert (longest, longest_k) == (int(ends.diff().max()), int(ends_k.diff().max()))
    assert (len(query), len(key), len(value)) == (int(ends[-1]), int(ends_k[-1]), int(ends_k[-1]))
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0
    assert all(tensor.is_contiguous() for tensor in (query, key, value))
    before, after = window_size
    outputs = []
    for (begin, end), (begin_k, end_k) in zip(pairwise(ends.tolist()), pairwise(ends_k.tolist()), strict=True):
        query_rows = query[begin:end].transpose(0, 1)[None]
        key_rows, value_rows = (tensor[begin_k:end_k].transpose(0, 1)[None] for tensor in (key, value))
        # The last query and the last key belong together.
        distance = torch.arange(end - begin)[:, None] - torch.arange(end_k - begin_k) + (end_k - begin_k - end + begin)
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= (distance <= before) if before >= 0 else seen
        seen &= (-distance <= after) if after >= 0 else seen
        out = F.scaled_dot_product_attention(
            query_rows, key_rows, value_rows, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def multiply(
    x: Tensor,
    matrices: Tensor,
    offsets: Tensor,
    addends: Addends = NOTHING,
    *,
    first_group: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute what `triton_grouped_gemm.multiply` does, as it does: sums in float32, rounded once."""
    with not_counted():
        x, matrices, addends = tree_map_only(Tensor, Tensor.float, (x, matrices, addends))
        begin = int(offsets[first_group - 1]) if first_group else 0
        ends = offsets[first_group : first_group + len(matrices)] - begin
        rows = slice(begin, begin + int(ends[-1]))
        addends = addends._replace(low=addends.low and addends.low._replace(rows=addends.low.rows[rows]))
        product = grouped_linear_dx(x[rows], matrices, spans_of(ends), addends).bfloat16()
        if out is None:
            return product
        out[rows] = product
        return out


def multiply_pairs(
    left: Tensor, right: Tensor, offsets: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute what `triton_grouped_gemm.multiply_pairs` does."""
    with not_counted():
        return grouped_linear_dw(left.float(), right.float(), spans_of(offsets), scale).to(dtype or left.dtype)


def multiply_into(dtype: torch.dtype, x: Tensor, y: Tensor) -> Tensor:
    """Compute what a product does that writes another type than that of its operands."""
    with not_counted():
        product = x.to(dtype) @ y.to(dtype)
    x @ y  # what is counted
    return product


def spans_of(offsets: Tensor) -> Groups:
    bounds = F.pad(offsets, (1, 0))
    return Groups(bounds, [(e, begin, end) for e, (begin, end) in enumerate(pairwise(bounds.tolist()))])


@contextmanager
def cuda_branches(capability: tuple[int, int] = HOPPER) -> Iterator[None]:
    """Choose kernels as on a GPU of a compute capability.

    Products of groups are torch's own, which check strides, and stand-ins for Triton's.
    """
    select_kernel, has_kernel = grouped_gemm.select_kernel, varlen_attention.has_kernel

    def on_gpu(query: Tensor, value: Tensor) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "is_cuda", True, raising=False)
            return has_kernel(query, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(varlen_attention, "varlen_attn", flash_attention_2)
        for module in (attention, image_attention):
            patch.setattr(module, "has_kernel", on_gpu)
        patch.setattr(grouped_gemm, "find_triton_failure", lambda _: None)
        patch.setattr(grouped_gemm, "_window", lambda _, begin, end: slice(begin, end))
        patch.setattr(
            grouped_gemm,
            "select_kernel",
            lambda _, dtype, widths, **options: select_kernel(torch.device("cuda"), dtype, widths, **options),
        )
        patch.setattr(triton_grouped_gemm, "multiply", multiply)
        patch.setattr(triton_grouped_gemm, "multiply_pairs", multiply_pairs)
        patch.setattr(lora_linear, "_multiply_into", multiply_into)
        patch.setattr(F, "rms_norm", rms_norm)
        yield


_is_counting = True


def is_counting() -> bool:
    """Return whether the work in progress is that of the code that is tested, and not that of a stand-in."""
    return _is_counting


@contextmanager
def not_counted() -> Iterator[None]:
    """Count no waits in the block: what a stand-in does is no work of the code that is tested."""
    global _is_counting
    before, _is_counting = _is_counting, False
    try:
        yield
    finally:
        _is_counting = before


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host must know the result of an operation, or its shape."""
    name = func.overloadpacket.__name__
    has_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
    return has_mask or repeats or name in WAITING


class _Waits(TorchDispatchMode):
    """Operations for which the host would wait for a GPU, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_counting and _waits(func, args, kwargs):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_waits() -> Iterator[Counter[str]]:
    """Count the operations of the block for which the host would wait for a GPU."""
    waits = _Waits()
    tolist, cpu, numpy = Tensor.tolist, Tensor.cpu, Tensor.numpy

    def counting(method: Any) -> Any:
        def count(self: Tensor, *args: Any, **options: Any) -> Any:
            waits.counts[method.__name__] += _is_counting
            return method(self, *args, **options)

        return count

    with pytest.MonkeyPatch.context() as patch, waits:
        for method in (tolist, cpu, numpy):
            patch.setattr(Tensor, method.__name__, counting(method))
        yield waits.counts


class _TwoDevices(TorchDispatchMode):
    """What runs on a GPU and what on the host, followed from tensor to tensor."""

    def __init__(self, on_gpu: Iterable[Tensor], on_host: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()
        self._places: Any = WeakIdKeyDictionary()
        for place, tensors in (("gpu", on_gpu), ("host", on_host)):
            for tensor in tensors:
                self._places[tensor] = place

    def place_of(self, tensor: Tensor) -> str | None:
        """Return where a tensor is; None if it depends on numbers alone."""
        place: str | None = self._places.get(tensor)
        return place

    def send(self, tensor: Tensor, _: torch.device) -> Tensor:
        """Stand in for a copy to the GPU."""
        if self.place_of(tensor) == "gpu":
            return tensor
        sent = tensor.clone()
        self._places[sent] = "gpu"
        return sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {self.place_of(tensor) for tensor in tensors}
        name = func.overloadpacket.__name__
        if "gpu" in places and is_counting():
            if _waits(func, args, kwargs):
                self.waits[name] += 1
            if any(self.place_of(tensor) == "host" and tensor.dim() for tensor in tensors):
                self.mixed[name] += 1
        results = func(*args, **(kwargs or {}))
        place = next((place for place in ("gpu", "host") if place in places), None)
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and place is not None:
                self._places[result] = place
        return results


@contextmanager
def two_devices(on_gpu: Iterable[Tensor], on_host: Iterable[Tensor]) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count the waits for tensors on a GPU, and the operations that take one from the GPU and one from the host."""
    mode = _TwoDevices(on_gpu, on_host)
    tolist = Tensor.tolist

    def counting(self: Tensor) -> Any:
        if mode.place_of(self) == "gpu" and is_counting():
            mode.waits["tolist"] += 1
        return tolist(self)

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(image_waits, "send", mode.send)
        patch.setattr(Tensor, "tolist", counting)
        yield mode.waits, mode.mixed
