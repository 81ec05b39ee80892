"""Likelihoods of tokens under a linear output layer, of which the logits of one chunk of tokens exist at a time.

The gradient of the layer's weight is summed over the chunks in float32, whatever the type of the products.

Shape suffixes: N tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK_TOKENS = 512
"""Number of tokens of a chunk."""


class ChunkedLogits(Protocol):
    """Logits of N tokens, given for one chunk at a time."""

    def logits(self, chunk: slice) -> Tensor:
        """Return the logits [n, V] of a chunk."""


ChunkLoss = Callable[[ChunkedLogits, slice, bool], tuple[Tensor, Tensor | None]]
"""Logits, a chunk, and whether the gradient is needed -> the sum of the loss over the chunk, and its gradient by the
logits, float32 [n, V]."""


class HeadInputs(NamedTuple):
    """States [N, H], weight [V, H] and bias [V] of a product with an output layer, in one type."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, head: nn.Linear) -> "HeadInputs":
        """Cast to autocast's type, else to that of the weight: some decoders return float32 states anyway."""
        dtype = head.weight.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        return cls(hidden.to(dtype), head.weight.to(dtype), head.bias.to(dtype) if head.bias is not None else None)

    def logits(self, chunk: slice) -> Tensor:
        """Return the logits [n, V] of a chunk."""
        return F.linear(self.hidden[chunk], self.weight, self.bias)


class StoredLogits(NamedTuple):
    """Logits that exist already. Shapes: [N, V]."""

    values: Tensor

    def logits(self, chunk: slice) -> Tensor:
        """Return the logits [n, V] of a chunk."""
        return self.values[chunk]


def sum_over_chunks(hidden: Tensor, head: nn.Linear, loss: ChunkLoss) -> Tensor:
    """Return the sum of a loss of the logits of these states. Its graph serves one backward.

    Shapes: hidden [N, H] -> a scalar in float32.
    """
    with torch.no_grad():
        inputs = HeadInputs.of(hidden, head)
    return _SumOverChunks.apply(hidden, head.weight, head.bias, inputs, loss, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


def sum_of_logits(logits: Tensor, loss: ChunkLoss) -> Tensor:
    """Return the sum of a loss of logits that exist already. Its graph serves one backward. Shapes: [N, V] -> []."""
    return _SumOfLogits.apply(logits, loss, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


def sum_nll(hidden: Tensor, head: nn.Linear, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum of the tokens' negative log-likelihoods, each times its weight. Its graph serves one backward.

    Shapes: hidden [N, H], targets [N], weights [N] -> a scalar in float32.
    """
    return sum_over_chunks(hidden, head, nll_loss(targets, weights))


def nll_loss(targets: Tensor, weights: Tensor | None = None) -> ChunkLoss:
    """Return the tokens' negative log-likelihoods, each times its weight. Shapes: targets [N], weights [N]."""

    def sum_chunk(source: ChunkedLogits, chunk: slice, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        logprobs = torch.log_softmax(source.logits(chunk).float(), dim=-1)
        of_targets = logprobs.gather(1, targets[chunk, None])
        d_logits = None
        if needs_gradient:
            d_logits = _d_logits_(logprobs, targets[chunk], of_targets)
            d_logits = d_logits if weights is None else d_logits.mul_(weights[chunk, None])
        # No product of vectors, which autocast would compute in bfloat16.
        return -(of_targets if weights is None else of_targets * weights[chunk, None]).sum(), d_logits

    return sum_chunk


def weighted_sum(losses: Sequence[tuple[float, ChunkLoss]]) -> ChunkLoss:
    """Return the sum of losses, each times its weight."""

    def sum_chunk(source: ChunkedLogits, chunk: slice, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        total, d_total = None, None
        for weight, loss in losses:
            value, d_logits = loss(source, chunk, needs_gradient)
            total = value * weight if total is None else total + value * weight
            if d_logits is not None:
                d_logits = d_logits.mul_(weight)
                d_total = d_logits if d_total is None else d_total.add_(d_logits)
        assert total is not None
        return total, d_total

    return sum_chunk


def token_logprobs(
    hidden: Tensor, head: nn.Linear, targets: Tensor, *, banned: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return what `score_logits` does for the logits of these states, which are computed again in the backward.

    Shapes: hidden [N, H], targets [N] -> [N] and [N], in float32.
    """
    with torch.no_grad():
        inputs = HeadInputs.of(hidden, head)
    return _Logprobs.apply(hidden, head.weight, head.bias, inputs, targets, banned, temperature)  # type: ignore[no-any-return,no-untyped-call]


def score_logits(logits: Tensor, targets: Tensor, *, banned: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the targets' log-probabilities, and the entropies without a graph, in nats.

    `banned`: tokens that are never drawn. Shapes: logits [n, V], targets [n] -> [n] and [n], in float32.
    """
    scores = _log_softmax(logits, banned, temperature)
    with torch.no_grad():
        entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(1, targets[:, None])[:, 0], entropy


def _log_softmax(logits: Tensor, banned: Tensor, temperature: float) -> Tensor:
    logits = logits.float() / temperature
    if len(banned):
        logits = logits.index_fill(-1, banned, torch.finfo(logits.dtype).min)
    return torch.log_softmax(logits, dim=-1)


def _chunks(num_tokens: int) -> Iterator[slice]:
    return (slice(begin, begin + CHUNK_TOKENS) for begin in range(0, num_tokens, CHUNK_TOKENS))


def _d_logits_(logprobs: Tensor, targets: Tensor, of_targets: Tensor) -> Tensor:
    """Return the gradient of the negative log-likelihood by the logits, in place of the log-probabilities [n, V]."""
    return logprobs.exp_().scatter_(1, targets[:, None], of_targets.exp() - 1)


class _HeadGradients:
    """Gradients by states, weight and bias, to which each chunk adds its part."""

    def __init__(self, inputs: HeadInputs, needs: Sequence[bool]) -> None:
        """`needs`: whether each of the three gradients is needed."""
        self._inputs = inputs
        self._hidden = torch.empty_like(inputs.hidden) if needs[0] else None
        self._weight = torch.zeros_like(inputs.weight, dtype=torch.float32) if needs[1] else None
        self._bias = (
            torch.zeros_like(inputs.bias, dtype=torch.float32) if needs[2] and inputs.bias is not None else None
        )

    def add(self, chunk: slice, d_logits: Tensor) -> None:
        """Add the part of a chunk, from the gradient by its logits [n, V] in float32."""
        if self._bias is not None:
            self._bias += d_logits.sum(0)
        d_logits = d_logits.to(self._inputs.weight.dtype)
        if self._hidden is not None:
            self._hidden[chunk] = d_logits @ self._inputs.weight
        if self._weight is None:
            return
        if d_logits.dtype == self._weight.dtype:
            self._weight.addmm_(d_logits.t(), self._inputs.hidden[chunk])
        else:
            self._weight += d_logits.t() @ self._inputs.hidden[chunk]

    def as_types_of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor | None]:
        """Return the three gradients, None where they are not needed, in the types of what they are for."""
        pairs = zip((self._hidden, self._weight, self._bias), (hidden, weight, bias), strict=True)
        return [
            gradient.to(tensor.dtype) if gradient is not None and tensor is not None else None
            for gradient, tensor in pairs
        ]


class _SumOverChunks(torch.autograd.Function):
    """Sum of a loss. The gradients are formed in the forward, where the logits exist anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: HeadInputs,
        loss: ChunkLoss,
        needs_graph: bool,
    ) -> Tensor:
        gradients = _HeadGradients(inputs, ctx.needs_input_grad) if needs_graph else None
        sums = [torch.zeros((), dtype=torch.float32, device=hidden.device)]
        for chunk in _chunks(len(hidden)):
            value, d_logits = loss(inputs, chunk, needs_graph)
            sums.append(value)
            if gradients is not None and d_logits is not None:
                gradients.add(chunk, d_logits)
            del d_logits  # before the next chunk has logits
        ctx.gradients = gradients.as_types_of(hidden, weight, bias) if gradients is not None else []
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, []
        if not gradients:  # they are multiplied in place
            raise RuntimeError("a loss of `sum_over_chunks` has one backward only")
        return (*(None if part is None else part.mul_(d_sum) for part in gradients), None, None, None)


class _SumOfLogits(torch.autograd.Function):
    """The same, of logits that exist already."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: ChunkLoss, needs_graph: bool) -> Tensor:
        ctx.gradient = torch.empty_like(logits) if needs_graph else None
        sums = [torch.zeros((), dtype=torch.float32, device=logits.device)]
        for chunk in _chunks(len(logits)):
            value, d_logits = loss(StoredLogits(logits), chunk, needs_graph)
            sums.append(value)
            if d_logits is not None and ctx.gradient is not None:
                ctx.gradient[chunk] = d_logits
            del d_logits  # before the next chunk has logits
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("a loss of `sum_of_logits` has one backward only")
        return gradient.mul_(d_sum), None, None


class _Logprobs(torch.autograd.Function):
    """Log-probabilities and entropies of tokens, of which a backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: HeadInputs,
        targets: Tensor,
        banned: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for chunk in _chunks(len(targets)):
            logprobs[chunk], entropies[chunk] = score_logits(
                inputs.logits(chunk), targets[chunk], banned=banned, temperature=temperature
            )
        ctx.save_for_backward(targets, banned, hidden, weight, bias, *inputs)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        targets, banned, hidden, weight, bias, *product = ctx.saved_tensors
        inputs = HeadInputs(*product)
        gradients = _HeadGradients(inputs, ctx.needs_input_grad)

        def add_chunk(chunk: slice) -> None:
            logprobs = _log_softmax(inputs.logits(chunk), banned, ctx.temperature)
            of_targets = logprobs.gather(1, targets[chunk, None])
            d_logits = _d_logits_(logprobs, targets[chunk], of_targets)
            gradients.add(chunk, d_logits.mul_(d_logprobs[chunk, None] / -ctx.temperature))

        for chunk in _chunks(len(targets)):
            add_chunk(chunk)
        return (*gradients.as_types_of(hidden, weight, bias), None, None, None, None)
