"""Opens small datasets the way a run does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from surefoot.config import DatasetItem
from surefoot.data.dataset import Dataset
from surefoot.data.prepare_pool import PrepareOptions
from surefoot.data.renderer_source import RendererSource
from surefoot.data.sample_selection import SampleOptions
from surefoot.data.sources import find_sources


def open_dataset(
    paths: Path | str | list[DatasetItem], tokenizer: PreTrainedTokenizerFast, *, num_workers: int = 0, **reading: Any
) -> Dataset:
    """A dataset that is found, not prepared."""
    items = paths if isinstance(paths, list) else [DatasetItem(path=str(paths))]
    keep_columns = reading.pop("keep_columns", False)
    kinds = {kind: reading.pop(kind, False) for kind in ("prompts", "pairs", "labels")}
    return Dataset(
        [replace(source, spec=replace(source.spec, **kinds)) for source in find_sources(items)],
        RendererSource.of(tokenizer, {}, parse_special_tokens=False),
        replace(SampleOptions(max_length=256, truncation="error"), **reading),
        prepare=PrepareOptions(num_workers),
        keep_columns=keep_columns,
        where="run.yaml:2",
    )


def prepared(paths: Path | str | list[DatasetItem], tokenizer: PreTrainedTokenizerFast, **options: Any) -> Dataset:
    """A dataset that is prepared and checked."""
    dataset = open_dataset(paths, tokenizer, **options)
    dataset.prepare()
    return dataset
