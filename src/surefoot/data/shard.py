"""Shards: prepared samples on disk, one file per chunk of rows, written atomically and read through a memory map.

A shard is a safetensors file. Its samples are stored uncut, with all spans, so the same shard serves any `max_length`,
`truncation` and `train_on`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from surefoot.data.images import BadImage, Image, has_changed, image_of, stamp_now
from surefoot.data.render import Rendered
from surefoot.system.atomic_io import write_bytes
from surefoot.system.safetensors_header import read_header


@dataclass(frozen=True)
class ShardRow:
    """A sample with its place."""

    number: int
    """Number of its row in the chunk."""
    line: int
    """Line of the row in the file."""
    sample: Rendered
    columns: Mapping[str, Any]
    """Columns to keep with it."""


@dataclass
class ShardWriter:
    """A writer that collects the samples of one chunk, then writes its shard."""

    rows: list[ShardRow] = field(default_factory=list)
    problems: list[tuple[int, int, str]] = field(default_factory=list)
    lost_images: list[list[tuple[str, tuple[int, int] | None]]] = field(default_factory=list)
    """Files that were tried, with their stamps at that time, for each row that lacks an image."""

    def refuse(self, row: int, line: int, reason: str, *, lost: BadImage | None = None) -> None:
        """Add a row that is no sample; `lost`: it may become one when its image can be read."""
        if lost is not None:
            self.lost_images.append([(path, stamp_now(path)) for path in lost.looked_for])
        # A reason may quote invalid text, which can be neither stored nor shown.
        self.problems.append((row, line, reason.encode("utf-8", "backslashreplace").decode()))

    def write(self, path: Path) -> None:
        """Write the shard. Raises: StorageError if writing fails."""
        samples = [row.sample for row in self.rows]
        spans = [span for sample in samples for span in sample.spans]
        ids = np.concatenate([np.zeros(0, np.int32), *(sample.ids for sample in samples)])
        tensors: dict[str, NDArray[Any]] = {
            "ids": ids,
            "offsets": np.cumsum([0, *(len(sample.ids) for sample in samples)], dtype=np.int64),
            "spans": np.array([(span.begin, span.end) for span in spans], np.int32).reshape(-1, 2),
            "weights": np.array([np.nan if span.weight is None else span.weight for span in spans], np.float32),
            "span_offsets": np.cumsum([0, *(len(sample.spans) for sample in samples)], dtype=np.int64),
            "rows": np.array([row.number for row in self.rows], np.int32),
            "lines": np.array([row.line for row in self.rows], np.int64),
            "digests": np.array([sample.digest for sample in samples], np.uint64),
            "flags": np.array([sample.flags for sample in samples], np.uint8),
            "image_counts": np.array([len(sample.images) for sample in samples], np.int32),
        }
        if any(sample.parts is not None for sample in samples):
            tensors["parts"] = np.array([sample.parts for sample in samples], np.int32)
        columns = [row.columns for row in self.rows]
        images = [[asdict(image) for image in sample.images] for sample in samples]
        metadata = {
            "problems": json.dumps(self.problems, ensure_ascii=False),
            # In ASCII, because a column may hold half a surrogate pair, which is invalid text.
            "columns": json.dumps(columns if any(columns) else [], default=str),
            "images": json.dumps(images if any(images) else [], ensure_ascii=False),
            "lost_images": json.dumps(self.lost_images),
            "max_id": str(int(ids.max(initial=-1))),
        }
        write_bytes(path, save(tensors, metadata))


class Shard:
    """A written shard. Shapes: S samples, T tokens, P spans."""

    ids: NDArray[np.int32]
    """[T]"""
    offsets: NDArray[np.int64]
    """[S + 1]: sample i is `ids[offsets[i] : offsets[i + 1]]`."""
    spans: NDArray[np.int32]
    """[P, 2]: trained token positions, from the sample's first token."""
    weights: NDArray[np.float32]
    """[P]: weights set by the rows; NaN where a row sets none."""
    span_offsets: NDArray[np.int64]
    """[S + 1]: spans of sample i."""
    rows: NDArray[np.int32]
    """[S]: number of the row in its chunk."""
    lines: NDArray[np.int64]
    """[S]: line of the row in the file."""
    digests: NDArray[np.uint64]
    """[S]: equal for samples that train the same."""
    flags: NDArray[np.uint8]
    """[S]: bits of `Oddity`."""
    image_counts: NDArray[np.int32]
    """[S]: images of each sample."""
    parts: NDArray[np.int32] | None = None
    """[S, 3]: tokens of the question and the two answers of each pair; None if rows are no pairs."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._metadata: Mapping[str, str] = header.metadata
        has_data = path.stat().st_size > header.num_bytes
        data = np.memmap(path, np.uint8, "r", offset=header.num_bytes) if has_data else b""
        types = {"I32": np.int32, "I64": np.int64, "F32": np.float32, "U64": np.uint64, "U8": np.uint8}
        for name, stored in header.tensors.items():
            array = np.frombuffer(data[stored.begin : stored.end], types[stored.dtype]).reshape(stored.shape)
            setattr(self, name, array)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def max_id(self) -> int:
        """Largest token id; -1 without samples."""
        return int(self._metadata["max_id"])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """[S]: tokens of each sample."""
        return np.diff(self.offsets)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[S]: tokens of the longest sequence of each sample: the sample, or the question with its longer answer."""
        return self.sizes if self.parts is None else self.parts[:, 0] + self.parts[:, 1:].max(1).astype(np.int64)

    @cached_property
    def problems(self) -> Sequence[tuple[int, int, str]]:
        """(row in the chunk, line, reason) of the rows that are no samples."""
        return [(row, line, reason) for row, line, reason in json.loads(self._metadata["problems"])]

    def find_piece(self, number: int) -> tuple[int, int]:
        """Return (index of a sample, which of its pieces) for the number of a piece: index + piece * S."""
        piece, index = divmod(number, len(self))
        return index, piece

    def columns(self, sample: int) -> Mapping[str, Any]:
        """Return the columns kept with a sample."""
        return self._columns[sample] if self._columns else {}

    @cached_property
    def _columns(self) -> Sequence[Mapping[str, Any]]:
        columns: list[Mapping[str, Any]] = json.loads(self._metadata["columns"])
        return columns

    @cached_property
    def digest(self) -> str:
        """Hash that is equal for shards with the same samples."""
        hashed = blake2b(self.digests.tobytes(), digest_size=8)
        hashed.update(self.rows.tobytes())
        return hashed.hexdigest()

    @property
    def has_changed_images(self) -> bool:
        """Whether images of its samples have changed since the shard was written."""
        return any(has_changed(image) for sample in range(len(self)) for image in self.images(sample))

    @property
    def may_find_images(self) -> bool:
        """Whether images that could not be read when the shard was written have changed since."""
        return any(
            not tried or any(stamp_now(path) != (tuple(stamp) if stamp else None) for path, stamp in tried)
            for tried in json.loads(self._metadata["lost_images"])
        )

    def images(self, sample: int) -> tuple[Image, ...]:
        """Return the images of a sample, in order."""
        return tuple(image_of(image) for image in self._images[sample]) if self._images else ()

    @cached_property
    def _images(self) -> Sequence[Sequence[Mapping[str, Any]]]:
        images: list[list[Mapping[str, Any]]] = json.loads(self._metadata["images"])
        return images
