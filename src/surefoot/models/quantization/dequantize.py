"""Readers of the weights of quantised checkpoints: from stored numbers and scales to a float type, part by part.

A part is some rows of a weight, or some experts of a stack, so that a rank of a sharded model reads what it holds. The
values equal, bit for bit, those that transformers' own loader reads with `dequantize=True`. FP8 weights whose size is
no multiple of their blocks are read, too: DeepSeek-V3 has some, which transformers up to 5.23 refuses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil, lcm, prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from surefoot.config.documents import shorten
from surefoot.errors import ModelError
from surefoot.models.quantization.released import (
    ABSMAX,
    BLOCK_SCALES,
    BLOCKS,
    GROUP_INDEX,
    INT32_BITS,
    LEVELS,
    NESTED_ABSMAX,
    NESTED_LEVELS,
    PACKED,
    SCALE,
    SHAPE,
    ZERO_POINT,
    Quantization,
    StoredPart,
    StoredWeight,
    read_state,
)

Slices = Mapping[str, Any]
"""safetensors' slices of the tensors of a weight, by ending."""

FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of E2M1 by their four bits. Source: OCP Microscaling Formats 1.0."""
E8M0_BIAS, E8M0_NAN = 127.0, 255
INT8_MOST = 127.0
"""Largest number of eight bits with a sign, which stands for a row's largest value."""
DEFAULT_BLOCK = [128, 128]
"""Rows and columns of a block of FP8 weights whose config does not say."""
MX_BLOCK = (1, 32)
"""Rows and columns of a block of microscaling formats."""
CHUNK_ELEMENTS = 1 << 18
"""Number of elements that are read at a time, so that little is held beside the weight that is filled."""
PACKED_ROWS = 32
"""Number of rows after which packed numbers begin with an integer of their own."""
MISFITS = (
    AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions of a library for settings, or for tensors, that do not fit together."""


class Dequantizer(ABC):
    """How the weights of a quantisation method are read."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    @abstractmethod
    def check(self, weight: StoredWeight) -> None:
        """Raise ModelError for scales whose shape does not fit the weight. Reads headers only."""

    @abstractmethod
    def read(self, weight: StoredWeight, slices: Slices, rows: range, dtype: torch.dtype) -> Tensor:
        """Return some rows of the first dimension of a weight. Raises: ModelError for scales that are no numbers."""


class Fp8Dequantizer(Dequantizer):
    """Numbers in FP8, or FP4 in pairs, with a factor for each block, each row, or the whole weight."""

    def __init__(self, quantization: Quantization) -> None:
        super().__init__(quantization)
        block = quantization.settings.get("weight_block_size", DEFAULT_BLOCK)
        is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        if block is not None and not is_pair:
            raise ModelError(
                f"{quantization.place}: weight_block_size={shorten(block)} in quantization_config; two whole numbers "
                "above 0, or null, are needed. Correct it."
            )
        self._block: tuple[int, int] | None = tuple(block) if block is not None else None

    def check(self, weight: StoredWeight) -> None:
        self._find_block(weight)

    def read(self, weight: StoredWeight, slices: Slices, rows: range, dtype: torch.dtype) -> Tensor:
        block, scale = self._find_block(weight), weight.parts[weight.scale_ending]
        values, scales = slices[""], slices[weight.scale_ending]
        out = torch.empty(len(rows), *weight.shape[1:], dtype=dtype)
        if len(weight.shape) == 2:
            factors = _read_scales(scale, scales[...])
            _fill_rows(out, lambda begin, end: values[begin:end], factors, rows.start, block, scale)
            return out
        for place, expert in enumerate(rows):
            own = slice(expert, expert + 1)
            factors = _read_scales(scale, scales[own][0])
            _fill_rows(out[place], lambda begin, end, own=own: values[own, begin:end][0], factors, 0, block, scale)  # type: ignore[misc]
        return out

    def _find_block(self, weight: StoredWeight) -> tuple[int, int]:
        """Return the rows and columns of a weight that share a scale."""
        scale, values = weight.parts[weight.scale_ending], weight.values
        outer, (rows, columns) = weight.shape[:-2], weight.shape[-2:] if len(weight.shape) > 1 else (0, 0)
        grid = scale.shape[len(outer) :]
        grid = (1, 1) if prod(grid) == 1 else (*grid, 1) if len(grid) == 1 else grid
        names_block = self._quantization.settings.get("weight_block_size") is not None
        is_microscaled = not values.dtype.startswith("F8") or scale.dtype in ("U8", "F8_E8M0")
        blocks = [
            *([self._block] if self._block is not None else []),
            *([MX_BLOCK] if is_microscaled else []),
            *([(rows, columns), (1, columns)] if not names_block else []),
        ]
        for block in blocks if len(weight.shape) in (2, 3) and scale.shape[: len(outer)] == outer else []:
            if grid == (ceil(rows / block[0]), ceil(columns / block[1])):
                return block
        wanted = " or ".join(f"{' x '.join(map(str, block))}" for block in blocks)
        raise ModelError(
            f"{scale.place} has shape {list(scale.shape)}, which does not fit {values.name} of shape "
            f"{list(weight.shape)} in blocks of {wanted}. Is the folder complete, its config.json its own?"
        )


def _read_scales(part: StoredPart, stored: Tensor) -> Tensor:
    """Return scales as factors in float32 [rows of blocks, columns of blocks]."""
    scales = stored.to(torch.float32)
    if stored.dtype == torch.uint8:
        scales = torch.where(stored == E8M0_NAN, torch.nan, (scales - E8M0_BIAS).exp2())
    _check_are_numbers(part, scales)
    return scales.reshape(-1, 1) if scales.dim() < 2 else scales


def _check_are_numbers(part: StoredPart, scales: Tensor) -> None:
    broken = scales.numel() - int(scales.isfinite().sum())
    if broken:
        raise ModelError(
            f"{part.place}: {broken} of its {scales.numel()} scales are not finite numbers, so their weights are "
            "lost. Fetch the file again."
        )


def _raise_lost(part: StoredPart) -> None:
    raise ModelError(f"{part.place}: a scale is 0 where weights are not, so they are lost. Fetch the file again.")


def _fill_rows(
    out: Tensor,
    read_rows: Callable[[int, int], Tensor],
    scales: Tensor,
    first_row: int,
    block: tuple[int, int],
    part: StoredPart,
) -> None:
    """Fill rows of a weight, which begin at `first_row`, with numbers times the scale of their block."""
    has_zero = bool((scales == 0).any())
    columns, rows_at_once = out.shape[1], max(1, CHUNK_ELEMENTS // max(1, out.shape[1]))
    for begin in range(0, len(out), rows_at_once):
        first, last = first_row + begin, first_row + min(begin + rows_at_once, len(out))
        chunk = _to_float32(read_rows(first, last))
        of_rows = scales[torch.arange(first, last) // block[0]]
        factors = of_rows.repeat_interleave(block[1], dim=1)[:, :columns] if scales.shape[1] > 1 else of_rows
        if has_zero and bool(((factors == 0) & (chunk != 0)).any()):
            _raise_lost(part)
        out[begin : begin + len(chunk)] = chunk.mul_(factors)


def _to_float32(values: Tensor) -> Tensor:
    if values.dtype != torch.int8:
        return values.to(torch.float32)
    numbers, pairs = torch.tensor(FP4_NUMBERS), values.view(torch.uint8).long()
    return torch.stack([numbers[pairs & 0xF], numbers[pairs >> 4]], dim=-1).flatten(-2)


def _element_bytes(weight: StoredWeight) -> int:
    part = weight.values
    return max(1, (part.end - part.begin) // max(1, prod(part.shape)))


def _read_packed(weight: StoredWeight, slices: Slices, begin: int, end: int) -> Tensor:
    """Return some bytes of a packed weight, whatever the type is in which they are stored."""
    size = _element_bytes(weight)
    elements: Tensor = slices[""][begin // size : ceil(end / size)]
    stored = elements.contiguous().view(torch.uint8).flatten()
    return stored[begin % size :][: end - begin]


class BitsandbytesDequantizer(Dequantizer):
    """Four bits: levels by their number, times the factor of a block, which may itself be a level times a factor; or
    eight bits with a scale for each row."""

    def check(self, weight: StoredWeight) -> None:
        rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
        parts = weight.parts
        wanted = {SCALE: (rows,), "": weight.shape}
        if ABSMAX in parts:
            state = read_state(parts)
            count = rows * columns
            blocks = ceil(count / state["blocksize"])
            packed_bytes = _element_bytes(weight)  # bytes may be stored as the elements of another type
            wanted = {"": (ceil(count / 2 / packed_bytes), 1), ABSMAX: (blocks,), LEVELS: (16,)}
            if parts[ABSMAX].dtype == "U8":
                nested = ceil(blocks / (state.get("nested_blocksize") or blocks))
                wanted |= {NESTED_ABSMAX: (nested,), NESTED_LEVELS: (256,)}
        for ending, shape in wanted.items():
            if ending not in parts or prod(parts[ending].shape) != prod(shape):
                problem = f"has shape {list(parts[ending].shape)}" if ending in parts else "is missing"
                raise ModelError(
                    f"{weight.values.place}: its tensor {weight.name}{ending} {problem}, and a weight of "
                    f"{list(weight.shape)} needs {list(shape)}. Is the folder complete, its config.json its own?"
                )

    def read(self, weight: StoredWeight, slices: Slices, rows: range, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(rows), *weight.shape[1:], dtype=dtype)
        if ABSMAX not in weight.parts:
            scales = slices[SCALE][rows.start : rows.stop].float() / INT8_MOST
            _check_are_numbers(weight.parts[SCALE], scales)
            out.copy_(slices[""][rows.start : rows.stop].float().mul_(scales[:, None]))
            return out
        state, columns = read_state(weight.parts), weight.shape[1]
        levels, block = slices[LEVELS][...], state["blocksize"]
        step = max(1, CHUNK_ELEMENTS // columns)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            begin, end = first * columns, last * columns
            from_block, to_block = begin // block, ceil(end / block)
            packed = _read_packed(
                weight, slices, from_block * block // 2, ceil(min(to_block * block, prod(weight.shape)) / 2)
            )
            codes = torch.stack([packed >> 4, packed & 0xF], dim=-1).flatten().long()
            factors = self._read_factors(weight, slices, state, from_block, to_block)
            numbers = levels[codes] * factors.repeat_interleave(block)[: len(codes)]
            out[first - rows.start : last - rows.start] = numbers[begin - from_block * block :][: end - begin].view(
                -1, columns
            )
        return out

    @staticmethod
    def _read_factors(weight: StoredWeight, slices: Slices, state: Mapping[str, Any], begin: int, end: int) -> Tensor:
        """Return the factors of some blocks in float32."""
        stored: Tensor = slices[ABSMAX][begin:end]
        factors = stored.float()
        if stored.dtype == torch.uint8:
            nested = state.get("nested_blocksize") or len(stored)
            by_block = slices[NESTED_ABSMAX][...].float()[torch.arange(begin, end) // nested]
            factors = slices[NESTED_LEVELS][...].float()[stored.long()] * by_block
            factors += float(state.get("nested_offset", 0))
        _check_are_numbers(weight.parts[ABSMAX], factors)
        return factors


class Mxfp4Dequantizer(Dequantizer):
    """Stacks of experts in blocks of 32 FP4 numbers with a power of two, as gpt-oss is released."""

    def check(self, weight: StoredWeight) -> None:
        blocks, scales = weight.parts[BLOCKS], weight.parts[BLOCK_SCALES]
        if scales.shape != blocks.shape[:-1] or {blocks.dtype, scales.dtype} != {"U8"}:
            raise ModelError(
                f"{scales.place} has type {scales.dtype} and shape {list(scales.shape)}, which does not fit "
                f"{blocks.name} of type {blocks.dtype} and shape {list(blocks.shape)}. Is the folder complete?"
            )

    def read(self, weight: StoredWeight, slices: Slices, rows: range, dtype: torch.dtype) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        out = torch.empty(len(rows), *weight.shape[1:], dtype=dtype)
        for place, expert in enumerate(rows):
            blocks, scales = (slices[ending][expert : expert + 1] for ending in (BLOCKS, BLOCK_SCALES))
            _check_are_numbers(weight.parts[BLOCK_SCALES], torch.where(scales == E8M0_NAN, torch.nan, 1.0))
            out[place] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0]
        return out


class CompressedTensorsDequantizer(Dequantizer):
    """The formats of the package compressed-tensors, which reads them."""

    def __init__(self, quantization: Quantization) -> None:
        super().__init__(quantization)
        from compressed_tensors.quantization import QuantizationConfig

        groups = quantization.settings.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ModelError(
                f"{quantization.place}: its quantization_config has config_groups={shorten(groups)}, which says of no "
                "layer how it is stored. Take the config.json of the model's release."
            )
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        if any(isinstance(args, Mapping) and args.get("actorder") == "group" for args in weights):
            self._raise_reordered(quantization.place)
        with self._raise_misfits(f"{quantization.place}: its quantization_config"):
            self._config = QuantizationConfig.model_validate(dict(quantization.settings))

    def check(self, weight: StoredWeight) -> None:
        part, (args, _, _) = weight.parts[SCALE], self._find_scheme(weight)
        rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
        packed = weight.parts.get(PACKED)
        if packed is not None and packed.dtype == "I32":
            expected = (rows, ceil(columns * args.num_bits / INT32_BITS))
            if packed.shape != expected:
                raise ModelError(
                    f"{packed.place} has shape {list(packed.shape)}, and {args.num_bits} bits for each of {rows} x "
                    f"{columns} numbers take {list(expected)}. Is the folder complete, its config.json its own?"
                )
        block_rows, block_columns = args.block_structure or (1, 1)
        size = args.group_size if args.group_size and args.group_size > 0 else columns
        grids = {
            "tensor": (1, 1),
            "channel": (rows, 1),
            "group": (rows, ceil(columns / max(1, size))),
            "tensor_group": (rows, ceil(columns / max(1, size))),
            "block": (ceil(rows / block_rows), ceil(columns / block_columns)),
        }
        grid = (1, 1) if prod(part.shape) == 1 else (*part.shape, 1) if len(part.shape) == 1 else part.shape
        if grid != grids.get(args.strategy):
            raise ModelError(
                f"{part.place} has shape {list(part.shape)}, which does not fit {weight.values.name} of shape "
                f"{list(weight.shape)} with a scale for each {args.strategy}. Is the folder complete, its config.json "
                "its own?"
            )
        self._check_zero_points(weight, args)
        if (order := weight.parts.get(GROUP_INDEX)) is not None:
            numbers = order.read_integers()
            if numbers not in ([column // max(1, size) for column in range(columns)], [-1] * columns):
                self._raise_reordered(order.place)

    def _check_zero_points(self, weight: StoredWeight, args: Any) -> None:
        """Raise ModelError for zero points that are missing or of another shape than the scales."""
        scales, zeros = weight.parts[SCALE], weight.parts.get(ZERO_POINT)
        if zeros is None and not args.symmetric:
            raise ModelError(
                f"{weight.values.place}: its zero points ({weight.name}{ZERO_POINT}) are missing, and config.json says "
                "that its numbers are not symmetric. Is the folder complete, its config.json its own?"
            )
        is_single = zeros is not None and prod(zeros.shape) == prod(scales.shape) == 1
        if zeros is not None and zeros.shape != scales.shape and not is_single:
            packed = (ceil(weight.shape[0] * args.num_bits / INT32_BITS), *scales.shape[1:])
            if zeros.dtype != "I32" or zeros.shape != packed:
                raise ModelError(
                    f"{zeros.place} has shape {list(zeros.shape)}, and the scales beside it {list(scales.shape)}. Is "
                    "the folder complete, its config.json its own?"
                )

    @staticmethod
    def _raise_reordered(place: object) -> NoReturn:
        raise ModelError(
            f"{place}: weights are in the order of their activations (actorder: group, weight_g_idx), which "
            "compressed-tensors no longer reads. Take another release of the model, or a GPTQ model that was "
            "quantised with actorder: weight."
        )

    def read(self, weight: StoredWeight, slices: Slices, rows: range, dtype: torch.dtype) -> Tensor:
        args, scheme, compressor = self._find_scheme(weight)
        out = torch.empty(len(rows), *weight.shape[1:], dtype=dtype)
        aligned = lcm(PACKED_ROWS, (args.block_structure or (1, 1))[0])
        step = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]) // aligned) * aligned
        for begin in range(rows.start // aligned * aligned, rows.stop, step) if rows else ():
            end = min(begin + step, weight.shape[0])
            tensors = {f"weight{ending}": self._cut(weight, ending, slices, begin, end) for ending in weight.parts}
            with self._raise_misfits(f"{weight.values.place} (stored as {', '.join(sorted(tensors))})"):
                chunk: Tensor = compressor.decompress(tensors, scheme)["weight"]
                self._check_scales(weight, tensors, chunk, partial(compressor.decompress, scheme=scheme))
                first, last = max(begin, rows.start), min(end, rows.stop)
                out[first - rows.start : last - rows.start] = chunk[first - begin : last - begin]
        return out

    def _cut(self, weight: StoredWeight, ending: str, slices: Slices, begin: int, end: int) -> Tensor:
        """Return what a tensor of a weight holds for some of its rows, which begin and end with blocks."""
        part, (args, _, _) = weight.parts[ending], self._find_scheme(weight)
        if ending == SHAPE:
            return torch.tensor([end - begin, weight.shape[1]])
        is_scale = ending in (SCALE, ZERO_POINT)
        if prod(part.shape) == 1 or not (is_scale or ending in ("", PACKED)):
            return slices[ending][...]  # type: ignore[no-any-return]
        if ending == ZERO_POINT and part.dtype == "I32":  # packed by column
            return slices[ending][begin * args.num_bits // INT32_BITS : ceil(end * args.num_bits / INT32_BITS)]  # type: ignore[no-any-return]
        height = args.block_structure[0] if is_scale and args.block_structure else 1
        return slices[ending][begin // height : ceil(end / height)]  # type: ignore[no-any-return]

    def _check_scales(
        self, weight: StoredWeight, tensors: dict[str, Tensor], values: Tensor, decompress: Callable[..., Any]
    ) -> None:
        """Raise ModelError for scales that are no numbers, and for those of 0 that lose weights."""
        stored, part = tensors["weight_scale"], weight.parts[SCALE]
        scales = stored.float()
        _check_are_numbers(part, scales)
        if bool((scales == 0).any()):
            ones = torch.where(scales == 0, 1.0, scales).to(stored.dtype)
            numbers = decompress({**tensors, "weight_scale": ones})["weight"]
            if bool(((numbers != 0) & (values == 0)).any()):
                _raise_lost(part)

    def _find_scheme(self, weight: StoredWeight) -> tuple[Any, Any, Any]:
        """Return how a weight is quantised: its settings, the scheme of its group, and the package's reader."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.utils.match import is_match, match_name

        name, groups = weight.name.removesuffix(".weight"), list(self._config.config_groups.values())
        linear = nn.Linear(1, 1, device="meta")
        schemes = [
            *(group for group in groups if any(match_name(name, target) for target in group.targets)),
            *(group for group in groups if is_match(name, linear, group.targets)),
            *(groups if len(groups) == 1 else ()),
        ]
        if not schemes or schemes[0].weights is None:
            raise ModelError(
                f"{self._quantization.place}: no group of its quantization_config says how {weight.values.name} is "
                f"stored ({weight.values.file})."
            )
        stored = getattr(schemes[0].format, "value", schemes[0].format) or self._quantization.settings.get("format")
        if stored not in BaseCompressor.registered_names():
            raise ModelError(
                f"{self._quantization.place}: its quantization_config has format={shorten(stored)}; "
                f"compressed-tensors reads {', '.join(BaseCompressor.registered_names())}. Take another release of the "
                "model."
            )
        return schemes[0].weights, schemes[0], BaseCompressor.get_value_from_registry(stored)

    @contextmanager
    def _raise_misfits(self, place: str) -> Iterator[None]:
        try:
            yield
        except ModelError:
            raise
        except MISFITS as error:
            reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split())[:300])))
            raise ModelError(
                f"{place} cannot be read by compressed-tensors as {self._quantization.describe()}: {reason}. Do the "
                "weights and config.json belong to one release?"
            ) from error


DEQUANTIZERS: Mapping[str, type[Dequantizer]] = {
    "fp8": Fp8Dequantizer,
    "mxfp8": Fp8Dequantizer,
    "mxfp4": Mxfp4Dequantizer,
    "bitsandbytes": BitsandbytesDequantizer,
    "compressed-tensors": CompressedTensorsDequantizer,
}
"""Readers by quant_method, one for each of `released.METHODS`."""
