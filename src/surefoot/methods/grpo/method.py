"""GRPO as a `Method`: reward workers, an engine for completions, and the batch source that joins them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from surefoot.config import LoadedConfig, RunConfig
from surefoot.data.collate import MicroBatch
from surefoot.data.sampler import Position, StepBatch
from surefoot.distributed.process_group import World
from surefoot.errors import ConfigError, StoppedOnFinding
from surefoot.methods.base import Method, MethodContext, Objective, PlannedLoss, TrainContext
from surefoot.methods.grpo.builtin_rewards import BUILT_IN, columns_problem
from surefoot.methods.grpo.loss import GrpoObjective, PlannedPolicyLoss, PolicyLoss
from surefoot.methods.grpo.pending import problems_of_pending
from surefoot.methods.grpo.reward_checks import EngineDriftDetector
from surefoot.methods.grpo.reward_model import RewardModel, check_scorer
from surefoot.methods.grpo.rewards import Rewards, check_reward
from surefoot.methods.grpo.rollout_source import RolloutSource
from surefoot.methods.grpo.settings import GrpoConfig, grpo_settings
from surefoot.methods.rollout.engines.vllm_probe import tolerance_of
from surefoot.methods.rollout.setup import Rollouts
from surefoot.models.build import BuiltModel, meta_model
from surefoot.models.isolation import can_share_prompts, longest_at_one_frequency
from surefoot.models.resolve_model import folder_here, may_be_fetched
from surefoot.models.routing import router_names


class Grpo(Method):
    """Group relative policy optimisation, on rewards of the model's own completions."""

    agrees_to_stop_before_batches = True

    def __init__(self, context: MethodContext) -> None:
        super().__init__(context)
        self._parts = ExitStack()
        """Callbacks that end all parts that were started, each even if another fails to end."""
        self._rewards: Rewards | None = None
        self._rollouts = Rollouts(context)
        self._source: RolloutSource | None = None
        self._settings = grpo_settings(context.loaded.run)
        self._check_drift: Callable[[int, Mapping[str, float]], None] = drift_check(self._settings)

    @staticmethod
    def check_model(loaded: LoadedConfig, base: Path) -> None:
        """Raise ConfigError if the model lacks what settings ask for. Reads no weights."""
        settings = grpo_settings(loaded.run)
        if settings.rollout_engine == "local":
            _check_frequencies(loaded, settings, base)
        replay = settings.routing_replay
        if replay != "none" and not router_names(meta_model(base)):
            raise ConfigError(
                f"routing_replay={replay}, but {loaded.run.model} has no routers whose choices can be recorded. Set "
                f"routing_replay: none ({loaded.where('routing_replay')})."
            )

    @classmethod
    def planned_loss(cls, run: RunConfig) -> PlannedLoss:
        settings = grpo_settings(run)
        return PlannedPolicyLoss(settings.max_completion_length, PolicyLoss.of(settings))

    @staticmethod
    def check_files(loaded: LoadedConfig) -> None:
        _check_rewards(loaded)

    @staticmethod
    def build_objective(built: BuiltModel, config: RunConfig, ranks: World) -> Objective:
        return GrpoObjective(built, grpo_settings(config), ranks)

    def start(self) -> None:
        """Start reward workers, and the server if there is one, which gets ready while the data are prepared."""
        context, settings = self.context, self._settings

        def start_rewards() -> Rewards:
            _check_rewards(context.loaded)
            return Rewards(
                settings.rewards,
                num_workers=settings.reward_num_proc,
                timeout_s=settings.reward_timeout_s,
                where=context.loaded.where("reward_funcs"),
            )

        with context.phase("load"):
            self._rewards = context.ranks.run_or_raise_on_all(start_rewards)
            self._parts.callback(self._rewards.end)
            self._parts.callback(self._rollouts.end)
            self._rollouts.start()

    def check_data(self, position: Position) -> None:
        """Raise ConfigError if rows at a position, or held-out rows, lack the answer that a built-in compares with."""
        data, where = self.context.data, self.context.loaded.where("reward_funcs")
        rows = [("the rows", data.first_columns(position)), ("the held-out rows", data.held_out_columns())]
        for item, (which, columns) in product(self._settings.rewards, rows):
            if item.model and columns and "images" in columns:
                raise ConfigError(f"{item.func}: {which} have images, and a reward model reads text alone ({where}).")
            can_check = columns and item.func in BUILT_IN
            problem = columns_problem(item.func, item.args, columns, which) if can_check else None
            if problem is not None:
                raise ConfigError(
                    f"{item.func}: {problem}. Name the column with the answer: reward_funcs: [{{func: {item.func}, "
                    f"args: {{answer_column: NAME}}}}] ({where})."
                )

    def connect(self) -> None:
        """Wait for the server to take its memory before training does."""
        self._rollouts.connect()

    def load(self, config: RunConfig, train_context: TrainContext) -> None:
        """Connect the engine to the model. Raises: StoppedOnFinding (SF801) if a server does not get ready."""
        assert self._rewards is not None
        self._load_reward_models(config, train_context)
        settings, objective = grpo_settings(config), train_context.objective
        assert isinstance(objective, GrpoObjective)
        routing = objective.routing if settings.records_routing else None
        generator = self._rollouts.load(settings, train_context, routing)
        dtype = getattr(torch, config.dtype)
        share_prompts = can_share_prompts(train_context.model, train_context.device, dtype)
        self._source = RolloutSource(settings, self.context, generator, self._rewards, share_prompts=share_prompts)

    def _load_reward_models(self, config: RunConfig, train_context: TrainContext) -> None:
        """Load the reward models on every rank. Collective. Raises: ConfigError, ModelError on all ranks."""
        assert self._rewards is not None
        ranks, where = self.context.ranks, self.context.loaded.where("reward_funcs")
        dtype = getattr(torch, config.dtype)
        for number, item in enumerate(self._settings.rewards):
            if item.model:
                ranks.local_rank0_first(partial(check_scorer, item, where))  # fetched once on each machine
                load = partial(RewardModel, item.model, train_context.device, dtype)
                self._rewards.add_model(number, ranks.run_or_raise_on_all(load))

    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:
        """Return completions with advantages. Raises: what `RolloutSource.batches` raises."""
        self.context.ranks.run_or_raise_on_all(self.context.data.check_prepared)
        return self._loaded_source.batches(position, step, epoch)

    def evaluate(self, step: int) -> Mapping[str, float]:
        assert self.context.data.held_out is not None
        return self._loaded_source.evaluate(self.context.data.held_out, step)

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End the run if its server uses other weights than are trained (SF805)."""
        self._check_drift(step, metrics)

    def pending(self, position: Position, step: int, wait_s: float) -> list[dict[str, Any]]:
        return self._loaded_source.pending(position, step, wait_s)

    @staticmethod
    def problems_of_pending(pending: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        return problems_of_pending(pending)

    def restore(self, pending: Sequence[Mapping[str, Any]]) -> None:
        self._loaded_source.restore(pending)

    def end(self) -> None:
        self._parts.close()

    @property
    def _loaded_source(self) -> RolloutSource:
        assert self._source is not None
        return self._source


def drift_check(config: GrpoConfig) -> Callable[[int, Mapping[str, float]], None]:
    """Return the check of each step, which ends a run whose server uses other weights than are trained (SF805)."""
    if config.rollout_engine != "vllm":
        return lambda _step, _metrics: None
    # Twice the probe's tolerance: training makes some tokens of a step less likely than those of the probe.
    drift = EngineDriftDetector(2 * tolerance_of(getattr(torch, config.dtype), config.quantization))

    def check_drift(step: int, metrics: Mapping[str, float]) -> None:
        finding = drift.add(step, metrics)
        if finding is not None:
            raise StoppedOnFinding(finding, is_agreed=True)

    return check_drift


def _check_rewards(loaded: LoadedConfig) -> None:
    """Raise ConfigError for a reward function or reward model that is missing or has a wrong setting. Fetches none."""
    where = loaded.where("reward_funcs")
    for item in grpo_settings(loaded.run).rewards:
        check_reward(item, where)
        if item.model and (folder_here(item.model) is not None or not may_be_fetched(item.model)):
            check_scorer(item, where)


def _check_frequencies(loaded: LoadedConfig, settings: GrpoConfig, base: Path) -> None:
    """Raise ConfigError if position frequencies may change while a completion is generated.

    Tokens before the change would have other probabilities than training computes for the whole sample.
    """
    limit = longest_at_one_frequency(meta_model(base))
    room, added = settings.max_row_tokens, settings.max_completion_length
    longest = room + added
    if limit is not None and longest > limit:
        name = settings.row_limit_setting
        raise ConfigError(
            f"{name}={room} and max_completion_length={added} allow samples of {longest} tokens. {loaded.run.model} "
            f"changes its position frequencies beyond {limit} tokens (longrope or dynamic NTK): the first tokens of a "
            "longer completion would be drawn with other probabilities than training computes. Lower them to "
            f"{limit} together ({loaded.where(name, 'max_completion_length')})."
        )
