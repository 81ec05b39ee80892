"""Tensors on disk as the blocks that ranks hold, which can be read back as any other blocks.

    rank-00000.safetensors   the blocks of one rank; its header gives for each the tensor and the part of it

Names and shapes are those of the full tensors, so nothing here depends on how many ranks wrote or read. A block that
several ranks hold is written by one of them.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surefoot.errors import CheckpointError
from surefoot.models.dtensor_blocks import LocalShard
from surefoot.system.json_files import is_count

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
}  # fmt: skip
"""Types of weights and of optimizer state, by safetensors' names."""
MAX_SIZE = 2**62


@dataclass(frozen=True)
class _StoredBlock:
    """One block of a file."""

    file: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def select_owned_blocks(blocks: Mapping[str, LocalShard], *, is_first: bool) -> dict[str, LocalShard]:
    """Return the blocks that this rank writes. `is_first`: it also writes the blocks that every rank has in full."""
    return {
        name: block
        for name, block in blocks.items()
        if block.is_first_copy and block.local.numel() and (is_first or not block.is_everywhere)
    }


def write_blocks(path: Path, blocks: Mapping[str, LocalShard]) -> None:
    """Write these blocks to one file."""
    about = {name: [list(block.offset), list(block.shape)] for name, block in blocks.items()}
    tensors = {name: block.local.contiguous() for name, block in blocks.items()}
    save_file(tensors, path, metadata={"format": "pt", "blocks": json.dumps(about)})


@contextmanager
def _raise_checkpoint_errors(path: Path) -> Iterator[None]:
    """Raise CheckpointError, with the file, for errors of reading a damaged one."""
    try:
        yield
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: could not be read: {error}") from error


class ShardedTensors:
    """Tensors of a folder that `write_blocks` filled.

    Raises: CheckpointError if a file cannot be read or describes its blocks wrongly.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blocks: dict[str, list[_StoredBlock]] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            with _raise_checkpoint_errors(path), safe_open(path, framework="pt") as file:
                self._add(path, file)

    def _add(self, path: Path, file: Any) -> None:
        """Add the blocks of one file. Raises: ValueError and others, see `_raise_checkpoint_errors`."""
        about = json.loads((file.metadata() or {})["blocks"])
        names = set(file.keys())
        if not isinstance(about, dict) or about.keys() != names:
            raise ValueError("its header does not describe the tensors that it holds")
        for name, (offset, shape) in about.items():
            part = file.get_slice(name)
            size, dtype = tuple(part.get_shape()), part.get_dtype()
            if not _is_within(offset, size, shape):
                raise ValueError(f"{name} is of shape {size}, and cannot be at {offset} of a tensor of shape {shape}")
            if dtype not in DTYPES:
                raise ValueError(f"{name} is of type {dtype}, which no weight or state has")
            full_spec = torch.Size(shape), DTYPES[dtype]
            if (self.shapes.setdefault(name, full_spec[0]), self.dtypes.setdefault(name, full_spec[1])) != full_spec:
                raise ValueError(f"{name} has another shape or type here than in another file")
            self._blocks.setdefault(name, []).append(_StoredBlock(path, tuple(offset), size))

    def check_whole(self) -> None:
        """Raise CheckpointError unless the blocks of each tensor, split along its first dimension, cover all of it."""
        for name, shape in self.shapes.items():
            end = 0
            for stored in sorted(self._blocks[name], key=lambda stored: stored.offset):
                begins_at = stored.offset[0] if shape else end
                if begins_at != end or stored.shape[1:] != tuple(shape[1:]):
                    break
                end += stored.shape[0] if shape else 1
            if end != (shape[0] if shape else 1):
                raise CheckpointError(
                    f"{self._folder}: the blocks of {name} do not make up a tensor of {tuple(shape)}."
                )

    def check(self, expected_specs: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Raise CheckpointError unless names, shapes and types are exactly the expected ones."""
        own = {name: (shape, self.dtypes[name]) for name, shape in self.shapes.items()}
        different = sorted(name for name in {**own, **expected_specs} if own.get(name) != expected_specs.get(name))
        if different:
            name = different[0]
            stored, expected = (
                f"{tuple(t[name][0])} {t[name][1]}" if name in t else "absent" for t in (own, expected_specs)
            )
            raise CheckpointError(
                f"{self._folder}: {len(different)} tensors do not fit this run; {name} is {stored} there and "
                f"{expected} here. The checkpoint belongs to another model or LoRA setting."
            )

    def fill(self, name: str, block: LocalShard) -> None:
        """Read the data that a block needs, and no more. Raises: CheckpointError if parts of it are in no file."""
        num_read = 0
        for stored in self._blocks.get(name, ()):
            both = [
                (max(a, b), min(a + m, b + n))
                for a, m, b, n in zip(block.offset, block.local.shape, stored.offset, stored.shape, strict=True)
            ]
            if any(begin >= end for begin, end in both):
                continue
            source_slices = tuple(slice(b - o, e - o) for (b, e), o in zip(both, stored.offset, strict=True))
            here = tuple(slice(b - o, e - o) for (b, e), o in zip(both, block.offset, strict=True))
            with _raise_checkpoint_errors(stored.file), safe_open(stored.file, framework="pt") as file:
                piece = file.get_slice(name)[source_slices] if source_slices else file.get_tensor(name)
            block.local[here] = piece.to(block.local.dtype)
            num_read += piece.numel()
        if num_read != block.local.numel():
            raise CheckpointError(
                f"{self._folder}: {name} needs {block.local.numel()} elements, and the files hold {num_read} of them."
            )

    def read(self, name: str) -> Tensor:
        """Read a full tensor."""
        shape = self.shapes[name]
        full = torch.empty(shape, dtype=self.dtypes[name])
        self.fill(name, LocalShard(full, (0,) * len(shape), shape))
        return full


def _is_within(offset: Any, size: tuple[int, ...], shape: Any) -> bool:
    """Return whether a block of `size` at `offset` is a part of a tensor of `shape`."""
    for numbers in (offset, shape):
        if not isinstance(numbers, list) or not all(is_count(n) and n < MAX_SIZE for n in numbers):
            return False
    if not len(offset) == len(size) == len(shape):
        return False
    return all(begin + length <= full_length for begin, length, full_length in zip(offset, size, shape, strict=True))
