"""Divergences between the next-token distributions of a student and a teacher, and their gradients.

Each divergence and its gradient by the student's logits are formed together, for one chunk of tokens at a time.

Shape suffixes: n tokens of a chunk, V vocabulary, K likeliest tokens of the teacher.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from surefoot.methods.output_layer import ChunkedLogits, ChunkLoss


class TeacherScores(Protocol):
    """The teacher's distribution at the trained tokens of a batch."""

    def compare(self, student: Tensor, chunk: slice, loss: "Divergence") -> tuple[Tensor, Tensor]:
        """Return the divergences of a chunk, and their gradients by the student's logits.

        Shapes: student float32 [n, V], logits divided by the temperature -> float32 [n], float32 [n, V].
        """


@dataclass(frozen=True)
class Divergence:
    """The generalised Jensen-Shannon divergence (arXiv:2306.13649, sec. 3.2), with both KL divergences at its ends."""

    beta: float
    temperature: float = 1.0

    def __call__(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergences and their gradients by scores of which `student` is the log-softmax.

        Shapes: log-probabilities of the same outcomes, float32 [n, O] each -> [n], [n, O].
        """
        q = student.exp()
        if self.beta == 0:
            p = teacher.exp()
            return (p * (teacher - student)).sum(-1), q.sub_(p)
        mixture = teacher
        if self.beta < 1:
            mixture = torch.logaddexp(student + math.log1p(-self.beta), teacher + math.log(self.beta))
        ratio = student - mixture
        reverse = (q * ratio).sum(-1)  # the gradient by q is the ratio, up to what all outcomes have in common
        d_scores = q.mul_(ratio.sub_(reverse[:, None]))
        if self.beta == 1:
            return reverse, d_scores
        forward = (teacher.exp() * (teacher - mixture)).sum(-1)
        return self.beta * forward + (1 - self.beta) * reverse, d_scores.mul_(1 - self.beta)


@dataclass(frozen=True)
class LikeliestTokens:
    """The teacher's likeliest tokens at each trained token. With `has_tail`, all others are one outcome more.

    Shapes: ids int64 [N, K], logprobs float32 [N, K], at the temperature of the loss.
    """

    ids: Tensor
    logprobs: Tensor
    has_tail: bool = True

    def compare(self, student: Tensor, chunk: slice, loss: Divergence) -> tuple[Tensor, Tensor]:
        """Compare K + 1 outcomes. A token that is not among the K has its share of the last outcome's gradient.

        Without a tail, compare K outcomes, over which both distributions are normalised.
        """
        ids, teacher = self.ids[chunk], self.logprobs[chunk]
        chosen = student.gather(1, ids)
        if not self.has_tail:
            values, d_chosen = loss(torch.log_softmax(chosen, dim=1), torch.log_softmax(teacher, dim=1))
            return values, torch.zeros_like(student).scatter_(1, ids, d_chosen)
        others = student.scatter(1, ids, -torch.inf)
        of_others = others.logsumexp(1, keepdim=True)
        outcomes = torch.log_softmax(torch.cat([chosen, of_others], dim=1), dim=1)
        values, d_outcomes = loss(outcomes, _with_rest(teacher))
        d_student = others.sub_(of_others).exp_().mul_(d_outcomes[:, -1:])
        return values, d_student.scatter_(1, ids, d_outcomes[:, :-1])


def _with_rest(logprobs: Tensor) -> Tensor:
    """Return the log-probabilities of K outcomes and of all others. Shapes: [n, K] -> [n, K + 1].

    Rounding can make the sum 1 or more; the others then have the smallest probability of their type's precision.
    """
    rest = (1 - logprobs.double().exp().sum(1, keepdim=True)).clamp(min=torch.finfo(torch.float32).eps)
    return torch.cat([logprobs, rest.log().float()], dim=1)


@dataclass(frozen=True)
class AllTokens:
    """The teacher's logits, of which the `top_k` likeliest tokens are compared, or all with 0.

    Both distributions are over the tokens that both models have: of one family, the larger models often have a few rows
    more, which stand for no token.
    """

    source: ChunkedLogits
    top_k: int = 0
    has_tail: bool = True

    def compare(self, student: Tensor, chunk: slice, loss: Divergence) -> tuple[Tensor, Tensor]:
        """Compare the whole distributions, or the teacher's likeliest tokens."""
        logits = self.source.logits(chunk)
        num_tokens = min(student.shape[1], logits.shape[1])
        teacher = torch.log_softmax(logits[:, :num_tokens].float() / loss.temperature, dim=-1)
        del logits
        own = student[:, :num_tokens]
        if self.top_k and self.top_k < num_tokens:
            logprobs, ids = teacher.topk(self.top_k, dim=-1)
            values, d_own = LikeliestTokens(ids, logprobs, self.has_tail).compare(own, slice(None), loss)
        else:
            values, d_own = loss(torch.log_softmax(own, dim=-1), teacher)
        return values, functional.pad(d_own, (0, student.shape[1] - num_tokens))


def divergence_loss(scores: TeacherScores, loss: Divergence, weights: Tensor | None) -> ChunkLoss:
    """Return the sum of the trained tokens' divergences from the teacher, each times its weight (float32 [N])."""

    def sum_chunk(source: ChunkedLogits, chunk: slice, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        values, d_logits = scores.compare(source.logits(chunk).float() / loss.temperature, chunk, loss)
        if weights is not None:
            values, d_logits = values * weights[chunk], d_logits.mul_(weights[chunk, None])
        return values.sum(), d_logits.div_(loss.temperature) if needs_gradient else None

    return sum_chunk
