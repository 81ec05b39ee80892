"""The losses of pairs of answers, in the variants of a dozen papers. Independent of models and batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.methods.dpo.settings import LOSS_TYPES, DpoConfig


class Pairs(NamedTuple):
    """The likelihoods of the answers of P pairs."""

    logps: Tensor
    """float32 [P, 2]: log-probability of the chosen and of the rejected answer, with its graph."""
    reference_logps: Tensor
    """float32 [P, 2]: the same under the reference; zeros without one."""
    num_tokens: Tensor
    """float32 [P, 2]: trained tokens of each answer."""

    @property
    def ratios(self) -> Tensor:
        """[P, 2]: log-ratio of the model to the reference, for each answer."""
        return self.logps - self.reference_logps

    @property
    def delta(self) -> Tensor:
        """[P]: log-ratio of the chosen answer less that of the rejected one."""
        return self.ratios[:, 0] - self.ratios[:, 1]

    @property
    def mean_delta(self) -> Tensor:
        """[P]: the same per token of each answer."""
        means = self.ratios / self.num_tokens
        return means[:, 0] - means[:, 1]


@dataclass(frozen=True)
class PairLoss:
    """The weighted sum of the losses of a pair."""

    weights: Mapping[str, float]
    """Weight of each loss by its name."""
    beta: float
    label_smoothing: float
    discopop_tau: float
    simpo_gamma: float

    @staticmethod
    def of(config: DpoConfig) -> "PairLoss":
        """Return the losses that a config names."""
        weights: dict[str, float] = {}
        for loss, weight in zip(config.loss_types, config.weights_of_losses, strict=True):
            weights[loss] = weights.get(loss, 0.0) + weight
        return PairLoss(weights, config.beta, config.label_smoothing, config.discopop_tau, config.simpo_gamma)

    def __call__(self, pairs: Pairs) -> Tensor:
        """Return the loss of each pair. Shapes: [P], with its graph."""
        total = torch.zeros_like(pairs.delta)
        for loss, weight in self.weights.items():
            total = total + weight * LOSSES[loss](self, pairs)
        return total

    def compared(self, pairs: Pairs) -> Tensor:
        """Return what the loss compares, which times beta is the reward of each answer. Shapes: [P, 2]."""
        return pairs.logps / pairs.num_tokens if "simpo" in self.weights else pairs.ratios

    def sigmoid(self, pairs: Pairs) -> Tensor:
        """-log sigma(beta delta) (DPO, arXiv:2305.18290, eq. 7)."""
        return -F.logsigmoid(self.beta * pairs.delta)

    def sigmoid_norm(self, pairs: Pairs) -> Tensor:
        """The same with log-ratios per token (Tulu 3, arXiv:2411.15124)."""
        return -F.logsigmoid(self.beta * pairs.mean_delta)

    def ipo(self, pairs: Pairs) -> Tensor:
        """(delta - 1 / (2 beta))^2 (IPO, arXiv:2310.12036, eq. 17), with log-ratios per token, as TRL has it."""
        return (pairs.mean_delta - 1 / (2 * self.beta)).square()

    def hinge(self, pairs: Pairs) -> Tensor:
        """max(0, 1 - beta delta) (SLiC-HF, arXiv:2305.10425)."""
        return torch.relu(1 - self.beta * pairs.delta)

    def robust(self, pairs: Pairs) -> Tensor:
        """The unbiased loss if a share of the labels is flipped (rDPO, arXiv:2403.00409)."""
        logit, flipped = self.beta * pairs.delta, self.label_smoothing
        return (flipped * F.logsigmoid(-logit) - (1 - flipped) * F.logsigmoid(logit)) / (1 - 2 * flipped)

    def exo_pair(self, pairs: Pairs) -> Tensor:
        """The reverse divergence from the smoothed preference (EXO, arXiv:2402.00856, eq. 16)."""
        logit, smoothing = self.beta * pairs.delta, torch.tensor(self.label_smoothing)
        wins = F.logsigmoid(logit) - torch.log1p(-smoothing)
        loses = F.logsigmoid(-logit) - smoothing.log()
        return logit.sigmoid() * wins + (-logit).sigmoid() * loses

    def nca_pair(self, pairs: Pairs) -> Tensor:
        """Noise-contrastive alignment for two answers (NCA, arXiv:2402.05369)."""
        rewards = self.beta * pairs.ratios
        return -F.logsigmoid(rewards[:, 0]) - 0.5 * F.logsigmoid(-rewards).sum(1)

    def bco_pair(self, pairs: Pairs) -> Tensor:
        """Two binary classifications (BCO, arXiv:2404.04656), without its moving reference point."""
        rewards = self.beta * pairs.ratios
        return -F.logsigmoid(rewards[:, 0]) - F.logsigmoid(-rewards[:, 1])

    def sppo_hard(self, pairs: Pairs) -> Tensor:
        """Squared distances of the log-ratios from +-1 / (2 beta) (SPPO, arXiv:2405.00675, eq. 4.7, P = 0 or 1)."""
        goal = 0.5 / self.beta
        return (pairs.ratios[:, 0] - goal).square() + (pairs.ratios[:, 1] + goal).square()

    def apo_zero(self, pairs: Pairs) -> Tensor:
        """Chosen up, rejected down (APO, arXiv:2408.06266, eq. 7)."""
        rewards = self.beta * pairs.ratios
        return (-rewards[:, 0]).sigmoid() + rewards[:, 1].sigmoid()

    def apo_down(self, pairs: Pairs) -> Tensor:
        """Both down, the rejected further (APO, arXiv:2408.06266, eq. 8)."""
        return (self.beta * pairs.ratios[:, 0]).sigmoid() + (-self.beta * pairs.delta).sigmoid()

    def discopop(self, pairs: Pairs) -> Tensor:
        """A blend of the logistic and the exponential loss (DiscoPOP, arXiv:2406.08414, eq. 5)."""
        logit = self.beta * pairs.delta
        share = (logit / self.discopop_tau).sigmoid()
        return -F.logsigmoid(logit) * (1 - share) + (-logit).exp() * share

    def cpo(self, pairs: Pairs) -> Tensor:
        """DPO with a uniform reference (CPO, arXiv:2401.08417, eq. 3)."""
        return -F.logsigmoid(self.beta * (pairs.logps[:, 0] - pairs.logps[:, 1]))

    def simpo(self, pairs: Pairs) -> Tensor:
        """Mean log-probabilities apart by a margin (SimPO, arXiv:2405.14734, eq. 6)."""
        means = pairs.logps / pairs.num_tokens
        return -F.logsigmoid(self.beta * (means[:, 0] - means[:, 1]) - self.simpo_gamma)


LOSSES: Mapping[str, Callable[[PairLoss, Pairs], Tensor]] = {name: getattr(PairLoss, name) for name in LOSS_TYPES}
"""Losses by name."""
