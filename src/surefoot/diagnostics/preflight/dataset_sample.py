"""Doctor check of the first rows of a run's data: their format, their rendering, and whether the model reads images."""

import re
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surefoot.config import LoadedConfig, RunConfig
from surefoot.data.build_dataset import open_images
from surefoot.data.conversation import BadRow, Conversation
from surefoot.data.file_readers import stream_chunks
from surefoot.data.images import ImageSettings, find_picture
from surefoot.data.model_processor import vision_class
from surefoot.data.render import check_vocabulary
from surefoot.data.renderer_source import TEXT_ONLY, RendererSource
from surefoot.data.row_formats import Reader, format_of
from surefoot.data.sources import Source, is_of_hub, sources_of
from surefoot.data.template import ChatTemplate
from surefoot.diagnostics.preflight.check import Check, NotApplicable, Result, fail, ok, run_check
from surefoot.errors import DataError, SurefootError
from surefoot.models.build import load_config, load_tokenizer
from surefoot.models.pretrained import read_template
from surefoot.models.resolve_model import folder_here

NAME = "first rows"
ROWS_PER_FILE, FILES_PER_SOURCE = 200, 8
"""Rows read of each file, and files read of each source: quick to read, and enough to show systematic errors."""
ADDRESS = re.compile(r"(?!file:)\w+:", re.IGNORECASE)
"""Beginning of an image that is no file: an address, or base64."""
MAX_ROWS_OPENED = 4
"""Rows whose image files are opened."""


def first_rows(loaded: LoadedConfig) -> Check:
    """Check that the first rows can be read and rendered, and count those with images. `surefoot data` reads all."""
    return run_check(NAME, _check_first_rows, loaded)


def _check_first_rows(loaded: LoadedConfig) -> Result:
    run, where = loaded.run, loaded.where("dataset")
    folder = folder_here(run.model)
    if folder is None:
        raise NotApplicable(f"{run.model} is not here yet")
    if any(is_of_hub(item) for item in run.dataset):
        raise NotApplicable("data of the hub are fetched when the run starts")
    try:
        config = load_config(folder)
        is_vision_model, sources = vision_class(config) is not None, sources_of(loaded, "dataset")
    except SurefootError as error:
        raise NotApplicable(f"they cannot be read: {error}") from error
    template, no_template_reason = None, ""
    try:
        tokenizer = load_run_tokenizer(run, folder)
        template = open_template(run, tokenizer)
    except NotApplicable as error:
        no_template_reason = str(error)
    except SurefootError as error:
        if run.chat_template is not None:  # the file is the run's own
            return fail("SF743", str(error), is_fatal=True, where=loaded.where("chat_template"))
        no_template_reason = str(error)
    code, is_fatal = ("SF747", False) if run.on_bad_row == "skip" else ("SF743", True)
    images: list[int] = []
    too_long: dict[str, int] = {}
    try:
        for source in sources:
            for place, folder_of_file, conversation in _read_first_rows(source):
                if is_vision_model and conversation.images and sum(map(bool, images)) < MAX_ROWS_OPENED:
                    _open_image_files(conversation, folder_of_file, run, place)
                images.append(len(conversation.images))
                if template is None or (images[-1] and not is_vision_model):
                    continue
                for side in conversation.sides:
                    text = _render(template, side, place)
                    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                    check_vocabulary(max(ids, default=0), config.get_text_config().vocab_size, place)
                    if len(ids) > run.max_length:
                        too_long.setdefault(place, len(ids))
    except BadRow as error:
        fix = (
            "Correct the row, name its columns with `columns`, or give another chat_template. `surefoot data` lists "
            "all such rows" + ("; on_bad_row: skip leaves them out." if is_fatal else ".")
        )
        return fail(code, str(error), is_fatal=is_fatal, fix=fix, where=where)
    except DataError as error:
        return fail("SF743", str(error), is_fatal=True, where=where)
    if too_long and run.truncation == "error":
        fix = "Raise max_length, or set truncation: drop, left or right."
        place, length = next(iter(too_long.items()))
        text = (
            f"{len(too_long)} of {len(images)} are longer than max_length={run.max_length}: {place} has {length} tokens"
        )
        return fail("SF743", text, is_fatal=True, fix=fix, where=where)
    if not images:
        raise NotApplicable("the run reads no row from the beginning of a file")
    num_with_images, num_text_only = sum(count > 0 for count in images), sum(count == 0 for count in images)
    summary = f"{num_with_images} of {len(images)} have images"
    if num_with_images and not is_vision_model:
        fix = "Take a model that reads images, or rows without."
        return fail(code, f"{summary}; {TEXT_ONLY}", is_fatal=is_fatal, fix=fix, where=where)
    if num_with_images and template is not None:
        reader, reason = open_images(loaded, folder, config, tokenizer)
        if reader is None:
            return fail(code, f"{summary}, and {reason}", is_fatal=is_fatal, where=where)
    if template is None:
        raise NotApplicable(f"{len(images)} are read, and not rendered: {no_template_reason}")
    if not num_with_images:
        return ok(f"{num_text_only} read, all of them text")
    if not num_text_only:
        return ok(f"{summary}: all")
    tower_note = "ranks with text only give the vision tower a blank image, so no rank waits"
    return ok(f"{summary} and {num_text_only} are text: {tower_note}")


def load_run_tokenizer(run: RunConfig, folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a run whose model is in `folder`.

    Raises: NotApplicable if a model that is fetched lacks files of it so far; SurefootError if it cannot be read.
    """
    is_fetched = not Path(run.model).is_dir()
    if is_fetched and not (folder / "tokenizer_config.json").is_file():
        raise NotApplicable(f"the tokenizer of {run.model} is not here yet")
    try:
        tokenizer = load_tokenizer(folder)
    except SurefootError as error:
        if is_fetched:
            raise NotApplicable(f"the tokenizer of {run.model} is incomplete on this machine") from error
        raise
    has_template = tokenizer.chat_template is not None or run.chat_template is not None
    if is_fetched and not has_template and not (folder / "chat_template.jinja").is_file():
        raise NotApplicable(f"no template of {run.model} is here yet")
    return tokenizer


def open_template(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Return the chat template of a run, in which `template` is None if it has none. Raises: SurefootError."""
    if run.chat_template is not None:
        tokenizer.chat_template = read_template(run.chat_template)
    source = RendererSource.of(
        tokenizer,
        run.template_variables,
        parse_special_tokens=run.parse_special_tokens,
        today=date.fromisoformat(run.chat_template_date),
    )
    return ChatTemplate(source.template)


def _open_image_files(conversation: Conversation, folder: Path, run: RunConfig, place: str) -> None:
    """Open the images of a row that are files; nothing is downloaded. Raises: BadRow for one that cannot be read."""
    settings = ImageSettings(  # nothing is measured in tokens
        token="", token_id=0, patch_size=0, merge_size=0, min_pixels=0, max_pixels=0, folder=run.image_dir
    )
    for source in conversation.images:
        if isinstance(source, str) and ADDRESS.match(source) is None:
            try:
                find_picture(source, folder, settings)[1].close()
            except BadRow as error:
                raise BadRow(f"{place}: {error}") from error


def _read_first_rows(source: Source) -> Iterator[tuple[str, Path, Conversation]]:
    """Yield the first rows of the first files, each with its place and the folder of its file.

    Raises: BadRow with its place; DataError for a file that cannot be read at all.
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
            place = f"{name}:{row.line}"
            try:
                if row.problem is not None:
                    raise BadRow(row.problem)
                reader = reader or Reader(source.spec, format_of(source.spec, row.columns))
                conversation = reader.read(row.columns)
            except BadRow as error:
                raise BadRow(f"{place}: {error}") from error
            yield place, path.parent, conversation


def _render(template: ChatTemplate, conversation: Conversation, place: str) -> str:
    """Return a row's text. Raises: BadRow if the template cannot render it; DataError for an unusable template."""
    try:
        return template.render(conversation).text
    except BadRow as error:
        raise BadRow(f"{place}: {error}") from error
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
