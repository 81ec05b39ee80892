"""Methods on pairs: of two answers to a question, the chosen one becomes the likelier."""

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.config import RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.distributed.process_group import SINGLE_PROCESS, World, sum_over_ranks
from surefoot.methods.base import BatchTotals, Objective
from surefoot.methods.dpo.loss import Pairs, compares_means, pair_losses
from surefoot.methods.dpo.settings import PairConfig
from surefoot.methods.preference import AnswerBatch, PreferenceMethod, PreferenceObjective
from surefoot.methods.token_loss import sum_answers
from surefoot.models.build import BuiltModel

METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Means over pairs, under TRL's names. A reward is beta times what the loss compares: log-ratios, or their means."""
NUMBERS = ("loss", "nll", "chosen_tokens", *METRICS)
"""Numbers of each pair that metrics and evaluations are made of."""


class DpoObjective(PreferenceObjective):
    """The loss of pairs, averaged over the pairs of the step. `answer_of` [N]: 2 p is the chosen answer of pair p."""

    def __init__(self, built: BuiltModel, config: PairConfig, ranks: World = SINGLE_PROCESS) -> None:
        """Detect how the model computes its logits. Collective."""
        super().__init__(built, config, ranks)
        self._settings = config.loss_settings
        self._chosen_tokens: Tensor | None = None
        """Weight of the tokens in the likelihood of the chosen answers, over the global batch."""

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Compute the reference's likelihoods of all pairs of the step, in forwards without graph."""
        if self._settings.sft_weight:
            local = [_weights_of_chosen(batch).sum() * (not batch.is_dummy) for batch in batches]
            self._chosen_tokens = sum_over_ranks(torch.stack(local).sum(), self.ranks)
        return super().begin_step(batches)

    def score(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of the chosen and of the rejected answer. Shapes: [P, 2]. Collective."""
        return self._sum_by_answer(self.compute_logprobs(batch), batch)

    def _sum_by_answer(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each answer. Shapes: [N] -> [P, 2]."""
        if batch.weights is not None:
            logprobs = logprobs * batch.weights
        if self._settings.ld_alpha is not None:
            logprobs = torch.where(_is_beyond_shorter(batch), logprobs * self._settings.ld_alpha, logprobs)
        return _sum_pairs(logprobs, batch)

    def compare(self, logprobs: Tensor, batch: MicroBatch, totals: BatchTotals | None) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's share of the loss, and NUMBERS of each pair; see `PreferenceObjective`."""
        logps = self._sum_by_answer(logprobs, batch)
        reference = batch.reference_logps if isinstance(batch, AnswerBatch) else None
        if reference is None:
            reference = torch.zeros_like(logps)
        pairs = Pairs(logps, reference, _sum_pairs(torch.ones_like(logprobs), batch))
        losses = pair_losses(pairs, self._settings)
        weights = _weights_of_chosen(batch)
        nll = -_sum_with_questions(logprobs * weights, batch)[:, 0]
        logged = logps / pairs.num_tokens if compares_means(self._settings) else logps
        compared = logged if compares_means(self._settings) else pairs.ratios
        chosen, rejected = (self._settings.beta * compared.detach()).unbind(1)
        columns = [
            losses.detach(), nll.detach(), _sum_with_questions(weights, batch)[:, 0], chosen, rejected,
            chosen - rejected, chosen > rejected, *logged.detach().unbind(1),
        ]  # fmt: skip
        share = losses.sum()
        if totals is not None:
            share = share / (totals.sequences / 2)
            if self._settings.sft_weight:
                chosen_tokens = totals.trained / 2 if self._chosen_tokens is None else self._chosen_tokens
                share = share + self._settings.sft_weight * nll.sum() / chosen_tokens
        return share, torch.stack([column.double() for column in columns], dim=1)

    def summarise(self, rows: Tensor) -> dict[str, float]:
        """Return `loss` and METRICS over all ranks. Collective: one sum of a few numbers."""
        sums = rows.sum(0).tolist() or [0.0] * len(NUMBERS)
        *totals, pairs = self.ranks.sum([*sums, len(rows)])
        loss, nll, chosen_tokens, *metrics = totals
        loss = loss / pairs + self._settings.sft_weight * nll / chosen_tokens
        return {"loss": loss, **{name: value / pairs for name, value in zip(METRICS, metrics, strict=True)}}


def _sum_pairs(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum over the tokens of each answer, without its question's. Shapes: [N] -> [P, 2]."""
    if batch.is_question is not None:
        values = torch.where(batch.is_question, 0, values)
    return _sum_with_questions(values, batch)


def _sum_with_questions(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum over all tokens that count as an answer's; a dummy is one pair. Shapes: [N] -> [P, 2]."""
    return sum_answers(values, batch, batch.num_sequences or 2).view(-1, 2)


def _is_beyond_shorter(batch: MicroBatch) -> Tensor:
    """Return whether each token is beyond the length of the shorter answer of its pair. Shapes: bool [N]."""
    counts = _sum_pairs(torch.ones_like(batch.answer_of), batch)
    begins = counts.flatten().cumsum(0) - counts.flatten()
    index = torch.arange(len(batch.answer_of), device=batch.answer_of.device) - begins[batch.answer_of]
    return index >= counts.amin(1)[batch.answer_of // 2]


def _weights_of_chosen(batch: MicroBatch) -> Tensor:
    """Return the weight of each token in the likelihood of the chosen answers. Shapes: float32 [N]."""
    is_chosen = (batch.answer_of % 2 == 0).float()
    return is_chosen if batch.weights is None else is_chosen * batch.weights


class Dpo(PreferenceMethod):
    """Direct preference optimisation, and the odds-ratio variant."""

    @staticmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:
        """Return the loss of pairs."""
        assert isinstance(config, PairConfig)
        return DpoObjective(built, config, ranks)
