"""The worker process for data preparation: it turns chunks of rows into shards.

    python -m surefoot.data.prepare_worker JOBS,ANSWERS [JOBS,ANSWERS ...]

loads the tokenizer once, then forks a worker for each pair of open file descriptors; the workers share its memory. A
worker reads jobs, one JSON object a line, writes the shards itself, and answers each job with a line. It ends when the
jobs end, so it never outlives the process that started it. No torch is imported here, and nothing runs in threads.
"""

import ctypes
import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.data.conversation import BadRow, Conversation
from surefoot.data.file_readers import Chunk, ChunkReader
from surefoot.data.images import BadImage, ImageSettings
from surefoot.data.render import Renderer, RendererSource
from surefoot.data.row_formats import FormatSpec, Reader, format_of
from surefoot.data.rows import Row
from surefoot.data.shard import ShardWriter
from surefoot.data.template import TemplateSource, Text
from surefoot.data.template_process import TEMPLATE_PROCESS
from surefoot.errors import DataError, SurefootError

BATCH_ROWS = 512
BATCH_CHARACTERS = 1 << 18
"""Number of characters tokenised together; bounds memory."""


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

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values, for worker processes."""
        return {
            "path": str(self.path),
            "name": self.name,
            "spec": self.spec.as_dict(),
            "folder": str(self.folder),
            "format": self.format,
            "stamp": self.stamp,
            "keep_columns": self.keep_columns,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "FileRecipe":
        return FileRecipe(
            Path(values["path"]),
            values["name"],
            FormatSpec(**values["spec"]),
            Path(values["folder"]),
            values["format"],
            tuple(values["stamp"]),
            values["keep_columns"],
        )


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Return size, mtime and inode, which show that a file changed. Raises: DataError if it is missing."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"dataset {path} cannot be read: {error.strerror or error}.") from error
    return status.st_size, status.st_mtime_ns, status.st_ino


def detect_format(path: Path, name: str, spec: FormatSpec, chunks: Sequence[Chunk]) -> str:
    """Detect the format of a file from its first valid row.

    Raises: DataError if there is no such row, or if its format is ambiguous or unknown.
    """
    rows = ChunkReader().rows(path, chunks[0]) if chunks else []
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


class Preparer:
    """A converter from chunks of files to shards."""

    def __init__(self, source: RendererSource) -> None:
        self._renderer = Renderer(source)
        self._readers: dict[Path, Reader] = {}
        self._chunks = ChunkReader()

    def prepare(self, recipe: FileRecipe, chunk: Chunk) -> None:
        """Write the shard of a chunk. Raises: DataError for errors that no single row causes; StorageError."""
        try:
            rows = self._chunks.rows(recipe.path, chunk)
        except OSError as error:
            raise DataError(f"{recipe.name}: cannot be read: {error.strerror or error}.") from error
        if (
            stamp_of(recipe.path) != recipe.stamp
        ):  # the key is of the old content, and its shard would be found for ever
            raise DataError(f"{recipe.name} was changed while it was being prepared. Start again.")
        reader = self._readers.get(recipe.folder)
        if reader is None:
            reader = Reader(recipe.spec, recipe.format, keep_columns=recipe.keep_columns)
            self._readers[recipe.folder] = reader
        writer = ShardWriter()
        batch: list[tuple[int, Row, Text, Conversation]] = []
        characters = 0
        for number, row in enumerate(rows):
            try:
                if row.problem is not None:
                    raise BadRow(row.problem)
                conversation = reader.read(row.columns)
                text = self._renderer.render(conversation, recipe.path.parent)
            except BadRow as error:
                writer.refuse(number, row.line, str(error), lost=error if isinstance(error, BadImage) else None)
                continue
            except DataError as error:
                raise DataError(f"{recipe.name}:{row.line}: {error}") from error
            batch.append((number, row, text, conversation))
            characters += len(text.text)
            if len(batch) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
                self._flush(writer, batch)
                batch, characters = [], 0
        self._flush(writer, batch)
        writer.write(recipe.shard_path(chunk.index))

    def _flush(self, writer: ShardWriter, batch: list[tuple[int, Row, Text, Conversation]]) -> None:
        samples = self._renderer.tokenize([text for _, _, text, _ in batch])
        for (number, row, _, conversation), sample in zip(batch, samples, strict=True):
            if isinstance(sample, BadRow):
                writer.refuse(number, row.line, str(sample))
            else:
                writer.add(number, row.line, sample, conversation.columns)


def source_as_dict(source: RendererSource) -> dict[str, Any]:
    """Return a tokenizer and template as JSON values."""
    return asdict(source)


def source_from_dict(values: Mapping[str, Any]) -> RendererSource:
    template = {**values["template"], "controls": tuple(values["template"]["controls"])}
    images = ImageSettings(**values["images"]) if values["images"] is not None else None
    return RendererSource(
        TemplateSource(**template), values["tokenizer_sha256"], values["bos_id"], images, values["no_vision_reason"]
    )


def main() -> None:
    """Load the tokenizer, fork the workers, and report the exit status of those that failed."""
    pairs = [(int(jobs), int(answers)) for jobs, answers in (pair.split(",") for pair in sys.argv[1:])]
    preparer = Preparer(source_from_dict(json.loads(sys.stdin.readline())))
    _free_memory()
    workers: dict[int, int] = {}
    for number, (jobs, answers) in enumerate(pairs):
        process = os.fork()
        if process == 0:
            for descriptor in {descriptor for pair in pairs[number:] for descriptor in pair} - {jobs, answers}:
                os.close(descriptor)
            with suppress(BrokenPipeError):  # the parent has ended
                _process_jobs(preparer, jobs, answers)
            os._exit(0)
        os.close(jobs)
        os.close(answers)
        workers[process] = number
    while workers:
        process, status = os.wait()
        number = workers.pop(process)
        if status:
            with suppress(BrokenPipeError):
                print(json.dumps({"worker": number, "status": os.waitstatus_to_exitcode(status)}), flush=True)


def _free_memory() -> None:
    """Free memory before forking: loading a tokenizer takes twice the memory that it needs afterwards."""
    gc.collect()
    gc.freeze()  # collections in the workers would touch, and so copy, shared memory
    with suppress(OSError, AttributeError):  # no GNU C library
        ctypes.CDLL(None).malloc_trim(0)


def _process_jobs(preparer: Preparer, jobs: int, answers: int) -> None:
    """Process jobs until there are no more."""
    TEMPLATE_PROCESS.is_worker = True
    with open(jobs, encoding="utf-8") as lines, open(answers, "w", encoding="utf-8") as out:
        for line in lines:
            job = json.loads(line)
            chunk = Chunk(**job["chunk"])
            answer: dict[str, Any] = {"file": job["file"], "index": chunk.index}
            try:
                preparer.prepare(FileRecipe.from_dict(job["recipe"]), chunk)
            except SurefootError as error:
                answer["error"] = [type(error).__name__, str(error)]
            out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
