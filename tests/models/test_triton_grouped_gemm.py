"""Triton's grouped products: against plain maths in its interpreter, and compiled for each kind of GPU since Ampere."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.models.grouped_gemm import Addends, Groups, LowRank, multiply_parts

kernels = pytest.importorskip("surefoot.models.triton_grouped_gemm")

COUNTS = (130, 0, 1, 64, 0, 70, 7, 0)
"""Rows of each group: more than a tile, none, one, a whole tile."""
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from surefoot.models import triton_grouped_gemm as kernels

POINTERS = {name: "*bf16" for name in ("x", "matrices", "y", "bias", "low", "low_matrices", "left", "right", "product")}
TYPES = {**POINTERS, "offsets": "*i32", "scale": "fp32"}

def compile(kernel, capability, tile, ones):
    constants = {**tile, **dict.fromkeys(ones, 1)}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    divisible = [i for i, name in enumerate(names) if name not in (*constants, "scale", "num_groups", "strips")]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

tile = {"ROWS": kernels.BLOCK_ROWS, "COLUMNS": kernels.BLOCK_COLUMNS, "SUM": kernels.BLOCK_SUM}
rank = {"RANK": kernels.BLOCK_RANK, "GROUPS": 64}
inner = ["x_inner", "bias_column", "low_inner"]
for capability in map(int, sys.argv[1:]):
    programs = [
        compile(kernels._multiply_kernel, capability, {**tile, **rank}, [*inner, "matrix_inner", "low_matrix_inner"]),
        compile(kernels._multiply_kernel, capability, {**tile, **rank}, [*inner, "matrix_column", "low_column"]),
        compile(kernels._multiply_pairs_kernel, capability, tile, ["left_column", "right_column"]),
    ]
    for program in programs:
        ptx = program.asm["ptx"]
        print(capability, program.metadata.shared, "mma" in ptx, "cp.async" in ptx or "tensormap" in ptx)
"""


def inputs(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def by_group(counts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [(e, *span) for e, span in enumerate(pairwise([0, *torch.tensor(counts).cumsum(0).tolist()]))]


@pytest.mark.parametrize("counts", [COUNTS, (5,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize(("inner", "outer", "rank"), [(72, 136, 8), (64, 20, 4), (200, 96, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_are_those_of_plain_maths(
    dtype: torch.dtype, inner: int, outer: int, rank: int, counts: tuple[int, ...]
) -> None:
    rows, groups = sum(counts), len(counts)
    x, dy, weight, bias, low, low_weight = inputs(
        dtype,
        (rows, inner),
        (rows, outer),
        (groups, outer, inner),
        (groups, outer),
        (rows, rank),
        (groups, outer, rank),
    )
    offsets = torch.tensor(counts).cumsum(0).int()
    addends = Addends(bias, LowRank(low, low_weight.transpose(1, 2), 0.5))
    found = {
        "y": kernels.multiply(x, weight.transpose(1, 2), offsets),
        "y + addends": kernels.multiply(x, weight.transpose(1, 2), offsets, addends),
        "dx": kernels.multiply(dy, weight, offsets),
        "dw": kernels.multiply_pairs(dy, x, offsets, 0.25),
    }
    x, dy, weight, bias, low, low_weight = (each.double() for each in (x, dy, weight, bias, low, low_weight))
    spans = by_group(counts)
    plain = torch.cat([x[begin:end] @ weight[e].T for e, begin, end in spans])
    added = torch.cat([bias[e] + 0.5 * low[begin:end] @ low_weight[e].T for e, begin, end in spans])
    wanted = {
        "y": plain,
        "y + addends": plain + added,
        "dx": torch.cat([dy[begin:end] @ weight[e] for e, begin, end in spans]),
        "dw": torch.stack([0.25 * dy[begin:end].T @ x[begin:end] for _, begin, end in spans]),
    }
    for name, value in wanted.items():
        tolerance = 1e-6 if dtype == torch.float32 else 1e-3
        assert found[name].dtype == dtype
        assert (found[name].double() - value).norm() <= tolerance * value.norm(), name


def test_products_are_the_same_numbers_again_and_do_not_depend_on_other_groups() -> None:
    x, weight = inputs(torch.float32, (200, 72), (2, 40, 72))
    alone = kernels.multiply(x[:70], weight[:1].transpose(1, 2), torch.tensor([70], dtype=torch.int32))
    both = kernels.multiply(x, weight.transpose(1, 2), torch.tensor([70, 200], dtype=torch.int32))
    assert torch.equal(both[:70], alone)


def test_products_with_a_part_of_the_groups_are_those_with_all_of_them() -> None:
    counts = COUNTS
    rows, groups = sum(counts), len(counts)
    x, weight, bias, low, low_weight = inputs(
        torch.float32, (rows, 72), (groups, 40, 72), (groups, 40), (rows, 8), (groups, 8, 40)
    )
    offsets = torch.tensor(counts).cumsum(0).int()
    addends = Addends(bias, LowRank(low, low_weight, 0.5))
    parts = ((first, weight[first : first + 2].transpose(1, 2)) for first in range(0, groups, 2))
    found = multiply_parts(x, parts, Groups(F.pad(offsets, (1, 0)), None, "triton"), addends)
    assert torch.equal(found, kernels.multiply(x, weight.transpose(1, 2), offsets, addends))


@pytest.mark.long
def test_kernels_compile_for_every_gpu_since_ampere(tmp_path: Path) -> None:
    """They use tensor cores, copy ahead of the products, and fit in 99 KiB, the least shared memory of these GPUs."""
    capabilities = ["80", "86", "89", "90", "120"]
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, *capabilities]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [capability for capability, *_ in lines] == [capability for capability in capabilities for _ in range(3)]
    for capability, shared, has_tensor_cores, copies_ahead in lines:
        assert int(shared) <= 99 * 1024, capability
        assert (has_tensor_cores, copies_ahead) == ("True", "True"), capability
