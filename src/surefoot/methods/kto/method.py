"""Kahneman-Tversky optimisation: desired answers become likelier, and others less likely, without pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from surefoot.config import RunConfig
from surefoot.data.collate import MicroBatch, collate, dummy_batch
from surefoot.data.dataset import Dataset, Sample, SampleKey
from surefoot.data.images import Image
from surefoot.data.pairs import CHOSEN, QUESTION, take_images
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.methods.base import BatchTotals, MethodContext, Objective
from surefoot.methods.kto.settings import KtoConfig
from surefoot.methods.preference import AnswerBatch, PreferenceMethod, PreferenceObjective
from surefoot.methods.token_loss import has_values, sum_answers
from surefoot.models.build import BuiltModel

METRICS = ("rewards/chosen", "logps/chosen", "rewards/rejected", "logps/rejected")
"""Means over the desired answers and over the others, under TRL's names."""


@dataclass(frozen=True)
class LabelledBatch(AnswerBatch):
    """Answers with their labels, and questions with the answers of others."""

    is_desired: Tensor | None = None
    """bool [P]."""
    mismatched: MicroBatch | None = None
    """The questions, each with the answer to another: they show how far the model is from its reference."""
    mismatched_logps: Tensor | None = None
    """float32 [P]: their log-probabilities under the model."""

    def to(self, device: torch.device) -> "LabelledBatch":
        """Return the batch with its tensors on `device`, without waiting for the copies."""
        moved = super().to(device)
        assert isinstance(moved, LabelledBatch)
        return replace(moved, mismatched=self.mismatched.to(device) if self.mismatched is not None else None)


class KtoObjective(PreferenceObjective):
    """The loss of labelled answers, averaged over the answers of the step."""

    def __init__(self, built: BuiltModel, config: KtoConfig, ranks: World = SINGLE_PROCESS) -> None:
        """Detect how the model computes its logits. Collective."""
        super().__init__(built, config, ranks)
        self._beta = config.beta
        self._weights = (config.undesirable_weight, config.desirable_weight)
        self._has_divergence = config.has_divergence
        self._divergence = 0.0

    def score(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each answer and of its mismatched one. Shapes: [P, 2]. Collective."""
        logps = sum_answers(self.compute_logprobs(batch), batch, max(batch.num_sequences, 1))
        return torch.stack([logps, self._score_mismatched(batch)], dim=1)

    def _score_mismatched(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities of answers to other questions; zeros without any. Shapes: [P]. Collective."""
        num_answers = max(batch.num_sequences, 1)
        other = batch.mismatched if isinstance(batch, LabelledBatch) else None
        if other is None or not self._has_divergence:
            return torch.zeros(num_answers, device=batch.ids.device)
        return sum_answers(self.compute_logprobs(other), other, num_answers)

    def complete(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the likelihoods of its reference, and those of mismatched answers. Collective."""
        batch = super().complete(batch)
        if not isinstance(batch, LabelledBatch) or not self._has_divergence:
            return batch
        return replace(batch, mismatched_logps=self._score_mismatched(batch))

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Compute the reference's likelihoods and the divergence from it, over the global batch. Collective.

        Batches of the planner have no labels: there, the mismatched answers are as long as their own.
        """
        labelled = [
            batch if isinstance(batch, LabelledBatch) else LabelledBatch(**vars(batch), mismatched=batch)
            for batch in batches
        ]
        complete = super().begin_step(labelled)
        log_ratios = [_divergences(batch) for batch in complete if isinstance(batch, LabelledBatch)]
        if log_ratios and has_values(self.model):
            local = torch.cat(log_ratios).double()
            self._divergence = self._average_divergence(float(local.sum()), len(local))
        return complete

    def _average_divergence(self, total: float, count: int) -> float:
        """Return the divergence from the reference, at least 0, from this rank's log-ratios. Collective."""
        sum_of_all, num_answers = self.ranks.sum([total, count])
        return max(sum_of_all / num_answers, 0.0) if num_answers else 0.0

    def compare(self, logprobs: Tensor, batch: MicroBatch, totals: BatchTotals | None) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's share of the loss, and four numbers of each answer; see `PreferenceObjective`.

        Those are its label, log-probability and log-ratio, and the log-ratio of a mismatched answer.
        """
        logps = sum_answers(logprobs, batch, batch.num_sequences)
        reference = batch.reference_logps if isinstance(batch, AnswerBatch) else None
        log_ratios = logps if reference is None else logps - reference[:, 0]
        is_desired = torch.ones_like(logps, dtype=torch.bool)
        mismatched = torch.zeros_like(logps)
        if isinstance(batch, LabelledBatch):
            is_desired = is_desired if batch.is_desired is None else batch.is_desired
            if batch.mismatched_logps is not None and reference is not None:
                mismatched = _divergences(batch)
        losses = self._compute_losses(log_ratios, is_desired, self._divergence)
        share = losses.sum() if totals is None else losses.sum() / totals.sequences
        numbers = [is_desired, logps.detach(), log_ratios.detach(), mismatched]
        return share, torch.stack([number.double() for number in numbers], dim=1)

    def _compute_losses(self, log_ratios: Tensor, is_desired: Tensor, divergence: float) -> Tensor:
        """1 - sigma(beta (r - z)) of desired answers, 1 - sigma(beta (z - r)) of others (arXiv:2402.01306, eq. 7).

        Shapes: [P]. `divergence`: z, without gradient; 0 with apo_zero_unpaired (arXiv:2408.06266, eq. 7).
        """
        distance = self._beta * (log_ratios - divergence)
        undesirable, desirable = self._weights
        return torch.where(is_desired, desirable * (1 - distance.sigmoid()), undesirable * (1 - (-distance).sigmoid()))

    def summarise(self, rows: Tensor) -> dict[str, float]:
        """Return `loss` and the metrics over all ranks. Collective: two sums of a few numbers."""
        is_desired, logps, log_ratios, mismatched = rows.unbind(1) if len(rows) else [torch.zeros(0)] * 4
        divergence = self._average_divergence(float(mismatched.sum()), len(mismatched))
        is_desired = is_desired.bool()
        losses = self._compute_losses(log_ratios, is_desired, divergence)
        rewards = self._beta * log_ratios
        local = [losses.sum(), *(value[mask].sum() for mask in (is_desired, ~is_desired) for value in (rewards, logps))]
        counts = [len(rows), int(is_desired.sum())]
        loss, *sums, answers, desired = self.ranks.sum([*map(float, local), *counts])
        others = answers - desired
        metrics = {
            name: total / count
            for name, total, count in zip(METRICS, sums, (desired, desired, others, others), strict=True)
            if count
        }
        if desired and others:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if self._has_divergence:
            metrics["kl"] = divergence
        return {"loss": loss / answers, **metrics}


def _divergences(batch: LabelledBatch) -> Tensor:
    """Return the log-ratios of mismatched answers; none of a dummy. Shapes: [P]."""
    if batch.is_dummy or batch.mismatched_logps is None or batch.reference_logps is None:
        return batch.targets.new_zeros(0, dtype=torch.float32)
    return batch.mismatched_logps - batch.reference_logps[:, 1]


class Kto(PreferenceMethod):
    """Kahneman-Tversky optimisation."""

    shares_questions = False

    @staticmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:
        """Return the loss of labelled answers."""
        assert isinstance(config, KtoConfig)
        return KtoObjective(built, config, ranks)

    def __init__(self, context: MethodContext) -> None:
        super().__init__(context)
        config = context.loaded.run
        assert isinstance(config, KtoConfig)
        self._has_divergence = config.has_divergence
        self._partners: dict[tuple[int, int], Mapping[int, int]] = {}
        """Partners of the samples of a chunk, by the identity of its dataset and its number."""

    def read_rows(self, batch: MicroBatch, dataset: Dataset) -> MicroBatch:
        """Return the batch with the labels of its answers, and its questions with the answers to others."""
        reader = self.context.data.reader
        mismatched = None
        if batch.is_dummy:
            return LabelledBatch(**vars(batch), mismatched=dummy_batch(reader) if self._has_divergence else None)
        samples = [dataset.sample(*key) for key in batch.sample_keys]
        if self._has_divergence:
            mismatched = collate([self._mismatch(dataset, key) for key in batch.sample_keys], reader)
        is_desired = [sample.parts is not None and sample.parts[CHOSEN] > 0 for sample in samples]
        return LabelledBatch(**vars(batch), is_desired=torch.tensor(is_desired), mismatched=mismatched)

    def _mismatch(self, dataset: Dataset, key: SampleKey) -> Sample:
        chunk, sample = key
        partners = self._partners.get((id(dataset), chunk))
        if partners is None:
            partners = self._partners[id(dataset), chunk] = find_partners(dataset, chunk)
        options = dataset.options
        other = dataset.sample(chunk, partners[sample])
        return mismatch(dataset.sample(*key), other, options.max_length, options.image_token)


def find_partners(dataset: Dataset, chunk: int) -> dict[int, int]:
    """Return, for each sample of a chunk, the one whose answer its question is given: the nearest before it with
    another question, around the beginning of the chunk; the one before it if all questions are equal.

    It depends on the rows in use alone, so it is the same in every epoch and on any number of ranks.
    """
    samples = dataset.chunk_samples(chunk).samples.tolist()
    questions = [_identify_question(dataset.sample(chunk, sample), dataset.options.image_token) for sample in samples]
    count = len(samples)
    first = next((index for index in range(count) if questions[index - 1] != questions[index]), None)
    if first is None:
        return {samples[index]: samples[index - 1] for index in range(count)}
    partners: dict[int, int] = {}
    before = 0
    for index in (place % count for place in range(first, first + count)):
        if questions[index - 1] != questions[index]:
            before = index - 1
        partners[samples[index]] = samples[before]
    return partners


def mismatch(sample: Sample, other: Sample, max_length: int, image_token: int | None) -> Sample:
    """Return a sample's question with the answer of another, cut to a length, and not within an image."""
    (question, own), (other_question, others) = (_split_question(each, image_token) for each in (sample, other))
    answer = slice(other_question, None)
    ids = np.concatenate([sample.ids[:question], other.ids[answer]])[:max_length]
    weights = np.concatenate([np.zeros(question, np.float32), other.weights[answer]])[:max_length]
    images = take_images(ids, (*own, *other.images[len(others) :]), image_token)
    places = np.flatnonzero(ids == image_token) if sample.images or other.images else ()
    if len(places) > (whole := sum(image.num_tokens for image in images)):
        ids, weights = ids[: places[whole]], weights[: places[whole]]
    return replace(sample, ids=ids, weights=weights, parts=None, images=images)


def _split_question(sample: Sample, image_token: int | None) -> tuple[int, tuple[Image, ...]]:
    """Return the number of tokens of a sample's question, and its images."""
    assert sample.parts is not None
    question = sample.parts[QUESTION]
    return question, take_images(sample.ids[:question], sample.images, image_token)


def _identify_question(sample: Sample, image_token: int | None) -> int:
    """Return a hash of the tokens and images of a sample's question."""
    question, images = _split_question(sample, image_token)
    return hash((sample.ids[:question].tobytes(), tuple(image.sha256 for image in images)))
