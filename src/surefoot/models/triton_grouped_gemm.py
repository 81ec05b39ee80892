"""Grouped products in bfloat16 by Triton, for GPUs on which `F.grouped_mm` has no kernel.

Two kernels, without a wait of the host: rows times the matrix of their group, with bias and low-rank product added
before the result is rounded; and the product of the rows of two tensors within each group, the gradient of a stack.
Sums are in float32, in an order that depends on shapes alone, so that a run gives the same numbers again.

Imported only where it is used: importing it imports Triton.

Shapes: S rows sorted by group, E groups; `x [S, K]`, `matrices [E, K, N]`, `offsets` int32 [E], the ends of groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.models.grouped_gemm import NOTHING, Addends

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_SUM = 64, 128, 64
"""Largest tile of a program, and its step over the sum: with three stages 48 KiB of shared memory on Ampere and Ada and
72 KiB on Hopper, of the 99 KiB or more of every GPU since Ampere."""
BLOCK_RANK = 16
"""Step over the inner dimension of a low-rank product, and the least side of a tile: what tensor cores take."""
WARPS, STAGES = 4, 3


@triton.jit  # type: ignore[untyped-decorator]
def _sum_products(  # type: ignore[no-untyped-def]
    left, right, is_row, is_column, inner, left_inner, right_inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return a tile [ROWS, COLUMNS] of a product over `inner`, from pointers to its rows [ROWS, 1] and columns."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, STEP):
        k = start + tl.arange(0, STEP)
        a = tl.load(left + k[None, :] * left_inner, mask=is_row & (k < inner)[None, :], other=0.0)
        b = tl.load(right + k[:, None] * right_inner, mask=is_column & (k < inner)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["first_group"])  # type: ignore[untyped-decorator]
def _multiply_kernel(  # type: ignore[no-untyped-def]
    x, matrices, y, offsets, first_group, bias, low, low_matrices, scale,
    num_groups, columns, inner, rank,
    x_row, x_inner, matrix_group, matrix_inner, matrix_column, bias_group, bias_column,
    low_row, low_inner, low_group, low_matrix_inner, low_column,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y: ROWS rows of one group by COLUMNS columns. `x_row` and the like are strides."""
    tile, strip = tl.program_id(0), tl.program_id(1)
    numbers = tl.arange(0, GROUPS)
    in_all = first_group + numbers
    ends = tl.load(offsets + in_all, mask=numbers < num_groups, other=0)
    begins = tl.load(offsets + in_all - 1, mask=(in_all > 0) & (numbers < num_groups), other=0)
    tiles = tl.where(numbers < num_groups, (ends - begins + ROWS - 1) // ROWS, 0)
    tile_ends = tl.cumsum(tiles, 0)
    group = tl.sum((tile_ends <= tile).to(tl.int32), 0)  # the first whose tiles end after this one
    if group >= num_groups:
        return
    is_group = numbers == group
    begin = tl.sum(tl.where(is_group, begins, 0), 0)
    end = tl.sum(tl.where(is_group, ends, 0), 0)
    first_tile = tl.sum(tl.where(is_group, tile_ends - tiles, 0), 0)
    row = begin + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    column = strip * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = (row < end)[:, None], (column < columns)[None, :]
    row, column, number = row.to(tl.int64)[:, None], column[None, :], group.to(tl.int64)
    left, right = x + row * x_row, matrices + number * matrix_group + column * matrix_column
    total = _sum_products(left, right, is_row, is_column, inner, x_inner, matrix_inner, ROWS, COLUMNS, SUM)
    if bias is not None:
        addend = tl.load(bias + number * bias_group + column * bias_column, mask=is_column, other=0.0)
        total += addend.to(tl.float32)
    if low is not None:
        left, right = low + row * low_row, low_matrices + number * low_group + column * low_column
        low_total = _sum_products(
            left, right, is_row, is_column, rank, low_inner, low_matrix_inner, ROWS, COLUMNS, RANK
        )
        total += scale * low_total
    tl.store(y + row * columns + column, total.to(y.dtype.element_ty), mask=is_row & is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_pairs_kernel(  # type: ignore[no-untyped-def]
    left, right, product, offsets, scale, rows, columns, strips,
    left_row, left_column, right_row, right_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `product[group] = scale * left[rows of group]^T right[rows of group]`."""
    group, tile = tl.program_id(0), tl.program_id(1)
    begin = tl.load(offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets + group)
    row = ((tile // strips) * ROWS + tl.arange(0, ROWS))[:, None]
    column = ((tile % strips) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, SUM):
        s = start + tl.arange(0, SUM).to(tl.int64)
        left_at = left + s[None, :] * left_row + row * left_column
        a = tl.load(left_at, mask=(s < end)[None, :] & (row < rows), other=0.0)
        right_at = right + s[:, None] * right_row + column * right_column
        b = tl.load(right_at, mask=(s < end)[:, None] & (column < columns), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = product + (group.to(tl.int64) * rows + row) * columns + column
    tl.store(at, (scale * total).to(product.dtype.element_ty), mask=(row < rows) & (column < columns))


def multiply(
    x: Tensor,
    matrices: Tensor,
    offsets: Tensor,
    addends: Addends = NOTHING,
    *,
    first_group: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `x[s] @ matrices[group of s]`, plus addends: [S, K] -> [S, N]. Strides are free.

    `matrices` and addends may be those of some groups, from `first_group` on: only their rows of `out` are written.
    """
    rows, inner = x.shape
    num_groups, _, columns = matrices.shape
    y = x.new_empty(rows, columns) if out is None else out
    bias, low = addends
    width = _fit_tile(columns, BLOCK_COLUMNS)
    # A group has at most one tile that is not full.
    grid = (rows // BLOCK_ROWS + min(num_groups, rows), triton.cdiv(columns, width))
    _multiply_kernel[grid](
        x, matrices, y, offsets, first_group, bias, *(low or (None, None, 0.0)),
        num_groups, columns, inner, low.rows.shape[1] if low else 0,
        *x.stride(), *matrices.stride(), *(bias.stride() if bias is not None else (0, 0)),
        *((*low.rows.stride(), *low.matrices.stride()) if low else (0, 0, 0, 0, 0)),
        GROUPS=triton.next_power_of_2(num_groups), ROWS=BLOCK_ROWS, COLUMNS=width, SUM=BLOCK_SUM, RANK=BLOCK_RANK,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return y


def multiply_pairs(
    left: Tensor, right: Tensor, offsets: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute `scale * sum of left[s]^T right[s]` over the rows of each group; groups without rows get zeros.

    Shapes: left [S, M], right [S, N] -> [E, M, N], in `dtype`, or in the type of the rows.
    """
    rows, columns = left.shape[1], right.shape[1]
    product = left.new_empty(len(offsets), rows, columns, dtype=dtype)
    height, width = _fit_tile(rows, BLOCK_ROWS), _fit_tile(columns, BLOCK_COLUMNS)
    strips = triton.cdiv(columns, width)
    _multiply_pairs_kernel[(len(offsets), triton.cdiv(rows, height) * strips)](
        left, right, product, offsets, scale, rows, columns, strips, *left.stride(), *right.stride(),
        ROWS=height, COLUMNS=width, SUM=BLOCK_SUM, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return product


def _fit_tile(size: int, most: int) -> int:
    """Return the side of a tile for a dimension, which low-rank products do not fill."""
    return min(most, max(BLOCK_RANK, int(triton.next_power_of_2(size))))
