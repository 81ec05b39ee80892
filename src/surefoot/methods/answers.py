"""The base of methods that learn from whole answers: a loss over answers, and the batches that it needs."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.config import RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Dataset
from surefoot.data.sampler import Position, StepBatch
from surefoot.distributed.fsdp import reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World, sum_over_ranks
from surefoot.methods.base import BatchTotals, Interrupted, LossTerms, Objective, TrainContext
from surefoot.methods.row_method import RowMethod
from surefoot.methods.token_loss import eval_no_grad
from surefoot.models.build import BuiltModel
from surefoot.models.isolation import can_share_prompts
from surefoot.models.routing import LayerRouting, expert_counts


class AnswerObjective(Objective):
    """A loss of whole answers, averaged over the answers or pairs of the step."""

    def __init__(self, built: BuiltModel, ranks: World = SINGLE_PROCESS) -> None:
        super().__init__(built.model)
        self.ranks = ranks
        self._routing = built.routing
        _turn_off_dropout(built.model)
        self._rows: list[Tensor] = []
        self._counts: Tensor | None = None
        self._metrics: Mapping[str, float] = {}

    @property
    def expert_counts(self) -> Tensor | None:
        """Rows of each expert in which the last step's trained tokens were predicted, int64 [layers, E]."""
        return self._counts

    def counted_tokens(self, totals: BatchTotals) -> int:
        """Return the number of trained tokens: a question may be computed once for both answers."""
        return totals.trained

    @property
    def metrics(self) -> Mapping[str, float]:
        """Means over the answers of the last step, under TRL's names."""
        return self._metrics

    @abstractmethod
    def measure(self, batch: MicroBatch) -> Tensor:
        """Return what the loss is made of, with its graph: a number for each trained token, or answer. Collective."""

    @abstractmethod
    def compare(self, values: Tensor, batch: MicroBatch, totals: BatchTotals | None) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's share of the loss, and the numbers that `summarise` needs of each sample.

        Shapes: what `measure` returns, with graph -> a scalar with graph, float64 [samples, numbers]. `totals`: None in
        an evaluation, whose loss `summarise` computes.
        """

    @abstractmethod
    def summarise(self, rows: Tensor) -> dict[str, float]:
        """Return `loss` and the metrics over all ranks from this rank's numbers. Collective.

        Shapes: float64 [samples, numbers], on the CPU; [0, 0] if this rank had none.
        """

    def complete(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with what the loss needs from forwards without graph. Collective."""
        return batch

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Complete all batches of the step."""
        self._rows, self._counts = [], None
        return [self.complete(batch) for batch in batches]

    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:
        """Return this micro-batch's share, for a batch that `begin_step` has completed."""
        with self._routing.recording() as layers:
            values = self.measure(batch)
        if layers:
            self._add_counts(layers, batch)
        if batch.is_dummy:
            return LossTerms(values.sum() * 0.0)
        loss, rows = self.compare(values, batch, totals)
        self._rows.append(rows)
        return LossTerms(loss)

    def _add_counts(self, layers: Sequence[LayerRouting], batch: MicroBatch) -> None:
        predicting = [LayerRouting(layer.logits, layer.index[batch.target_positions]) for layer in layers]
        counts = expert_counts(predicting, layers[0].logits.shape[-1])
        if batch.is_dummy:
            counts = torch.zeros_like(counts)
        self._counts = counts if self._counts is None else self._counts + counts

    def end_step(self) -> None:
        """Complete the metrics. Collective: sums of a few numbers, and another if there are experts."""
        if self._counts is not None:
            self._counts = sum_over_ranks(self._counts, self.ranks)
        metrics = self.summarise(_join(self._rows))
        del metrics["loss"]  # the loop has it
        self._metrics = metrics

    def evaluate(
        self, batches: Iterable[MicroBatch], stop_requested: Callable[[], bool] = lambda: False
    ) -> Mapping[str, float]:
        """Return the mean loss and the metrics over held-out answers, with dropout off. Collective.

        `stop_requested`: whether this rank received a stop signal; called before each batch.
        Raises: Interrupted on all ranks.
        """
        rows: list[Tensor] = []
        try:
            with eval_no_grad(self.model):
                for batch in batches:
                    if self.ranks.sum([stop_requested()])[0]:
                        raise Interrupted
                    complete = self.complete(batch)
                    values = self.measure(complete)
                    if not batch.is_dummy:
                        rows.append(self.compare(values, complete, None)[1])
        finally:
            reshard(self.model)
        return {f"eval_{name}": value for name, value in self.summarise(_join(rows)).items()}


def _join(rows: Sequence[Tensor]) -> Tensor:
    """Return the numbers of all batches of a rank on the CPU. Shapes: [samples, numbers]."""
    return torch.cat(list(rows)).cpu() if rows else torch.zeros(0, 0, dtype=torch.float64)


def _turn_off_dropout(model: PreTrainedModel) -> None:
    """Turn off the dropout that config.json asks for, which would add noise to the comparison of two answers.

    It would also make the model another one than its reference, which is computed without.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


class AnswerMethod(RowMethod):
    """A method whose rows hold answers that are compared, with each other or with what is desired."""

    shares_questions: ClassVar[bool] = True
    """Whether a sample has several answers to its question, which is then computed once where the model can."""

    def read_rows(self, batch: MicroBatch, dataset: Dataset) -> MicroBatch:  # noqa: ARG002
        """Return the batch with what the loss needs of its rows besides tokens."""
        return batch

    def prepare_batch(self, batch: MicroBatch, dataset: Dataset) -> MicroBatch:
        """Return the batch with all that the loss needs besides tokens."""
        return self.read_rows(batch, dataset)

    def use_start(self, config: RunConfig, train_context: TrainContext) -> None:
        """Find out whether the model can compute a question once for both answers."""
        if self.shares_questions:
            dtype = getattr(torch, config.dtype)
            self.context.data.shares_questions = can_share_prompts(train_context.model, train_context.device, dtype)

    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:
        """Return samples in the order of the data. Raises: DataError."""
        step_batch, batches = super().batches(position, step, epoch)
        return step_batch, [self.prepare_batch(batch, self.context.data.train) for batch in batches]

    def evaluate(self, step: int) -> Mapping[str, float]:  # noqa: ARG002 - the weights alone decide
        """Return the loss and the metrics on held-out answers."""
        train_context, data = self._train_context, self.context.data
        assert isinstance(train_context.objective, AnswerObjective)
        assert data.held_out is not None
        held_out = data.held_out
        with train_context.forward_context():
            batches = (self.prepare_batch(batch, held_out).to(train_context.device) for batch in data.eval_batches())
            return train_context.objective.evaluate(batches, self.context.stop_requested)
