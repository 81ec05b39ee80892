"""The cache of prepared data: which shards a file needs, and which exist.

    <cache>/data/scans/<path>.json         what a scan of the file found, valid while its size and mtime stay
    <cache>/data/<key>/00000000.safetensors ...  a shard per chunk of rows
                       complete.json       written once all shards exist
                       failure.json        why the last preparation failed, for processes that wait for it
                       lock                held by the process that prepares

The key is a hash over the file's content, its format, the tokenizer, the chat template and the settings of both, so a
stale shard cannot be read. Complete shards are renamed into place: a killed preparation resumes where it stopped,
and any process of any run that finds a shard may use it.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from surefoot.data.conversation import BadRow
from surefoot.data.file_readers import CHUNK_BYTES, CHUNK_ROWS, Chunk, ChunkReader, Scan, scan, stream_chunks
from surefoot.data.renderer_source import RendererSource
from surefoot.data.row_formats import FormatSpec, format_of
from surefoot.data.rows import MAX_ROW_BYTES, Row
from surefoot.data.shard import Shard
from surefoot.errors import DataError
from surefoot.system.atomic_io import cache_folder, storage_error, write_json

VERSION = 13
"""Version in every key: raised when the same input gives different shards."""
SETTLED_NS = 2_000_000_000
"""Age in nanoseconds below which a file may change again without a new mtime."""


@dataclass(frozen=True)
class FileRecipe:
    """A file with its format and the folder of its shards."""

    path: Path
    name: str
    """Name in places: `data.jsonl` of `data.jsonl:203`."""
    spec: FormatSpec
    folder: Path
    format: str
    """Format detected from the first row, before any worker reads the file."""
    stamp: tuple[int, int, int]
    """Size, mtime and inode of the file when its content was hashed."""
    keep_columns: bool = False

    def shard_path(self, index: int) -> Path:
        return self.folder / f"{index:08d}.safetensors"

    @staticmethod
    def parse(values: Mapping[str, Any]) -> "FileRecipe":
        """Return a recipe from its JSON values."""
        path, folder = Path(values["path"]), Path(values["folder"])
        spec, stamp = FormatSpec(**values["spec"]), tuple(values["stamp"])
        return FileRecipe(**{**values, "path": path, "folder": folder, "spec": spec, "stamp": stamp})


class CachedFile:
    """A file of a dataset in the cache, under one recipe. `has_images`: its rows may have images.

    Raises: DataError for a file that is missing, empty or broken as a whole.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        spec: FormatSpec,
        renderer_key: str,
        *,
        keep_columns: bool = False,
        has_images: bool = False,
    ) -> None:
        stamp = stamp_of(path)
        scanned = _scan_or_reuse(path, stamp)
        self.chunks = scanned.chunks
        rows = ChunkReader().rows(path, scanned.chunks[0]) if scanned.chunks else []
        format = _detect_format(path, name, spec, rows)
        limits = [CHUNK_ROWS, CHUNK_BYTES, MAX_ROW_BYTES]
        # Rows may name images by a path that begins there: equal files in two folders are two datasets then.
        image_folders = [str(path.parent.resolve()), str(Path.cwd())] if has_images else None
        settings = asdict(spec)
        del settings["pairs"]  # the format says it
        key = [VERSION, limits, scanned.sha256, path.suffixes, settings, format, renderer_key, keep_columns]
        key.append(image_folders)
        self.key = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        folder = cache_folder() / "data" / self.key
        self.recipe = FileRecipe(path, name, spec, folder, format, stamp, keep_columns)
        self.num_bytes = stamp[0]
        self._lock: int | None = None

    def drop_stale(self, shard_digests: Mapping[str, str]) -> None:
        """Delete shards whose images have changed or may have become readable, so that they are prepared again.

        `shard_digests`: digests by shard name that a resumed run has already read. Those shards keep their samples,
        even if images that they lack may have become readable.
        """

        def is_stale(shard: Shard, name: str) -> bool:
            return shard.has_changed_images or (shard_digests.get(name) != shard.digest and shard.may_find_images)

        cached = [chunk.index for chunk in self.chunks if self.has(chunk.index)]
        stale = [index for index in cached if is_stale(self.shard(index), self.name_of(index))]
        if stale and self.try_lock():
            (self.recipe.folder / "complete.json").unlink(missing_ok=True)
            for index in stale:
                self.recipe.shard_path(index).unlink(missing_ok=True)
            self.unlock()

    @property
    def is_complete(self) -> bool:
        return (self.recipe.folder / "complete.json").is_file()

    def has(self, index: int) -> bool:
        return self.recipe.shard_path(index).is_file()

    def count_cached_bytes(self) -> int:
        """Return how many bytes of the file have a shard already."""
        if self.is_complete:
            return self.num_bytes
        return sum(chunk.num_bytes for chunk in self.chunks if self.has(chunk.index))

    def name_of(self, index: int) -> str:
        """Return the name of a shard; it is the same for the same rows under the same recipe."""
        return f"{self.key}/{index}"

    def shard(self, index: int) -> Shard:
        return Shard(self.recipe.shard_path(index))

    def complete(self) -> None:
        """Record that all shards exist."""
        write_json(self.recipe.folder / "complete.json", {"name": self.recipe.name, "shards": len(self.chunks)})

    def note_failure(self, reason: str) -> None:
        """Record a failure for the processes that wait for this file's shards."""
        if not self.is_complete:
            write_json(self.recipe.folder / "failure.json", {"time_ns": time.time_ns(), "reason": reason})

    def failure_since(self, time_ns: int) -> str | None:
        """Return the reason of a failure that was recorded after `time_ns`."""
        try:
            failure = json.loads((self.recipe.folder / "failure.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return str(failure["reason"]) if failure["time_ns"] > time_ns else None

    def try_lock(self) -> bool:
        """Try to take the lock for preparing; `unlock` or the end of this process releases it."""
        try:
            self.recipe.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.recipe.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise storage_error(self.recipe.folder / "lock", error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._lock = descriptor
        for leftover in self.recipe.folder.glob(".*.tmp"):  # left by a killed worker
            leftover.unlink(missing_ok=True)
        return True

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Return size, mtime and inode, which show that a file changed. Raises: DataError if it is missing or empty."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"dataset {path} cannot be read: {error.strerror or error}.") from error
    if status.st_size == 0:
        raise DataError(f"dataset {path} is empty (0 bytes).")
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_format(path: Path, name: str, spec: FormatSpec) -> None:
    """Read the beginning of a file to detect its format. Raises: DataError if that is ambiguous or unknown."""
    stamp_of(path)
    _, rows = next(stream_chunks(path), (None, []))
    _detect_format(path, name, spec, rows)


def _detect_format(path: Path, name: str, spec: FormatSpec, rows: Sequence[Row]) -> str:
    """Detect the format of a file from the first valid one of its first rows.

    Raises: DataError if there is no such row, or if its format is ambiguous or unknown.
    """
    first = next((row for row in rows if row.problem is None), None)
    if first is not None:
        try:
            return format_of(spec, first.columns)
        except BadRow as error:
            reason = str(error).encode("utf-8", "backslashreplace").decode()  # it may quote invalid text
            raise DataError(f"{name}:{first.line}: {reason}.") from error
    if rows:
        raise DataError(f"{name}:{rows[0].line}: {rows[0].problem}.")
    raise DataError(f"dataset {path} holds no rows.")


def renderer_key(source: RendererSource) -> str:
    """Return a hash over everything that affects rendering and tokenising, library versions included."""
    values: dict[str, Any] = {**asdict(source), "versions": [transformers.__version__, tokenizers.__version__]}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _scan_or_reuse(path: Path, stamp: tuple[int, int, int]) -> Scan:
    """Scan a file, or return the scan of an earlier run while the file is unchanged.

    Raises: DataError where the file cannot be read or is broken as a whole.
    """
    try:
        scan_path = (
            cache_folder() / "data" / "scans" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
        )
        with suppress(OSError, ValueError, KeyError, TypeError):  # no valid saved scan: read the file
            saved = json.loads(scan_path.read_text("utf-8"))
            if saved["version"] == VERSION and saved["stamp"] == list(stamp):
                return Scan(saved["sha256"], tuple(Chunk(*chunk) for chunk in saved["chunks"]))
        scanned = scan(path)
    except OSError as error:
        raise DataError(f"dataset {path} cannot be read: {error.strerror or error}.") from error
    if time.time_ns() - stamp[1] > SETTLED_NS:
        chunks = [list(vars(chunk).values()) for chunk in scanned.chunks]
        write_json(scan_path, {"version": VERSION, "stamp": stamp, "sha256": scanned.sha256, "chunks": chunks})
    return scanned
