"""The base of methods that compare likelihoods of answers with those of a reference, and where these come from."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.config import RunConfig
from surefoot.config.preference import PreferenceConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Dataset, SampleKey
from surefoot.distributed.fsdp import reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.events import Notice
from surefoot.methods.answers import AnswerMethod, AnswerObjective
from surefoot.methods.base import MethodContext, TrainContext
from surefoot.methods.stored_reference import ReferenceScorer, StoredReference
from surefoot.methods.token_loss import TokenLogprobs, eval_no_grad
from surefoot.models.adapter_files import CONFIG, WEIGHTS
from surefoot.models.build import BuiltModel
from surefoot.models.lora import disable_adapter
from surefoot.system.atomic_io import sha256_of


@dataclass(frozen=True)
class AnswerBatch(MicroBatch):
    """Answers with their likelihoods under the reference."""

    reference_logps: Tensor | None = None
    """float32 [samples, 2]: log-probabilities under the reference, in the order of `PreferenceObjective.score`; None
    without a reference."""


class PreferenceObjective(AnswerObjective):
    """A loss of the log-probabilities of whole answers, compared with those under a reference."""

    def __init__(self, built: BuiltModel, config: PreferenceConfig, ranks: World = SINGLE_PROCESS) -> None:
        """Detect how the model computes its logits. Collective."""
        super().__init__(built, ranks)
        self._computes_reference = config.needs_reference and not config.stores_reference
        self._logprobs = TokenLogprobs(built.model, is_drawn=False)

    @property
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self._logprobs.holds_all_logits

    @abstractmethod
    def score(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities that are compared with the reference's, without graph. Collective.

        Shapes: float32 [samples, 2].
        """

    def measure(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each trained token. Shapes: [N]. Collective."""
        return self._logprobs(batch)[0]

    def compute_logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each trained token, without dropout and graph. Shapes: [N]. Collective."""
        with eval_no_grad(self.model):
            return self.measure(batch)

    def complete(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the likelihoods of its reference, if the loss needs any and it has none. Collective."""
        if not self._computes_reference or getattr(batch, "reference_logps", None) is not None:
            return batch
        with disable_adapter(self.model):
            return with_reference(batch, self.score(batch))


def with_reference(batch: MicroBatch, logps: Tensor) -> AnswerBatch:
    """Return the batch with likelihoods under the reference. Shapes: [samples, 2]."""
    if isinstance(batch, AnswerBatch):
        return replace(batch, reference_logps=logps)
    return AnswerBatch(**vars(batch), reference_logps=logps)


class PreferenceMethod(AnswerMethod):
    """A method that compares the likelihoods of answers with those of a reference."""

    def __init__(self, context: MethodContext) -> None:
        super().__init__(context)
        self._references: dict[int, StoredReference] = {}
        """Stored references by the identity of their dataset."""

    def use_start(self, config: RunConfig, train_context: TrainContext) -> None:
        """Compute the likelihoods under the reference, unless they are computed in each step."""
        super().use_start(config, train_context)
        assert isinstance(config, PreferenceConfig)
        data, ranks, device = self.context.data, self.context.ranks, train_context.device
        objective = train_context.objective
        assert isinstance(objective, PreferenceObjective)
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
        return (self.read_rows(batch, dataset) for batch in batches)

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

    def prepare_batch(self, batch: MicroBatch, dataset: Dataset) -> MicroBatch:
        """Return the batch with what the loss needs of its rows, and with its reference if that is stored."""
        batch = super().prepare_batch(batch, dataset)
        reference = self._references.get(id(dataset))
        return batch if reference is None or batch.is_dummy else with_reference(batch, reference.of(batch.sample_keys))
