"""Generates with the trained model itself, in its own process, on whatever it is laid out over.

Why this loop and not transformers' continuous batching: draws must depend on a completion's seed alone, whatever the
rank and whoever else is generated; ranks that share parameters must take their forwards together; and the prompt of a
group is read once. (On two CPU cores it takes half the time of continuous batching: docs/grpo.md.)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from surefoot.events import Phase
from surefoot.models.generate import generating
from surefoot.parallel.ranks import ALONE, Ranks
from surefoot.parallel.shard import put_to_rest
from surefoot.rl.rollout import Completion, Request, Sampling

DROP_SHARE = 0.25
"""Rows that are complete are dropped once they are so many of all: each dropping copies what is kept."""
STOP_TAIL = 32
"""Tokens at the end of a completion in which a stopping text is looked for."""


class LocalEngine:
    """`Engine` on the model that is trained."""

    phase: Phase = "rollout"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ranks: Ranks = ALONE,
        in_step: bool = False,
        batch_size: int | None = None,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`in_step`: each forward of a rank needs the others (ZeRO 3, expert parallelism), so all take as many.

        `batch_size`: the most completions that are generated at a time.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._in_step = ranks if in_step else ALONE
        self._batch_size = batch_size
        self._forward_context = forward_context

    def publish(self, policy_version: int) -> None:
        """Nothing: the weights are the model's own."""

    def end(self) -> None:
        """Nothing: the model is its owner's."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> list[Completion]:
        """A completion for each request, in order. Collective, also without a request: a forward may gather weights."""
        each = self._batch_size or max(len(requests), 1)
        waves = [requests[begin : begin + each] for begin in range(0, len(requests), each)]
        most = max(self._ranks.gather(len(waves)))
        waves += [[] for _ in range(max(most, 1) - len(waves))]
        completions: list[Completion] = []
        with generating(self._model), self._forward_context():
            for wave in waves:
                completions += self._wave(wave, sampling, policy_version)
        put_to_rest(self._model)
        return completions

    def _predict(self, **inputs: Any) -> Tensor:
        """Logits of the next token: [R, V].

        The model is called as it is: inside `gathered`, ranks would gather their weights anew for each token, and one
        that is through with its completions would leave the others waiting.
        """
        logits: Tensor = self._model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits

    def _wave(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> list[Completion]:
        rows = _Rows(requests or [Request([0], (0,))], sampling, self._tokenizer, is_real=bool(requests))
        prompts = list(dict.fromkeys(tuple(request.prompt) for request in rows.requests))
        width = max(map(len, prompts))
        device = self._model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        logits = self._predict(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        of_row = torch.tensor([numbers[tuple(request.prompt)] for request in rows.requests], device=device)
        logits, mask, positions = _select((logits, mask, positions[:, -1:]), cache, of_row)
        while True:
            drawn = rows.draw(logits)
            if not self._in_step.sum([rows.num_going])[0]:
                return rows.completions(policy_version)
            kept = rows.drop_complete()
            if kept is not None:
                drawn, mask, positions = _select((drawn, mask, positions), cache, torch.tensor(kept, device=device))
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            positions = positions + 1
            logits = self._predict(
                input_ids=drawn[:, None], attention_mask=mask, position_ids=positions, past_key_values=cache
            )


def _select(state: tuple[Tensor, ...], cache: Any, index: Tensor) -> tuple[Tensor, ...]:
    """Rows of a batch and of its cache, by number; a row may come several times."""
    cache.batch_select_indices(index)
    return tuple(part[index] for part in state)


class _Rows:
    """The completions of one wave while they grow. `going` names the rows that are still in the batch."""

    def __init__(
        self, requests: Sequence[Request], sampling: Sampling, tokenizer: PreTrainedTokenizerBase, *, is_real: bool
    ) -> None:
        self.requests = list(requests)
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._is_real = is_real
        self._in_batch = list(range(len(requests)))
        self._ids: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._has_stopped = [not is_real for _ in requests]
        self._uniform = np.stack(
            [np.random.default_rng(request.seed).random(sampling.max_tokens) for request in requests]
        )
        self._filters: list[Callable[[Any, Tensor], Tensor]] = []
        if sampling.top_k:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._filters.append(TopPLogitsWarper(sampling.top_p))

    def _is_going(self, row: int) -> bool:
        return not self._has_stopped[row] and len(self._ids[row]) < self._sampling.max_tokens

    @property
    def num_going(self) -> int:
        return sum(map(self._is_going, range(len(self.requests))))

    def draw(self, logits: Tensor) -> Tensor:
        """The next token of each row of the batch, by inverting the distribution at the row's next uniform number.

        Shapes: logits [R, V] -> int64 [R]. A row that is complete gets one too, which is not kept.
        """
        scores = logits.float() / self._sampling.temperature
        logprobs = torch.log_softmax(scores, dim=-1)
        for choose in self._filters:
            scores = choose(None, scores)
        # In float64: the sum over a large vocabulary must resolve tokens of small probability.
        upto = torch.softmax(scores.double(), dim=-1).cumsum(-1)
        at = [min(len(self._ids[row]), self._sampling.max_tokens - 1) for row in self._in_batch]
        uniform = torch.from_numpy(self._uniform[self._in_batch, at]).to(upto.device)
        drawn = torch.searchsorted(upto, (uniform * upto[:, -1])[:, None], right=True)
        drawn = drawn.clamp(max=logits.shape[-1] - 1)
        found = torch.cat([drawn.double(), logprobs.gather(1, drawn).double()], dim=1).tolist()
        for row, (token, logprob) in zip(self._in_batch, found, strict=True):
            if self._is_going(row):
                self._ids[row].append(int(token))
                self._logprobs[row].append(logprob)
                self._has_stopped[row] = int(token) in self._sampling.ends or self._says_stop(row)
        return drawn[:, 0]

    def _says_stop(self, row: int) -> bool:
        if not self._sampling.stops:
            return False
        text = self._tokenizer.decode(self._ids[row][-STOP_TAIL:])
        return any(stop in text for stop in self._sampling.stops)

    def drop_complete(self) -> list[int] | None:
        """Places in the batch of the rows that stay; None where all do. One always stays."""
        going = [place for place, row in enumerate(self._in_batch) if self._is_going(row)] or [0]
        if len(self._in_batch) - len(going) < DROP_SHARE * len(self._in_batch):
            return None
        self._in_batch = [self._in_batch[place] for place in going]
        return going

    def completions(self, policy_version: int) -> list[Completion]:
        if not self._is_real:
            return []
        return [
            Completion(ids, logprobs, "stop" if has_stopped else "length", policy_version)
            for ids, logprobs, has_stopped in zip(self._ids, self._logprobs, self._has_stopped, strict=True)
        ]
