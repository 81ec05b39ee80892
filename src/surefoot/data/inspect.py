"""The report of `surefoot data`: counts, lengths, skipped rows, findings, and samples as they are trained."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from surefoot.data.checks import count_labels, data_findings, digests
from surefoot.data.conversation import BadRow
from surefoot.data.dataset import Counts, Dataset, Sample
from surefoot.data.file_readers import ChunkReader
from surefoot.data.render import Renderer
from surefoot.data.row_formats import Reader
from surefoot.data.sample_selection import ChunkSamples
from surefoot.errors import DataError
from surefoot.findings import Finding

HISTOGRAM_BINS = 8
SKIPPED_SHOWN = 10


@dataclass(frozen=True)
class ShownSample:
    """A sample as it is trained. Shapes: input_ids and loss_mask [n]; the mask holds weights in the loss."""

    text: str
    input_ids: list[int]
    loss_mask: list[float]
    source: str
    trained_text: list[tuple[str, bool]]
    """The text as (part, is trained) pairs."""


@dataclass(frozen=True)
class DataReport:
    """A report about a dataset. Lengths and tokens are those of the samples in use, after cutting."""

    format: str
    counts: Counts
    held_out: Counts | None
    """Counts of eval_dataset, or of the samples that eval_fraction holds out."""
    tokens: int
    trained_tokens: int
    duplicates: int
    """Number of samples that equal an earlier one."""
    lengths: dict[str, int]
    """Lengths in tokens: min, median, mean, p95, max."""
    images: dict[str, int]
    """Number of images and tokens per image; empty without images."""
    histogram: list[tuple[int, int, int]]
    """Bins of the lengths, in tokens: (from, to, samples), both ends included."""
    skipped: list[tuple[str, str]]
    """(place, reason) of the first skipped rows."""
    findings: list[Finding]
    refusal: str | None
    """Reason why training would stop before its first step, if it would."""
    samples: list[ShownSample]
    are_prompts: bool = False
    """Whether samples are prompts (GRPO): none of their tokens is trained, the model continues them."""
    labels: tuple[int, int] | None = None
    """Numbers of desired answers and of others (KTO); None without labels."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "format": self.format,
            "rows": self.counts.as_dict(),
            "held_out": self.held_out.as_dict() if self.held_out is not None else None,
            "truncated_inside_a_trained_turn": self.counts.cut_inside,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "labels": dict(zip(("desired", "not_desired"), self.labels, strict=True)) if self.labels else None,
            "duplicates": self.duplicates,
            "lengths": self.lengths,
            "images": self.images,
            "histogram": [{"from": low, "to": high, "samples": count} for low, high, count in self.histogram],
            "skipped": [{"source": place, "reason": reason} for place, reason in self.skipped],
            "findings": [finding.as_dict() for finding in self.findings],
            "refusal": self.refusal,
            "samples": [
                {
                    "text": sample.text,
                    "input_ids": sample.input_ids,
                    "loss_mask": [int(weight) if weight in (0, 1) else weight for weight in sample.loss_mask],
                    "source": sample.source,
                }
                for sample in self.samples
            ],
        }


def report_on(dataset: Dataset, held_out: Dataset | None, *, show: int) -> DataReport:
    """Return the report of a prepared dataset. Rows that training would refuse appear as findings or skipped rows."""
    refusal = None
    try:
        dataset.check()
    except DataError as error:
        refusal = str(error)
    dataset = dataset.without_validation()
    held_out = held_out.without_validation() if held_out is not None else None
    parts = [dataset.chunk_samples(number) for number in range(len(dataset.chunks))]
    tokens = sum(int(part.lengths.sum()) for part in parts)
    per_chunk = (_limited_lengths(dataset, number) for number in range(len(parts)))
    all_lengths = np.concatenate([np.zeros(0, np.int64), *per_chunk])
    counts = dataset.counts()
    all_digests = digests(dataset)
    return DataReport(
        format=", ".join(dataset.formats),
        counts=counts,
        held_out=held_out.counts() if held_out is not None else None,
        tokens=tokens,
        trained_tokens=sum(int(part.trained.sum()) for part in parts),
        duplicates=len(all_digests) - len(np.unique(all_digests)),
        lengths=_summarize(all_lengths),
        images=_summarize_images(dataset, parts),
        histogram=_build_histogram(all_lengths),
        skipped=list(islice(dataset.skipped(), SKIPPED_SHOWN)),
        findings=data_findings(dataset, held_out),
        refusal=refusal,
        samples=list(islice(_render_samples(dataset), min(show, sys.maxsize))),
        are_prompts=dataset.has_prompts,
        labels=count_labels(dataset),
    )


def _limited_lengths(dataset: Dataset, number: int) -> NDArray[np.int64]:
    """Return what `max_length` limits of each sample: its tokens; of a pair, the question with its longer answer."""
    shard, part = dataset.shard(number), dataset.chunk_samples(number)
    if shard.parts is None:
        return part.lengths
    return np.minimum(shard.lengths[part.indices], dataset.options.max_length)


def _summarize_images(dataset: Dataset, parts: Sequence[ChunkSamples]) -> dict[str, int]:
    """Return the number of images and the tokens per image; empty without images."""
    tokens = [
        image.num_tokens
        for number, part in enumerate(parts)
        for index in part.indices.tolist()
        for image in dataset.shard(number).images(index)
    ]
    per_image = _summarize(np.array(tokens))
    return {"count": len(tokens), **{f"tokens {name}": value for name, value in per_image.items()}} if tokens else {}


def _summarize(lengths: Any) -> dict[str, int]:
    if not len(lengths):
        return {}
    values = [lengths.min(), np.median(lengths), lengths.mean(), np.percentile(lengths, 95), lengths.max()]
    return {name: round(float(v)) for name, v in zip(("min", "median", "mean", "p95", "max"), values, strict=True)}


def _build_histogram(lengths: Any) -> list[tuple[int, int, int]]:
    if not len(lengths):
        return []
    least, most = int(lengths.min()), int(lengths.max())
    width = -(-(most - least + 1) // HISTOGRAM_BINS)
    counts = np.bincount((lengths - least) // width)
    return [(low, min(low + width - 1, most), int(counts[n])) for n, low in enumerate(range(least, most + 1, width))]


def _render_samples(dataset: Dataset) -> Iterator[ShownSample]:
    """Yield samples in file order, rendered again, because the cache holds token ids only."""
    renderer, chunks = Renderer(dataset.renderer_source), ChunkReader()
    for number, ref in enumerate(dataset.chunks):
        file = dataset.files[ref.file]
        reader = Reader(file.recipe.spec, file.recipe.format)
        rows = chunks.rows(file.recipe.path, file.chunks[ref.index])
        shard = dataset.shard(number)
        for name in dataset.chunk_samples(number).samples.tolist():
            index, piece = shard.find_piece(name)
            conversation = reader.read(rows[int(shard.rows[index])].columns)
            sample = dataset.sample(number, name)
            try:
                texts = [renderer.render(side, file.recipe.path.parent) for side in conversation.sides]
            except BadRow as error:  # its image was removed after the check
                raise DataError(f"{sample.place}: {error}") from error
            rendered = [each for each in renderer.tokenize(texts, with_bounds=True) if not isinstance(each, BadRow)]
            marked = [
                _Marked(text.text, each.bounds) for text, each in zip(texts, rendered, strict=True) if each.bounds
            ]
            if shard.parts is None:
                first, _ = dataset.options.kept_range(len(marked[0].bounds), piece)
                parts = marked[0].cut(first, sample.weights.tolist())
            else:
                parts = _mark_pair(marked, sample, int(shard.parts[index, 0]))
            shown = "".join(piece for piece, _ in parts)
            yield ShownSample(shown, sample.ids.tolist(), sample.weights.tolist(), sample.place, parts)


class _Marked(NamedTuple):
    """A rendered text with the range of characters of each token."""

    text: str
    bounds: Sequence[tuple[int, int]]

    def cut(self, first: int, weights: Sequence[float]) -> list[tuple[str, bool]]:
        """Return the text of the tokens from `first` on in parts that are trained or not, a token for each weight."""
        last = first + len(weights)
        position = self.bounds[first][0] if first else 0
        pieces = []
        for index, ((_, stop), weight) in enumerate(zip(self.bounds[first:last], weights, strict=True), first + 1):
            stop = len(self.text) if index == len(self.bounds) else stop
            pieces.append((self.text[position:stop], weight > 0))
            position = max(position, stop)
        return [("".join(piece for piece, _ in group), kind) for kind, group in groupby(pieces, key=itemgetter(1))]


def _mark_pair(sides: Sequence[_Marked], sample: Sample, question_tokens: int) -> list[tuple[str, bool]]:
    """Return the parts of a pair's text, or of one answer with a label, each answer behind a line that names it.

    `question_tokens`: tokens of the question before it was cut.
    """
    assert sample.parts is not None
    question, chosen, rejected = sample.parts
    weights, first = sample.weights.tolist(), question_tokens - question
    names = ("chosen", "rejected") if chosen and rejected else ("desired", "not desired")
    parts = sides[0].cut(first, weights[:question])
    if chosen:
        answer = sides[0].cut(question_tokens, weights[question : question + chosen])
        parts += [(f"\n--- {names[0]}:\n", False), *answer]
    if rejected:
        parts += [
            (f"\n--- {names[1]}:\n", False),
            *sides[-1].cut(question_tokens, weights[question + chosen :]),
        ]
    return parts


def as_text(report: DataReport, *, color: bool) -> str:
    """Return the report as text; trained text is green, or between ⟦ and ⟧ without colors."""
    begin, end = ("\x1b[32m", "\x1b[0m") if color else ("⟦", "⟧")
    counts = report.counts
    lines = [
        f"format      {report.format}",
        f"rows        {counts.read} read = {counts.trained} trained + {counts.truncated} truncated "
        f"+ {counts.skipped} skipped",
    ]
    if report.held_out is not None:
        held_out = ", ".join(f"{count} {name}" for name, count in report.held_out.as_dict().items())
        lines.append(f"held out    {held_out}")
    if counts.cut_inside:
        lines.append(f"            {counts.cut_inside} of the truncated lost a part of a trained turn")
    share = f" ({report.trained_tokens / report.tokens:.1%})" if report.tokens else ""
    trained = "of prompts" if report.are_prompts else f"{report.trained_tokens} of them trained{share}"
    lines.append(f"tokens      {report.tokens}, {trained}")
    if report.labels is not None:
        lines.append("labels      {} desired, {} not desired".format(*report.labels))
    lines.append(f"duplicates  {report.duplicates}")
    if report.images:
        lines.append("images      " + ", ".join(f"{name} {value}" for name, value in report.images.items()))
    if report.lengths:
        lines.append("lengths     " + ", ".join(f"{name} {value}" for name, value in report.lengths.items()))
        most = max(count for _, _, count in report.histogram)
        for low, high, count in report.histogram:
            lines.append(f"  {low:>6} - {high:<6} {'#' * max(round(40 * count / most), 1 if count else 0):<40} {count}")
    if report.skipped:
        lines.append(f"skipped rows ({counts.skipped}):")
        places: dict[str, list[str]] = {}
        for place, reason in report.skipped:
            places.setdefault(reason, []).append(place)
        for reason, (first, *others) in places.items():
            lines.append(f"  {first}: {reason}")
            lines += [f"    the same: {', '.join(others)}"] if others else []
        if counts.skipped > len(report.skipped):
            lines.append(f"  ... and {counts.skipped - len(report.skipped)} more")
    lines += [finding.as_text() for finding in report.findings]
    if report.refusal is not None:
        lines.append(f"`surefoot train` would stop: {report.refusal}")
    for sample in report.samples:
        shown = "".join(f"{begin}{text}{end}" if trained else text for text, trained in sample.trained_text)
        legend = f"trained {begin}like this{end}"
        if report.are_prompts:
            shown, legend = sample.text, "a prompt"
        lines.append(f"--- {sample.source}: {len(sample.input_ids)} tokens, {legend}\n{shown}")
    return "\n".join(lines)
