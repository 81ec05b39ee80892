"""The first rows of a run's data, as a check of the doctor: their format, and images that its model has to read."""

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
LOOKED_AT, FILES_LOOKED_AT = 200, 8
"""Rows of each file, and files of each source: read in a moment, and what is wrong with all of it shows in them."""


def first_rows(loaded: LoadedConfig) -> Check:
    """Whether the first rows can be read, and how many have images. `surefoot data` reads all of them."""
    run = loaded.run
    folder = folder_here(run.model)
    if folder is None:
        return not_applicable(NAME, f"{run.model} is not here yet")
    if any(is_of_hub(item) for item in run.dataset):
        return not_applicable(NAME, "data of the hub are fetched when the run starts")
    try:
        sees, sources = load_config(folder).model_type in VISION_MODEL_TYPES, sources_of(loaded, "dataset")
    except SurefootError as error:
        return not_applicable(NAME, f"they cannot be looked at: {error}")
    skips, where = run.on_bad_row == "skip", loaded.where("dataset")
    try:
        images = [_num_images(conversation) for source in sources for conversation in _first(source)]
    except BadRow as error:
        return fail(NAME, "SF743", str(error), is_fatal=not skips, where=where,
                     fix="Correct the row, or name its columns with `columns`. `surefoot data` lists all such rows; "
                     "on_bad_row: skip leaves them out.")  # fmt: skip
    except DataError as error:
        return fail(NAME, "SF743", str(error), is_fatal=True, where=where)
    if not images:
        return not_applicable(NAME, "of what the run reads, no row is at the beginning of a file")
    seeing, blind = sum(count > 0 for count in images), sum(count == 0 for count in images)
    if not seeing:
        return ok(NAME, f"{blind} read, all of them text")
    said = f"{seeing} of {len(images)} have images"
    if not sees:
        return fail(NAME, "SF743", f"{said}; {TEXT_ONLY}", is_fatal=not skips, where=where,
                     fix="Take a model that reads images, or rows without.")  # fmt: skip
    if not blind:
        return ok(NAME, f"{said}: all")
    return ok(
        NAME, f"{said} and {blind} are text: ranks that get text alone show the tower a blank image, so none waits"
    )


def _first(source: Source) -> Iterator[Conversation]:
    """Of its first files. Raises: BadRow with its place; DataError for a file that is broken as a whole."""
    end = source.rows.end
    if source.rows.begin is not None or (end is not None and not end.isdecimal()):
        return  # which rows are the run's, only their number would say
    files, most = FILES_LOOKED_AT, LOOKED_AT
    if end is not None:  # counted over all files
        files, most = 1, min(LOOKED_AT, int(end))
    for path, name in islice(zip(source.files, source.names, strict=True), files):
        reader: Reader | None = None
        for row in islice((row for _, rows in stream_chunks(path) for row in rows), most):
            try:
                if row.problem is not None:
                    raise BadRow(row.problem)
                reader = reader or Reader(source.spec, format_of(source.spec, row.columns))
                yield reader.read(row.columns)
            except BadRow as error:
                raise BadRow(f"{name}:{row.line}: {error}") from error


def _num_images(conversation: Conversation) -> int:
    return sum(len(message.images) for message in conversation.messages)
