"""Supervised fine-tuning: the likelihood of the assistant's tokens, plus the load-balancing loss if requested."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surefoot.config import LoadedConfig, RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.distributed.fsdp import as_fsdp_forward, reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World, sum_over_ranks
from surefoot.errors import ModelError
from surefoot.methods.base import (
    BatchTotals,
    Interrupted,
    LossTerms,
    Objective,
    PlannedLoss,
    PlannedObjective,
)
from surefoot.methods.row_method import RowMethod
from surefoot.methods.sft.settings import SftConfig
from surefoot.methods.token_loss import TokenLoss, dummy_inputs, eval_no_grad, has_values, vision_inputs
from surefoot.models.build import BuiltModel, meta_model
from surefoot.models.decoder_layers import body_of, class_name
from surefoot.models.embedding_noise import add_embedding_noise
from surefoot.models.routing import (
    LayerRouting,
    check_recorded,
    expert_counts,
    load_balancing_loss,
    router_names,
)


def check_routers(aux_loss_coef: float, model: PreTrainedModel) -> None:
    """Raise ModelError if there is a load-balancing loss and no router to balance."""
    if aux_loss_coef and not router_names(model):
        raise ModelError(
            f"router_aux_loss_coef={aux_loss_coef}, but {class_name(model)} has no routers to balance. Drop it."
        )


def _check_recording(built: BuiltModel) -> None:
    """Check that the routing of a few tokens is recorded. Collective. Raises: ModelError, see `check_recorded`."""
    model, inputs = built.model, dummy_inputs(built.model)
    with eval_no_grad(model), built.routing.recording() as layers:
        as_fsdp_forward(model, lambda: body_of(model)(**inputs))()
    reshard(model)  # weights may be loaded before the next forward
    check_recorded(layers, built.routing.names)


class SftObjective(Objective):
    """The likelihood of the trained tokens, with counts of how the last step's tokens were spread over experts."""

    def __init__(self, built: BuiltModel, aux_loss_coef: float, ranks: World = SINGLE_PROCESS) -> None:
        """Raise ModelError if the routers cannot be balanced. Collective."""
        super().__init__(built.model)
        self.ranks = ranks

        def run_decoder(batch: MicroBatch) -> None:
            body_of(built.model)(**vision_inputs(batch, built.model))

        self._run_decoder = as_fsdp_forward(built.model, run_decoder)
        self._routing = built.routing
        check_routers(aux_loss_coef, built.model)
        if aux_loss_coef and has_values(built.model):
            _check_recording(built)
        self._coefficient = aux_loss_coef
        self.token_loss = TokenLoss(built.model)
        self._counts: Tensor | None = None
        """Rows per expert over the global batch, [layers, E]."""
        self._counts_are_complete = False

    @property
    def expert_counts(self) -> Tensor | None:
        """Rows of each expert in the last step, int64 [layers, E]; None for a dense model."""
        return self._counts

    @property
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self.token_loss.holds_all_logits

    def sum_losses(self, batch: MicroBatch) -> Tensor:
        """Return the weighted sum of the losses of a batch's trained tokens, with its graph. Collective."""
        return self.token_loss(batch)

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Count the routing of the whole global batch, by which the load-balancing loss weighs each micro-batch.

        A single micro-batch is counted in its own forward. Several are counted first in a forward without graph: exact
        for any accumulation (dropout aside), for about a third more time, only with `router_aux_loss_coef`.
        """
        self._counts = None
        self._counts_are_complete = False
        if self._coefficient and len(batches) > 1:
            for batch in batches:
                with torch.no_grad(), self._routing.recording() as layers:
                    self._run_decoder(batch)
                self._add_counts(layers, batch)
            self._complete_counts()
        return batches

    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:
        """Return this micro-batch's share, normalised over the global batch."""
        with self._routing.recording() as layers:
            main = self.sum_losses(batch) * (0.0 if batch.is_dummy else 1 / totals.weight)
        if not layers:
            return LossTerms(main)
        if not self._counts_are_complete:
            self._add_counts(layers, batch)
        if not self._coefficient:
            return LossTerms(main)
        if not self._counts_are_complete:
            self._complete_counts()
        assert self._counts is not None
        aux = self._coefficient * load_balancing_loss(layers, self._counts, totals.tokens)
        return LossTerms(main, aux * 0 if batch.is_dummy else aux)

    def end_step(self) -> None:
        """Complete the counts of experts. Collective if there are experts and their rows were not summed before."""
        if self._counts is not None and not self._counts_are_complete:
            self._complete_counts()

    def _add_counts(self, layers: list[LayerRouting], batch: MicroBatch) -> None:
        counts = expert_counts(layers, layers[0].logits.shape[-1])
        if batch.is_dummy:
            counts = torch.zeros_like(counts)
        self._counts = counts if self._counts is None else self._counts + counts

    def _complete_counts(self) -> None:
        """Sum the counts of all ranks."""
        assert self._counts is not None
        self._counts = sum_over_ranks(self._counts, self.ranks)
        self._counts_are_complete = True

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[MicroBatch], stop_requested: Callable[[], bool] = lambda: False
    ) -> tuple[float, int]:
        """Return (mean loss of a token, trained tokens) over held-out batches, with dropout off. Collective.

        `stop_requested`: whether this rank received a stop signal; called before each batch.
        Raises: Interrupted on all ranks.
        """
        total, trained, weight = 0.0, 0.0, 0.0
        self.model.eval()
        try:
            for batch in batches:
                if self.ranks.sum([stop_requested()])[0]:
                    raise Interrupted
                loss = self.sum_losses(batch).item()
                total += 0.0 if batch.is_dummy else loss
                trained += batch.num_trained
                weight += batch.trained_weight
        finally:
            self.model.train()
            reshard(self.model)
        total, trained, weight = self.ranks.sum([total, trained, weight])
        return total / weight, round(trained)


class Sft(RowMethod):
    """Supervised fine-tuning."""

    @staticmethod
    def check_model(loaded: LoadedConfig, base: Path) -> None:
        """Refuse a load-balancing loss of a model without routers."""
        if loaded.run.router_aux_loss_coef:
            check_routers(loaded.run.router_aux_loss_coef, meta_model(base))

    @staticmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:
        """Return the likelihood of the trained tokens."""
        if isinstance(config, SftConfig) and config.neftune_noise_alpha is not None:
            add_embedding_noise(built.model, config.neftune_noise_alpha)
        return SftObjective(built, config.router_aux_loss_coef, ranks)

    @classmethod
    def planned_loss(cls, run: RunConfig) -> PlannedLoss:
        """Return the loss. Only its load-balancing term depends on the settings."""
        return PlannedObjective(cls, run, run.router_aux_loss_coef, run.max_length - 1)

    def evaluate(self, step: int) -> Mapping[str, float]:  # noqa: ARG002 - the weights alone decide
        """Return the loss on held-out rows."""
        train_context = self._train_context
        assert isinstance(train_context.objective, SftObjective)
        with train_context.forward_context():
            held_out = (batch.to(train_context.device) for batch in self.context.data.eval_batches())
            loss, trained = train_context.objective.evaluate(held_out, self.context.stop_requested)
        return {"eval_loss": loss, "eval_trained_tokens": trained}
