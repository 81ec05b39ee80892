"""Tensors on disk as the blocks that ranks hold, read back as any other blocks.

    rank-00000.safetensors   the blocks of one rank; its header says of each which part of which tensor it is

Names and shapes are those of the whole tensors, so nothing here depends on how many ranks wrote or read. A block that
several ranks hold is written by one of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surefoot.errors import CheckpointError
from surefoot.models.placement import Block


@dataclass(frozen=True)
class _Stored:
    """One block of a file."""

    file: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def of_this_rank(blocks: Mapping[str, Block], *, is_first: bool) -> dict[str, Block]:
    """Those that it writes. `is_first`: this rank also writes what every rank has all of."""
    return {
        name: block
        for name, block in blocks.items()
        if block.is_first_copy and block.local.numel() and (is_first or not block.is_everywhere)
    }


def write_pieces(path: Path, blocks: Mapping[str, Block]) -> None:
    """Write these blocks to one file."""
    about = {name: [list(block.offset), list(block.shape)] for name, block in blocks.items()}
    tensors = {name: block.local.contiguous() for name, block in blocks.items()}
    save_file(tensors, path, metadata={"format": "pt", "blocks": json.dumps(about)})


class Pieces:
    """The tensors of a folder that `write_pieces` filled.

    Raises: CheckpointError where a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blocks: dict[str, list[_Stored]] = {}
        self.shapes: dict[str, torch.Size] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    about = json.loads(file.metadata()["blocks"])
                    for name, (offset, shape) in about.items():
                        size = tuple(file.get_slice(name).get_shape())
                        self._blocks.setdefault(name, []).append(_Stored(path, tuple(offset), size))
                        self.shapes[name] = torch.Size(shape)
            except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
                raise CheckpointError(f"{path}: could not be read: {error}") from error

    def check(self, wanted: Mapping[str, torch.Size]) -> None:
        """Raise CheckpointError where names or shapes are not exactly the wanted ones."""
        names = self.shapes.keys() | wanted.keys()
        different = sorted(name for name in names if self.shapes.get(name) != wanted.get(name))
        if different:
            name = different[0]
            there, here = (tuple(s[name]) if name in s else "absent" for s in (self.shapes, wanted))
            raise CheckpointError(
                f"{self._folder}: {len(different)} tensors do not fit this run; {name} is {there} there and {here} "
                "here. The checkpoint belongs to another model or LoRA setting."
            )

    def fill(self, name: str, block: Block) -> None:
        """Read what a block needs, and no more. Raises: CheckpointError where parts of it are on no file."""
        found = 0
        for stored in self._blocks.get(name, ()):
            both = [
                (max(a, b), min(a + m, b + n))
                for a, m, b, n in zip(block.offset, block.local.shape, stored.offset, stored.shape, strict=True)
            ]
            if any(begin >= end for begin, end in both):
                continue
            there = tuple(slice(b - o, e - o) for (b, e), o in zip(both, stored.offset, strict=True))
            here = tuple(slice(b - o, e - o) for (b, e), o in zip(both, block.offset, strict=True))
            with safe_open(stored.file, framework="pt") as file:
                piece = file.get_slice(name)[there] if there else file.get_tensor(name)
            block.local[here] = piece.to(block.local.dtype)
            found += piece.numel()
        if found != block.local.numel():
            raise CheckpointError(
                f"{self._folder}: of {name} {block.local.numel()} elements are needed and {found} are there."
            )

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        shape = self.shapes[name]
        with safe_open(self._blocks[name][0].file, framework="pt") as file:
            dtype = file.get_tensor(name).dtype
        whole = torch.empty(shape, dtype=dtype)
        self.fill(name, Block(whole, (0,) * len(shape), shape))
        return whole
