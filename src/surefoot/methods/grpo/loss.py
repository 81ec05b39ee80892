"""Group relative policy optimisation: the loss over completions with advantages, in the forms of six papers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.data.collate import MicroBatch
from surefoot.data.image_processor import PixelReader
from surefoot.distributed.fsdp import reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World, sum_over_ranks
from surefoot.errors import ModelError
from surefoot.methods.base import BatchTotals, LossTerms, Objective, PlannedLoss
from surefoot.methods.grpo.batch import PolicyBatch, Trajectory, collate_policy
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.grpo.types import Request
from surefoot.methods.token_loss import TokenLogprobs, eval_no_grad
from surefoot.models.build import BuiltModel
from surefoot.models.lora import disable_adapter
from surefoot.models.routing import LayerRouting, ReplayedRouting, RoutingRecorder, expert_counts

EPSILON = 0.2
OWN_CLIPS = {"cispo": (EPSILON, 5.0), "gspo": (3e-4, 4e-4)}
"""epsilon and epsilon_high where none is set: the largest ratio of cispo (ScaleRL, arXiv:2510.13786); ratios of whole
completions lie closer together (GSPO, arXiv:2507.18071, sec. 5.1)."""
LARGEST_LOG_RATIO = 20.0
"""Of training's to sampling's probability: larger ones mean no more, and their mean would be no number."""
SUMS = ("entropy", "kl", "clip_ratio", "importance_ratio", "logprob_difference", "ratio", "routing_agreement")


@dataclass(frozen=True)
class PolicyLoss:
    """The settings of the loss, and the loss of tokens under them."""

    loss_type: str
    epsilon: float
    epsilon_high: float
    beta: float
    importance_correction: str
    importance_cap: float
    knows_rollout_logprobs: bool = True
    """Else nothing is compared with them, and nothing corrected."""
    importance_floor: float = 0.0

    @staticmethod
    def of(config: GrpoConfig) -> "PolicyLoss":
        """With clips as the loss type has them where they are not set."""
        own_low, own_high = OWN_CLIPS.get(config.loss_type, (EPSILON, None))
        low = config.epsilon if config.epsilon is not None else own_low
        high = own_high if own_high is not None and config.epsilon is None else low
        return PolicyLoss(
            config.loss_type,
            low,
            config.epsilon_high if config.epsilon_high is not None else high,
            config.beta,
            config.importance_correction,
            config.importance_cap,
            config.knows_rollout_logprobs,
            config.importance_floor,
        )

    def __call__(self, logprobs: Tensor, batch: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Shapes: logprobs [N] with graph -> losses [N], not weighted yet, and what is measured of each token, [N].

        grpo, dapo, dr_grpo, bnpo: -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r of each token (PPO,
        arXiv:1707.06347, eq. 7; GRPO, arXiv:2402.03300, eq. 3). gspo: the same with r of the whole completion, the
        geometric mean of its tokens' (arXiv:2507.18071, eq. 7). cispo: -min(r, epsilon_high) A log p, with no gradient
        through r (arXiv:2506.13585, eq. 4).
        Times p_old / p_rollout, because the engine's numbers are not the trainer's: from `importance_floor` up to
        `importance_cap` (truncate: importance sampling as in IMPALA, arXiv:1802.01561, eq. 1) or 0 outside (mask:
        IcePop, arXiv:2510.18855); sequence_truncate and sequence_mask: the product over the completion, as TRL has it.
        Plus beta times the divergence from the reference (arXiv:2402.03300, eq. 4), times r, which makes its gradient
        unbiased where r is of the token and completions are of the same weights (DeepSeek-V3.2, arXiv:2512.02556).
        """
        assert batch.weights is not None
        # A masked token may be one that the policy finds impossible by now: its ratio must not reach a gradient.
        is_trained = batch.weights > 0
        nothing = torch.zeros_like(batch.advantages)
        logprobs = torch.where(is_trained, logprobs, nothing)
        old = batch.old_logprobs if batch.old_logprobs is not None else logprobs.detach()
        old = torch.where(is_trained, old, nothing)
        advantages = batch.advantages
        log_ratio = logprobs - old
        if self.loss_type == "gspo":
            log_ratio = (_sums(log_ratio, batch) / _sums(torch.ones_like(log_ratio), batch))[batch.completion]
        ratio = log_ratio.exp()
        if self.loss_type == "cispo":
            losses = -ratio.detach().clamp(max=self.epsilon_high) * advantages * logprobs
            is_clipped = ratio > self.epsilon_high
        else:
            clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
            losses = -torch.min(ratio * advantages, clipped * advantages)
            low, high = ratio < 1 - self.epsilon, ratio > 1 + self.epsilon_high
            is_clipped = (low & (advantages < 0)) | (high & (advantages > 0))
        measured = {"clip_ratio": is_clipped.float(), "ratio": ratio.detach()}
        if self.knows_rollout_logprobs:
            off_rollout = old - torch.where(is_trained, batch.rollout_logprobs, nothing)
            importance = off_rollout.clamp(max=LARGEST_LOG_RATIO).exp()
            if self.importance_correction != "none":
                weights = importance
                if self.importance_correction.startswith("sequence"):
                    product = _sums(off_rollout, batch)[batch.completion]
                    weights = product.clamp(max=LARGEST_LOG_RATIO).exp()
                kept = weights.clamp(self.importance_floor, self.importance_cap)
                if self.importance_correction.endswith("mask"):
                    kept = torch.where(weights == kept, weights, nothing)
                losses = losses * kept
            measured |= {"importance_ratio": importance, "logprob_difference": off_rollout.abs()}
        if self.beta and batch.reference_logprobs is not None:
            distance = torch.where(is_trained, batch.reference_logprobs, nothing) - logprobs
            divergence = distance.exp() - distance - 1
            losses = losses + self.beta * ratio * divergence
            measured["kl"] = divergence.detach()
        return losses, measured


def _sums(values: Tensor, batch: PolicyBatch) -> Tensor:
    """[N] values of tokens -> [completions], of each the sum."""
    return values.new_zeros(len(batch.trajectories) or 1).index_add(0, batch.completion, values)


class GrpoObjective(Objective):
    """The clipped policy loss over completions."""

    def __init__(self, built: BuiltModel, config: GrpoConfig, ranks: World = SINGLE_PROCESS) -> None:
        super().__init__(built.model)
        self._routing = built.routing
        self._ranks = ranks
        self._loss = PolicyLoss.of(config)
        self._keeps_old = config.num_iterations > 1
        self._replays = config.routing_replay != "none"
        self._keeps_first_routing = config.routing_replay == "first"
        self._logprobs = TokenLogprobs(built.model, config.temperature)
        if self._replays:
            self._check_routers()
        self._counts: Tensor | None = None
        self._sums: list[Tensor] = []
        self._metrics: dict[str, float] = {}

    @property
    def routing(self) -> RoutingRecorder:
        """Of the model's routers."""
        return self._routing

    @property
    def expert_counts(self) -> Tensor | None:
        """Rows each expert got of the last step's trained tokens, int64 [layers, E]; None for a dense model."""
        return self._counts

    def counted_tokens(self, totals: BatchTotals) -> int:
        """Return the trained tokens: `expert_counts` counts their rows alone."""
        return totals.trained

    @property
    def holds_all_logits(self) -> bool:
        """See `Objective`."""
        return self._logprobs.holds_all_logits

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the trained tokens of the last step: entropy, clip_ratio, importance_ratio, logprob_difference,
        ratio, kl, routing_agreement."""
        return self._metrics

    def _check_routers(self) -> None:
        """Every router must say what it chose, and take what it is told, in the way that most models have. Collective.

        Raises: ModelError on all ranks.
        """
        some = Trajectory([0], [0, 0], [0.0, 0.0], 0.0, 1.0, "a check of routers")
        batch = collate_policy([some], share_prompts=False).to(self.model.device)
        with eval_no_grad(self.model):
            with self._routing.recording() as layers:
                self._logprobs(batch)
            if len(layers) != len(self._routing.names):
                raise ModelError(
                    f"routing_replay: {len(layers)} of {len(self._routing.names)} routers of "
                    f"{type(self.model).__name__} say which experts they chose. Set routing_replay: none."
                )
            with ReplayedRouting(torch.stack([layer.index for layer in layers], dim=1)):
                self._logprobs(batch)
        reshard(self.model)

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Log-probabilities that stay for all steps on these completions, in forwards without graph.

        They are kept with the completions: those of the weights as they are now (`num_iterations` over 1) and those of
        the model without its adapter (`beta`).
        """
        self._counts, self._sums = None, []
        ready: list[MicroBatch] = []
        for batch in batches:
            assert isinstance(batch, PolicyBatch)
            if self._keeps_old:
                batch = self._kept(batch, "old_logprobs", with_adapter=True)
            if self._loss.beta:
                batch = self._kept(batch, "reference_logprobs", with_adapter=False)
            ready.append(batch)
        return ready

    def _kept(self, batch: PolicyBatch, name: str, *, with_adapter: bool) -> PolicyBatch:
        """The batch with log-probabilities under a name, which are computed where they are not there yet."""
        # All ranks take the forward or none does: those of a step have all been trained on before, or none has.
        if getattr(batch, name) is not None:
            return batch
        # The reference is another model: it goes its own ways.
        replayed = _replayed(batch) if with_adapter else nullcontext()
        adapter = nullcontext() if with_adapter else disable_adapter(self.model)
        with eval_no_grad(self.model), adapter, self._routing.recording() as layers, replayed:
            found, _ = self._logprobs(batch)
        if batch.is_dummy:
            return batch
        values = iter(found.tolist())
        for one in batch.trajectories:
            setattr(one, name, [next(values) for _ in one.ids])
        if with_adapter and self._keeps_first_routing:
            chosen = torch.stack([layer.index for layer in layers], dim=1).short()
            batch.keep_experts(chosen)
            batch = replace(batch, experts=chosen)
        return replace(batch, **{name: found})  # type: ignore[arg-type]

    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:
        """This micro-batch's share: its tokens' weights say what part of the step each is."""
        del totals
        assert isinstance(batch, PolicyBatch)
        assert batch.weights is not None
        replayed = _replayed(batch)
        with self._routing.recording() as layers, replayed:
            logprobs, entropy = self._logprobs(batch)
        losses, measured = self._loss(logprobs, batch)
        is_trained = batch.weights > 0
        if layers:
            # A prompt may be computed once or several times; the trained tokens are there once.
            rows = batch.token_at[is_trained]
            seen = [LayerRouting(layer.logits[rows], layer.index[rows]) for layer in layers]
            counts = expert_counts(seen, layers[0].logits.shape[-1])
            self._counts = counts if self._counts is None else self._counts + counts
        if batch.is_dummy:
            return LossTerms(logprobs.sum() * 0.0)
        measured["entropy"] = entropy
        if isinstance(replayed, ReplayedRouting):
            measured["routing_agreement"] = _agreement(replayed.own, layers)[batch.target_positions]
        nothing = torch.zeros_like(entropy)
        sums = [torch.where(is_trained, measured.get(name, nothing), nothing).sum() for name in SUMS]
        self._sums.append(torch.stack([*sums, is_trained.sum()]).double())
        return LossTerms((losses * batch.weights).sum())

    def end_step(self) -> None:
        """Collective: one sum of a few numbers; another where there are experts."""
        if self._counts is not None:
            self._counts = sum_over_ranks(self._counts, self._ranks)
        mine = torch.stack(self._sums).sum(0).tolist() if self._sums else [0.0] * (len(SUMS) + 1)
        *sums, tokens = self._ranks.sum(mine)
        knows = self._loss.knows_rollout_logprobs
        there = {"kl": bool(self._loss.beta), "routing_agreement": self._replays}
        there |= {"importance_ratio": knows, "logprob_difference": knows}
        self._metrics = {  # nothing where no token was trained
            name: value / tokens for name, value in zip(SUMS, sums, strict=True) if tokens and there.get(name, True)
        }

    def score(
        self, request: Request, ids: list[int], device: torch.device, reader: PixelReader | None = None
    ) -> list[float]:
        """The logprobs of tokens after a prompt, without dropout. Collective. `reader`: see `collate_policy`."""
        one = Trajectory(request.prompt, ids, [0.0] * len(ids), 0.0, 1.0, request.place, request.images)
        with eval_no_grad(self.model):
            found, _ = self._logprobs(collate_policy([one], share_prompts=False, reader=reader).to(device))
        reshard(self.model)
        return [float(value) for value in found.tolist()]


def _replayed(batch: PolicyBatch) -> AbstractContextManager[object]:
    """Routers choose what they are to repeat, where that is known."""
    return nullcontext() if batch.experts is None else ReplayedRouting(batch.experts)


def _agreement(own: Sequence[Tensor], layers: Sequence[LayerRouting]) -> Tensor:
    """The share of each token's experts that its routers would have chosen, over all layers: float32 [T]."""
    chosen = torch.stack([layer.index for layer in layers], dim=1)
    wanted = torch.stack(list(own), dim=1)
    return (chosen[..., None] == wanted[..., None, :]).any(-1).float().mean((1, 2))


@dataclass(frozen=True)
class PlannedPolicyLoss(PlannedLoss):
    """The loss of GRPO on completions of full length."""

    tokens_per_sequence: int
    loss: PolicyLoss

    def __call__(self, built: BuiltModel, batch: MicroBatch) -> Callable[[], Tensor]:
        """Return the sum of the losses of the batch's tokens."""
        logprobs = TokenLogprobs(built.model, 1.0)
        tokens = torch.zeros(len(batch.targets))
        policy = PolicyBatch(
            **{**vars(batch), "weights": tokens + 1},
            advantages=tokens,
            rollout_logprobs=tokens,
            token_at=batch.target_positions,
            completion=batch.target_positions,
            old_logprobs=tokens,
            reference_logprobs=tokens if self.loss.beta else None,
        )
        # gspo counts the tokens of completions, which have no values here; it holds as many numbers a token as grpo.
        loss = replace(self.loss, loss_type="grpo") if self.loss.loss_type == "gspo" else self.loss
        return lambda: loss(logprobs(policy)[0], policy)[0].sum()
