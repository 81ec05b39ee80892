"""The losses of pairs of answers, in the variants of a dozen papers. Independent of models and batches."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.methods.dpo.settings import PairLossSettings

NEARLY_CERTAIN = -1e-6
"""Largest mean log-probability with which odds are computed: those of a certain answer are infinite."""


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


def pair_losses(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Return the weighted sum of the losses of each pair. Shapes: [P], with its graph."""
    total = torch.zeros_like(pairs.delta)
    for loss, weight in settings.weights.items():
        total = total + weight * LOSSES[loss](pairs, settings)
    return total


def compares_means(settings: PairLossSettings) -> bool:
    """Return whether rewards are of log-probabilities per token, without a reference."""
    return not {"simpo", "orpo"}.isdisjoint(settings.weights)


def _sigmoid(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """-log sigma(beta delta) (DPO, arXiv:2305.18290, eq. 7)."""
    return -F.logsigmoid(settings.beta * pairs.delta)


def _sigmoid_norm(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """The same with log-ratios per token (Tulu 3, arXiv:2411.15124)."""
    return -F.logsigmoid(settings.beta * pairs.mean_delta)


def _ipo(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """(delta - 1 / (2 beta))^2 (IPO, arXiv:2310.12036, eq. 17), with log-ratios per token, as TRL has it."""
    return (pairs.mean_delta - 1 / (2 * settings.beta)).square()


def _hinge(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """max(0, 1 - beta delta) (SLiC-HF, arXiv:2305.10425)."""
    return torch.relu(1 - settings.beta * pairs.delta)


def _robust(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """The unbiased loss if a share of the labels is flipped (rDPO, arXiv:2403.00409)."""
    logit, flipped = settings.beta * pairs.delta, settings.label_smoothing
    return (flipped * F.logsigmoid(-logit) - (1 - flipped) * F.logsigmoid(logit)) / (1 - 2 * flipped)


def _exo_pair(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """The reverse divergence from the smoothed preference (EXO, arXiv:2402.00856, eq. 16)."""
    logit, smoothing = settings.beta * pairs.delta, torch.tensor(settings.label_smoothing)
    wins = F.logsigmoid(logit) - torch.log1p(-smoothing)
    loses = F.logsigmoid(-logit) - smoothing.log()
    return logit.sigmoid() * wins + (-logit).sigmoid() * loses


def _nca_pair(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Noise-contrastive alignment for two answers (NCA, arXiv:2402.05369)."""
    rewards = settings.beta * pairs.ratios
    return -F.logsigmoid(rewards[:, 0]) - 0.5 * F.logsigmoid(-rewards).sum(1)


def _bco_pair(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Two binary classifications (BCO, arXiv:2404.04656), without its moving reference point."""
    rewards = settings.beta * pairs.ratios
    return -F.logsigmoid(rewards[:, 0]) - F.logsigmoid(-rewards[:, 1])


def _sppo_hard(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Squared distances of the log-ratios from +-1 / (2 beta) (SPPO, arXiv:2405.00675, eq. 4.7, P = 0 or 1)."""
    goal = 0.5 / settings.beta
    return (pairs.ratios[:, 0] - goal).square() + (pairs.ratios[:, 1] + goal).square()


def _apo_zero(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Chosen up, rejected down (APO, arXiv:2408.06266, eq. 7)."""
    rewards = settings.beta * pairs.ratios
    return (-rewards[:, 0]).sigmoid() + rewards[:, 1].sigmoid()


def _apo_down(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Both down, the rejected further (APO, arXiv:2408.06266, eq. 8)."""
    return (settings.beta * pairs.ratios[:, 0]).sigmoid() + (-settings.beta * pairs.delta).sigmoid()


def _discopop(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """A blend of the logistic and the exponential loss (DiscoPOP, arXiv:2406.08414, eq. 5)."""
    logit = settings.beta * pairs.delta
    share = (logit / settings.discopop_tau).sigmoid()
    return -F.logsigmoid(logit) * (1 - share) + (-logit).exp() * share


def _cpo(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """DPO with a uniform reference (CPO, arXiv:2401.08417, eq. 3)."""
    return -F.logsigmoid(settings.beta * (pairs.logps[:, 0] - pairs.logps[:, 1]))


def _simpo(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Mean log-probabilities apart by a margin (SimPO, arXiv:2405.14734, eq. 6)."""
    means = pairs.logps / pairs.num_tokens
    return -F.logsigmoid(settings.beta * (means[:, 0] - means[:, 1]) - settings.simpo_gamma)


def _orpo(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """-beta log sigma(log odds ratio), with mean log-probabilities (ORPO, arXiv:2403.07691, eq. 7)."""
    means = pairs.logps / pairs.num_tokens
    odds = means - (-torch.expm1(means.clamp(max=NEARLY_CERTAIN))).log()
    return -settings.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


LOSSES: Mapping[str, Callable[[Pairs, PairLossSettings], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "cpo": _cpo,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""Losses by name."""
