"""The header of a safetensors file: names, types, shapes and places of its tensors. Standard library only."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

MOST_HEADER_BYTES = 100 << 20
LFS_POINTER = b"version https://git-lfs"
"""Beginning of the text that Git leaves in place of a large file that it has not fetched."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file; `begin` and `end` are bytes from the beginning of the data."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """Header of a file."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    num_bytes: int
    """Length of the header; the data follow."""


def read_header(path: Path) -> Header:
    """Return the header of a file, and check that all data that it names are there. Raises: ValueError if not."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            if not start:
                raise ValueError("it is empty")
            if LFS_POINTER.startswith(start):
                raise ValueError("it is a pointer of Git LFS. `git lfs pull` in its folder fetches the file itself")
            length = int.from_bytes(start, "little")
            entries = json.loads(file.read(min(length, MOST_HEADER_BYTES)))
        metadata = entries.pop("__metadata__", None) or {}
        tensors = {
            name: StoredTensor(entry["dtype"], entry["shape"], *entry["data_offsets"])
            for name, entry in entries.items()
        }
        missing = 8 + length + max((tensor.end for tensor in tensors.values()), default=0) - path.stat().st_size
        prod(number for tensor in tensors.values() for number in tensor.shape)  # raises unless all are numbers
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    if missing > 0:
        raise ValueError(f"{path} ends {missing} bytes too early")
    return Header(tensors, metadata, 8 + length)
