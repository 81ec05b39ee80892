"""From a config and a tokenizer to the datasets of a run."""

import os
from dataclasses import replace
from datetime import date
from typing import Literal

from transformers import PreTrainedTokenizerBase

from surefoot.config import DatasetItem, LoadedConfig
from surefoot.data.dataset import Dataset, Reading
from surefoot.data.preparation import OnProgress
from surefoot.data.render import RendererSource
from surefoot.data.sources import find_sources

MAX_WORKERS = 16


def open_dataset(
    loaded: LoadedConfig,
    setting: Literal["dataset", "eval_dataset"],
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None,
    only_waits: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> Dataset:
    """A dataset setting of a run, found and its formats told, but not prepared yet; `only_waits`: by another process.

    Rows are samples or, with GRPO, prompts. With `eval_fraction`, `dataset` is the training side; `held_out_side` gives
    the other.
    Raises: DataError for what is missing or of no known format.
    """
    config = loaded.run
    items: list[DatasetItem] = getattr(config, setting)
    own = [
        item.model_copy(
            update={
                "format": item.format if item.format != "auto" else config.dataset_format,
                "columns": item.columns or config.columns,
            }
        )
        for item in items
    ]
    where = loaded.where(setting)
    renderer = RendererSource.of(
        tokenizer,
        config.template_variables,
        parse_special_tokens=config.parse_special_tokens,
        today=date.fromisoformat(config.chat_template_date),
    )
    prompts = config.method == "grpo"
    reading = Reading(
        max_length=config.prompt_length if prompts else config.max_length,
        truncation=config.truncation,
        limit="max_prompt_length" if prompts and config.max_prompt_length else "max_length",
        train_on="all" if prompts else config.train_on,
        skip_bad_rows=config.on_bad_row == "skip",
        vocab_size=vocab_size,
        side="train" if config.eval_fraction and setting == "dataset" else "all",
        eval_fraction=config.eval_fraction,
    )
    sources = find_sources(own, where)
    return Dataset(
        [replace(source, spec=replace(source.spec, prompts=prompts)) for source in sources],
        renderer,
        reading,
        num_workers=num_workers(config.dataset_num_proc),
        keep_columns=prompts,
        only_waits=only_waits,
        on_progress=on_progress,
        where=where,
    )


def held_out_side(dataset: Dataset) -> Dataset:
    """The samples that `eval_fraction` holds out of a dataset."""
    return dataset.read_as(replace(dataset.reading, side="eval"))


def num_workers(asked: int | None) -> int:
    """Worker processes for preparing data: what was asked for, or one per CPU core this process may use."""
    return asked if asked is not None else min(len(os.sched_getaffinity(0)), MAX_WORKERS)
