"""Grouped matrix products, in which each group of rows has its own matrix: the arithmetic of Mixture-of-Experts.

Independent of experts, LoRA and gradients. Two backends give the same numbers up to rounding: `F.grouped_mm` (one
kernel, no host synchronisation) for bfloat16 on CUDA, and one `mm` per non-empty group written in place elsewhere.

Shapes: S rows sorted by group, E groups; `x [S, in]`, `dy [S, out]`, `weight [E, out, in]`, `bias [E, out]`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

FUSED_ON = (9, 10)
"""Major compute capabilities for which `grouped_mm` has a kernel: Hopper and data-centre Blackwell."""
STRIDE_ELEMENTS = 8
"""Number of elements in the row stride that `grouped_mm` needs: 16 bytes, 8 elements of bfloat16."""


@dataclass(frozen=True)
class Groups:
    """Assignment of S sorted rows to E groups."""

    offsets: Tensor
    """End of each group, int32 [E]."""
    spans: list[tuple[int, int, int]] | None
    """(group, begin, end) of each non-empty group on the host; None where one kernel computes all groups."""

    @classmethod
    def of(cls, ids: Tensor, num_groups: int, dtype: torch.dtype, widths: Iterable[int]) -> "Groups":
        """Count sorted `ids [S]`, 0 <= id < num_groups, for products with matrices of these widths in `dtype`.

        The host waits for the device only where no kernel computes all groups.
        """
        if isinstance(ids, FakeTensor):  # without values: one group has all rows, which needs the same memory and work
            return cls(ids.new_empty(num_groups, dtype=torch.int32), [(0, 0, len(ids))])
        numbers = torch.arange(num_groups, dtype=ids.dtype, device=ids.device)
        offsets = torch.searchsorted(ids, numbers, right=True, out_int32=True)
        if _is_fused(ids.device, dtype, widths):
            return cls(offsets, None)
        ends = offsets.tolist()
        spans = [
            (e, begin, end) for e, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if end > begin
        ]
        return cls(offsets, spans)

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.offsets.shape[0]

    @cached_property
    def sizes(self) -> Tensor:
        """Rows per group, int64 [E]."""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1)).long()

    @cached_property
    def is_empty(self) -> Tensor:
        """Whether each group has no rows, bool [E, 1, 1]."""
        return (self.sizes == 0)[:, None, None]


def _is_fused(device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> bool:
    """Return whether one kernel computes the products of all groups. Elsewhere torch waits for the host in each."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] in FUSED_ON
        and all(width % STRIDE_ELEMENTS == 0 for width in widths)
    )


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Compute `y[s] = weight[group of s] @ x[s]`: [S, in] -> [S, out]."""
    if groups.spans is None:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=groups.offsets)
    y = x.new_empty(x.shape[0], weight.shape[1])
    for group, begin, end in groups.spans:
        torch.mm(x[begin:end], weight[group].t(), out=y[begin:end])
    return y


def grouped_linear_add_(y: Tensor, x: Tensor, weight: Tensor, groups: Groups, scale: float) -> Tensor:
    """Compute `y += scale * grouped_linear(x, weight)`, in place."""
    if groups.spans is None:
        return y.add_(F.grouped_mm(x, weight.transpose(-2, -1), offs=groups.offsets), alpha=scale)
    for group, begin, end in groups.spans:
        y[begin:end].addmm_(x[begin:end], weight[group].t(), alpha=scale)
    return y


def grouped_linear_dx(dy: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Compute the gradient of `grouped_linear` by x: [S, out] -> [S, in]."""
    if groups.spans is None:
        return F.grouped_mm(dy, weight, offs=groups.offsets)
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    for group, begin, end in groups.spans:
        torch.mm(dy[begin:end], weight[group], out=dx[begin:end])
    return dx


def grouped_linear_dx_add_(dx: Tensor, dy: Tensor, weight: Tensor, groups: Groups, scale: float) -> Tensor:
    """Compute `dx += scale * grouped_linear_dx(dy, weight)`, in place."""
    if groups.spans is None:
        return dx.add_(F.grouped_mm(dy, weight, offs=groups.offsets), alpha=scale)
    for group, begin, end in groups.spans:
        dx[begin:end].addmm_(dy[begin:end], weight[group], alpha=scale)
    return dx


def grouped_linear_dw(dy: Tensor, x: Tensor, groups: Groups, scale: float = 1.0) -> Tensor:
    """Compute the gradient of `grouped_linear` by its weights, times `scale`: [E, out, in]. Empty groups get zeros."""
    shape = (groups.count, dy.shape[1], x.shape[1])
    if groups.spans is None:
        dw = F.grouped_mm(dy.t(), x, offs=groups.offsets)
        # In place: it is as large as the weights. The kernel may leave the matrix of an empty group unwritten.
        dw = dw.mul_(scale) if scale != 1.0 else dw
        return dw.masked_fill_(groups.is_empty, 0)
    dw = dy.new_zeros(shape) if len(groups.spans) < shape[0] else dy.new_empty(shape)
    for group, begin, end in groups.spans:
        if x.shape[1] < dy.shape[1]:  # a thin product is several times faster on the CPU with its short side as rows
            dw[group].t().copy_(torch.mm(x[begin:end].t(), dy[begin:end])).mul_(scale)
        else:
            torch.addmm(dw[group], dy[begin:end].t(), x[begin:end], beta=0, alpha=scale, out=dw[group])
    return dw


def grouped_bias_add_(y: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    """Compute `y[s] += bias[group of s]`, in place."""
    if groups.spans is None:
        return y.add_(_repeat_by_group(bias, y, groups))
    for group, begin, end in groups.spans:
        y[begin:end].add_(bias[group])
    return y


def grouped_dot(dy: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    """Compute `dy[s] @ bias[group of s]`: [S, out] -> [S]."""
    if groups.spans is None:
        return (dy * _repeat_by_group(bias, dy, groups)).sum(-1)
    product = dy.new_empty(dy.shape[0])
    for group, begin, end in groups.spans:
        torch.mv(dy[begin:end], bias[group], out=product[begin:end])
    return product


def grouped_sum(dy: Tensor, groups: Groups) -> Tensor:
    """Compute the gradient of `grouped_bias_add_` by its biases: [S, out] -> [E, out]. Empty groups get zeros."""
    if groups.spans is None:  # a product, because adding by index is not deterministic on CUDA
        return grouped_linear_dw(dy, dy.new_ones(dy.shape[0], STRIDE_ELEMENTS), groups)[..., 0]
    total = dy.new_zeros(groups.count, dy.shape[1])
    for group, begin, end in groups.spans:
        torch.sum(dy[begin:end], 0, out=total[group])
    return total


def _repeat_by_group(bias: Tensor, like: Tensor, groups: Groups) -> Tensor:
    return bias.repeat_interleave(groups.sizes, dim=0, output_size=like.shape[0])
