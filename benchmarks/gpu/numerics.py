"""Kernels against plain maths in float64: grouped products, and attention over packed samples with its gradients."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from part import Row, check, main
from torch import Tensor, nn

from surefoot.models import grouped_gemm as gemm
from surefoot.models.attention import packed_attention
from surefoot.models.attention_math import AttentionTerms, attend_by_definition
from surefoot.models.sample_layout import SampleLayout, samples_are
from surefoot.models.sample_masks import SampleMask

WITHIN = 1e-2
"""Relative error, of norms, that arithmetic in bfloat16 explains."""
COUNTS = (130, 0, 1, 64, 0, 253, 7, 0)
"""Rows of each expert."""
WIDTHS = ((2048, 1408), (64, 96), (2048, 4), (2048, 8), (12, 2048), (20, 36))
RANK = 8
LENGTHS = (130, 1, 64, 253)
ATTENTION: dict[str, dict[str, Any]] = {
    "head size 64": {"size": 64},
    "head size 80, grouped heads": {"size": 80, "kv_heads": 2},
    "head size 128, grouped heads": {"size": 128, "kv_heads": 1},
    "head size 256": {"size": 256},
    "head size 512": {"size": 512},
    "head size 36": {"size": 36},
    "values of 128, keys of 192 (MLA)": {"size": 192, "value_size": 128},
    "values of 256, keys of 192": {"size": 192, "value_size": 256},
    "values of 512, keys of 576 (absorbed MLA)": {"size": 576, "value_size": 512},
    "window of 32": {"size": 64, "window": 32},
    "chunks of 48": {"size": 64, "chunk": 48},
    "sinks": {"size": 64, "kv_heads": 2, "sinks": True},
    "sinks, window of 32": {"size": 64, "kv_heads": 2, "sinks": True, "window": 32},
    "softcap of 5": {"size": 64, "softcap": 5.0},
    "a prompt and its continuations": {"size": 128, "kv_heads": 2, "prefix_of": (-1, 0, 0, -1)},
}
"""Cases of attention: head sizes, numbers of heads, and the terms and masks that models add."""


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def grouped_products(device: torch.device) -> Iterator[Row]:
    """Each product and its gradients, with experts that have no rows."""
    if device.type == "cuda" and (reason := gemm.find_triton_failure(device)) is not None:
        yield Row("Triton's grouped products", reason, "", passed=False)
    for wide, narrow in WIDTHS:
        chosen = gemm.select_kernel(device, torch.bfloat16, (wide, narrow))
        for kernel in dict.fromkeys((chosen, "triton" if chosen == "torch" else chosen)):
            name = f"grouped products, {wide} to {narrow}, by {kernel or 'a product each'}"
            yield from check(name, partial(products_error, device, wide, narrow, kernel), WITHIN)


def products_error(device: torch.device, wide: int, narrow: int, kernel: gemm.Kernel | None) -> float:
    """Return the largest relative error of the products."""
    ids = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    torch.manual_seed(0)
    x, dy = (torch.randn(len(ids), width).bfloat16() for width in (wide, narrow))
    weight = (torch.randn(len(COUNTS), narrow, wide) / wide**0.5).bfloat16()
    bias, low = torch.randn(len(COUNTS), narrow).bfloat16(), torch.randn(len(ids), RANK).bfloat16()
    low_matrices = torch.randn(len(COUNTS), RANK, narrow).bfloat16()
    wanted = plain_products(*(each.double() for each in (x, dy, weight, bias, low, low_matrices)))
    x, dy, weight, bias, low, low_matrices = (each.to(device) for each in (x, dy, weight, bias, low, low_matrices))
    groups = replace(gemm.Groups.of(ids.to(device), len(COUNTS), x.dtype, (wide, narrow)), kernel=kernel)
    addends = gemm.Addends(bias, gemm.LowRank(low, low_matrices, 0.5))
    found = {
        "y": gemm.grouped_linear(x, weight, groups),
        "y + addends": gemm.grouped_linear(x, weight, groups, addends),
        "dx": gemm.grouped_linear_dx(dy, weight, groups),
        "dw": gemm.grouped_linear_dw(dy, x, groups, 0.5),
        "sum": gemm.grouped_sum(dy, groups),
    }
    return max(relative_error(found[name], tensor) for name, tensor in wanted.items())


def plain_products(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, low: Tensor, low_matrices: Tensor
) -> dict[str, Tensor]:
    """Return the products of each expert's rows, one expert after the other."""
    bounds = list(pairwise([0, *torch.tensor(COUNTS).cumsum(0).tolist()]))
    parts = [(matrix, x[begin:end], dy[begin:end]) for matrix, (begin, end) in zip(weight, bounds, strict=True)]
    added = [bias[e] + 0.5 * low[begin:end] @ low_matrices[e] for e, (begin, end) in enumerate(bounds)]
    y = torch.cat([rows @ matrix.T for matrix, rows, _ in parts])
    return {
        "y": y,
        "y + addends": y + torch.cat(added),
        "dx": torch.cat([gradient @ matrix for matrix, _, gradient in parts]),
        "dw": torch.stack([0.5 * gradient.T @ rows for _, rows, gradient in parts]),
        "sum": torch.stack([gradient.sum(0) for _, _, gradient in parts]),
    }


def attention(device: torch.device) -> Iterator[Row]:
    """Outputs and gradients of every case."""
    for name, case in ATTENTION.items():
        yield from check(f"attention, {name}", partial(attention_error, device, **case), WITHIN)


def attention_error(
    device: torch.device,
    size: int,
    value_size: int | None = None,
    kv_heads: int = 4,
    window: int | None = None,
    chunk: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
    prefix_of: tuple[int, ...] | None = None,
) -> float:
    """The largest relative error of the output and the gradients by queries, keys, values and sinks."""
    torch.manual_seed(0)
    tokens, heads = sum(LENGTHS), 4
    shapes = [(1, heads, tokens, size), (1, kv_heads, tokens, size), (1, kv_heads, tokens, value_size or size)]
    inputs = [torch.randn(shape).bfloat16() for shape in shapes] + [torch.randn(heads).bfloat16()] * sinks
    gradient = torch.randn(1, tokens, heads, value_size or size).bfloat16()
    samples = replace(SampleLayout.of(list(LENGTHS), device), prefix_of=prefix_of)

    def ours(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None = None) -> Tensor:
        with samples_are(samples):
            mask = SampleMask(window=window, chunk=chunk)
            attended: Tensor = packed_attention(nn.Module(), query, key, value, mask, softcap=softcap, s_aux=sink)[0]
            return attended

    def plain(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None = None) -> Tensor:
        terms = AttentionTerms(softcap=softcap, sinks=sink)
        sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        at = torch.cat([torch.arange(length) for length in LENGTHS])
        seen = (sample[:, None] == sample) & (at[:, None] >= at)
        for own, other in enumerate(prefix_of or ()):
            seen |= (sample[:, None] == own) & (sample == other)
        if window:
            seen &= at[:, None] - at < window
        if chunk:
            seen &= at[:, None] // chunk == at // chunk
        return attend_by_definition(query, key, value, seen, terms).transpose(1, 2)

    def run(function: Any, kind: dict[str, Any]) -> list[Tensor]:
        leaves = [tensor.to(**kind).requires_grad_() for tensor in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(**kind))]

    wanted = run(plain, {"dtype": torch.float64})
    found = run(ours, {"device": device})
    return max(relative_error(one, other) for one, other in zip(found, wanted, strict=True))


if __name__ == "__main__":
    main(grouped_products, attention)
