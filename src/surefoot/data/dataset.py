"""A dataset ready to train on: files read, rendered, measured against `max_length`, and counted."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from surefoot.data.formats import to_conversation
from surefoot.data.render import Renderer, Sample
from surefoot.data.sources import read_rows
from surefoot.errors import DataError

Truncation = Literal["error", "drop", "left", "right"]


@dataclass(frozen=True)
class Counts:
    """What became of the rows: read = trained + truncated + skipped."""

    read: int
    trained: int
    """Used whole."""
    truncated: int
    """Used after being cut to max_length."""
    skipped: int
    """Left out: longer than max_length (drop), or nothing trained was left of them."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Dataset:
    """Rendered samples in the files' order."""

    samples: Sequence[Sample]
    counts: Counts
    skipped_places: Sequence[str]

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        return [len(sample.ids) for sample in self.samples]

    def fingerprint(self) -> str:
        """SHA-256 over every token and mask: two datasets with the same one train the same."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(len(sample.ids).to_bytes(4, "little"))
            digest.update(sample.ids.tobytes())
            digest.update(sample.trained.tobytes())
        return digest.hexdigest()


def load_dataset(
    paths: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    truncation: Truncation,
    vocab_size: int,
    where: str = "dataset",
) -> Dataset:
    """Read, render and measure a dataset.

    Raises: DataError for anything in the files that cannot be trained on, with file and line.
    """
    renderer = Renderer(tokenizer)
    kept: list[Sample] = []
    too_long: list[Sample] = []
    skipped: list[str] = []
    read = truncated = 0
    for sample in renderer.samples(map(to_conversation, read_rows(paths, where))):
        read += 1
        if sample.ids.size and int(sample.ids.max()) >= vocab_size:
            raise DataError(
                f"{sample.place}: token id {int(sample.ids.max())} is outside the model's vocabulary of {vocab_size}. "
                "The tokenizer does not belong to the model."
            )
        cut = sample
        if len(sample.ids) > max_length:
            too_long.append(sample)
            if truncation in ("error", "drop"):
                skipped.append(sample.place)
                continue
            span = slice(None, max_length) if truncation == "right" else slice(-max_length, None)
            cut = Sample(sample.ids[span], sample.trained[span], sample.place)
        if not cut.trained[1:].any():  # the first token is never predicted
            skipped.append(sample.place)
            continue
        truncated += cut is not sample
        kept.append(cut)
    if too_long and truncation == "error":
        longest = max(too_long, key=lambda sample: len(sample.ids))
        raise DataError(
            f"{len(too_long)} of {read} rows are longer than max_length={max_length}: the first is "
            f"{too_long[0].place}, the longest {longest.place} with {len(longest.ids)} tokens. Cutting them would "
            "train on answers without an end. "
            f"Set max_length: {len(longest.ids)}, or truncation: drop (leave them out) or right (cut them) ({where})."
        )
    if not kept:
        raise DataError(
            f"no row of {read} is left to train on: {len(skipped)} were skipped, the first at {skipped[0]} ({where}). "
            f"max_length is {max_length}."
        )
    return Dataset(kept, Counts(read, len(kept) - truncated, truncated, len(skipped)), skipped)
