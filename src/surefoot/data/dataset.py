"""The training dataset: prepared samples of all its sources, cut to `max_length`, weighted and counted.

The samples of a shard depend on the shard and the settings alone, so any part of the dataset can be read without the
parts before it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.data.cache import CachedFile, renderer_key
from surefoot.data.file_readers import can_be_entered
from surefoot.data.images import Image
from surefoot.data.prepare_pool import Preparation, PrepareOptions
from surefoot.data.render import RendererSource
from surefoot.data.shard import Shard
from surefoot.data.sources import Source
from surefoot.errors import DataError

Truncation = Literal["error", "drop", "left", "right"]
TrainOn = Literal["assistant", "last_assistant", "all"]
Side = Literal["all", "train", "eval"]
OPEN_SHARDS = 512
"""Number of shards mapped into memory at a time: more than a sampler window holds, unless rows are very long."""


@dataclass(frozen=True)
class SampleOptions:
    """Options for reading prepared samples. None of them affects the cache."""

    max_length: int
    truncation: Truncation
    limit: str = "max_length"
    """Name of the setting that `max_length` comes from."""
    way_out: str = ""
    """Advice on making room for longer rows, where it is not to raise that setting."""
    train_on: TrainOn = "assistant"
    skip_bad_rows: bool = False
    vocab_size: int | None = None
    is_lenient: bool = False
    """Accept samples that training would refuse, in order to inspect them."""
    side: Side = "all"
    eval_fraction: float = 0.0
    """Share of the samples on the `eval` side, chosen by their content, so that equal samples are on the same side."""


@dataclass(frozen=True)
class Sample:
    """A sample. Shapes: ids int32 [n]; weights float32 [n], the weight of each token in the loss, 0 for context."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    place: str
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Counts:
    """Counts of the rows by outcome: read = trained + truncated + skipped."""

    read: int = 0
    trained: int = 0
    """Number of rows used uncut."""
    truncated: int = 0
    """Number of rows used after being cut to max_length."""
    skipped: int = 0
    """Number of rows left out: bad rows, too long ones (drop), and those in which nothing trained is left."""
    cut_inside: int = 0
    """Number of truncated rows that lost a part of a trained turn."""

    def as_dict(self) -> dict[str, int]:
        """Return the four numbers of summary.json."""
        return {"read": self.read, "trained": self.trained, "truncated": self.truncated, "skipped": self.skipped}


@dataclass(frozen=True)
class ChunkRef:
    """A reference to a chunk: its source, its file, its index in the file, and its rows in the source."""

    source: int
    file: int
    index: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class ChunkSamples:
    """The samples in use of a chunk. Shapes: S samples."""

    samples: NDArray[np.int64]
    """[S]: indices in the shard."""
    rows: NDArray[np.int64]
    """[S]: row numbers in the chunk."""
    lengths: NDArray[np.int64]
    """[S]: tokens after cutting."""
    trained: NDArray[np.int64]
    """[S]: trained tokens after cutting."""
    is_cut: NDArray[np.bool_]
    """[S]: whether the sample was cut."""
    cut_inside: NDArray[np.bool_]
    """[S]: whether a part of a trained turn is lost."""
    skipped: Sequence[tuple[int, str]]
    """(line, reason) of the rows that give no sample."""
    read: int
    """Number of the chunk's rows that belong to the dataset."""


class Dataset:
    """The samples of all sources of one setting.

    Raises: DataError for files that are missing, empty or of no known format.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        source: RendererSource,
        reading: SampleOptions,
        *,
        prepare: PrepareOptions,
        keep_columns: bool = False,
        shard_digests: Mapping[str, str] | None = None,
        where: str = "dataset",
    ) -> None:
        """Find the files and detect their formats. `shard_digests`: `seen` of the resumed run."""
        self.sources = sources
        self.renderer_source = source
        self.reading = reading
        self._where = where
        self.seen = dict(shard_digests or {})
        """Digest of each shard that was read, by name. Only for data with images, which can change beside the rows."""
        key = renderer_key(source)
        self._files: list[CachedFile] = []
        self._file_sources: list[int] = []
        for number, part in enumerate(sources):
            for path, name in zip(part.files, part.names, strict=True):
                try:
                    has_images = source.images is not None
                    file = CachedFile(path, name, part.spec, key, keep_columns=keep_columns, has_images=has_images)
                    if has_images and not prepare.only_waits:
                        file.drop_stale(self.seen)
                    self._files.append(file)
                except DataError as error:
                    raise DataError(f"{error} ({where})") from error
                self._file_sources.append(number)
        self.preparation = Preparation(self._files, source, prepare)
        self._chunks: list[ChunkRef] | None = None
        self._reset_caches()

    def _reset_caches(self) -> None:
        self.shard = lru_cache(OPEN_SHARDS)(self._load_shard)
        self.usable = lru_cache(OPEN_SHARDS)(self._select_samples)

    def read_as(self, reading: SampleOptions) -> "Dataset":
        """Return a view of the same prepared samples with other options."""
        view = copy(self)
        view.reading = reading
        view._reset_caches()
        return view

    @property
    def formats(self) -> list[str]:
        """Distinct formats of the files."""
        return list(dict.fromkeys(file.format for file in self._files))

    @property
    def keys(self) -> list[str]:
        """Cache keys of the files: two datasets with the same keys hold the same samples."""
        return [file.key for file in self._files]

    @property
    def can_be_entered(self) -> bool:
        """Whether any chunk can be prepared without reading those before it."""
        return all(can_be_entered(file.recipe.path) for file in self._files)

    @property
    def chunks(self) -> Sequence[ChunkRef]:
        """All chunks, ordered by source, file and row."""
        if self._chunks is None:
            refs: list[ChunkRef] = []
            done: Counter[int] = Counter()
            for number, (file, part) in enumerate(zip(self._files, self._file_sources, strict=True)):
                refs += [
                    ChunkRef(part, number, chunk.index, done[part] + chunk.first_row, chunk.num_rows)
                    for chunk in file.chunks
                ]
                done[part] += sum(chunk.num_rows for chunk in file.chunks)
            self._chunks = [ref for ref in refs if self._clip_to_range(ref, done[ref.source]) != (0, 0)]
            self._totals = done
        return self._chunks

    def _clip_to_range(self, ref: ChunkRef, total: int) -> tuple[int, int]:
        """Return the range of a chunk's rows, relative to its first, that is inside the source's range."""
        begin, end = self.sources[ref.source].rows.of(total)
        first, last = max(begin - ref.first_row, 0), min(end - ref.first_row, ref.num_rows)
        return (first, last) if first < last else (0, 0)

    def without_validation(self) -> "Dataset":
        """Return a view of the same samples for inspection: nothing is refused."""
        return self.read_as(replace(self.reading, is_lenient=True))

    def prepare(self) -> None:
        """Prepare and check everything. Raises: DataError, with file and line if a row caused it."""
        self.preparation.run()
        self.check()

    def check(self) -> None:
        """Raise DataError for bad or too long rows, if the settings require it, or if nothing is left to train on."""
        counts, too_long, with_images, first_long, longest = Counts(), 0, 0, "", (0, "")
        first_skipped = ""
        lenient = self.without_validation()
        for number, ref in enumerate(self.chunks):
            shard = self.shard(number)
            usable = lenient.usable(number)
            counts = _add_counts(counts, lenient.counts_of(number))
            if usable.skipped and not first_skipped:
                first_skipped = f"{self._locate(ref, usable.skipped[0][0])}: {usable.skipped[0][1]}"
            if self.reading.truncation == "error":
                long_samples = np.flatnonzero((shard.lengths > self.reading.max_length) & self._mask_in_range(number))
                if len(long_samples):
                    too_long += len(long_samples)
                    with_images += int((shard.image_counts[long_samples] > 0).sum())
                    first_long = first_long or self._locate(ref, int(shard.lines[long_samples[0]]))
                    worst = long_samples[shard.lengths[long_samples].argmax()]
                    longest = max(longest, (int(shard.lengths[worst]), self._locate(ref, int(shard.lines[worst]))))
        if too_long:
            of_prompts = self._has_prompts
            why = "Cutting them would train on answers without an end."
            why, side = ("Cutting them would lose what is asked.", "left") if of_prompts else (why, "right")
            cut = f" or {side} (cut them{', but not those with images' if with_images else ''})"
            cut = "" if with_images == too_long else cut
            raise DataError(
                f"{too_long} of {counts.read} rows are longer than {self.reading.limit}={self.reading.max_length}: the "
                f"first is {first_long}, the longest {longest[1]} with {longest[0]} tokens. {why} "
                f"{self.reading.way_out or f'Set {self.reading.limit}: {longest[0]}'}, or truncation: drop (leave them "
                f"out){cut} ({self._where})."
            )
        if counts.read == 0:
            nothing = f"eval_fraction={self.reading.eval_fraction} holds out no sample. Raise it, or give eval_dataset"
            if self.reading.side != "eval":
                nothing = "no row is left of the ranges that `split` names, or of what eval_fraction leaves"
            raise DataError(f"{nothing} ({self._where}).")
        if counts.trained + counts.truncated == 0:
            raise DataError(
                f"no row of {counts.read} is left to train on: {counts.skipped} were skipped, the first "
                f"{first_skipped or 'of none'} ({self._where})."
            )

    def counts_of(self, number: int) -> Counts:
        """Return the counts of a chunk's rows."""
        usable = self.usable(number)
        cut = int(usable.is_cut.sum())
        return Counts(
            usable.read, len(usable.samples) - cut, cut, usable.read - len(usable.samples), int(usable.cut_inside.sum())
        )

    def counts(self) -> Counts:
        """Return the counts of all rows that are prepared."""
        total = Counts()
        for number, ref in enumerate(self.chunks):
            if self._files[ref.file].has(ref.index):
                total = _add_counts(total, self.counts_of(number))
        return total

    def skipped(self) -> Iterator[tuple[str, str]]:
        """Yield (place, reason) of the rows that are left out, in order, as far as the dataset is prepared."""
        for number, ref in enumerate(self.chunks):
            if self._files[ref.file].has(ref.index):
                for line, reason in self.usable(number).skipped:
                    yield self._locate(ref, line), reason

    def fingerprint(self) -> str:
        """Return a hash that two datasets share only if they hold the same samples."""
        parts = [[source.weight, source.rows.begin, source.rows.end, len(source.files)] for source in self.sources]
        return hashlib.sha256(json.dumps([self.keys, parts]).encode()).hexdigest()

    def sample(self, chunk: int, sample: int) -> Sample:
        """Return a sample of a chunk, cut and weighted."""
        shard = self.shard(chunk)
        begin, end = int(shard.offsets[sample]), int(shard.offsets[sample + 1])
        first, last = self.window(end - begin)
        weights = np.full(end - begin, self.reading.train_on == "all", np.float32)
        span_begin, span_end = int(shard.span_offsets[sample]), int(shard.span_offsets[sample + 1])
        for index in range(span_begin, span_end):
            span = slice(shard.spans[index, 0], shard.spans[index, 1])
            if not np.isnan(shard.weights[index]):
                weights[span] = shard.weights[index]
            elif self.reading.train_on == "assistant" or index == span_end - 1:
                weights[span] = 1
        ids = np.array(shard.ids[begin + first : begin + last])
        place = self._locate(self.chunks[chunk], int(shard.lines[sample]))
        return Sample(ids, weights[first:last], place, shard.images(sample))

    def sample_keys(self) -> Iterator[tuple[int, int]]:
        """Yield (chunk, sample) of all samples, in file order."""
        for number in range(len(self.chunks)):
            for sample in self.usable(number).samples:
                yield number, int(sample)

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over all samples, in file order."""
        return (self.sample(*key) for key in self.sample_keys())

    def file_of(self, ref: ChunkRef) -> CachedFile:
        """Return the file of a chunk."""
        return self._files[ref.file]

    def weight(self, chunk: int) -> float:
        """Return how often an epoch visits each row of a chunk."""
        return self.sources[self.chunks[chunk].source].weight

    def columns(self, chunk: int, sample: int) -> dict[str, object]:
        """Return the columns kept with a sample, if the dataset was opened with `keep_columns`."""
        return dict(self.shard(chunk).columns(sample))

    @property
    def _has_prompts(self) -> bool:
        return any(source.spec.prompts for source in self.sources)

    def _locate(self, ref: ChunkRef, line: int) -> str:
        return f"{self._files[ref.file].recipe.name}:{line}"

    def _load_shard(self, number: int) -> Shard:
        ref = self.chunks[number]
        self.preparation.require(ref.file, ref.index)
        file = self._files[ref.file]
        shard = file.shard(ref.index)
        if self.renderer_source.images is not None:
            name = file.name_of(ref.index)
            if self.seen.setdefault(name, shard.digest) != shard.digest:
                raise DataError(
                    f"{self._locate(ref, int(shard.lines[0]) if len(shard) else 1)}: of the {ref.num_rows} rows from "
                    "here on, some have other images than this run saw before, so it would go on in another order. Put "
                    f"them back as they were, or start a new run ({self._where})."
                )
        vocab_size = self.reading.vocab_size
        if vocab_size is not None and shard.max_id >= vocab_size and not self.reading.is_lenient:
            sample = int(np.searchsorted(shard.offsets, int(np.argmax(shard.ids)), "right")) - 1
            raise DataError(
                f"{self._locate(ref, int(shard.lines[sample]))}: token id {shard.max_id} is outside the model's "
                f"vocabulary of {vocab_size}. The tokenizer does not belong to the model."
            )
        if shard.problems and not (self.reading.skip_bad_rows or self.reading.is_lenient):
            first, last = self._clip_to_range(ref, self._totals[ref.source])
            problems = [(line, reason) for row, line, reason in shard.problems if first <= row < last]
            if problems:
                raise DataError(self._describe_bad_rows(ref, problems))
        return shard

    def _describe_bad_rows(self, ref: ChunkRef, problems: Sequence[tuple[int, str]]) -> str:
        line, reason = problems[0]
        advice = "Correct the row, or leave such rows out with on_bad_row: skip"
        if len(problems) == ref.num_rows > 1:
            where = " and image_dir" if "image" in reason else ""
            advice = f"No row around it can be used: look at chat_template, dataset_format, columns{where}"
        elif len(problems) > 1:
            advice = f"{len(problems) - 1} more of the {ref.num_rows} rows around it are bad. {advice}"
        end = "" if reason.endswith(("?", ".")) else "."
        return f"{self._locate(ref, line)}: {reason}{end} {advice} ({self._where})."

    def _mask_in_range(self, number: int) -> NDArray[np.bool_]:
        """Return a mask [S] of the samples in the source's range and on this side of the held-out split."""
        ref, shard = self.chunks[number], self.shard(number)
        first, last = self._clip_to_range(ref, self._totals[ref.source])
        inside = (shard.rows >= first) & (shard.rows < last)
        if self.reading.side != "all":
            held_out = shard.digests < np.uint64(round(self.reading.eval_fraction * 2**64 * (1 - 1e-12)))
            inside &= held_out if self.reading.side == "eval" else ~held_out
        return inside

    def window(self, length: int) -> tuple[int, int]:
        """Return the range of a sample's tokens that is kept."""
        if length <= self.reading.max_length:
            return 0, length
        return (length - self.reading.max_length, length) if self.reading.truncation == "left" else (
            0, self.reading.max_length)  # fmt: skip

    def _select_samples(self, number: int) -> ChunkSamples:
        ref, shard, reading = self.chunks[number], self.shard(number), self.reading
        in_range = self._mask_in_range(number)
        lengths = shard.lengths
        too_long = lengths > reading.max_length
        cut_lengths = np.minimum(lengths, reading.max_length)
        first = np.where(too_long, lengths - cut_lengths, 0) if reading.truncation == "left" else np.zeros_like(lengths)
        trained, loses_trained = self._count_trained_tokens(shard, first, first + cut_lengths)
        has_images = shard.image_counts > 0  # an image's tokens are meaningless if some are cut off
        if reading.truncation == "error" and not reading.is_lenient and (too_long & in_range).any():
            first_long = int(np.flatnonzero(too_long & in_range)[0])
            side = "left" if self._has_prompts else "right"
            ways = "drop" if has_images[first_long] else f"drop or {side}"
            raise DataError(
                f"{self._locate(ref, int(shard.lines[first_long]))}: {lengths[first_long]} tokens, longer than "
                f"{reading.limit}={reading.max_length}. {reading.way_out or 'Raise it'}, or set truncation: {ways} "
                f"({self._where})."
            )
        is_untrained = (lengths if self._has_prompts else trained) == 0
        skipped = in_range & (is_untrained | (too_long & (has_images | (reading.truncation in ("error", "drop")))))
        used = in_range & ~skipped
        reasons = [
            (int(shard.lines[i]), _explain_skip(int(lengths[i]), reading, bool(loses_trained[i]), bool(has_images[i])))
            for i in np.flatnonzero(skipped)
        ]
        begin, end = self._clip_to_range(ref, self._totals[ref.source])
        bad = [(line, reason) for row, line, reason in shard.problems if begin <= row < end]
        # Each side of a held-out split counts its own samples; a bad row has no side and counts with the training rows.
        counted_bad = bad if reading.side != "eval" else []
        return ChunkSamples(
            np.flatnonzero(used),
            shard.rows[used].astype(np.int64),
            cut_lengths[used],
            trained[used],
            too_long[used],
            (too_long & loses_trained)[used],
            sorted(reasons + counted_bad),
            int(in_range.sum()) + len(counted_bad),
        )

    def _count_trained_tokens(
        self, shard: Shard, first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Count the trained tokens inside `[first, last)` of each sample [S]; the second mask [S]: any is outside.

        The first token of the kept range is never predicted, so it does not count as inside.
        """
        counts = np.diff(shard.span_offsets)
        owner = np.repeat(np.arange(len(shard)), counts)
        begins, ends = shard.spans[:, 0].astype(np.int64), shard.spans[:, 1].astype(np.int64)
        # The weight of each span; a weight set by the row overrides `train_on`.
        default_weights = np.ones(len(owner), np.int64)
        if self.reading.train_on == "last_assistant":
            default_weights[:] = 0
            default_weights[shard.span_offsets[1:][counts > 0] - 1] = 1
        is_trained = np.where(np.isnan(shard.weights), default_weights, shard.weights) > 0
        inside = np.maximum(np.minimum(ends, last[owner]) - np.maximum(begins, first[owner] + 1), 0)
        outside = (begins < first[owner]) | (ends > last[owner])
        if self.reading.train_on == "all":  # the whole sample without the spans of weight 0
            untrained = np.bincount(owner[~is_trained], inside[~is_trained], minlength=len(shard)).astype(np.int64)
            return np.maximum(last - first - 1, 0) - untrained, shard.lengths > last - first
        trained = np.bincount(owner[is_trained], inside[is_trained], minlength=len(shard)).astype(np.int64)
        return trained, np.bincount(owner[is_trained & outside], minlength=len(shard)) > 0


def _explain_skip(length: int, reading: SampleOptions, loses_trained: bool, has_images: bool) -> str:
    if length > reading.max_length and has_images:
        return f"{length} tokens with images, which are never cut, longer than {reading.limit}={reading.max_length}"
    if length > reading.max_length and reading.truncation in ("error", "drop"):
        return f"{length} tokens, longer than {reading.limit}={reading.max_length}"
    if length > reading.max_length and loses_trained:
        return f"{length} tokens: cut to {reading.limit}={reading.max_length}, nothing trained is left"
    return "no token of it is trained"


def _add_counts(left: Counts, right: Counts) -> Counts:
    return Counts(*(a + b for a, b in zip(vars(left).values(), vars(right).values(), strict=True)))
