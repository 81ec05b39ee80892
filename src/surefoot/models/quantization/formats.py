"""Formats of frozen weights that a run can choose: NF4 (four bits) and int8.

NF4: a block of numbers of one row shares a factor, its largest absolute value, and each number is one of 16 quantiles
of the normal distribution times that factor. bitsandbytes stores, and reads on GPUs. Blocks never cross rows, so a rank
stores its part of a weight as the bytes that the whole would have. With double quantisation the factors of a row are
themselves eight-bit steps between the row's smallest and largest factor.

Source: Dettmers et al., https://arxiv.org/abs/2305.14314
"""

from dataclasses import dataclass
from functools import cache
from typing import get_args

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from surefoot.config.schema import BlockSize
from surefoot.errors import ModelError
from surefoot.models.quantization.base import Stored, WeightFormat
from surefoot.models.quantization.bitsandbytes_ops import check_package, operators

KIND = "nf4"
BLOCK_SIZES: tuple[int, ...] = get_args(BlockSize)
STEPS = 255
"""Number of steps between the smallest and the largest factor of a row."""


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


@dataclass(frozen=True)
class Nf4Format(WeightFormat):
    """NF4 in blocks of one row.

    Stored: pairs of numbers [.., in / 2] in bytes and the factors [.., in / block] in float32; with double quantisation
    the factors as steps in bytes, and the first step and the width of a step of each row [.., 2] in float32.
    """

    block_size: int
    is_double: bool

    def check_package(self) -> None:
        check_package(f"quantization: {KIND}", "int8 needs no package")

    @property
    def endings(self) -> tuple[str, ...]:
        return ("", "_absmax", "_absmax_steps") if self.is_double else ("", "_absmax")

    def check(self, name: str, shape: torch.Size) -> None:
        if shape[-1] % self.block_size:
            fitting = [size for size in BLOCK_SIZES if shape[-1] % size == 0]
            remedy = f"Set quantization_block_size: {fitting[-1]}" if fitting else "Set quantization: int8"
            raise ModelError(
                f"quantization: {name} has rows of {shape[-1]} numbers, which blocks of {self.block_size} do not "
                f"divide. {remedy}, or null."
            )

    def store(self, weight: Tensor) -> Stored:
        *rows, width = weight.shape
        if not _has_values(weight):
            values = weight.new_empty(*rows, width // 2, dtype=torch.uint8)
            factors = weight.new_empty(*rows, width // self.block_size, dtype=torch.float32)
        else:
            values, factors = operators().quantize_4bit(weight.contiguous(), self.block_size, KIND, torch.uint8)
            values, factors = values.view(*rows, width // 2), factors.view(*rows, width // self.block_size)
        if not self.is_double:
            return values, factors
        low, high = factors.aminmax(dim=-1, keepdim=True)
        step = (high - low) / STEPS
        steps = ((factors - low) / step.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.uint8)
        return values, steps, torch.cat([low, step], -1)

    def shape_of(self, first: Tensor) -> torch.Size:
        return torch.Size((*first.shape[:-1], 2 * first.shape[-1]))

    def read(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        values, factors, *rows = stored
        shape = self.shape_of(values)
        if rows:
            low, step = rows[0].chunk(2, dim=-1)
            factors = torch.addcmul(low, factors, step)
        if not _has_values(values):
            return values.new_zeros(shape, dtype=dtype)  # a pass over what is read, for forecasts of its time
        if values.is_cpu:
            # Threads of bitsandbytes would spin beside torch's: beside another process, a run takes 20 times as long.
            pairs = _pairs_of_bytes().index_select(0, values.reshape(-1).int()).view(torch.float32)
            blocks = pairs.view(*factors.shape, self.block_size).mul_(factors.unsqueeze(-1))
            return blocks.view(shape).to(dtype)
        return _dequantize(values, factors, self.block_size, shape, dtype)


def _dequantize(values: Tensor, factors: Tensor, block_size: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the weight that bitsandbytes reads from pairs of numbers in bytes and the factors of blocks."""
    arguments = (values.contiguous().view(-1), factors.reshape(-1), block_size, KIND, shape, dtype)
    weight: Tensor = operators().dequantize_4bit(*arguments)
    return weight


@cache
def _pairs_of_bytes() -> Tensor:
    """Return the two numbers in float32 that each byte stands for, as one number of eight bytes: [256]."""
    numbers, block_size = torch.arange(256, dtype=torch.uint8, device="cpu"), BLOCK_SIZES[0]
    factors = torch.ones(2 * len(numbers) // block_size, dtype=torch.float32, device="cpu")
    shape = torch.Size((len(numbers), 2))
    return _dequantize(numbers, factors, block_size, shape, torch.float32).view(torch.int64)[:, 0]


@dataclass(frozen=True)
class Int8Format(WeightFormat):
    """Rows of whole numbers from -127 to 127, and the scale of each row [.., out, 1] in float32."""

    @property
    def endings(self) -> tuple[str, ...]:
        return ("", "_scale")

    def store(self, weight: Tensor) -> Stored:
        scale = weight.abs().amax(-1, keepdim=True).float() / 127
        return (weight / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8), scale

    def read(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        values, scale = stored
        return (values * scale).to(dtype)
