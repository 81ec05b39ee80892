"""Direct preference optimisation: of two answers to a question, the chosen one becomes the likelier."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.config import RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.distributed.fsdp import reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World, sum_over_ranks
from surefoot.methods.base import BatchTotals, Interrupted, LossTerms, Objective, TrainContext
from surefoot.methods.dpo.loss import PairLoss, Pairs
from surefoot.methods.dpo.settings import DpoConfig
from surefoot.methods.row_method import RowMethod
from surefoot.methods.token_loss import TokenLogprobs, eval_no_grad
from surefoot.models.build import BuiltModel
from surefoot.models.isolation import can_share_prompts
from surefoot.models.lora import disable_adapter
from surefoot.models.routing import LayerRouting, expert_counts

METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Means over pairs, under TRL's names. A reward is beta times the log-ratio of an answer."""
SUMS = ("loss", "nll", "chosen_tokens", *METRICS, "pairs")
"""Names of the sums that metrics and evaluations are made of."""


@dataclass(frozen=True)
class PairBatch(MicroBatch):
    """Pairs of answers with the likelihoods of their reference. `answer_of` [N]: 2 p is the chosen answer of pair p."""

    reference_logps: Tensor | None = None
    """float32 [P, 2]: log-probability of each answer under the reference; None without one."""


class DpoObjective(Objective):
    """The loss of pairs, averaged over the pairs of the step."""

    def __init__(self, built: BuiltModel, config: DpoConfig, ranks: World = SINGLE_PROCESS) -> None:
        """Detect how the model computes its logits. Collective."""
        super().__init__(built.model)
        self._ranks = ranks
        self._routing = built.routing
        self._loss = PairLoss.of(config)
        self._needs_reference = config.needs_reference
        self._ld_alpha = config.ld_alpha
        self._sft_weight = config.sft_weight
        self._logprobs = TokenLogprobs(built.model, is_drawn=False)
        _turn_off_dropout(built.model)
        self._chosen_tokens: Tensor | None = None
        """Trained tokens of the chosen answers of the global batch; None unless `sft_weight` needs them."""
        self._sums: list[Tensor] = []
        self._counts: Tensor | None = None
        self._metrics: dict[str, float] = {}

    @property
    def expert_counts(self) -> Tensor | None:
        """Rows of each expert in which the last step's trained tokens were predicted, int64 [layers, E]."""
        return self._counts

    def counted_tokens(self, totals: BatchTotals) -> int:
        """Return the number of trained tokens: a question may be computed once for both answers."""
        return totals.trained

    @property
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self._logprobs.holds_all_logits

    @property
    def metrics(self) -> Mapping[str, float]:
        """See METRICS."""
        return self._metrics

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Compute the reference's likelihoods of all pairs of the step, in forwards without graph."""
        self._sums, self._counts = [], None
        if self._sft_weight:
            local = [_weights_of_chosen(batch).sum() * (not batch.is_dummy) for batch in batches]
            self._chosen_tokens = sum_over_ranks(torch.stack(local).sum(), self._ranks)
        return [self._add_reference(batch) for batch in batches]

    def _add_reference(self, batch: MicroBatch) -> PairBatch:
        """Return the batch with the likelihoods under the model without its adapter, if the loss needs them."""
        if not self._needs_reference:
            return PairBatch(**vars(batch))
        with eval_no_grad(self.model), disable_adapter(self.model):
            logprobs, _ = self._logprobs(batch)
        return PairBatch(**vars(batch), reference_logps=self._sum_by_answer(logprobs, batch))

    def _sum_by_answer(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each answer. Shapes: [N] -> [P, 2]."""
        if batch.weights is not None:
            logprobs = logprobs * batch.weights
        if self._ld_alpha is not None:
            logprobs = torch.where(_is_beyond_shorter(batch), logprobs * self._ld_alpha, logprobs)
        return _sum_pairs(logprobs, batch)

    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:
        """Return this micro-batch's share. Without `begin_step`, the reference counts as uniform."""
        with self._routing.recording() as layers:
            logprobs, _ = self._logprobs(batch)
        if layers:
            self._add_counts(layers, batch)
        if batch.is_dummy:
            return LossTerms(logprobs.sum() * 0.0)
        losses, nll, sums = self._compare(logprobs, batch)
        self._sums.append(sums)
        loss = losses.sum() / (totals.sequences / 2)
        if self._sft_weight:
            chosen_tokens = totals.trained / 2 if self._chosen_tokens is None else self._chosen_tokens
            loss = loss + self._sft_weight * nll / chosen_tokens
        return LossTerms(loss)

    def _compare(self, logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of each pair, the negative log-likelihood of the chosen answers, and the sums of SUMS.

        Shapes: logprobs [N] with graph -> [P] and a scalar with graph, float64 [sums].
        """
        logps = self._sum_by_answer(logprobs, batch)
        reference = batch.reference_logps if isinstance(batch, PairBatch) else None
        if reference is None:
            reference = torch.zeros_like(logps)
        pairs = Pairs(logps, reference, _sum_pairs(torch.ones_like(logprobs), batch))
        losses = self._loss(pairs)
        weights = _weights_of_chosen(batch)
        nll = -(logprobs * weights).sum()
        chosen, rejected = (self._loss.beta * self._loss.compared(pairs).detach()).unbind(1)
        columns = [
            losses.detach(), nll.detach(), weights, chosen, rejected, chosen - rejected,
            chosen > rejected, *logps.detach().unbind(1), torch.ones_like(chosen),
        ]  # fmt: skip
        return losses, nll, torch.stack([column.double().sum() for column in columns])

    def _add_counts(self, layers: Sequence[LayerRouting], batch: MicroBatch) -> None:
        predicting = [LayerRouting(layer.logits, layer.index[batch.target_positions]) for layer in layers]
        counts = expert_counts(predicting, layers[0].logits.shape[-1])
        if batch.is_dummy:
            counts = torch.zeros_like(counts)
        self._counts = counts if self._counts is None else self._counts + counts

    def end_step(self) -> None:
        """Complete the metrics. Collective: one sum of a few numbers, and another if there are experts."""
        if self._counts is not None:
            self._counts = sum_over_ranks(self._counts, self._ranks)
        _, self._metrics = self._average(self._sums)

    def _average(self, sums: Sequence[Tensor]) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the metrics over all ranks, from the sums of this rank's batches. Collective."""
        local = torch.stack(list(sums)).sum(0).tolist() if sums else [0.0] * len(SUMS)
        totals = dict(zip(SUMS, self._ranks.sum(local), strict=True))
        loss = totals["loss"] / totals["pairs"] + self._sft_weight * totals["nll"] / totals["chosen_tokens"]
        return loss, {name: totals[name] / totals["pairs"] for name in METRICS}

    def evaluate(
        self, batches: Iterable[MicroBatch], stop_requested: Callable[[], bool] = lambda: False
    ) -> Mapping[str, float]:
        """Return the mean loss and the metrics over held-out pairs, with dropout off. Collective.

        `stop_requested`: whether this rank received a stop signal; called before each batch.
        Raises: Interrupted on all ranks.
        """
        sums: list[Tensor] = []
        try:
            with eval_no_grad(self.model):
                for batch in batches:
                    if self._ranks.sum([stop_requested()])[0]:
                        raise Interrupted
                    complete = self._add_reference(batch)
                    logprobs, _ = self._logprobs(complete)
                    if not batch.is_dummy:
                        sums.append(self._compare(logprobs, complete)[-1])
        finally:
            reshard(self.model)
        loss, metrics = self._average(sums)
        return {"eval_loss": loss} | {f"eval_{name}": value for name, value in metrics.items()}


def _sum_pairs(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum over the tokens of each answer. Shapes: [N] -> [P, 2]."""
    num_answers = batch.num_sequences or 2  # a dummy has none
    return values.new_zeros(num_answers).index_add(0, batch.answer_of, values).view(-1, 2)


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


def _turn_off_dropout(model: PreTrainedModel) -> None:
    """Turn off the dropout that config.json asks for: the reference is computed without, as another model then."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


class Dpo(RowMethod):
    """Direct preference optimisation."""

    @staticmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:
        """Return the loss of pairs."""
        assert isinstance(config, DpoConfig)
        return DpoObjective(built, config, ranks)

    def load(self, config: RunConfig, train_context: TrainContext) -> None:
        """Receive the model; find out whether a question can be computed once for both of its answers."""
        super().load(config, train_context)
        dtype = getattr(torch, config.dtype)
        self.context.data.shares_questions = can_share_prompts(train_context.model, train_context.device, dtype)

    def evaluate(self, step: int) -> Mapping[str, float]:  # noqa: ARG002 - the weights alone decide
        """Return the loss and the metrics on held-out pairs."""
        train_context = self._train_context
        assert isinstance(train_context.objective, DpoObjective)
        with train_context.forward_context():
            held_out = (batch.to(train_context.device) for batch in self.context.data.eval_batches())
            return train_context.objective.evaluate(held_out, self.context.stop_requested)
