"""Building the datasets of a run from its config and tokenizer."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from surefoot.config import LoadedConfig
from surefoot.data.cache import check_format
from surefoot.data.dataset import Dataset
from surefoot.data.image_processor import PixelReader
from surefoot.data.images import ImageSettings
from surefoot.data.model_processor import (
    PROCESSORS,
    REFUSED,
    MissingPackage,
    ModelProcessor,
    hash_processor,
    limits_of,
    load_model_processor,
    processor_file,
    vision_class,
)
from surefoot.data.prepare_pool import OnProgress, PrepareOptions
from surefoot.data.renderer_source import TEXT_ONLY, RendererSource
from surefoot.data.sample_selection import SampleOptions
from surefoot.data.sources import DATA_SETTINGS, DataSetting, sources_of
from surefoot.errors import ConfigError, DataError

MAX_WORKERS = 16


@dataclass(frozen=True)
class ModelInputs:
    """Parts of a model that its data depend on."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    context: int | None
    """Largest number of tokens that it has positions for; a prompt leaves room in it for its completion."""
    num_positions: int | None
    """Size of its table of positions, which no sample can exceed; None for a model that computes positions."""
    reader: PixelReader | None
    """Reader of images; None if it cannot read them."""
    no_vision_reason: str
    """Reason why it cannot read images."""


def open_dataset(
    loaded: LoadedConfig,
    setting: DataSetting,
    model: ModelInputs,
    *,
    only_waits: bool = False,
    shard_digests: Mapping[str, str] | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Dataset:
    """Open the dataset of a setting: find its files and detect their formats, but prepare nothing yet.

    `RunConfig.row` defines what a row is. `only_waits`: another process prepares the data. `shard_digests`: those of
    the resumed run. With `eval_fraction`, `dataset` is the training side; `held_out_side` returns the other.
    Raises: DataError for files that are missing or of no known format.
    """
    config, context = loaded.run, model.context
    renderer = RendererSource.of(
        model.tokenizer,
        config.template_variables,
        parse_special_tokens=config.parse_special_tokens,
        today=date.fromisoformat(config.chat_template_date),
        images=model.reader.settings if model.reader is not None else None,
        no_vision_reason=model.no_vision_reason,
    )
    longest, limit, added = config.max_row_tokens, config.row_limit_setting, config.max_added_tokens
    advice = ""
    if added and context is not None and context - added < longest:
        longest, limit = context - added, f"the context less max_completion_length ({context} - {added})"
        advice = "Lower max_completion_length"
        if longest < 1:
            raise ConfigError(
                f"max_completion_length={added} leaves no room for a prompt in the {context} "
                f"tokens that the model can see. Lower it ({loaded.where('max_completion_length')})."
            )
    if not added and model.num_positions is not None and model.num_positions < longest:
        longest, limit, advice = model.num_positions, "the model's table of positions", "Shorten them"
    options = SampleOptions(
        max_length=longest,
        truncation=config.truncation,
        limit_name=limit,
        limit_advice=advice,
        largest_limit=context - added if context is not None else None,
        train_on="all" if config.row.is_prompt else config.train_on,
        image_token=renderer.images.token_id if renderer.images is not None and not config.row.is_prompt else None,
        skip_bad_rows=config.on_bad_row == "skip",
        vocab_size=model.vocab_size,
        side="train" if config.eval_fraction and setting == "dataset" else "all",
        eval_fraction=config.eval_fraction,
    )
    return Dataset(
        sources_of(loaded, setting),
        renderer,
        options,
        prepare=PrepareOptions(_num_workers(config.dataset_num_proc), only_waits, on_progress),
        keep_columns=config.row.keeps_columns,
        shard_digests=shard_digests,
        where=loaded.where(setting),
        limit_where=loaded.where(config.row_limit_setting),
    )


def check_sources(loaded: LoadedConfig) -> None:
    """Raise DataError for local data files that do not exist, or whose first row is of no known format."""
    for setting in DATA_SETTINGS:
        for source in sources_of(loaded, setting, only_local=True):
            for path, name in zip(source.files, source.names, strict=True):
                try:
                    check_format(path, name, source.spec)
                except DataError as error:
                    raise DataError(f"{str(error).removesuffix('.')} ({loaded.where(setting)}).") from error


IMAGE_SETTINGS = ("min_pixels", "max_pixels", "image_dir", "allow_image_urls")
"""Settings that have no effect without images."""


def open_images(
    loaded: LoadedConfig, base: Path, model: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PixelReader | None, str]:
    """Return the image reader of a model, or None and the reason. `model`: the configuration of the folder `base`.

    Raises: ConfigError for impossible limits; DataError for a processor that cannot be read or does not fit.
    """
    config = loaded.run
    if vision_class(model) is None:
        unused = [name for name in IMAGE_SETTINGS if getattr(config, name)]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)}: a setting of images, but {config.model} ({model.model_type}) reads none. Drop "
                f"it, or take a model that reads images, such as Qwen3-VL ({loaded.where(*unused)})."
            )
        return None, REFUSED.get(model.model_type, TEXT_ONLY)
    if processor_file(base) is None:
        names = " or ".join(PROCESSORS)
        _check_tower_is_frozen(loaded, f"{base} has no {names}")
        return None, f"the model's folder has no {names}, which says how to cut them"
    try:
        processor = load_model_processor(base, model, tokenizer)
    except MissingPackage as error:
        _check_tower_is_frozen(loaded, str(error))
        return None, str(error)  # rows of text need none
    image_settings = ImageSettings(
        token=processor.token,
        token_id=int(model.image_token_id),
        patch_size=0,
        merge_size=0,
        min_pixels=0,
        max_pixels=config.max_pixels or 0,
        folder=config.image_dir,
        allow_urls=config.allow_image_urls,
    )
    if processor.has_cells:
        return PixelReader(processor, _set_cells(image_settings, loaded, base, model, processor)), ""
    if config.min_pixels is not None:
        raise ConfigError(
            f"min_pixels={config.min_pixels}: the processor of {model.model_type} decides itself how far a small image "
            f"is enlarged. Drop min_pixels ({loaded.where('min_pixels')})."
        )
    return PixelReader(
        processor, replace(image_settings, processor=str(base), processor_sha256=hash_processor(base))
    ), ""


def _check_tower_is_frozen(loaded: LoadedConfig, reason: str) -> None:
    """Raise ConfigError if the vision tower is trained, where no image can be read."""
    config = loaded.run
    if config.tuning == "full" and not config.freeze_vision_tower:
        setting, demand = "freeze_vision_tower", "freeze_vision_tower=false"
    elif config.tuning == "lora" and "vision" in config.target_modules:
        setting, demand = "target_modules", "target_modules names vision"
    else:
        return
    raise ConfigError(
        f"{demand}, but no image can be read, so the tower would learn from none: {reason} ({loaded.where(setting)})."
    )


def _set_cells(
    settings: ImageSettings, loaded: LoadedConfig, base: Path, model: PreTrainedConfig, processor: ModelProcessor
) -> ImageSettings:
    """Return the settings with the size of cells and the limits of an image's pixels.

    Raises: ConfigError for impossible limits; DataError for a processor that does not fit the model.
    """
    config, cutter, vision = loaded.run, processor.image_processor, model.vision_config
    least, most = limits_of(cutter)
    least, most = config.min_pixels or least, config.max_pixels or most
    cell = cutter.patch_size * cutter.merge_size
    if least > most or most < cell**2:
        raise ConfigError(
            f"min_pixels={least}, max_pixels={most}: an image has at least {cell}x{cell} pixels, one cell of "
            f"{model.model_type}, and its least number cannot be above its largest "
            f"({loaded.where('max_pixels', 'min_pixels')})."
        )
    actual = (cutter.patch_size, cutter.merge_size, cutter.temporal_patch_size)
    expected = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if actual != expected:
        raise DataError(
            f"{base}: its image processor cuts patches of (side, merged, frames) {actual}, its vision tower reads "
            f"{expected}. The files are of two models."
        )
    patch_size, merge_size, _ = actual
    return replace(settings, patch_size=patch_size, merge_size=merge_size, min_pixels=least, max_pixels=most)


def held_out_side(dataset: Dataset) -> Dataset:
    """Return the samples that `eval_fraction` holds out of a dataset."""
    return dataset.read_as(side="eval")


def _num_workers(requested: int | None) -> int:
    """Return the number of preparation workers: the requested one, or one per CPU core this process may use."""
    return requested if requested is not None else min(len(os.sched_getaffinity(0)), MAX_WORKERS)
