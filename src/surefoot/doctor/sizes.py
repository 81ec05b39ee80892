"""How large a model is, from the headers of its files. Reads no weights and imports no torch."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from surefoot.models.sources import weight_files

MOST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class Weights:
    """What the safetensors files of a folder hold."""

    parameters: int
    bytes: int


def weights_of(folder: Path) -> Weights | None:
    """None where there are no safetensors files, or none that can be read: loading says more about that."""
    parameters = total_bytes = 0
    files = weight_files(folder)
    for path in files:
        try:
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MOST_HEADER_BYTES:
                    return None
                header = json.loads(file.read(length))
            for name, about in header.items():
                if name != "__metadata__":
                    parameters += prod(about["shape"])
                    begin, end = about["data_offsets"]
                    total_bytes += end - begin
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return None
    return Weights(parameters, total_bytes) if files else None
