"""Size of a model, from the headers of its files. Reads no weights and imports no torch."""

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from surefoot.models.resolve_model import weight_files

MOST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class Weights:
    """Contents of the safetensors files of a folder."""

    parameters: int
    bytes: int
    dense_shapes: tuple[tuple[int, int], ...] = ()
    """(rows, elements of a row) of each tensor outside the experts, which are fused when they are read."""

    def rounding_bytes(self, parts: int, each_bytes: int) -> int:
        """Return how many bytes of pinned memory one part of `parts` takes beyond its size."""
        sizes = [-(-rows // parts) * row * each_bytes for rows, row in self.dense_shapes]
        return sum(pinned_bytes(size) - size for size in sizes)


def pinned_bytes(size_bytes: int) -> int:
    """Return the bytes that a block of pinned memory takes: torch rounds each up to a power of two.

    Source: ATen/core/CachingHostAllocator.h.
    """
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def weights_of(folder: Path) -> Weights | None:
    """Return the weights of a folder, or None if it has no safetensors files.

    Raises: ValueError naming a file that is incomplete.
    """
    files = weight_files(folder)
    stamps = []
    for path in files:
        try:
            stat = path.stat()
        except OSError as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
        stamps.append((path, stat.st_size, stat.st_mtime_ns))
    return _read_weights(tuple(stamps)) if files else None


@lru_cache(maxsize=4)
def _read_weights(files: tuple[tuple[Path, int, int], ...]) -> Weights:
    """Read the weights of files, each given as (path, bytes, modification time).

    Cached, because several checks ask and the headers of a large model take a second to read.
    """
    parameters = total_bytes = 0
    dense = []
    for path, _, _ in files:
        for name, shape, begin, end in read_header(path):
            parameters += prod(shape)
            total_bytes += end - begin
            if "expert" not in name:
                dense.append((shape[0] if shape else 1, prod(shape[1:])))
    return Weights(parameters, total_bytes, tuple(dense))


def read_header(path: Path) -> list[tuple[str, list[int], int, int]]:
    """Return (name, shape, begin, end) of each tensor, in bytes of the data.

    Raises: ValueError for a file that is not a complete safetensors file.
    """
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(length, MOST_HEADER_BYTES)))
        entries.pop("__metadata__", None)
        tensors = [(name, entry["shape"], *entry["data_offsets"]) for name, entry in entries.items()]
        missing = 8 + length + max((end for *_, end in tensors), default=0) - path.stat().st_size
        prod(number for _, shape, *_ in tensors for number in shape)  # raises unless all are numbers
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    if missing > 0:
        raise ValueError(f"{path} ends {missing} bytes too early")
    return tensors
