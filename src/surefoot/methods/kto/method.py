"""Kahneman-Tversky optimisation: desired answers become likelier, and others less likely, without pairs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from surefoot.config import RunConfig
from surefoot.data.collate import MicroBatch, collate, dummy_batch
from surefoot.data.dataset import Dataset, Sample, SampleKey
from surefoot.data.pairs import CHOSEN
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.methods.base import BatchTotals, Objective
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
        self._has_divergence = config.loss_type == "kto"
        self._divergence = 0.0

    def score(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each answer, and of another answer to the same question. Shapes: [P, 2]."""
        logps = sum_answers(self.compute_logprobs(batch), batch, max(batch.num_sequences, 1))
        return torch.stack([logps, self._score_mismatched(batch, logps)], dim=1)

    def _score_mismatched(self, batch: MicroBatch, otherwise: Tensor) -> Tensor:
        """Return the log-probabilities of the answers to other questions. Shapes: [P]. Collective."""
        other = batch.mismatched if isinstance(batch, LabelledBatch) else None
        if other is None or not self._has_divergence:
            return torch.zeros_like(otherwise)
        return sum_answers(self.compute_logprobs(other), other, len(otherwise))

    def add_reference(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the likelihoods of its reference, and those of mismatched answers. Collective."""
        batch = super().add_reference(batch)
        if not isinstance(batch, LabelledBatch) or not self._has_divergence:
            return batch
        count = batch.targets.new_zeros(max(batch.num_sequences, 1), dtype=torch.float32)
        return replace(batch, mismatched_logps=self._score_mismatched(batch, count))

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

    def prepare_batch(self, batch: MicroBatch, dataset: Dataset) -> MicroBatch:
        """Return the batch with the labels of its answers, and its questions with the answers to others."""
        reader, most = self.context.data.reader, dataset.options.max_length
        if batch.is_dummy:
            return LabelledBatch(**vars(batch), mismatched=dummy_batch(reader))
        samples = [dataset.sample(*key) for key in batch.sample_keys]
        others = [mismatched_sample(dataset, key, most) for key in batch.sample_keys]
        is_desired = [sample.parts is not None and sample.parts[CHOSEN] > 0 for sample in samples]
        return LabelledBatch(**vars(batch), is_desired=torch.tensor(is_desired), mismatched=collate(others, reader))


def mismatched_sample(dataset: Dataset, key: SampleKey, most: int) -> Sample:
    """Return a sample's question with the answer to another, of the nearest sample before it in its chunk.

    It depends on the data alone, so it is the same in every epoch and on any number of ranks. `most`: tokens to keep.
    """
    sample = dataset.sample(*key)
    question = _question_of(sample)
    differing = (each for each in _earlier(dataset, key) if not np.array_equal(_question_of(each), question))
    other = next(differing, sample)
    answer = slice(len(_question_of(other)), None)
    ids = np.concatenate([question, other.ids[answer]])[:most]
    weights = np.concatenate([np.zeros(len(question), np.float32), other.weights[answer]])[:most]
    return replace(sample, ids=ids, weights=weights, parts=None)


def _question_of(sample: Sample) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    assert sample.parts is not None
    return sample.ids[: sample.parts[0]]


def _earlier(dataset: Dataset, key: SampleKey) -> Iterator[Sample]:
    """Yield the other samples in use of a sample's chunk, from the one before it backwards, around its beginning."""
    chunk, sample = key
    samples = dataset.chunk_samples(chunk).samples
    place = int(np.searchsorted(samples, sample))
    return (dataset.sample(chunk, int(each)) for each in np.roll(samples, -place)[:0:-1])
