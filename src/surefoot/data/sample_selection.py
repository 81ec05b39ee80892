"""The samples of a shard that a run uses: cut to `max_length`, weighted and counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.data.pairs import CHOSEN, QUESTION, REJECTED, PairTrim, select_tokens, trim_within
from surefoot.data.shard import Shard

Truncation = Literal["error", "drop", "left", "right", "split"]
TrainOn = Literal["assistant", "last_assistant", "all"]
Side = Literal["all", "train", "eval"]


@dataclass(frozen=True)
class SampleOptions:
    """Options for reading prepared samples. None of them affects the cache."""

    max_length: int
    truncation: Truncation
    limit_name: str = "max_length"
    """Name of the setting that `max_length` comes from."""
    limit_advice: str = ""
    """Advice on making room for longer rows, where it is not to raise that setting."""
    largest_limit: int | None = None
    """Largest `max_length` that the model has positions for; None if it has no limit."""
    train_on: TrainOn = "assistant"
    image_token: int | None = None
    """Token in whose places images stand. It is never trained; None for text alone, and for prompts."""
    skip_bad_rows: bool = False
    vocab_size: int | None = None
    is_lenient: bool = False
    """Accept samples that training would refuse, in order to inspect them."""
    side: Side = "all"
    eval_fraction: float = 0.0
    """Share of the samples on the `eval` side, chosen by their content, so that equal samples are on the same side."""

    @property
    def limit(self) -> str:
        """The limit as messages quote it."""
        return f"{self.limit_name}={self.max_length}"

    def advise(self, longest: int) -> str:
        """Return the advice on making room for rows of up to `longest` tokens, as far as the model has positions."""
        if self.limit_advice:
            return f"{self.limit_advice}, or"
        if self.largest_limit is None or longest <= self.largest_limit:
            return f"Set {self.limit_name}: {longest}, or"
        if self.largest_limit <= self.max_length:
            return f"The model has positions for {self.largest_limit} tokens, so"
        return f"Set {self.limit_name}: {self.largest_limit}, which is all that the model has positions for, and"

    def trim_pairs(self, parts: NDArray[np.int32]) -> PairTrim:
        """Return which tokens are kept of pairs. Shapes: parts [S, 3], see `Shard`."""
        return trim_within(parts, self.max_length, cuts_question=self.truncation == "left")

    def kept_range(self, length: int, piece: int = 0) -> tuple[int, int]:
        """Return the range of a sample's tokens that is kept; `piece`: its number, if the sample is split."""
        begin = max(length - self.max_length, 0) if self.truncation == "left" else piece * self.max_length
        return begin, min(begin + self.max_length, length)


@dataclass(frozen=True)
class ChunkSamples:
    """The samples in use of a chunk. Shapes: S samples."""

    samples: NDArray[np.int64]
    """[S]: their numbers; each is its index in the shard, unless the sample is split, see `Shard.find_piece`."""
    indices: NDArray[np.int64]
    """[S]: indices in the shard."""
    rows: NDArray[np.int64]
    """[S]: row numbers in the chunk."""
    lengths: NDArray[np.int64]
    """[S]: tokens after cutting; of both sequences of a pair."""
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


def mask_samples(shard: Shard, rows: tuple[int, int], options: SampleOptions) -> NDArray[np.bool_]:
    """Return a mask [S] of the samples in a range of the chunk's rows and on the side of the held-out split."""
    in_range = (shard.rows >= rows[0]) & (shard.rows < rows[1])
    if options.side == "all":
        return in_range
    is_held_out = shard.digests < np.uint64(round(options.eval_fraction * 2**64 * (1 - 1e-12)))
    return in_range & (is_held_out if options.side == "eval" else ~is_held_out)


def problems_in(shard: Shard, rows: tuple[int, int]) -> list[tuple[int, str]]:
    """Return (line, reason) of the bad rows in a range of the chunk's rows."""
    return [(line, reason) for row, line, reason in shard.problems if rows[0] <= row < rows[1]]


def select_samples(shard: Shard, rows: tuple[int, int], options: SampleOptions, *, are_prompts: bool) -> ChunkSamples:
    """Return the samples in use of a range of a chunk's rows, and the reasons of those that are skipped."""
    in_range = mask_samples(shard, rows, options)
    lengths = shard.lengths
    too_long = lengths > options.max_length
    has_images = shard.image_counts > 0  # an image's tokens are meaningless if some are cut off
    measure = _measure_samples(shard, options) if shard.parts is None else _measure_pairs(shard, shard.parts, options)
    cut_lengths, trained, loses_trained = measure
    is_untrained = (lengths if are_prompts else trained) == 0
    is_refused = too_long & (has_images | (options.truncation in ("error", "drop")))
    samples = np.flatnonzero(in_range & ~(is_untrained | is_refused))
    cut_lengths, trained, is_cut = cut_lengths[samples], trained[samples], too_long
    if options.truncation == "split":
        samples, cut_lengths, trained = _split_samples(shard, samples, options)
        is_cut = np.zeros_like(too_long)
    indices = samples % max(len(shard), 1)
    used = np.isin(np.arange(len(shard)), indices)
    reasons = [
        (
            int(shard.lines[i]),
            _explain_skip(int(lengths[i]), options, bool(loses_trained[i]), bool(has_images[i]), _is_pair(shard, i)),
        )
        for i in np.flatnonzero(in_range & ~used).tolist()
    ]
    # Each side of a held-out split counts its own samples; a bad row has no side and counts with the training rows.
    bad_rows = problems_in(shard, rows) if options.side != "eval" else []
    return ChunkSamples(
        samples,
        indices,
        shard.rows[indices].astype(np.int64),
        cut_lengths,
        trained,
        is_cut[indices],
        (is_cut & loses_trained)[indices],
        sorted(reasons + bad_rows),
        int(in_range.sum()) + len(bad_rows),
    )


def _split_samples(
    shard: Shard, indices: NDArray[np.int64], options: SampleOptions
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers [P] of the pieces of samples, their tokens and the trained ones among them.

    Pieces without a trained token are left out.
    """
    lengths = shard.lengths[indices].astype(np.int64)
    counts = -(-lengths // options.max_length)
    owners = np.repeat(indices, counts)
    pieces = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes = np.minimum(options.max_length, np.repeat(lengths, counts) - pieces * options.max_length)
    trained = sizes - 1  # the first token of a piece is never predicted
    has_weights = np.diff(shard.span_offsets)[owners] > 0
    for position in np.flatnonzero(has_weights):
        begin = int(pieces[position]) * options.max_length
        weights = token_weights(shard, int(owners[position]), options)[begin + 1 : begin + int(sizes[position])]
        trained[position] = np.count_nonzero(weights)
    is_used = trained > 0
    return (owners + pieces * len(shard))[is_used], sizes[is_used], trained[is_used]


def _measure_samples(
    shard: Shard, options: SampleOptions
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return [S] the tokens after cutting, the trained ones among them, and whether any trained token is lost."""
    is_whole = options.truncation == "split"
    cut_lengths = shard.lengths if is_whole else np.minimum(shard.lengths, options.max_length)
    begins = shard.lengths - cut_lengths if options.truncation == "left" else np.zeros_like(cut_lengths)
    trained, loses_trained = _count_trained_tokens(shard, begins, begins + cut_lengths, options.train_on)
    for sample in np.flatnonzero(shard.image_counts) if options.image_token is not None else ():
        predicted = slice(begins[sample] + 1, begins[sample] + cut_lengths[sample])
        trained[sample] = np.count_nonzero(token_weights(shard, int(sample), options)[predicted])
    return cut_lengths, trained, loses_trained


def _measure_pairs(
    shard: Shard, parts: NDArray[np.int32], options: SampleOptions
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the same of pairs. Nothing counts as trained if nothing of one answer is, or if what is left is equal."""
    trim = options.trim_pairs(parts)
    trained = np.zeros(len(shard), np.int64)
    loses_trained = np.zeros(len(shard), np.bool_)
    for sample in range(len(shard)):
        weights = token_weights(shard, sample, options)
        indices = select_tokens(parts, trim, sample)
        ends = np.cumsum(trim.tokens[sample])
        chosen, rejected = (indices[ends[part - 1] : ends[part]] for part in (CHOSEN, REJECTED))
        answers = [answer for part, answer in ((CHOSEN, chosen), (REJECTED, rejected)) if parts[sample, part]]
        counts = [int(np.count_nonzero(weights[answer])) for answer in answers]
        first = int(shard.offsets[sample])
        if all(counts) and trim.tokens[sample, QUESTION]:
            is_equal = np.array_equal(shard.ids[first + chosen], shard.ids[first + rejected])
            trained[sample] = 0 if is_equal else np.count_nonzero(weights[indices[1:]])
        loses_trained[sample] = trained[sample] < np.count_nonzero(weights)
    return trim.sequence_tokens, trained, loses_trained


def token_weights(shard: Shard, sample: int, options: SampleOptions) -> NDArray[np.float32]:
    """Return the weight of each token of an uncut sample in the loss: float32 [n]."""
    length, train_on = int(shard.sizes[sample]), options.train_on
    weights = np.full(length, train_on == "all", np.float32)
    first, end = int(shard.span_offsets[sample]), int(shard.span_offsets[sample + 1])
    for index in range(first, end):
        span = slice(shard.spans[index, 0], shard.spans[index, 1])
        if not np.isnan(shard.weights[index]):
            weights[span] = shard.weights[index]
        elif train_on == "assistant" or index == end - 1:
            weights[span] = 1
    if options.image_token is not None and shard.image_counts[sample]:
        begin = int(shard.offsets[sample])
        weights[np.asarray(shard.ids[begin : begin + length]) == options.image_token] = 0
    return weights


def _count_trained_tokens(
    shard: Shard, first: NDArray[np.int64], last: NDArray[np.int64], train_on: TrainOn
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Count the trained tokens inside `[first, last)` of each sample [S]; the second mask [S]: any is outside.

    The first token of the kept range is never predicted, so it does not count as inside.
    """
    counts = np.diff(shard.span_offsets)
    owner = np.repeat(np.arange(len(shard)), counts)
    begins, ends = shard.spans[:, 0].astype(np.int64), shard.spans[:, 1].astype(np.int64)
    # The weight of each span; a weight set by the row overrides `train_on`.
    default_weights = np.ones(len(owner), np.int64)
    if train_on == "last_assistant":
        default_weights[:] = 0
        default_weights[shard.span_offsets[1:][counts > 0] - 1] = 1
    is_trained = np.where(np.isnan(shard.weights), default_weights, shard.weights) > 0
    inside = np.maximum(np.minimum(ends, last[owner]) - np.maximum(begins, first[owner] + 1), 0)
    outside = (begins < first[owner]) | (ends > last[owner])
    if train_on == "all":  # the whole sample without the spans of weight 0
        untrained = np.bincount(owner[~is_trained], inside[~is_trained], minlength=len(shard)).astype(np.int64)
        return np.maximum(last - first - 1, 0) - untrained, shard.lengths > last - first
    trained = np.bincount(owner[is_trained], inside[is_trained], minlength=len(shard)).astype(np.int64)
    return trained, np.bincount(owner[is_trained & outside], minlength=len(shard)) > 0


def _is_pair(shard: Shard, sample: int) -> bool:
    return shard.parts is not None and bool(shard.parts[sample, CHOSEN] and shard.parts[sample, REJECTED])


def _explain_skip(length: int, options: SampleOptions, loses_trained: bool, has_images: bool, is_pair: bool) -> str:
    if length > options.max_length:
        if has_images:
            return f"{length} tokens with images, which are never cut, longer than {options.limit}"
        if options.truncation in ("error", "drop"):
            return f"{length} tokens, longer than {options.limit}"
        if loses_trained:
            left = "its answers are equal, or nothing of one is left" if is_pair else "nothing trained is left"
            return f"{length} tokens: cut to {options.limit}, {left}"
    return "no token of it is trained"
