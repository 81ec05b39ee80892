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
    """None where there are no safetensors files. Raises: ValueError naming a file that is no whole one."""
    parameters = total_bytes = 0
    files = weight_files(folder)
    for path in files:
        try:
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, MOST_HEADER_BYTES)))
            ends = [0]
            for name, about in header.items():
                if name != "__metadata__":
                    parameters += prod(about["shape"])
                    begin, end = about["data_offsets"]
                    total_bytes += end - begin
                    ends.append(end)
            missing = 8 + length + max(ends) - path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
        if missing > 0:
            raise ValueError(f"{path} ends {missing} bytes too early")
    return Weights(parameters, total_bytes) if files else None
