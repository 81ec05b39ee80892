"""The interface of a fine-tuning method: the base class of all methods, and the types they share with the loop.

SFT is `sft/method.py`, GRPO is `grpo/method.py`. `config/methods.py` finds a method's settings by its name in run.yaml,
and `registry.py` the class that they name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.config import LoadedConfig, RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.sampler import Position, StepBatch
from surefoot.distributed.fsdp import reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.events import Emit, Phase
from surefoot.methods.token_loss import eval_no_grad
from surefoot.methods.training_data import RunData
from surefoot.models.build import BuiltModel
from surefoot.models.frozen_model import find_frozen
from surefoot.models.isolation import Isolation
from surefoot.models.resolve_model import folder_here
from surefoot.models.router_bias import RouterBiases
from surefoot.system.atomic_io import sha256_of

LAST_WAIT_S = 5.0
"""Seconds that the last save waits for what a method has requested ahead."""


class Interrupted(Exception):
    """A stop signal ended a rollout or an evaluation; raised on all ranks."""


@dataclass(frozen=True)
class BatchTotals:
    """Counts of the global batch, over all ranks, by which losses are normalised."""

    tokens: int
    trained: int
    weight: float
    """Sum of the trained tokens' weights; equal to `trained` unless rows set weights."""
    sequences: int = 1
    """Number of sequences; a pair of answers is two."""

    @classmethod
    def of(cls, counts: Sequence[float]) -> "BatchTotals":
        """Return the totals from the sum of `counts_of` over the ranks."""
        tokens, trained, weight, sequences = counts
        return cls(round(tokens), round(trained), weight, round(sequences))


@dataclass(frozen=True)
class LossTerms:
    """A micro-batch's share of the step's loss. The shares of all micro-batches add up."""

    main: Tensor
    aux: Tensor | None = None
    """Load-balancing loss times its coefficient."""

    @property
    def total(self) -> Tensor:
        return self.main if self.aux is None else self.main + self.aux


class Objective(ABC):
    """The loss of a method, on one rank's micro-batches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    def expert_counts(self) -> Tensor | None:
        """Rows of each expert in the last step, int64 [layers, E]; None for a dense model, or if none are counted."""
        return None

    def counted_tokens(self, totals: BatchTotals) -> int:
        """Return how many tokens of the global batch `expert_counts` has counted."""
        return totals.tokens

    @property
    def holds_all_logits(self) -> bool:
        """Whether logits of all trained tokens of a micro-batch exist at once: the model scales or caps them itself."""
        return False

    @property
    def metrics(self) -> Mapping[str, float]:
        """Further metrics of the last step by name; equal on all ranks."""
        return {}

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Receive this rank's part of the global batch before its first forward; return it with any additions.

        The model is in training mode here: compute what needs no gradient under `eval_no_grad`. Collective.
        """
        return batches

    def end_step(self) -> None:  # noqa: B027 - a method may need nothing
        """Complete the metrics after the last backward. Collective."""

    @abstractmethod
    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:
        """Return a micro-batch's share of the loss, with its graph; for a dummy batch, 0 with its graph."""

    def probe_forward(self, batches: Iterable[MicroBatch]) -> None:
        """Run a forward of each batch without graph and dropout, for hooks on the modules. Collective."""
        with eval_no_grad(self.model):
            for batch in batches:
                self.loss(batch, BatchTotals(max(batch.num_tokens, 1), max(batch.num_trained, 1), 1.0))
        reshard(self.model)


@dataclass(frozen=True)
class TrainContext:
    """The model as this rank holds it, with its optimizer and its objective."""

    model: PreTrainedModel
    parameters: dict[str, nn.Parameter]
    """Trained parameters by name."""
    optimizer: torch.optim.Optimizer
    objective: Objective
    ranks: World
    device: torch.device
    router_biases: RouterBiases | None = None
    """Correction biases of the routers, which full fine-tuning may change; None with LoRA."""
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    rollout_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of many forwards with the same weights."""
    before_micro_batch: Callable[[bool], None] = lambda _: None
    """Called before each micro-batch; the argument is whether it is the last of the step."""
    phase: Callable[[Phase], AbstractContextManager[None]] = lambda _: nullcontext()
    """Context that reports the beginning and the end of a phase."""
    isolation: Isolation = field(default_factory=Isolation)

    @property
    def biases(self) -> dict[str, Tensor]:
        """Tensors that are saved beside the trained parameters, by name."""
        return self.router_biases.tensors if self.router_biases is not None else {}

    @property
    def saved_tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint holds of the model, by name."""
        return {**self.parameters, **self.biases}


@dataclass(frozen=True)
class MethodContext:
    """Parts of a run that exist before the model is loaded."""

    loaded: LoadedConfig
    base: Path
    """Folder of the model."""
    tokenizer: PreTrainedTokenizerBase
    data: RunData
    weights_fingerprint: str
    """Equal for equal weights of the model in `base`."""
    ranks: World
    phase: Callable[[Phase], AbstractContextManager[None]]
    emit: Emit
    stop_requested: Callable[[], bool]
    """Whether this rank has received a stop signal."""


class Method(ABC):
    """One method in one run: where its batches come from, its objective and its evaluation.

    The trainer calls, in this order: `check_files`, `check_model`, `start`, `check_data` on prepared rows, `connect`,
    `build_objective`, `use_start`, `load` after a checkpoint is loaded, `restore`; then for each step `batches` and
    `check_step`;
    `end` however the run ends. They are collective and raise on all ranks, but `check_files`, `check_model`,
    `check_data` and `batches` may raise on one rank, and the trainer tells the others. `end` is not collective.
    """

    agrees_to_stop_before_batches: bool = False
    """Whether ranks agree on stop signals before each batch, because making a batch takes long."""

    def __init__(self, context: MethodContext) -> None:
        self.context = context

    @staticmethod  # noqa: B027
    def check_model(loaded: LoadedConfig, base: Path) -> None:
        """Check the model's config.json, first on one rank of each machine. Raises: ConfigError, ModelError."""

    @staticmethod  # noqa: B027
    def check_files(loaded: LoadedConfig) -> None:
        """Check the files that the method's settings name, and run none of them. Raises: ConfigError."""

    @classmethod
    def planned_loss(cls, run: RunConfig) -> "PlannedLoss":
        """Return the loss as the planner runs it."""
        return PlannedObjective(cls, run, run.model_dump_json(), run.max_row_tokens + run.max_added_tokens - 1)

    @staticmethod
    @abstractmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:
        """Return the objective for a model as this rank holds it."""

    def start(self) -> None:  # noqa: B027 - a method may need nothing
        """Start what is needed besides model and data. Checks that are cheap and often fail belong here."""

    def check_data(self, position: Position) -> None:  # noqa: B027
        """Check prepared rows at a position, first on one rank of each machine. Raises: ConfigError."""

    def connect(self) -> None:  # noqa: B027
        """Wait for what `start` has started, before the model takes its memory."""

    def use_start(self, config: RunConfig, train_context: TrainContext) -> None:  # noqa: B027
        """Compute what depends on the model that training begins with, before a checkpoint is loaded into it."""

    @abstractmethod
    def load(self, config: RunConfig, train_context: TrainContext) -> None:
        """Receive the model and the config with all sizes resolved."""

    @abstractmethod
    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:
        """Return the batch after `step` steps and this rank's micro-batches; emits its own phases."""

    @abstractmethod
    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return metrics on held-out rows after `step` steps. Raises: Interrupted."""

    def code_files(self) -> dict[str, str]:
        """Return a fingerprint of each file of the user's code, and of each model beside the trained one that is here.

        By path; a resume reports which have changed.
        """
        run = self.context.loaded.run
        models = [model.source for model in run.models_beside if folder_here(model.source) is not None]
        return {
            **{name: sha256_of(Path(name)) for name in run.code_files()},
            **{source: find_frozen(source).fingerprint for source in models},
        }

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: B027
        """Check the metrics of a step. Raises: StoppedOnFinding."""

    def pending(self, position: Position, step: int, wait_s: float) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return, as JSON, what further steps train on and a checkpoint must keep; wait for it at most `wait_s`."""
        return []

    @staticmethod
    def problems_of_pending(pending: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield why entries of a checkpoint are not what `pending` returns."""
        if pending:
            yield "this method keeps nothing for further steps"

    def restore(self, pending: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Continue with what `pending` returned when the checkpoint was written."""

    def end(self) -> None:  # noqa: B027
        """Release what was started. Not collective."""


class PlannedLoss(ABC):
    """The loss of a run as the planner runs it: on a model and a batch that have shapes but no values.

    Equal instances compute the same and use as much memory, so the planner runs only one of them.
    """

    tokens_per_sequence: int
    """Number of tokens in the loss of a sequence of full length."""

    @abstractmethod
    def __call__(self, built: BuiltModel, batch: MicroBatch) -> Callable[[], Tensor]:
        """Return a function that runs the forward and returns the loss of the batch."""


@dataclass(frozen=True)
class PlannedObjective(PlannedLoss):
    """The loss of a method's own objective."""

    method: type[Method]
    run: RunConfig = field(compare=False)
    key: Hashable
    """Settings that the loss depends on."""
    tokens_per_sequence: int

    def __call__(self, built: BuiltModel, batch: MicroBatch) -> Callable[[], Tensor]:
        """Return a function that computes the loss of a micro-batch that is the whole step, with what it needs."""
        objective = self.method.build_objective(built, self.run, SINGLE_PROCESS)
        totals = BatchTotals(batch.num_tokens, batch.num_trained, float(batch.num_trained), batch.num_sequences)

        def loss() -> Tensor:
            (complete,) = objective.begin_step([batch])
            return objective.loss(complete, totals).total

        return loss
