"""Writer of safetensors files, tensor by tensor, so that a model never has to be in one place in full."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
MOST_BYTES = 5_000_000_000
"""Largest size of one file of a model."""
TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class TensorFile:
    """A safetensors file that is being written: its tensors come in the order of the header."""

    def __init__(self, file: BinaryIO, specs: Mapping[str, Tensor]) -> None:
        """`specs`: tensors of the meta device with the name, type and shape of each tensor to come."""
        self._file, self._specs = file, specs
        self._expected = iter(specs)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, spec in specs.items():
            begin, end = end, end + spec.nbytes
            header[name] = {
                "dtype": TYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # to align the tensors
        file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, value: Tensor) -> None:
        """Append the tensor that the header names next."""
        expected = next(self._expected)
        spec = self._specs[expected]
        assert (name, value.shape, value.dtype) == (expected, spec.shape, spec.dtype), (name, expected)
        self._file.write(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def check_complete(self) -> None:
        missing = list(self._expected)
        assert not missing, missing


@contextmanager
def tensor_file(path: Path, specs: Mapping[str, Tensor]) -> Iterator[TensorFile]:
    """Write one safetensors file; see `TensorFile`."""
    with open(path, "wb") as file:
        writing = TensorFile(file, specs)
        yield writing
        writing.check_complete()


def write_files(folder: Path, groups: list[dict[str, Tensor]], read_group: Callable[[int], dict[str, Tensor]]) -> None:
    """Write the weights of a model and, if they need several files, their index.

    `groups`: names, types and shapes, as tensors of the meta device. `read_group` returns the tensors of one; the
    groups are read in order, and a tensor is freed when it is written.
    """
    places: dict[str, str] = {}
    for file_name, numbers in split_into_files(groups):
        header = {name: spec for number in numbers for name, spec in groups[number].items()}
        places |= dict.fromkeys(header, file_name)
        with tensor_file(folder / file_name, header) as file:
            for number in numbers:
                stored = read_group(number)
                while stored:
                    name = next(iter(stored))
                    file.write(name, stored.pop(name))
    if len(set(places.values())) > 1:
        total = sum(spec.nbytes for group in groups for spec in group.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def split_into_files(groups: list[dict[str, Tensor]]) -> list[tuple[str, list[int]]]:
    """Return file names for a model, each with the numbers of the groups of tensors that belong in it.

    A group is not split; a file has no more than `MOST_BYTES` unless one group does.
    """
    files: list[list[int]] = []
    room = 0
    for number, group in enumerate(groups):
        size = sum(spec.nbytes for spec in group.values())
        if not files or size > room:
            files.append([])
            room = MOST_BYTES
        files[-1].append(number)
        room -= size
    if len(files) == 1:
        return [("model.safetensors", files[0])]
    return [(f"model-{n:05d}-of-{len(files):05d}.safetensors", file) for n, file in enumerate(files, 1)]
