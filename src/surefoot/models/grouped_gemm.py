"""Grouped matrix products, in which each group of rows has its own matrix: the arithmetic of Mixture-of-Experts.

Independent of experts, LoRA and gradients. Three backends give the same numbers up to rounding: for bfloat16 on CUDA
`F.grouped_mm` where it has a kernel, else those of `triton_grouped_gemm.py` (no host synchronisation with both);
elsewhere one `mm` per non-empty group written in place.

Shapes: S rows sorted by group, E groups; `x [S, in]`, `dy [S, out]`, `weight [E, out, in]`, `bias [E, out]`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from surefoot.system.allocators import is_out_of_memory

FUSED_ON = (9, 10)
"""Major compute capabilities for which `grouped_mm` has a kernel: Hopper and data-centre Blackwell."""
STRIDE_ELEMENTS = 8
"""Number of elements in the row stride that `grouped_mm` needs: 16 bytes, 8 elements of bfloat16."""
OLDEST_FOR_TRITON = 8
"""Major compute capability from which Triton's kernels run: Ampere, the first with bfloat16."""

ROWS_MULTIPLE = 32
"""Number of rows of which a product in bfloat16 on a CPU has a multiple."""

Kernel = Literal["torch", "triton"]
"""Library whose kernel computes the products of all groups at once."""


@dataclass(frozen=True)
class Groups:
    """Assignment of S sorted rows to E groups."""

    bounds: Tensor
    """End of each group, behind a 0: int32 [E + 1]."""
    spans: list[tuple[int, int, int]] | None
    """(group, begin, end) of each non-empty group on the host; None where one kernel computes all groups."""
    kernel: Kernel | None = None
    """That kernel."""

    @classmethod
    def of(
        cls, ids: Tensor, num_groups: int, dtype: torch.dtype, widths: Iterable[int], *, in_parts: bool = False
    ) -> "Groups":
        """Count sorted `ids [S]`, 0 <= id < num_groups, for products with matrices of these widths in `dtype`.

        The host waits for the device only where no kernel computes all groups. `in_parts`: whether the matrices are
        there a few groups at a time.
        """
        if isinstance(ids, FakeTensor):  # without values: one group has all rows, which needs the same memory and work
            return cls(ids.new_empty(num_groups + 1, dtype=torch.int32), [(0, 0, len(ids))])
        bounds = torch.searchsorted(ids, integers(-1, num_groups, ids), right=True, out_int32=True)
        if kernel := select_kernel(ids.device, dtype, widths, in_parts=in_parts):
            return cls(bounds, None, kernel)
        spans = [(e, begin, end) for e, (begin, end) in enumerate(pairwise(bounds.tolist())) if end > begin]
        return cls(bounds, spans)

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.bounds.shape[0] - 1

    @property
    def offsets(self) -> Tensor:
        """End of each group, int32 [E]."""
        return self.bounds[1:]

    @property
    def takes_parts(self) -> bool:
        """Whether a few groups at a time are multiplied with `multiply_parts`; as forecasts assume without values."""
        return self.spans is None or isinstance(self.bounds, FakeTensor)

    @cached_property
    def sizes(self) -> Tensor:
        """Rows per group, int64 [E]."""
        return self.bounds.diff().long()

    @cached_property
    def is_empty(self) -> Tensor:
        """Whether each group has no rows, bool [E, 1, 1]."""
        return (self.bounds[1:] == self.bounds[:-1])[:, None, None]


def integers(begin: int, end: int, like: Tensor) -> Tensor:
    """Return the integers `begin <= n < end` in the type of `like` and on its device; layers share them."""
    if isinstance(like, FakeTensor):
        return torch.arange(begin, end, dtype=like.dtype, device=like.device)
    return _integers(begin, end, like.dtype, like.device)


@lru_cache(maxsize=8)
@unset_fake_temporarily()
@torch.inference_mode(mode=False)
def _integers(begin: int, end: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(begin, end, dtype=dtype, device=device)


@cache
@unset_fake_temporarily()
@torch.inference_mode(mode=False)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, 1, 1, dtype=dtype, device=device)


class LowRank(NamedTuple):
    """The product `scale * rows[s] @ matrices[group of s]`."""

    rows: Tensor
    """Shape [S, R]."""
    matrices: Tensor
    """Shape [E, R, out]."""
    scale: float


class Addends(NamedTuple):
    """The terms added to a grouped product `y [S, out]`; Triton adds them before it rounds."""

    bias: Tensor | None = None
    """Shape [E, out]."""
    low: LowRank | None = None

    def of_groups(self, groups: slice) -> "Addends":
        """Return the addends of some groups."""
        bias = self.bias[groups] if self.bias is not None else None
        return Addends(bias, self.low and self.low._replace(matrices=self.low.matrices[groups]))

    def add_to_group_(self, product: Tensor, group: int, rows: slice) -> None:
        """Add to the product of some rows with the matrix of a group, in place."""
        if self.bias is not None:
            product.add_(self.bias[group])
        if self.low is not None:
            product.addmm_(self.low.rows[rows], self.low.matrices[group], alpha=self.low.scale)


NOTHING = Addends()


def select_kernel(
    device: torch.device, dtype: torch.dtype, widths: Iterable[int], *, in_parts: bool = False
) -> Kernel | None:
    """Return what computes the products of all groups at once; None where each group has its own product.

    There the host waits for the device once for all groups, and launches a product for each.
    """
    kernel = kernel_for(device, dtype, widths, in_parts=in_parts)
    return None if kernel == "triton" and find_triton_failure(device) is not None else kernel


def kernel_for(
    device: torch.device, dtype: torch.dtype, widths: Iterable[int], *, in_parts: bool = False
) -> Kernel | None:
    """Return the kernel that a device takes; None if there is none for it. Only Triton's takes matrices in parts."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    major, _ = torch.cuda.get_device_capability(device)
    if major in FUSED_ON and not in_parts and all(width % STRIDE_ELEMENTS == 0 for width in widths):
        return "torch"
    return "triton" if major >= OLDEST_FOR_TRITON else None


@cache
def find_triton_failure(device: torch.device) -> str | None:
    """Return why Triton's kernels do not run on a GPU, such as a missing compiler for C; None if they do."""
    rows = torch.ones(1, STRIDE_ELEMENTS, dtype=torch.bfloat16, device=device)
    groups = Groups(torch.arange(2, dtype=torch.int32, device=device), None, "triton")
    try:
        sums = [grouped_linear(rows, rows[None], groups), grouped_linear_dw(rows, rows, groups)]
        total = sum(float(product.sum()) for product in sums)  # waits for what fails later
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"
    wanted = rows.numel() + rows.numel() ** 2
    return None if total == wanted else f"its products of ones sum up to {total}, not {wanted}"


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups, addends: Addends = NOTHING) -> Tensor:
    """Compute `y[s] = weight[group of s] @ x[s]`, plus addends: [S, in] -> [S, out]."""
    return _multiply(x, weight.transpose(-2, -1), groups, addends)


def grouped_linear_dx(dy: Tensor, weight: Tensor, groups: Groups, addends: Addends = NOTHING) -> Tensor:
    """Compute the gradient of `grouped_linear` by x, plus addends: [S, out] -> [S, in]."""
    return _multiply(dy, weight, groups, addends)


def _multiply(x: Tensor, matrices: Tensor, groups: Groups, addends: Addends) -> Tensor:
    """Compute `x[s] @ matrices[group of s]`, plus addends."""
    if groups.kernel == "triton":
        from surefoot.models import triton_grouped_gemm  # here, because it imports Triton

        return triton_grouped_gemm.multiply(x, matrices, groups.offsets, addends)
    if groups.spans is None:
        y: Tensor = F.grouped_mm(x, matrices, offs=groups.offsets)
        if addends.bias is not None:
            y.add_(_repeat_by_group(addends.bias, y, groups))
        if (low := addends.low) is not None:
            y.add_(F.grouped_mm(low.rows, low.matrices, offs=groups.offsets), alpha=low.scale)
        return y
    return multiply_in_turn(x, matrices.__getitem__, matrices.shape[2], groups, addends)


def multiply_parts(x: Tensor, parts: Iterable[tuple[int, Tensor]], groups: Groups, addends: Addends) -> Tensor:
    """Compute `x[s] @ matrices[group of s]`, plus addends, where the matrices come in parts.

    `parts`: the number of the first group of each part, and its matrices [groups of the part, in, width].
    """
    y: Tensor | None = None
    for first, matrices in parts:
        y = x.new_empty(x.shape[0], matrices.shape[2]) if y is None else y
        own = addends.of_groups(slice(first, first + len(matrices)))
        if groups.spans is None:
            from surefoot.models import triton_grouped_gemm

            triton_grouped_gemm.multiply(x, matrices, groups.offsets, own, first_group=first, out=y)
            continue
        for group, begin, end in groups.spans:
            if first <= group < first + len(matrices):
                product = torch.mm(x[begin:end], matrices[group - first], out=y[begin:end])
                own.add_to_group_(product, group - first, slice(begin, end))
    assert y is not None, "there are no groups"
    return y


def multiply_in_turn(
    x: Tensor, matrix_of: Callable[[int], Tensor], width: int, groups: Groups, addends: Addends
) -> Tensor:
    """Compute `x[s] @ matrix_of(group of s)`, plus addends, one group after the other: [S, in] -> [S, width]."""
    assert groups.spans is not None
    y = x.new_empty(x.shape[0], width)
    for group, begin, end in groups.spans:
        rows = _window(x, begin, end)
        # In the order of the rows: those after the group's own are overwritten by the next groups.
        product = y[rows] if rows.start == begin else y.new_empty(rows.stop - rows.start, width)
        torch.mm(x[rows], matrix_of(group), out=product)
        addends.add_to_group_(product, group, rows)
        if rows.start != begin:
            y[begin:end] = product[begin - rows.start : end - rows.start]
    return y


def _window(x: Tensor, begin: int, end: int) -> slice:
    """Return the rows to multiply for the group `[begin, end)`: on a CPU in bfloat16 a few more, up to a multiple.

    oneDNN compiles a product in bfloat16 for each new number of rows, in milliseconds, which takes longer than the
    product.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return slice(begin, end)
    count = -(-(end - begin) // ROWS_MULTIPLE) * ROWS_MULTIPLE
    if count > x.shape[0]:
        return slice(begin, end)
    first = min(begin, x.shape[0] - count)
    return slice(first, first + count)


def grouped_linear_dw(
    dy: Tensor, x: Tensor, groups: Groups, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute the gradient of `grouped_linear` by its weights, times `scale`: [E, out, in]. Empty groups get zeros.

    `dtype`: of the gradient; None for that of the rows.
    """
    dtype = dtype or x.dtype
    if groups.kernel == "triton":
        from surefoot.models import triton_grouped_gemm

        return triton_grouped_gemm.multiply_pairs(dy, x, groups.offsets, scale, dtype)
    if groups.spans is None:
        dw = F.grouped_mm(dy.t(), x, offs=groups.offsets)
        # In place: it is as large as the weights. The kernel may leave the matrix of an empty group unwritten.
        dw = dw.mul_(scale) if scale != 1.0 else dw
        # Zeros of another type have the kernel write that type.
        return (
            dw.masked_fill_(groups.is_empty, 0)
            if dtype == dw.dtype
            else torch.where(groups.is_empty, _zero(dtype, dw.device), dw).to(dtype)
        )
    return _multiply_pairs_in_turn(dy, x, groups, scale).to(dtype)


def _multiply_pairs_in_turn(dy: Tensor, x: Tensor, groups: Groups, scale: float) -> Tensor:
    """Compute the gradient by the weights, one group after the other."""
    assert groups.spans is not None
    shape = (groups.count, dy.shape[1], x.shape[1])
    dw = dy.new_zeros(shape) if len(groups.spans) < shape[0] else dy.new_empty(shape)
    is_thin = x.shape[1] < dy.shape[1]
    for group, begin, end in groups.spans:
        rows = _window(x, begin, end)
        left, right = (
            (dy[rows], _zero_outside(x, rows, begin, end))
            if is_thin
            else (_zero_outside(dy, rows, begin, end), x[rows])
        )
        if is_thin:  # a thin product is several times faster on the CPU with its short side as rows
            dw[group].t().copy_(torch.mm(right.t(), left)).mul_(scale)
        else:
            torch.addmm(dw[group], left.t(), right, beta=0, alpha=scale, out=dw[group])
    return dw


def _zero_outside(x: Tensor, rows: slice, begin: int, end: int) -> Tensor:
    """Return some rows of x in which those outside of the group `[begin, end)` are zero.

    In a product with the same rows of another tensor they add nothing, unless a value there is not finite.
    """
    if rows == slice(begin, end):
        return x[rows]
    rows_of_group = x.new_zeros(rows.stop - rows.start, x.shape[1])
    rows_of_group[begin - rows.start : end - rows.start] = x[begin:end]
    return rows_of_group


def grouped_dot(dy: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    """Compute `dy[s] @ bias[group of s]`: [S, out] -> [S]."""
    if groups.spans is None:
        return (dy * _repeat_by_group(bias, dy, groups)).sum(-1)
    product = dy.new_empty(dy.shape[0])
    for group, begin, end in groups.spans:
        torch.mv(dy[begin:end], bias[group], out=product[begin:end])
    return product


def grouped_sum(dy: Tensor, groups: Groups) -> Tensor:
    """Compute the gradient of `grouped_linear` by its biases: [S, out] -> [E, out]. Empty groups get zeros."""
    if groups.spans is None:  # a product, because adding by index is not deterministic on CUDA
        return grouped_linear_dw(dy, dy.new_ones(dy.shape[0], STRIDE_ELEMENTS), groups)[..., 0]
    total = dy.new_zeros(groups.count, dy.shape[1])
    for group, begin, end in groups.spans:
        torch.sum(dy[begin:end], 0, out=total[group])
    return total


def _repeat_by_group(bias: Tensor, like: Tensor, groups: Groups) -> Tensor:
    return bias.repeat_interleave(groups.sizes, dim=0, output_size=like.shape[0])
