"""Size of a model, from the headers of its files. Reads no weights and imports no torch."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from surefoot.models.resolve_model import weight_files
from surefoot.system.safetensors_header import read_header


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
        for name, tensor in read_header(path).tensors.items():
            parameters += prod(tensor.shape)
            total_bytes += tensor.end - tensor.begin
            if "expert" not in name:
                dense.append((tensor.shape[0] if tensor.shape else 1, prod(tensor.shape[1:])))
    return Weights(parameters, total_bytes, tuple(dense))
