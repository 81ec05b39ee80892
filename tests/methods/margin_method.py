"""A method of another package: answers that a label calls good are made likelier, bad ones less likely, to a margin."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from surefoot.config import RunConfig
from surefoot.config.schema import LABELLED, Contradiction, RowKind
from surefoot.data.collate import MicroBatch
from surefoot.data.sampler import Position, StepBatch
from surefoot.distributed.process_group import World
from surefoot.errors import DataError
from surefoot.methods.base import BatchTotals, LossTerms, Method, MethodContext, Objective, TrainContext
from surefoot.methods.token_loss import TokenLogprobs
from surefoot.models.build import BuiltModel


class MarginConfig(RunConfig):
    """Settings of a run with `method: margin`."""

    implementation: ClassVar[str] = "margin_method:Margin"
    row: ClassVar[RowKind] = LABELLED

    method: Literal["margin"] = "margin"
    """Hinge loss on labelled answers."""
    margin: float = Field(default=1.0, gt=0)
    """Mean log-probability beyond which an answer is good or bad enough."""
    label_column: str = "label"
    """Column with 1 for a good answer and -1 for a bad one."""

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:
        """Yield what margin cannot do."""
        yield from super().contradictions(non_default)
        if self.eval_dataset is not None:
            yield Contradiction("eval_dataset is not available with method: margin. Drop it", "eval_dataset")


class MarginObjective(Objective):
    """max(0, margin - label * (mean log-probability + margin)), averaged over the samples of the step."""

    def __init__(self, built: BuiltModel, config: MarginConfig) -> None:
        super().__init__(built.model)
        self._margin = config.margin
        self._logprobs = TokenLogprobs(built.model, 1.0)
        self.labels: dict[str, int] = {}
        """Place of a sample of the step -> its label."""
        self.num_samples = 1
        """Samples of the global batch; one may be in it twice."""

    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:  # noqa: ARG002
        """Return this micro-batch's share."""
        logprobs, _ = self._logprobs(batch)
        if batch.is_dummy:
            return LossTerms(logprobs.sum() * 0.0)
        device = logprobs.device
        ends = torch.tensor(batch.lengths, device=device).cumsum(0)
        sample = torch.bucketize(batch.target_positions, ends, right=True)
        sums = logprobs.new_zeros(len(ends)).index_add(0, sample, logprobs)
        labels_here = [self.labels.get(place, 1) for place in batch.row_refs or [""] * len(ends)]
        labels = torch.tensor(labels_here, device=device)
        counts = logprobs.new_zeros(len(ends)).index_add(0, sample, torch.ones_like(logprobs))
        means = sums / counts.clamp(min=1)
        return LossTerms((self._margin - labels * (means + self._margin)).clamp(min=0).sum() / self.num_samples)


class Margin(Method):
    """Labelled answers, with a margin."""

    def __init__(self, context: MethodContext) -> None:
        super().__init__(context)
        assert isinstance(context.loaded.run, MarginConfig)
        self._settings = context.loaded.run

    @staticmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:  # noqa: ARG004
        """Return the hinge loss."""
        assert isinstance(config, MarginConfig)
        return MarginObjective(built, config)

    def load(self, config: RunConfig, train_context: TrainContext) -> None:  # noqa: ARG002
        """Receive the objective."""
        assert isinstance(train_context.objective, MarginObjective)
        self._objective = train_context.objective

    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:  # noqa: ARG002
        """Return samples in the order of the data, and tell the objective their labels. Raises: DataError."""
        with self.context.phase("data_wait"):
            batch, micro_batches = self.context.data.batches(position)
        train, column = self.context.data.train, self._settings.label_column
        keys = [key for sequence in batch.sequences for key in sequence]
        self._objective.labels, self._objective.num_samples = {}, len(keys)
        for key in keys:
            label, place = train.columns(*key).get(column), train.sample(*key).place
            if label not in (1, -1):
                raise DataError(f"{place}: {column} is {label!r}, not 1 or -1.")
            self._objective.labels[place] = int(str(label))
        return batch, micro_batches

    def evaluate(self, step: int) -> Mapping[str, float]:  # noqa: ARG002
        """Nothing is held out, see `MarginConfig.contradictions`."""
        return {}
