"""Distillation: each next token's distribution comes closer to a teacher's, on the rows or on completions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from surefoot.config import LoadedConfig, RunConfig
from surefoot.data.collate import MicroBatch, collate, dummy_batch
from surefoot.data.dataset import Dataset, Sample, SampleKey
from surefoot.data.image_processor import PixelReader
from surefoot.data.pairs import take_images
from surefoot.data.sampler import Position, StepBatch
from surefoot.distributed.fsdp import Sharding
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import DataError
from surefoot.events import Notice, SamplesTrained
from surefoot.methods.base import MethodContext, Objective, PlannedLoss, PlannedObjective, TrainContext
from surefoot.methods.distill.divergence import Divergence, LikeliestTokens, TeacherScores, divergence_loss
from surefoot.methods.distill.served_teacher import ServedTeacher, check_server
from surefoot.methods.distill.settings import DistillConfig, distill_settings
from surefoot.methods.distill.teacher import LocalTeacher, check_teacher, load_teacher
from surefoot.methods.output_layer import nll_loss, weighted_sum
from surefoot.methods.rollout.generator import EVALUATION, Generator, complete_prompt, poll
from surefoot.methods.rollout.setup import Rollouts
from surefoot.methods.rollout.types import Request
from surefoot.methods.row_method import SAMPLES_SHOWN
from surefoot.methods.sft.method import Sft, SftObjective
from surefoot.models.build import BuiltModel, load_config
from surefoot.models.resolve_model import folder_here, may_be_fetched

OWN_SEED = 0x6F776E
"""Part of the seed from which it is drawn whether a step trains on the student's completions."""


@dataclass(frozen=True)
class TaughtBatch(MicroBatch):
    """Samples or completions, with what a teacher server gives for their trained tokens. Shapes: see `MicroBatch`."""

    is_own: bool = field(default=False, kw_only=True)
    """Whether they are completions of the student."""
    likeliest_ids: Tensor | None = field(default=None, kw_only=True)
    """int64 [N, K]; None if the teacher is in this process."""
    likeliest_logprobs: Tensor | None = field(default=None, kw_only=True)
    """float32 [N, K]."""


class DistillObjective(SftObjective):
    """The divergence from a teacher, summed over trained tokens. A load-balancing loss may be added as in SFT."""

    def __init__(self, built: BuiltModel, config: DistillConfig, ranks: World = SINGLE_PROCESS) -> None:
        """Until `teacher` is given, the teacher is the model without its adapter. Collective."""
        super().__init__(built, config.router_aux_loss_coef, ranks)
        self._divergence = Divergence(config.beta, config.loss_temperature)
        self._sft_weight = config.sft_weight
        self._has_tail = config.teacher_top_k_tail
        self.teacher: LocalTeacher | None = LocalTeacher(self.token_loss.predict, config, is_base_of=built.model)
        """The teacher in this process; None if it is on a server."""

    def sum_losses(self, batch: MicroBatch) -> Tensor:
        """Return the weighted sum of the divergences, and of the negative log-likelihoods of rows' answers."""
        is_own = False
        scores: TeacherScores | None = None
        if isinstance(batch, TaughtBatch):
            is_own = batch.is_own
            if batch.likeliest_ids is not None and batch.likeliest_logprobs is not None:
                scores = LikeliestTokens(batch.likeliest_ids, batch.likeliest_logprobs, self._has_tail)
        if scores is None:
            assert self.teacher is not None, "a batch without what the teacher's server gives for it"
            scores = self.teacher(batch)
        loss = divergence_loss(scores, self._divergence, batch.weights)
        if self._sft_weight and not is_own:
            loss = weighted_sum([(1.0, loss), (self._sft_weight, nll_loss(batch.targets, batch.weights))])
        total = self.token_loss(batch, loss)
        if self.teacher is not None:
            self.teacher.free()
        return total


class Distill(Sft):
    """Distillation from a teacher, on the answers of the rows and on completions of the student."""

    def __init__(self, context: MethodContext) -> None:
        super().__init__(context)
        self._settings = distill_settings(context.loaded.run)
        self.agrees_to_stop_before_batches = self._settings.generates
        self._rollouts = Rollouts(context) if self._settings.generates else None
        self._generator: Generator | None = None
        self._served: ServedTeacher | None = None
        self._has_shown_completions = False

    @staticmethod
    def check_model(loaded: LoadedConfig, base: Path) -> None:
        """Refuse a teacher that does not fit the student, or a load-balancing loss of a model without routers."""
        Sft.check_model(loaded, base)
        settings = distill_settings(loaded.run)
        teacher = settings.teacher_model
        if teacher is None or settings.teacher_server is not None or settings.shares_base:
            return
        if folder_here(teacher) is not None or not may_be_fetched(teacher):  # else `start` fetches it
            check_teacher(loaded, base, settings)

    @staticmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:
        """Return the divergence from the teacher."""
        return DistillObjective(built, distill_settings(config), ranks)

    @classmethod
    def planned_loss(cls, run: RunConfig) -> PlannedLoss:
        """Return the loss, with a teacher of the student's own size."""
        settings = distill_settings(run)
        tokens = (settings.teacher_top_k, settings.teacher_top_k_tail)
        key = (settings.router_aux_loss_coef, tokens, settings.beta, bool(settings.sft_weight))
        length = settings.max_completion_length if settings.lmbda == 1 else run.max_length - 1
        return PlannedObjective(cls, run, key, length)

    def start(self) -> None:
        """Fetch the teacher or ask its server, and start the server of completions, if there is one."""
        context, settings = self.context, self._settings
        with context.phase("load"):
            if settings.teacher_server is None and not settings.shares_base:
                context.ranks.local_rank0_first(lambda: check_teacher(context.loaded, context.base, settings))
            if settings.teacher_server is not None:
                context.emit(Notice(f"asking the teacher's server at {settings.teacher_server}"))
                vocab_size = int(load_config(context.base).get_text_config().vocab_size)
                where = context.loaded.where("teacher_server")
                name = context.ranks.broadcast_from_rank0(
                    lambda: check_server(settings, context.tokenizer, vocab_size, where)
                )
                self._served = ServedTeacher.of(settings, name, vocab_size)
            if self._rollouts is not None:
                self._rollouts.start()

    def connect(self) -> None:
        """Wait for the server to take its memory before training does."""
        if self._rollouts is not None:
            self._rollouts.connect()

    def load(self, config: RunConfig, train_context: TrainContext) -> None:
        """Load the teacher, and connect the engine of completions. Collective. Raises: ModelError on all ranks."""
        super().load(config, train_context)
        settings, objective = distill_settings(config), train_context.objective
        assert isinstance(objective, DistillObjective)
        if self._served is not None:
            objective.teacher = None
        elif not settings.shares_base:
            objective.teacher = self._load_teacher(settings, train_context)
        if self._rollouts is not None:
            self._generator = self._rollouts.load(settings, train_context)

    def _load_teacher(self, settings: DistillConfig, train_context: TrainContext) -> LocalTeacher:
        ranks = self.context.ranks
        layout = replace(Layout.of(settings, ranks.size), expert_parallel=1)
        if settings.zero_stage == 3 and layout.is_sharded:  # reading its weights is collective
            return load_teacher(settings, train_context, Sharding(layout, train_context.device))
        return ranks.run_or_raise_on_all(lambda: load_teacher(settings, train_context, None))

    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:
        """Return samples in the order of the data, or completions of their prompts.

        Raises: DataError; Interrupted; StoppedOnFinding (SF801, SF806) of a server, on all ranks.
        """
        if not self._trains_on_own(step):
            step_batch, batches = self._read_rows(position, step, epoch)
            metrics = {**step_batch.metrics, **({"on_policy": 0.0} if self._settings.generates else {})}
            return replace(step_batch, metrics=metrics), self._teach(batches)
        data, ranks = self.context.data, self.context.ranks
        ranks.run_or_raise_on_all(data.check_prepared)
        step_batch = ranks.run_or_raise_on_all(lambda: data.order.step(position))
        keys = [samples[0] for samples in step_batch.sequences]
        batches, metrics = self._complete(data.train, keys, (step, 0), step)
        return replace(step_batch, metrics={**step_batch.metrics, "on_policy": 1.0, **metrics}), batches

    def _read_rows(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:
        """Return samples in the order of the data. An error of one rank is raised on all if a server is asked next."""
        read = partial(super().batches, position, step, epoch)
        is_agreed = self._served is None or self.context.data.reader is not None  # with images it is raised on all
        return read() if is_agreed else self.context.ranks.run_or_raise_on_all(read)

    def check_data(self, position: Position) -> None:
        """Raise DataError for a row without a prompt among those that are prepared first, if prompts are needed."""
        if self._settings.generates:
            for sample in self.context.data.first_samples(position):
                self._take_prompt(sample)

    def _trains_on_own(self, step: int) -> bool:
        """Return whether a step trains on completions of the student."""
        draw = np.random.default_rng((self._settings.seed, OWN_SEED, step)).random()
        return bool(draw < self._settings.lmbda)

    def _complete(
        self, dataset: Dataset, keys: Sequence[SampleKey], seed: tuple[int, int], step: int
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """Return this rank's part of completions of some samples' prompts by the weights after `step`. Collective.

        `seed`: part of the seed of each completion, besides the config's and its place in `keys`.
        """
        assert self._generator is not None
        data = self.context.data
        layout = data.layout
        numbers = range(len(keys))[layout.data_rank :: layout.data_size]
        prompts = self._generator.read_prompts(dataset, [keys[number] for number in numbers], self._take_prompt)
        requests = [
            Request(prompt.ids, (self._settings.seed, *seed, number, 0), prompt.images, prompt.place)
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        completions = self._generator.wait(self._generator.request(requests, step))
        samples = [
            complete_prompt(request.prompt, completion.ids, request.images, request.place)
            for request, completion in zip(requests, completions, strict=True)
        ]
        self._show(samples, step)
        rows_each = self._settings.rows_at_a_time
        begins = range(0, -(-len(keys) // layout.data_size), rows_each)
        # Each rank opens the images of its own part; an error of one is raised on all.
        batches = self.context.ranks.run_or_raise_on_all(
            lambda: [_collate_own(samples[begin : begin + rows_each], data.reader) for begin in begins]
        )
        local_tokens = sum(len(completion.ids) for completion in completions)
        local_truncated = sum(completion.finish == "length" for completion in completions)
        batches = self._teach(batches)
        tokens, truncated = self.context.ranks.sum([local_tokens, local_truncated])
        metrics = {"completion_length": tokens / len(keys), "truncated_share": truncated / len(keys)}
        return batches, metrics

    def _teach(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the batches with what the teacher's server gives for them, if there is one. Collective."""
        if self._served is None:
            return batches
        try:
            with self.context.phase("rollout"):
                scores = poll(self._served.submit(batches, self.context.ranks), self.context)
        finally:
            self._served.threads.cancel_waiting()
        assert scores is not None
        pairs = zip(batches, scores, strict=True)
        return [
            TaughtBatch(**{**vars(batch), "likeliest_ids": each.ids, "likeliest_logprobs": each.logprobs})
            for batch, each in pairs
        ]

    def _show(self, samples: Sequence[Sample], step: int) -> None:
        """Show some completions of the first step that trains on such. Collective."""
        if self._has_shown_completions:
            return
        self._has_shown_completions = True
        if any(map(self._trains_on_own, range(step))):
            return
        shown = tuple(self.describe_sample(sample) for sample in samples[:SAMPLES_SHOWN])
        # Rank 0 writes the event, and its error is raised on all ranks.
        self.context.ranks.run_or_raise_on_all(
            lambda: self.context.emit(SamplesTrained(step + 1, shown)), names_rank=False
        )

    def _take_prompt(self, sample: Sample) -> Sample:
        """Return a row's prompt: all before its last answer. Raises: DataError for a row without one."""
        if self._settings.row.is_prompt:
            return sample
        is_trained = sample.weights > 0
        begins = np.flatnonzero(is_trained[1:] & ~is_trained[:-1])
        if not len(begins):
            raise DataError(
                f"{sample.place}: nothing stands before the row's answer, so the student has no prompt to complete. "
                "Give the row a question (or raise max_length, if truncation: left has cut it off), or set lmbda: 0."
            )
        ids = sample.ids[: begins[-1] + 1]
        reader = self.context.data.reader
        images = take_images(ids, sample.images, reader.settings.token_id if reader is not None else None)
        return replace(sample, ids=ids, weights=sample.weights[: len(ids)], images=images)

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return the loss on held-out rows; with `lmbda: 1` on completions of their prompts."""
        data, train_context = self.context.data, self._train_context
        assert data.held_out is not None
        assert isinstance(train_context.objective, DistillObjective)
        of_completions: Mapping[str, float] = {}
        held_out: Iterable[MicroBatch] = (batch for each in data.eval_batches() for batch in self._teach([each]))
        if self._settings.lmbda == 1:
            keys = list(data.held_out.sample_keys())
            held_out, metrics = self._complete(data.held_out, keys, (EVALUATION, 0), step)
            of_completions = {f"eval_{name}": value for name, value in metrics.items()}
        with train_context.forward_context():
            on_device = (batch.to(train_context.device) for batch in held_out)
            loss, trained = train_context.objective.evaluate(on_device, self.context.stop_requested)
        return {"eval_loss": loss, "eval_trained_tokens": trained, **of_completions}

    def end(self) -> None:
        """End the engine of completions, and its server."""
        if self._rollouts is not None:
            self._rollouts.end()


def _collate_own(samples: Sequence[Sample], reader: PixelReader | None) -> MicroBatch:
    """Return completions as a batch; a dummy for a rank that has none left. Raises: DataError for a bad image."""
    return TaughtBatch(**vars(collate(samples, reader) if samples else dummy_batch(reader)), is_own=True)
