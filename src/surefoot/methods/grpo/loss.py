"""Group relative policy optimisation: the loss over completions with advantages, in the variants of eight papers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from math import isnan, nan
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.data.collate import MicroBatch
from surefoot.distributed.fsdp import reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World, sum_over_ranks
from surefoot.errors import ModelError
from surefoot.methods.base import BatchTotals, LossTerms, Objective, PlannedLoss
from surefoot.methods.grpo.advantage import advantages
from surefoot.methods.grpo.batch import CompletionBatch, Trajectory, collate_completions
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.token_loss import TokenLogprobs, eval_no_grad, sum_answers
from surefoot.models.build import BuiltModel
from surefoot.models.lora import disable_adapter
from surefoot.models.routing import LayerRouting, ReplayedRouting, expert_counts

EPSILON = 0.2
DEFAULT_CLIPS = {"cispo": (EPSILON, 5.0), "gspo": (3e-4, 4e-4)}
"""epsilon and epsilon_high if none is set. For cispo, the latter is the largest ratio (ScaleRL, arXiv:2510.13786); for
gspo, the ratios of whole completions are closer to 1 (GSPO, arXiv:2507.18071, sec. 5.1)."""
OF_COMPLETIONS = frozenset(("gspo", "rloo"))
"""Losses by the ratio of a whole completion."""
MAX_LOG_RATIO = 20.0
"""Largest log-ratio of training's to sampling's probability. Larger ones add no meaning and would overflow the mean."""
METRICS = ("entropy", "kl", "clip_ratio", "importance_ratio", "logprob_difference", "ratio", "routing_agreement")


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of tokens, with its settings."""

    loss_type: str
    epsilon: float
    epsilon_high: float
    beta: float
    importance_correction: str
    importance_cap: float
    knows_rollout_logprobs: bool = True
    """Whether the engine's logprobs can be compared with the trainer's; without, nothing is corrected."""
    importance_floor: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    kl_in_reward: bool = False

    @staticmethod
    def of(config: GrpoConfig) -> "PolicyLoss":
        """Return the loss of a config, with the loss type's own clips if none are set."""
        low, high = DEFAULT_CLIPS.get(config.loss_type, (EPSILON, EPSILON))
        if config.epsilon is not None:
            low = high = config.epsilon
        settings = {setting.name: getattr(config, setting.name) for setting in fields(PolicyLoss)}
        high = config.epsilon_high if config.epsilon_high is not None else high
        return PolicyLoss(**{**settings, "epsilon": low, "epsilon_high": high})

    def __call__(self, logprobs: Tensor, batch: CompletionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return unweighted losses and metrics per token. Shapes: logprobs [N] with graph -> losses [N], metrics [N].

        grpo, dapo, dr_grpo, bnpo: -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r of each token (PPO,
        arXiv:1707.06347, eq. 7; GRPO, arXiv:2402.03300, eq. 3). gspo: the same with r of the whole completion, the
        geometric mean of its tokens' (arXiv:2507.18071, eq. 7); rloo: with their product (arXiv:2402.14740). cispo:
        -min(r, epsilon_high) A log p, with no gradient through r (arXiv:2506.13585, eq. 4). sapo:
        -4 / t sigma(t (r - 1)) A, with t by the sign of A, which bounds the ratio smoothly (arXiv:2511.20347, eq. 6).
        Times p_old / p_rollout, because the engine's numbers are not the trainer's: from `importance_floor` up to
        `importance_cap` (truncate: importance sampling as in IMPALA, arXiv:1802.01561, eq. 1) or 0 outside (mask:
        IcePop, arXiv:2510.18855); sequence_truncate and sequence_mask: the product over the completion, as TRL has it.
        Plus beta times the divergence from the reference (arXiv:2402.03300, eq. 4), unless that is in the reward; times
        r, which makes its gradient unbiased where r is of the token and completions are of the same weights
        (DeepSeek-V3.2, arXiv:2512.02556).
        """
        assert batch.weights is not None
        # The policy may give a masked token a probability of 0 by now: its ratio must not reach a gradient.
        is_trained = batch.weights > 0
        zeros = torch.zeros_like(batch.advantages)
        logprobs = torch.where(is_trained, logprobs, zeros)
        old = batch.old_logprobs if batch.old_logprobs is not None else logprobs.detach()
        old = torch.where(is_trained, old, zeros)
        advantages = batch.advantages
        log_ratio = logprobs - old
        if self.loss_type in OF_COMPLETIONS:
            sums = _sum_by_completion(log_ratio, batch)
            if self.loss_type == "gspo":
                sums = sums / _sum_by_completion(torch.ones_like(log_ratio), batch)
            log_ratio = sums[batch.answer_of]
        ratio = log_ratio.exp()
        if self.loss_type == "cispo":
            losses = -ratio.detach().clamp(max=self.epsilon_high) * advantages * logprobs
            is_clipped = ratio > self.epsilon_high
        elif self.loss_type == "sapo":
            temperature = torch.where(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg)
            losses = -4 / temperature * (temperature * (ratio - 1)).sigmoid() * advantages
            is_clipped = torch.zeros_like(ratio)
        else:
            clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
            losses = -torch.min(ratio * advantages, clipped * advantages)
            low, high = ratio < 1 - self.epsilon, ratio > 1 + self.epsilon_high
            is_clipped = (low & (advantages < 0)) | (high & (advantages > 0))
        metrics = {"clip_ratio": is_clipped.float(), "ratio": ratio.detach()}
        if self.knows_rollout_logprobs:
            log_importance = old - torch.where(is_trained, batch.rollout_logprobs, zeros)
            importance = log_importance.clamp(max=MAX_LOG_RATIO).exp()
            if self.importance_correction != "none":
                weights = importance
                if self.importance_correction.startswith("sequence"):
                    log_product = _sum_by_completion(log_importance, batch)[batch.answer_of]
                    weights = log_product.clamp(max=MAX_LOG_RATIO).exp()
                bounded_weights = weights.clamp(self.importance_floor, self.importance_cap)
                if self.importance_correction.endswith("mask"):
                    bounded_weights = torch.where(weights == bounded_weights, weights, zeros)
                losses = losses * bounded_weights
            metrics |= {"importance_ratio": importance, "logprob_difference": log_importance.abs()}
        if self.beta and batch.reference_logprobs is not None:
            distance = torch.where(is_trained, batch.reference_logprobs, zeros) - logprobs
            divergence = distance.exp() - distance - 1
            if not self.kl_in_reward:
                losses = losses + self.beta * ratio * divergence
            metrics["kl"] = divergence.detach()
        return losses, metrics


def _sum_by_completion(values: Tensor, batch: CompletionBatch) -> Tensor:
    """Return the sum over the tokens of each completion. Shapes: [N] -> [completions]."""
    return sum_answers(values, batch, len(batch.trajectories) or 1)


class _Computed(NamedTuple):
    """Results of a forward without graph for the completions of a batch."""

    batch: CompletionBatch
    field_name: str
    """Field of the completions' log-probabilities."""
    logprobs: Tensor
    experts: Tensor | None
    """Chosen experts, int16 [T, layers, K], if they are to be repeated."""


class GrpoObjective(Objective):
    """The clipped policy loss over completions."""

    def __init__(self, built: BuiltModel, config: GrpoConfig, ranks: World = SINGLE_PROCESS) -> None:
        super().__init__(built.model)
        self.routing = built.routing
        """Recorder of the model's routers."""
        self._ranks = ranks
        self._loss = PolicyLoss.of(config)
        self._compute_advantages = partial(advantages, scale=config.scale_rewards, estimator=config.advantage_estimator)
        self._stores_old_logprobs = config.num_iterations > 1
        self._replays_routing = config.routing_replay != "none"
        self._stores_first_routing = config.routing_replay == "first"
        self._logprobs = TokenLogprobs(built.model, config.temperature)
        if self._replays_routing:
            self._check_routers()
        self._computed: list[_Computed] = []
        self._counts: Tensor | None = None
        self._sums: list[Tensor] = []
        self._metrics: dict[str, float] = {}

    @property
    def expert_counts(self) -> Tensor | None:
        """Rows of each expert among the last step's trained tokens, int64 [layers, E]; None for a dense model."""
        return self._counts

    def counted_tokens(self, totals: BatchTotals) -> int:
        """Return the number of trained tokens: `expert_counts` counts their rows alone."""
        return totals.trained

    @property
    def holds_all_logits(self) -> bool:
        return self._logprobs.holds_all_logits

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the trained tokens of the last step: entropy, clip_ratio, importance_ratio, logprob_difference,
        ratio, kl, routing_agreement."""
        return self._metrics

    def _check_routers(self) -> None:
        """Check that every router can be recorded and replayed. Collective. Raises: ModelError on all ranks."""
        trajectory = Trajectory([0], [0, 0], [0.0, 0.0], 0.0, 1.0, "a check of routers")
        batch = collate_completions([trajectory], share_prompts=False).to(self.model.device)
        with eval_no_grad(self.model):
            with self.routing.recording() as layers:
                self._logprobs(batch)
            if len(layers) != len(self.routing.names):
                raise ModelError(
                    f"routing_replay: {len(layers)} of {len(self.routing.names)} routers of "
                    f"{type(self.model).__name__} report their choices. Set routing_replay: none."
                )
            with self._replay(torch.stack([layer.index for layer in layers], dim=1)):
                self._logprobs(batch)
        reshard(self.model)

    def _replay(self, experts: Tensor | None) -> AbstractContextManager[object]:
        """Return a context in which routers choose recorded experts, if there are any."""
        return nullcontext() if experts is None else ReplayedRouting(experts, self.routing.num_experts)

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Compute the log-probabilities that all steps on these completions share, in forwards without graph.

        They are those of the current weights (`num_iterations` over 1) and of the model without its adapter (`beta`).
        """
        self._counts, self._sums = None, []
        ready: list[MicroBatch] = []
        is_new = any(not batch.is_dummy and getattr(batch, "reference_logprobs", None) is None for batch in batches)
        for batch in batches:
            assert isinstance(batch, CompletionBatch)
            if self._stores_old_logprobs:
                batch = self._add_logprobs(batch, "old_logprobs", with_adapter=True)
            if self._loss.beta:
                batch = self._add_logprobs(batch, "reference_logprobs", with_adapter=False)
            ready.append(batch)
        takes_divergence = self._loss.kl_in_reward and bool(self._ranks.sum([is_new])[0])
        return self._subtract_divergence(ready) if takes_divergence else ready

    def _subtract_divergence(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the batches with advantages of rewards from which `beta` times the divergence is taken. Collective.

        The divergence of a completion is the sum of log p - log p_reference over its tokens, p being the probability
        with which they were drawn (RLOO, arXiv:2402.14740, sec. 3).
        """
        local: list[tuple[int, float]] = []
        for batch in batches:
            if isinstance(batch, CompletionBatch) and batch.reference_logprobs is not None:
                sums = _sum_by_completion(batch.rollout_logprobs - batch.reference_logprobs, batch).tolist()
                for trajectory, divergence in zip(batch.trajectories, sums, strict=True):
                    reward = nan if trajectory.reward is None else trajectory.reward - self._loss.beta * divergence
                    local.append((trajectory.group, reward))
        of_ranks = self._ranks.gather(local)
        groups: dict[int, list[float]] = {}
        for group, reward in chain.from_iterable(of_ranks):
            groups.setdefault(group, []).append(reward)
        computed = dict(zip(groups, self._compute_advantages(list(groups.values())), strict=True))
        # Each rank finds its own behind those of the ranks before it.
        remaining = {group: iter(values) for group, values in computed.items()}
        for group, _ in chain.from_iterable(of_ranks[: self._ranks.rank]):
            next(remaining[group])
        return [self._replace_advantages(batch, remaining) for batch in batches]

    def _replace_advantages(self, batch: MicroBatch, values: Mapping[int, Iterator[float]]) -> MicroBatch:
        """Return a batch with the next advantages of its completions' groups, which the completions keep."""
        if not isinstance(batch, CompletionBatch) or batch.reference_logprobs is None:
            return batch
        for trajectory in batch.trajectories:
            advantage = next(values[trajectory.group])
            trajectory.advantage = 0.0 if isnan(advantage) else advantage
        each = torch.tensor([trajectory.advantage for trajectory in batch.trajectories], device=batch.advantages.device)
        return replace(batch, advantages=each[batch.answer_of])

    def _add_logprobs(self, batch: CompletionBatch, field_name: str, *, with_adapter: bool) -> CompletionBatch:
        """Return the batch with log-probabilities in a field; compute them if it has none."""
        # All ranks take the forward or none does: either all completions of a step were trained on before, or none.
        if getattr(batch, field_name) is not None:
            return batch
        # The reference is another model, so its routers choose for themselves.
        replay = self._replay(batch.experts) if with_adapter else nullcontext()
        adapter = nullcontext() if with_adapter else disable_adapter(self.model)
        with eval_no_grad(self.model), adapter, self.routing.recording() as layers, replay:
            logprobs, _ = self._logprobs(batch)
        if batch.is_dummy:
            return batch
        experts = None
        if with_adapter and self._stores_first_routing:
            experts = torch.stack([layer.index for layer in layers], dim=1).short()
        self._computed.append(_Computed(batch, field_name, logprobs, experts))
        batch = replace(batch, **{field_name: logprobs})  # type: ignore[arg-type]
        return batch if experts is None else replace(batch, experts=experts)

    def _store_computed(self) -> None:
        """Store what this step has computed with the completions, for further steps on them. Waits for the device."""
        for computed in self._computed:
            values = iter(computed.logprobs.tolist())
            for trajectory in computed.batch.trajectories:
                setattr(trajectory, computed.field_name, [next(values) for _ in trajectory.ids])
            if computed.experts is not None:
                computed.batch.keep_experts(computed.experts)
        self._computed = []

    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:
        """Return this micro-batch's share: the weights of its tokens are normalised over the step."""
        del totals
        assert isinstance(batch, CompletionBatch)
        assert batch.weights is not None
        replay = self._replay(batch.experts)
        with self.routing.recording() as layers, replay:
            logprobs, entropy = self._logprobs(batch)
        losses, metrics = self._loss(logprobs, batch)
        is_trained = batch.weights > 0
        if layers:
            # A prompt may be computed once or several times, each trained token exactly once.
            routing = [LayerRouting(layer.logits, layer.index[batch.token_at]) for layer in layers]
            counts = expert_counts(routing, layers[0].logits.shape[-1], is_trained)
            self._counts = counts if self._counts is None else self._counts + counts
        if batch.is_dummy:
            return LossTerms(logprobs.sum() * 0.0)
        metrics["entropy"] = entropy
        if isinstance(replay, ReplayedRouting):
            metrics["routing_agreement"] = _compute_agreement(replay.own, layers)[batch.target_positions]
        zeros = torch.zeros_like(entropy)
        sums = [torch.where(is_trained, metrics.get(name, zeros), zeros).sum() for name in METRICS]
        self._sums.append(torch.stack([*sums, is_trained.sum()]).double())
        return LossTerms((losses * batch.weights).sum())

    def end_step(self) -> None:
        """Complete the metrics. Collective: one sum of a few numbers, and another if there are experts."""
        self._store_computed()
        if self._counts is not None:
            self._counts = sum_over_ranks(self._counts, self._ranks)
        local_sums = torch.stack(self._sums).sum(0).tolist() if self._sums else [0.0] * (len(METRICS) + 1)
        *sums, tokens = self._ranks.sum(local_sums)
        has_rollout_logprobs = self._loss.knows_rollout_logprobs
        is_measured = {"kl": bool(self._loss.beta), "routing_agreement": self._replays_routing}
        is_measured |= {"importance_ratio": has_rollout_logprobs, "logprob_difference": has_rollout_logprobs}
        self._metrics = {  # empty if no token was trained
            name: value / tokens
            for name, value in zip(METRICS, sums, strict=True)
            if tokens and is_measured.get(name, True)
        }


def _compute_agreement(own: Sequence[Tensor], layers: Sequence[LayerRouting]) -> Tensor:
    """Return the share of each token's experts that its routers would have chosen, over all layers: float32 [T]."""
    used_experts = torch.stack([layer.index for layer in layers], dim=1)
    own_experts = torch.stack(list(own), dim=1)
    return (used_experts[..., None] == own_experts[..., None, :]).any(-1).float().mean((1, 2))


@dataclass(frozen=True)
class PlannedPolicyLoss(PlannedLoss):
    """The loss of GRPO on completions of full length."""

    tokens_per_sequence: int
    loss: PolicyLoss

    def __call__(self, built: BuiltModel, batch: MicroBatch) -> Callable[[], Tensor]:
        """Return the sum of the losses of the batch's tokens."""
        logprobs = TokenLogprobs(built.model, 1.0)
        tokens = torch.zeros(len(batch.targets))
        policy = CompletionBatch(
            **{**vars(batch), "weights": tokens + 1},
            advantages=tokens,
            rollout_logprobs=tokens,
            token_at=batch.target_positions,
            old_logprobs=tokens,
            reference_logprobs=tokens if self.loss.beta else None,
        )
        # They sum over completions, whose numbers have no values here, and hold as many numbers per token as grpo.
        loss = replace(self.loss, loss_type="grpo") if self.loss.loss_type in OF_COMPLETIONS else self.loss
        return lambda: loss(logprobs(policy)[0], policy)[0].sum()
