"""The training dataset: the prepared samples of all its sources.

The samples of a shard depend on the shard and the settings alone, so any part of the dataset can be read without the
parts before it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.data.cache import CachedFile, renderer_key
from surefoot.data.file_readers import can_be_entered
from surefoot.data.images import Image
from surefoot.data.pairs import select_tokens
from surefoot.data.prepare_pool import Preparation, PrepareOptions
from surefoot.data.render import check_vocabulary
from surefoot.data.renderer_source import RendererSource
from surefoot.data.sample_selection import (
    ChunkSamples,
    SampleOptions,
    mask_samples,
    problems_in,
    select_samples,
    token_weights,
)
from surefoot.data.shard import Shard
from surefoot.data.sources import Source
from surefoot.errors import DataError

OPEN_SHARDS = 512
"""Number of shards mapped into memory at a time: more than a sampler window holds, unless rows are very long."""


SampleKey = tuple[int, int]
"""(chunk of the dataset, sample of its shard)."""


@dataclass(frozen=True)
class Sample:
    """A sample. Shapes: ids int32 [n]; weights float32 [n], the weight of each token in the loss, 0 for context."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    place: str
    key: SampleKey | None = None
    """Its place in its dataset; None if it is of none."""
    images: tuple[Image, ...] = ()
    parts: tuple[int, int, int] | None = None
    """Tokens of the question, the chosen and the rejected answer, one after the other; None if it is no pair."""


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


class Dataset:
    """The samples of all sources of one setting.

    Raises: DataError for files that are missing, empty or of no known format.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        source: RendererSource,
        options: SampleOptions,
        *,
        prepare: PrepareOptions,
        keep_columns: bool = False,
        shard_digests: Mapping[str, str] | None = None,
        where: str = "dataset",
        limit_where: str = "max_length",
    ) -> None:
        """Find the files and detect their formats. `shard_digests`: those of the resumed run.

        `where`, `limit_where`: the places of the setting of the data and of the limit of a row, for errors.
        """
        self.sources = sources
        self.renderer_source = source
        self.options = options
        self._where, self._limit_where = where, limit_where
        self.shard_digests = dict(shard_digests or {})
        """Digest of each shard that was read, by name. Only for data with images, which can change beside the rows."""
        key = renderer_key(source)
        self.files: list[CachedFile] = []
        self._file_sources: list[int] = []
        for number, part in enumerate(sources):
            for path, name in zip(part.files, part.names, strict=True):
                try:
                    has_images = source.images is not None
                    file = CachedFile(path, name, part.spec, key, keep_columns=keep_columns, has_images=has_images)
                    if has_images and not prepare.only_waits:
                        file.drop_stale(self.shard_digests)
                    self.files.append(file)
                except DataError as error:
                    raise DataError(f"{str(error).removesuffix('.')} ({where}).") from error
                self._file_sources.append(number)
        self.preparation = Preparation(self.files, source, prepare)
        self._reset_caches()

    def _reset_caches(self) -> None:
        self.shard = lru_cache(OPEN_SHARDS)(self._load_shard)
        self.chunk_samples = lru_cache(OPEN_SHARDS)(self._select_samples)

    def read_as(self, **changes: Any) -> "Dataset":
        """Return a view of the same prepared samples with other options."""
        view = copy(self)
        view.options = replace(self.options, **changes)
        view._reset_caches()
        return view

    def without_validation(self) -> "Dataset":
        """Return a view of the same samples for inspection: nothing is refused."""
        return self.read_as(is_lenient=True)

    @property
    def formats(self) -> list[str]:
        """Distinct formats of the files."""
        return list(dict.fromkeys(file.recipe.format for file in self.files))

    @property
    def has_prompts(self) -> bool:
        """Whether samples are prompts (GRPO): none of their tokens is trained, the model continues them."""
        return any(source.spec.prompts for source in self.sources)

    @property
    def can_be_entered(self) -> bool:
        """Whether any chunk can be prepared without reading those before it."""
        return all(can_be_entered(file.recipe.path) for file in self.files)

    @cached_property
    def chunks(self) -> Sequence[ChunkRef]:
        """All chunks, ordered by source, file and row."""
        refs: list[ChunkRef] = []
        done: Counter[int] = Counter()
        for number, (file, source) in enumerate(zip(self.files, self._file_sources, strict=True)):
            refs += [
                ChunkRef(source, number, chunk.index, done[source] + chunk.first_row, chunk.num_rows)
                for chunk in file.chunks
            ]
            done[source] += sum(chunk.num_rows for chunk in file.chunks)
        self._source_rows = done
        return [ref for ref in refs if self._rows_in_use(ref) != (0, 0)]

    def _rows_in_use(self, ref: ChunkRef) -> tuple[int, int]:
        """Return the range of a chunk's rows, relative to its first, that is inside the source's range."""
        begin, end = self.sources[ref.source].rows.of(self._source_rows[ref.source])
        first, last = max(begin - ref.first_row, 0), min(end - ref.first_row, ref.num_rows)
        return (first, last) if first < last else (0, 0)

    def prepare(self) -> None:
        """Prepare and check everything. Raises: DataError, with file and line if a row caused it."""
        self.preparation.run()
        self.check()

    def check(self) -> None:
        """Raise DataError for bad or too long rows, if the settings require it, or if nothing is left to train on."""
        for number in range(len(self.chunks)):
            self.shard(number)
        lenient = self.without_validation()
        counts = lenient.counts()
        if self.options.truncation == "error":
            self._check_lengths(counts.read)
        if counts.read == 0:
            nothing = f"eval_fraction={self.options.eval_fraction} holds out no sample. Raise it, or give eval_dataset"
            if self.options.side != "eval":
                nothing = "no row is left of the ranges that `split` names, or of what eval_fraction leaves"
            raise DataError(f"{nothing} ({self._where}).")
        if counts.trained + counts.truncated == 0:
            first = next((f"{place}: {reason}" for place, reason in lenient.skipped()), "of none")
            raise DataError(
                f"no row of {counts.read} is left to train on: {counts.skipped} were skipped, the first {first} "
                f"({self._where})."
            )

    def _check_lengths(self, num_rows: int) -> None:
        """Raise DataError if rows are too long."""
        options = self.options
        num_long = with_images = 0
        first, longest = "", (0, "")
        for number, ref in enumerate(self.chunks):
            shard = self.shard(number)
            in_use = mask_samples(shard, self._rows_in_use(ref), options)
            long_samples = np.flatnonzero((shard.lengths > options.max_length) & in_use)
            if len(long_samples):
                num_long += len(long_samples)
                with_images += int((shard.image_counts[long_samples] > 0).sum())
                first = first or self._locate(ref, int(shard.lines[long_samples[0]]))
                worst = long_samples[shard.lengths[long_samples].argmax()]
                longest = max(longest, (int(shard.lengths[worst]), self._locate(ref, int(shard.lines[worst]))))
        if not num_long:
            return
        why, side = "Cutting them would train on answers without an end.", "right"
        if self.has_prompts:
            why, side = "Cutting them would lose the question.", "left"
        elif options.train_on == "all" and not any(source.spec.pairs for source in self.sources):
            why, side = "Cutting them would leave text out.", "split (make several samples of each) or right"
        if with_images:
            why += f" {with_images} of them have images, which a lower max_pixels makes shorter."
        cut = f" or {side} (cut them{', but not those with images' if with_images else ''})"
        raise DataError(
            f"{num_long} of {num_rows} rows are longer than {options.limit}: the first is {first}, the longest "
            f"{longest[1]} with {longest[0]} tokens. {why} "
            f"{options.advise(longest[0])} truncation: drop (leave them out)"
            f"{cut if with_images < num_long else ''} ({self._limit_where})."
        )

    def counts_of(self, number: int) -> Counts:
        """Return the counts of a chunk's rows."""
        part = self.chunk_samples(number)
        used, cut = len(np.unique(part.indices)), int(part.is_cut.sum())
        return Counts(part.read, used - cut, cut, part.read - used, int(part.cut_inside.sum()))

    def counts(self) -> Counts:
        """Return the counts of all rows that are prepared."""
        chunks = [vars(self.counts_of(number)) for number in self._prepared_chunks()]
        return Counts(**{field.name: sum(counts[field.name] for counts in chunks) for field in fields(Counts)})

    def skipped(self) -> Iterator[tuple[str, str]]:
        """Yield (place, reason) of the rows that are left out, in order, as far as the dataset is prepared."""
        for number in self._prepared_chunks():
            for line, reason in self.chunk_samples(number).skipped:
                yield self._locate(self.chunks[number], line), reason

    def _prepared_chunks(self) -> Iterator[int]:
        return (number for number, ref in enumerate(self.chunks) if self.files[ref.file].has(ref.index))

    def fingerprint(self) -> str:
        """Return a hash that two datasets share only if they hold the same samples."""
        parts = [[source.weight, source.rows.begin, source.rows.end, len(source.files)] for source in self.sources]
        return hashlib.sha256(json.dumps([[file.key for file in self.files], parts]).encode()).hexdigest()

    def sample(self, chunk: int, sample: int) -> Sample:
        """Return a sample of a chunk, cut and weighted."""
        shard, key = self.shard(chunk), (chunk, sample)
        index, piece = shard.find_piece(sample)
        begin = int(shard.offsets[index])
        place = self._locate(self.chunks[chunk], int(shard.lines[index]))
        weights = token_weights(shard, index, self.options)
        if shard.parts is None:
            first, last = self.options.kept_range(int(shard.lengths[index]), piece)
            ids = np.array(shard.ids[begin + first : begin + last])
            return Sample(ids, weights[first:last], place, key, shard.images(index))
        parts = shard.parts[index : index + 1]
        trim = self.options.trim_pairs(parts)
        tokens = select_tokens(parts, trim, 0)
        question, chosen, rejected = trim.tokens[0].tolist()
        ids, sizes = shard.ids[begin + tokens], (question, chosen, rejected)
        return Sample(ids, weights[tokens], place, key, shard.images(index), sizes)

    def sample_keys(self) -> Iterator[SampleKey]:
        """Yield (chunk, sample) of all samples, in file order."""
        for number in range(len(self.chunks)):
            for sample in self.chunk_samples(number).samples:
                yield number, int(sample)

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over all samples, in file order."""
        return (self.sample(*key) for key in self.sample_keys())

    def weight(self, chunk: int) -> float:
        """Return how often an epoch visits each row of a chunk."""
        return self.sources[self.chunks[chunk].source].weight

    def columns(self, chunk: int, sample: int) -> dict[str, object]:
        """Return the columns kept with a sample, if the dataset was opened with `keep_columns`."""
        shard = self.shard(chunk)
        return dict(shard.columns(shard.find_piece(sample)[0]))

    def _locate(self, ref: ChunkRef, line: int) -> str:
        return f"{self.files[ref.file].recipe.name}:{line}"

    def _load_shard(self, number: int) -> Shard:
        ref = self.chunks[number]
        self.preparation.require(ref.file, ref.index)
        file = self.files[ref.file]
        shard = file.shard(ref.index)
        has_images = self.renderer_source.images is not None
        if has_images and self.shard_digests.setdefault(file.name_of(ref.index), shard.digest) != shard.digest:
            raise DataError(
                f"{self._locate(ref, int(shard.lines[0]) if len(shard) else 1)}: of the {ref.num_rows} rows from "
                "here on, some have other images than this run saw before, so it would go on in another order. Put "
                f"them back as they were, or start a new run ({self._where})."
            )
        if self.options.is_lenient:
            return shard
        vocab_size = self.options.vocab_size
        if vocab_size is not None and shard.max_id >= vocab_size:
            sample = int(np.searchsorted(shard.offsets, int(np.argmax(shard.ids)), "right")) - 1
            check_vocabulary(shard.max_id, vocab_size, self._locate(ref, int(shard.lines[sample])))
        if not self.options.skip_bad_rows and (problems := problems_in(shard, self._rows_in_use(ref))):
            raise DataError(self._describe_bad_rows(ref, problems))
        return shard

    def _describe_bad_rows(self, ref: ChunkRef, problems: Sequence[tuple[int, str]]) -> str:
        line, reason = problems[0]
        advice = "Correct the row, or leave such rows out with on_bad_row: skip"
        no_vision_reason = self.renderer_source.no_vision_reason
        if no_vision_reason and no_vision_reason in reason:
            advice = "So it is with every row with images: on_bad_row: skip would leave all of them out"
        elif len(problems) == ref.num_rows > 1:
            where = " and image_dir" if "image" in reason else ""
            settings = f"chat_template, dataset_format, columns{where}"
            advice = f"None of the {ref.num_rows} rows in this part of the file can be used: look at {settings}"
        elif len(problems) > 1:
            advice = f"{len(problems)} of the {ref.num_rows} rows in this part of the file are bad. {advice}"
        end = "" if reason.endswith(("?", ".")) else "."
        return f"{self._locate(ref, line)}: {reason}{end} {advice} ({self._where})."

    def _select_samples(self, number: int) -> ChunkSamples:
        ref, shard, options = self.chunks[number], self.shard(number), self.options
        rows = self._rows_in_use(ref)
        if options.truncation == "error" and not options.is_lenient:
            long_samples = np.flatnonzero((shard.lengths > options.max_length) & mask_samples(shard, rows, options))
            if len(long_samples):
                first = int(long_samples[0])
                images = int(shard.image_counts[first])
                with_images = f" with {images} image{'s' * (images > 1)}" if images else ""
                smaller = ", or lower max_pixels" if images else ""
                cut = "" if images else " or left" if self.has_prompts else " or right"
                advice = f"{options.advise(int(shard.lengths[first]))} truncation: drop{cut}{smaller}"
                raise DataError(
                    f"{self._locate(ref, int(shard.lines[first]))}: {shard.lengths[first]} tokens{with_images}, longer "
                    f"than {options.limit}. {advice} ({self._limit_where})."
                )
        return select_samples(shard, rows, options, are_prompts=self.has_prompts)
