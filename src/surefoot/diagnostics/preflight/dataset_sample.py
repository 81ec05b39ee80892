"""Doctor check of the first rows of a run's data: their format, and whether the model can read their images."""

from collections.abc import Iterator
from itertools import islice

from surefoot.config import LoadedConfig
from surefoot.data.build_dataset import VISION_MODEL_TYPES, sources_of
from surefoot.data.conversation import BadRow, Conversation
from surefoot.data.file_readers import stream_chunks
from surefoot.data.render import TEXT_ONLY
from surefoot.data.row_formats import Reader, format_of
from surefoot.data.sources import Source, is_of_hub
from surefoot.diagnostics.preflight.check import Check, fail, not_applicable, ok
from surefoot.errors import DataError, SurefootError
from surefoot.models.build import load_config
from surefoot.models.resolve_model import folder_here

NAME = "first rows"
ROWS_PER_FILE, FILES_PER_SOURCE = 200, 8
"""Rows read of each file, and files read of each source: quick to read, and enough to show systematic errors."""


def first_rows(loaded: LoadedConfig) -> Check:
    """Check that the first rows can be read, and count those with images. `surefoot data` reads all rows."""
    run = loaded.run
    folder = folder_here(run.model)
    if folder is None:
        return not_applicable(NAME, f"{run.model} is not here yet")
    if any(is_of_hub(item) for item in run.dataset):
        return not_applicable(NAME, "data of the hub are fetched when the run starts")
    try:
        is_vision_model, sources = load_config(folder).model_type in VISION_MODEL_TYPES, sources_of(loaded, "dataset")
    except SurefootError as error:
        return not_applicable(NAME, f"they cannot be looked at: {error}")
    skips_bad_rows, where = run.on_bad_row == "skip", loaded.where("dataset")
    try:
        images = [_count_images(conversation) for source in sources for conversation in _read_first_rows(source)]
    except BadRow as error:
        return fail(NAME, "SF743", str(error), is_fatal=not skips_bad_rows, where=where,
                     fix="Correct the row, or name its columns with `columns`. `surefoot data` lists all such rows; "
                     "on_bad_row: skip leaves them out.")  # fmt: skip
    except DataError as error:
        return fail(NAME, "SF743", str(error), is_fatal=True, where=where)
    if not images:
        return not_applicable(NAME, "of what the run reads, no row is at the beginning of a file")
    num_with_images, num_text_only = sum(count > 0 for count in images), sum(count == 0 for count in images)
    if not num_with_images:
        return ok(NAME, f"{num_text_only} read, all of them text")
    summary = f"{num_with_images} of {len(images)} have images"
    if not is_vision_model:
        return fail(NAME, "SF743", f"{summary}; {TEXT_ONLY}", is_fatal=not skips_bad_rows, where=where,
                     fix="Take a model that reads images, or rows without.")  # fmt: skip
    if not num_text_only:
        return ok(NAME, f"{summary}: all")
    return ok(
        NAME,
        f"{summary} and {num_text_only} are text: ranks that get text alone show the tower a blank image, so none "
        "waits",
    )


def _read_first_rows(source: Source) -> Iterator[Conversation]:
    """Yield the first rows of the first files.

    Raises: BadRow with its file and line; DataError for a file that cannot be read at all.
    """
    end = source.rows.end
    if source.rows.begin is not None or (end is not None and not end.isdecimal()):
        return  # a share of the rows: which rows the run reads depends on their total number
    files, max_rows = FILES_PER_SOURCE, ROWS_PER_FILE
    if end is not None:  # the limit is counted over all files
        files, max_rows = 1, min(ROWS_PER_FILE, int(end))
    for path, name in islice(zip(source.files, source.names, strict=True), files):
        reader: Reader | None = None
        for row in islice((row for _, rows in stream_chunks(path) for row in rows), max_rows):
            try:
                if row.problem is not None:
                    raise BadRow(row.problem)
                reader = reader or Reader(source.spec, format_of(source.spec, row.columns))
                yield reader.read(row.columns)
            except BadRow as error:
                raise BadRow(f"{name}:{row.line}: {error}") from error


def _count_images(conversation: Conversation) -> int:
    return sum(len(message.images) for message in conversation.messages)
