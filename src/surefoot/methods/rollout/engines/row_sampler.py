"""The completions of a batch while they are generated: their draws, ends and records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from surefoot.methods.rollout.routed_experts import Experts, encode_experts
from surefoot.methods.rollout.types import Completion, Request, Sampling

DROP_SHARE = 0.25
"""Share of complete rows at which they are dropped from the batch: dropping copies the remaining rows."""
STOP_TAIL = 32
"""Number of tokens at the end of a completion that are searched for a stop text; more if a stop text is longer."""


@dataclass
class Row:
    """A completion while it is generated."""

    request: Request
    uniform: NDArray[np.float64]
    """A random number in [0, 1) for the draw of each token."""
    has_stopped: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)


class RowSampler:
    """The completions of one wave while they are generated."""

    def __init__(
        self, requests: Sequence[Request], sampling: Sampling, tokenizer: PreTrainedTokenizerBase, *, is_dummy: bool
    ) -> None:
        self._sampling = sampling
        self._stop_tail = max([STOP_TAIL, *(len(stop.encode()) for stop in sampling.stops)])
        self._tokenizer = tokenizer
        self._rows = [
            Row(request, np.random.default_rng(request.seed).random(sampling.max_tokens), has_stopped=is_dummy)
            for request in requests
        ]
        self._in_batch = self._rows
        """Rows of the batch: all at first, without complete ones later."""
        self._filters: list[Callable[[Any, Tensor], Tensor]] = []
        if sampling.top_k:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._filters.append(TopPLogitsWarper(sampling.top_p))

    def _is_running(self, row: Row) -> bool:
        return not row.has_stopped and len(row.ids) < self._sampling.max_tokens

    @property
    def num_running(self) -> int:
        return sum(map(self._is_running, self._rows))

    def draw(self, logits: Tensor) -> Tensor:
        """Draw the next token of each row of the batch, by inverting the distribution at the row's next uniform number.

        Shapes: logits [R, V] -> int64 [R]. A complete row gets a token too, which is discarded.
        """
        scores = logits.float() / self._sampling.temperature
        if self._sampling.banned:
            scores = SuppressTokensLogitsProcessor(sorted(self._sampling.banned))(None, scores)
        logprobs = torch.log_softmax(scores, dim=-1)
        for apply_filter in self._filters:
            scores = apply_filter(None, scores)
        # In float64: the sum over a large vocabulary must resolve tokens of small probability.
        cumulative = torch.softmax(scores.double(), dim=-1).cumsum(-1)
        last = self._sampling.max_tokens - 1
        numbers = [row.uniform[min(len(row.ids), last)] for row in self._in_batch]
        uniform = torch.tensor(numbers, dtype=torch.float64, device=cumulative.device)
        tokens = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
        pairs = torch.cat([tokens.double(), logprobs.gather(1, tokens).double()], dim=1).tolist()
        for row, (token, logprob) in zip(self._in_batch, pairs, strict=True):
            if self._is_running(row):
                row.ids.append(int(token))
                row.logprobs.append(logprob)
                row.has_stopped = int(token) in self._sampling.ends or self._has_stop_text(row)
        return tokens[:, 0]

    def _has_stop_text(self, row: Row) -> bool:
        if not self._sampling.stops:
            return False
        text = self._tokenizer.decode(row.ids[-self._stop_tail :])
        return any(stop in text for stop in self._sampling.stops)

    def append_prompt_experts(self, experts: Sequence[Experts]) -> None:
        """Record the experts of the prompts. Shapes: [width, layers, K] for each row, padded on the left like it."""
        for row, row_experts in zip(self._rows, experts, strict=True):
            row.experts.append(row_experts[-len(row.request.prompt) :])

    def append_experts(self, experts: Experts) -> None:
        """Record the experts of the newest token of each running row. Shapes: [R, layers, K]."""
        for row, row_experts in zip(self._in_batch, experts, strict=True):
            if self._is_running(row):
                row.experts.append(row_experts[None])

    def drop_complete(self) -> list[int] | None:
        """Drop complete rows; return the batch indices of the remaining ones, at least one, or None if all remain."""
        running = [index for index, row in enumerate(self._in_batch) if self._is_running(row)] or [0]
        if len(self._in_batch) - len(running) < DROP_SHARE * len(self._in_batch):
            return None
        self._in_batch = [self._in_batch[index] for index in running]
        return running

    def completions(self, policy_version: int) -> list[Completion]:
        return [
            Completion(
                row.ids,
                row.logprobs,
                "stop" if row.has_stopped else "length",
                policy_version,
                encode_experts(np.concatenate(row.experts)) if row.experts else None,
            )
            for row in self._rows
        ]
