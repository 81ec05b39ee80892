"""Size of a model, from the headers of its files. Reads no weights and imports no torch."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from surefoot.models.quantization.released import find_quantization, find_weights
from surefoot.models.resolve_model import weight_files


@dataclass(frozen=True)
class Weights:
    """Contents of the safetensors files of a folder."""

    parameters: int
    bytes: int
    """Their bytes in the files."""
    dense_shapes: tuple[tuple[int, int], ...] = ()
    """(rows, elements of a row) of each tensor outside the experts, which are fused when they are read."""
    quantization: str | None = None
    """How they are quantised, if they are. Their numbers above are those of the weights that are read back."""

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

    Raises: ValueError naming a file that is incomplete. ModelError for quantised weights that cannot be read.
    """
    files = weight_files(folder)
    stamps = []
    for path in [*files, folder / "config.json"] if files else []:
        try:
            stat = path.stat()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        stamps.append((path, stat.st_size, stat.st_mtime_ns))
    return _read_weights(tuple(stamps)) if files else None


@lru_cache(maxsize=4)
def _read_weights(files: tuple[tuple[Path, int, int], ...]) -> Weights:
    """Read the weights of files and the config.json that comes last, each given as (path, bytes, modification time).

    Cached, because several checks ask and the headers of a large model take a second to read.
    """
    *paths, config = (path for path, _, _ in files)
    quantization = find_quantization(config)
    weights = find_weights(paths, quantization).values()
    return Weights(
        parameters=sum(prod(weight.shape) for weight in weights),
        bytes=sum(part.end - part.begin for weight in weights for part in weight.parts.values()),
        dense_shapes=tuple(
            (weight.shape[0] if weight.shape else 1, prod(weight.shape[1:]))
            for weight in weights
            if "expert" not in weight.name
        ),
        quantization=quantization.describe() if quantization is not None else None,
    )
