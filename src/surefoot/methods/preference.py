"""The base of methods that compare answers: their objective, and where the likelihoods of the reference come from."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.config import RunConfig
from surefoot.config.preference import PreferenceConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Dataset, SampleKey
from surefoot.data.sampler import Position, StepBatch
from surefoot.distributed.fsdp import reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World, sum_over_ranks
from surefoot.events import Notice
from surefoot.methods.base import BatchTotals, Interrupted, LossTerms, MethodContext, Objective, TrainContext
from surefoot.methods.row_method import RowMethod
from surefoot.methods.stored_reference import ReferenceScorer, StoredReference
from surefoot.methods.token_loss import TokenLogprobs, eval_no_grad
from surefoot.models.adapter_files import CONFIG, WEIGHTS
from surefoot.models.build import BuiltModel
from surefoot.models.isolation import can_share_prompts
from surefoot.models.lora import disable_adapter
from surefoot.models.routing import LayerRouting, expert_counts
from surefoot.system.atomic_io import sha256_of


@dataclass(frozen=True)
class AnswerBatch(MicroBatch):
    """Answers with their likelihoods under the reference."""

    reference_logps: Tensor | None = None
    """float32 [samples, 2]: log-probabilities under the reference, in the order of `PreferenceObjective.score`; None
    without a reference."""


class PreferenceObjective(Objective):
    """A loss of the log-probabilities of whole answers, averaged over the answers or pairs of the step."""

    def __init__(self, built: BuiltModel, config: PreferenceConfig, ranks: World = SINGLE_PROCESS) -> None:
        """Detect how the model computes its logits. Collective."""
        super().__init__(built.model)
        self.ranks = ranks
        self._routing = built.routing
        self._computes_reference = config.needs_reference and not config.stores_reference
        self._logprobs = TokenLogprobs(built.model, is_drawn=False)
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
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self._logprobs.holds_all_logits

    @property
    def metrics(self) -> Mapping[str, float]:
        """Means over the answers of the last step, under TRL's names."""
        return self._metrics

    @abstractmethod
    def score(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities that are compared with the reference's, without graph. Collective.

        Shapes: float32 [samples, 2].
        """

    @abstractmethod
    def compare(self, logprobs: Tensor, batch: MicroBatch, totals: BatchTotals | None) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's share of the loss, and the numbers that `summarise` needs of each sample.

        Shapes: logprobs [N] with graph -> a scalar with graph, float64 [samples, numbers]. `totals`: None in an
        evaluation, whose loss `summarise` computes.
        """

    @abstractmethod
    def summarise(self, rows: Tensor) -> dict[str, float]:
        """Return `loss` and the metrics over all ranks from this rank's numbers. Collective.

        Shapes: float64 [samples, numbers], on the CPU; [0, 0] if this rank had none.
        """

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Compute the reference's likelihoods of all answers of the step, in forwards without graph."""
        self._rows, self._counts = [], None
        return [self.add_reference(batch) for batch in batches]

    def compute_logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each trained token, without dropout and graph. Shapes: [N]. Collective."""
        with eval_no_grad(self.model):
            return self._logprobs(batch)[0]

    def add_reference(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the likelihoods of its reference, if the loss needs any and it has none. Collective."""
        if not self._computes_reference or getattr(batch, "reference_logps", None) is not None:
            return batch
        with disable_adapter(self.model):
            return with_reference(batch, self.score(batch))

    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:
        """Return this micro-batch's share. Without `begin_step`, the reference counts as uniform."""
        with self._routing.recording() as layers:
            logprobs, _ = self._logprobs(batch)
        if layers:
            self._add_counts(layers, batch)
        if batch.is_dummy:
            return LossTerms(logprobs.sum() * 0.0)
        loss, rows = self.compare(logprobs, batch, totals)
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
                    complete = self.add_reference(batch)
                    logprobs, _ = self._logprobs(complete)
                    if not batch.is_dummy:
                        rows.append(self.compare(logprobs, complete, None)[1])
        finally:
            reshard(self.model)
        return {f"eval_{name}": value for name, value in self.summarise(_join(rows)).items()}


def with_reference(batch: MicroBatch, logps: Tensor) -> AnswerBatch:
    """Return the batch with likelihoods under the reference. Shapes: [samples, 2]."""
    if isinstance(batch, AnswerBatch):
        return replace(batch, reference_logps=logps)
    return AnswerBatch(**vars(batch), reference_logps=logps)


def _join(rows: Sequence[Tensor]) -> Tensor:
    """Return the numbers of all batches of a rank on the CPU. Shapes: [samples, numbers]."""
    return torch.cat(list(rows)).cpu() if rows else torch.zeros(0, 0, dtype=torch.float64)


def _turn_off_dropout(model: PreTrainedModel) -> None:
    """Turn off the dropout that config.json asks for: the reference is computed without, as another model then."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


class PreferenceMethod(RowMethod):
    """A method whose rows hold answers that are compared, with each other or with what is desired."""

    shares_questions: ClassVar[bool] = True
    """Whether a sample has several answers to its question, which is then computed once where the model can."""

    def __init__(self, context: MethodContext) -> None:
        super().__init__(context)
        self._references: dict[int, StoredReference] = {}
        """Stored references by the identity of their dataset."""

    def prepare_batch(self, batch: MicroBatch, dataset: Dataset) -> MicroBatch:  # noqa: ARG002
        """Return the batch with what the loss needs besides its answers."""
        return batch

    def use_start(self, config: RunConfig, train_context: TrainContext) -> None:
        """Compute the likelihoods under the reference, unless they are computed in each step."""
        assert isinstance(config, PreferenceConfig)
        data, ranks, device = self.context.data, self.context.ranks, train_context.device
        objective = train_context.objective
        assert isinstance(objective, PreferenceObjective)
        if self.shares_questions:
            dtype = getattr(torch, config.dtype)
            data.shares_questions = can_share_prompts(train_context.model, device, dtype)
        if not config.stores_reference:
            return
        ranks.local_rank0_first(data.finish)
        identity = self._identify_reference(config)
        datasets = [(data.train, data.visited_samples())]
        if data.held_out is not None:
            datasets.append((data.held_out, list(data.held_out.sample_keys())))
        for dataset, keys in datasets:
            scorer = ReferenceScorer(
                batches=partial(self._batches_to_score, dataset),
                ranks=ranks,
                device=device,
                score=objective.score,
                identity=identity,
                announce=self._announce,
            )
            with train_context.forward_context():
                self._references[id(dataset)] = scorer.complete(dataset, keys)
        reshard(train_context.model)

    def _announce(self, count: int) -> None:
        self.context.emit(Notice(f"computing the likelihoods of {count} rows under the model as training begins"))

    def _batches_to_score(self, dataset: Dataset, keys: Iterable[SampleKey]) -> Iterator[MicroBatch]:
        batches = self.context.data.batches_of(dataset, keys, "likelihoods of the reference")
        return (self.prepare_batch(batch, dataset) for batch in batches)

    def _identify_reference(self, config: PreferenceConfig) -> dict[str, Any]:
        """Return what the reference's likelihoods depend on besides the rows."""
        files = [self.context.base / "config.json"]
        if config.init_adapter is not None:
            files += [Path(config.init_adapter) / name for name in (WEIGHTS, CONFIG)]
        return {
            "method": config.method,
            "weights": self.context.weights_fingerprint,
            "files": [sha256_of(file) for file in files],
            "dtype": config.dtype,
            "settings": config.reference_settings,
        }

    def _complete(self, batch: MicroBatch, dataset: Dataset) -> MicroBatch:
        """Return the batch with what the loss needs, and with its reference if that is stored."""
        batch = self.prepare_batch(batch, dataset)
        reference = self._references.get(id(dataset))
        return batch if reference is None or batch.is_dummy else with_reference(batch, reference.of(batch.sample_keys))

    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:
        """Return samples in the order of the data. Raises: DataError."""
        step_batch, batches = super().batches(position, step, epoch)
        return step_batch, [self._complete(batch, self.context.data.train) for batch in batches]

    def evaluate(self, step: int) -> Mapping[str, float]:  # noqa: ARG002 - the weights alone decide
        """Return the loss and the metrics on held-out answers."""
        train_context, data = self._train_context, self.context.data
        assert isinstance(train_context.objective, PreferenceObjective)
        assert data.held_out is not None
        held_out = data.held_out
        with train_context.forward_context():
            batches = (self._complete(batch, held_out).to(train_context.device) for batch in data.eval_batches())
            return train_context.objective.evaluate(batches, self.context.stop_requested)
