"""Products of groups one after the other: in bfloat16 on a CPU with a few rows more than each group has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.models.attention_math import AttentionTerms, attend
from surefoot.models.grouped_gemm import (
    Addends,
    Groups,
    LowRank,
    grouped_linear,
    grouped_linear_dw,
    grouped_linear_dx,
)

SIZES = [0, 1, 31, 32, 33, 100, 0, 7]
WIDE, NARROW, RANK = 48, 24, 4


class _Rows(TorchDispatchMode):
    """Numbers of rows that products go over, as rows or as the sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.counts |= set(args[-2].shape) - {WIDE, NARROW, RANK}
        return func(*args, **(kwargs or {}))


@contextmanager
def rows_of_products() -> Iterator[set[int]]:
    with _Rows() as rows:
        yield rows.counts


def draw(*shape: int) -> Tensor:
    """Numbers that bfloat16 has exactly."""
    return torch.randint(-8, 9, shape).float() / 8


@pytest.mark.parametrize("sizes", [SIZES, [5, 3], [32], [0, 40]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_multiplied_alone(sizes: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ids = torch.repeat_interleave(torch.tensor(sizes))
    groups = Groups.of(ids, len(sizes), dtype, (WIDE, NARROW, RANK))
    x, dy = draw(len(ids), NARROW), draw(len(ids), WIDE)
    weight, bias = draw(len(sizes), WIDE, NARROW), draw(len(sizes), WIDE)
    low, matrices = draw(len(ids), RANK), draw(len(sizes), RANK, WIDE)
    wanted = (
        torch.einsum("si,soi->so", x, weight[ids]) + bias[ids] + 0.5 * torch.einsum("sr,sro->so", low, matrices[ids])
    )
    hot = torch.nn.functional.one_hot(ids, len(sizes)).float()
    addends = Addends(bias.to(dtype), LowRank(low.to(dtype), matrices.to(dtype), 0.5))
    with rows_of_products() as rows:
        y = grouped_linear(x.to(dtype), weight.to(dtype), groups, addends)
        dx = grouped_linear_dx(dy.to(dtype), weight.to(dtype), groups)
        dw = grouped_linear_dw(dy.to(dtype), x.to(dtype), groups, 0.5)
        thin = grouped_linear_dw(dy.to(dtype), low.to(dtype), groups)
    close = {"rtol": 1e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.float(), wanted, **close)
    torch.testing.assert_close(dx.float(), torch.einsum("so,soi->si", dy, weight[ids]), **close)
    torch.testing.assert_close(dw.float(), 0.5 * torch.einsum("se,so,si->eoi", hot, dy, x), **close)
    torch.testing.assert_close(thin.float(), torch.einsum("se,so,sr->eor", hot, dy, low), **close)
    if dtype == torch.bfloat16 and len(ids) >= 64:  # each other number would be compiled
        assert {count % 32 for count in rows} == {0}
    else:
        assert rows <= set(sizes) - {0} | {32}


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_in_bfloat16_on_a_cpu_is_that_of_float32(heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, count, 12, 16).bfloat16().requires_grad_() for count in (4, heads, heads))
    out = attend(query, key, value, None, AttentionTerms())
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    exact = [tensor.detach().float().requires_grad_() for tensor in (query, key, value)]
    wanted = attend(*exact, None, AttentionTerms())
    wanted.square().sum().backward()
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
    for tensor, other in zip((query, key, value), exact, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(tensor.grad.float(), other.grad, rtol=2e-2, atol=4e-2)


def test_a_bias_of_the_scores_in_bfloat16_is_added_in_float32() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 8).bfloat16() for _ in range(3))
    bias = torch.randn(1, 2, 6, 6).bfloat16()
    out = attend(query, key, value, None, AttentionTerms(bias=bias))
    wanted = attend(query.float(), key.float(), value.float(), None, AttentionTerms(bias=bias.float()))
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
