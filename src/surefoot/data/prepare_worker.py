"""The worker process for data preparation: it turns chunks of rows into shards.

    python -m surefoot.data.prepare_worker JOBS,ANSWERS [JOBS,ANSWERS ...]

is started by `ForkedWorkers`. A worker writes the shards itself. No torch is imported here, unless the processor of a
model must measure images; it is then loaded before the fork. Nothing runs in threads.
"""

from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.data.cache import FileRecipe, stamp_of
from surefoot.data.conversation import BadRow
from surefoot.data.file_readers import Chunk, ChunkReader
from surefoot.data.images import BadImage, ImageSettings
from surefoot.data.pairs import join_sides
from surefoot.data.render import Renderer
from surefoot.data.renderer_source import RendererSource
from surefoot.data.row_formats import Reader
from surefoot.data.shard import ShardRow, ShardWriter
from surefoot.data.template import Text
from surefoot.data.template_process import TEMPLATE_PROCESS
from surefoot.data.template_source import TemplateSource
from surefoot.errors import DataError, SurefootError
from surefoot.system.forked_workers import Answer, fork_workers

BATCH_ROWS = 512
BATCH_CHARACTERS = 1 << 18
"""Number of characters tokenised together; bounds memory."""


class _Rendering(NamedTuple):
    """The texts of a row: one, or the two of a pair."""

    number: int
    line: int
    texts: list[Text]
    columns: Mapping[str, Any]
    is_desired: bool | None
    """Label of its only answer, if it has one."""


class Preparer:
    """A converter from chunks of files to shards."""

    def __init__(self, source: RendererSource) -> None:
        self._renderer = Renderer(source)
        self._image_token = source.images.token_id if source.images is not None else None
        self._readers: dict[Path, Reader] = {}
        self._chunks = ChunkReader()
        if source.images is not None and source.images.processor is not None:
            self._renderer.image_layout.load()

    def prepare(self, recipe: FileRecipe, chunk: Chunk) -> None:
        """Write the shard of a chunk. Raises: DataError for errors that no single row causes; StorageError."""
        try:
            rows = self._chunks.rows(recipe.path, chunk)
        except OSError as error:
            raise DataError(f"{recipe.name}: cannot be read: {error.strerror or error}.") from error
        if stamp_of(recipe.path) != recipe.stamp:  # the key is of the old content, and would hold the new one for ever
            raise DataError(f"{recipe.name} was changed while it was being prepared. Start again.")
        reader = self._readers.get(recipe.folder)
        if reader is None:
            reader = Reader(recipe.spec, recipe.format, keep_columns=recipe.keep_columns)
            self._readers[recipe.folder] = reader
        writer = ShardWriter()
        batch: list[_Rendering] = []
        characters = 0
        for number, row in enumerate(rows):
            try:
                if row.problem is not None:
                    raise BadRow(row.problem)
                conversation = reader.read(row.columns)
                texts = [self._renderer.render(side, recipe.path.parent) for side in conversation.sides]
            except BadRow as error:
                writer.refuse(number, row.line, str(error), lost=error if isinstance(error, BadImage) else None)
                continue
            except DataError as error:
                raise DataError(f"{recipe.name}:{row.line}: {error}") from error
            batch.append(_Rendering(number, row.line, texts, conversation.columns, conversation.is_desired))
            characters += sum(len(text.text) for text in texts)
            if len(batch) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
                self._flush(writer, batch)
                batch, characters = [], 0
        self._flush(writer, batch)
        writer.write(recipe.shard_path(chunk.index))

    def _flush(self, writer: ShardWriter, batch: list[_Rendering]) -> None:
        samples = self._renderer.tokenize([text for row in batch for text in row.texts])
        for row in batch:
            sample = join_sides(list(islice(samples, len(row.texts))), self._image_token, row.is_desired)
            if isinstance(sample, BadRow):
                writer.refuse(row.number, row.line, str(sample))
            else:
                writer.rows.append(ShardRow(row.number, row.line, sample, row.columns))


def _parse_source(values: Mapping[str, Any]) -> RendererSource:
    template = values["template"]
    template |= {name: tuple(template[name]) for name in ("controls", "generation_ends")}
    images = ImageSettings(**values["images"]) if values["images"] is not None else None
    return RendererSource(**{**values, "template": TemplateSource(**template), "images": images})


def main() -> None:
    """Load the tokenizer and work; see `fork_workers`."""
    fork_workers(_load)


def _load(setup: Mapping[str, Any]) -> Answer:
    preparer = Preparer(_parse_source(setup))
    TEMPLATE_PROCESS.is_worker = True
    return partial(_run_job, preparer)


def _run_job(preparer: Preparer, job: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the chunk of a job. Return the class and the text of an error, if one ends the preparation."""
    try:
        preparer.prepare(FileRecipe.parse(job["recipe"]), Chunk(**job["chunk"]))
    except SurefootError as error:
        return {"error": [type(error).__name__, str(error)]}
    return {}


if __name__ == "__main__":
    main()
