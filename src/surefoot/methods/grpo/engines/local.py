"""Generates with the trained model itself, in its own process, on whatever it is laid out over.

Why this loop and not transformers' continuous batching: draws must depend on a completion's seed alone, whatever the
rank and whoever else is generated; ranks that share parameters must take their forwards together; and the prompt of a
group is read once. (On two CPU cores it takes half the time of continuous batching: docs/grpo.md.)
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from surefoot.data.image_processor import PixelReader, Vision
from surefoot.distributed.fsdp import as_fsdp_forward, reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import StoppedOnFinding
from surefoot.events import Phase
from surefoot.findings import Finding
from surefoot.methods.base import Interrupted
from surefoot.methods.grpo.routed_experts import Experts, as_text
from surefoot.methods.grpo.types import Completion, Request, Sampling, Wait
from surefoot.models.generate import generating
from surefoot.models.routing import LayerRouting, RoutingRecorder
from surefoot.models.vision import embed_images

DROP_SHARE = 0.25
"""Rows that are complete are dropped once they are so many of all: each dropping copies what is kept."""
MOST_NAMED = 4
"""Prompts of a rank, in a finding."""
STOP_TAIL = 32
"""Tokens at the end of a completion in which a stopping text is looked for; more for one that may have more."""


class LocalEngine:
    """`Engine` on the model that is trained."""

    phase: Phase = "rollout"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ranks: World = SINGLE_PROCESS,
        in_step: bool = False,
        batch_size: int | None = None,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        reader: PixelReader | None = None,
        routing: RoutingRecorder | None = None,
        timeout_s: float = inf,
        is_told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`in_step`: each forward of a rank needs the others (ZeRO 3, expert parallelism), so all take as many.

        `batch_size`: the most completions that are generated at a time. `reader`: of images, where the model sees.
        `routing`: of a model whose completions shall say which experts their tokens went to. `timeout_s`: for a whole
        rollout. `is_told_to_stop`: asked at each token; then `Interrupted` is raised, on all ranks.
        """
        self._timeout_s = timeout_s
        self._is_told_to_stop = is_told_to_stop
        self._model = model
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._in_step = ranks if in_step else SINGLE_PROCESS
        self._batch_size = batch_size
        self._forward_context = forward_context
        self._reader = reader
        self._routing = routing
        self._run_seeing = as_fsdp_forward(model, self._see_prompts)

    @property
    def bytes_sent(self) -> int:
        """Nothing is."""
        return 0

    def publish(self, policy_version: int) -> None:
        """Nothing: the weights are the model's own."""

    def ask(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> Wait:
        """See `Engine`: they are generated when they are waited for."""
        return lambda _seconds: self.generate(requests, sampling, policy_version)

    def end(self) -> None:
        """Nothing: the model is its owner's."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> list[Completion]:
        """A completion for each request, in order. Collective, also without a request: a forward may gather weights.

        Raises: StoppedOnFinding (SF801), Interrupted; on all ranks.
        """
        deadline_s = time.monotonic() + self._timeout_s
        each = self._batch_size or max(len(requests), 1)
        waves = [requests[begin : begin + each] for begin in range(0, len(requests), each)]
        most = max(self._ranks.gather(len(waves)))
        waves += [[] for _ in range(max(most, 1) - len(waves))]
        completions: list[Completion] = []
        was_late = False
        with generating(self._model), self._forward_context():
            try:
                for number, wave in enumerate(waves):
                    if self._reader is not None:  # prompts are read together, so ranks stop together: between waves
                        if self._ranks.sum([self._is_over(deadline_s)])[0]:
                            break
                    elif number and self._in_step is SINGLE_PROCESS and self._is_over(deadline_s):
                        break  # no other rank waits for its forwards; the first may have gathered weights with them
                    made = self._wave(wave, sampling, policy_version, deadline_s)
                    completions += made or []
                    if made is None and self._in_step is not SINGLE_PROCESS:
                        break  # all ranks have heard of it
            finally:
                was_late = time.monotonic() > deadline_s
                reshard(self._model)
        told, missing = self._ranks.sum([self._is_told_to_stop(), len(requests) - len(completions)])
        if told:
            raise Interrupted
        if missing:
            places = list(dict.fromkeys(request.place for request in requests[len(completions) :] if request.place))
            stopped = StoppedOnFinding(_late(self._ranks.gather([was_late, places]), round(missing), self._timeout_s))
            stopped.is_agreed = True
            raise stopped
        return completions

    def _predict(self, **inputs: Any) -> Tensor:
        """Logits of the next token: [R, V].

        The model is called as it is: inside `as_fsdp_forward`, ranks would gather their weights anew for each token,
        and one that is through with its completions would leave the others waiting.
        """
        logits: Tensor = self._model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits

    def _read_prompts(self, prompts: Sequence[Request], cache: DynamicCache) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [R, V] behind each prompt, mask [R, n], and the last token's position.

        That is [R, 1], or [R, 3, 1] where the model sees. Prompts are padded on the left.
        Raises: DataError for an image that cannot be read, on all ranks.
        """
        width = max(len(request.prompt) for request in prompts)
        device = self._model.device
        before = [width - len(request.prompt) for request in prompts]
        ids = torch.tensor(
            [[0] * n + request.prompt for n, request in zip(before, prompts, strict=True)], device=device
        )
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in before], device=device)
        if self._reader is None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
            return self._predict(**inputs), mask, positions[:, -1:]
        reader = self._reader
        placed = [reader.places(np.array(request.prompt, np.int32), request.images) for request in prompts]
        positions = torch.stack([F.pad(one, (n, 0)) for n, one in zip(before, placed, strict=True)]).to(device)
        vision = self._ranks.run_or_raise_on_all(lambda: reader.read([(one.place, one.images) for one in prompts])).to(
            device
        )
        return (
            self._run_seeing(ids, vision, mask, positions, cache),
            mask,
            positions.amax((1, 2))[:, None, None].expand(-1, 3, 1),
        )

    def _see_prompts(self, ids: Tensor, vision: Vision, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits behind prompts with images. The vision tower may lie on all ranks, so all of them run it."""
        seen = embed_images(self._model, ids, vision.pixels, vision.grid, is_blank=vision.is_blank)
        hidden = self._model.base_model(
            **seen,
            attention_mask=mask,
            position_ids=positions.transpose(0, 1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits: Tensor = self._model.get_output_embeddings()(hidden[:, -1])
        return logits

    def _wave(
        self, requests: Sequence[Request], sampling: Sampling, policy_version: int, deadline_s: float
    ) -> list[Completion] | None:
        """Those of some requests; None where it is told to stop or late, or another rank that it is in step with."""
        rows = _Rows(requests or [Request([0], (0,))], sampling, self._tokenizer, is_real=bool(requests))
        prompts = list({(tuple(request.prompt), request.images): request for request in rows.requests}.values())
        device = self._model.device
        cache = DynamicCache(config=self._model.config)
        with self._recording() as layers:
            logits, mask, positions = self._read_prompts(prompts, cache)
        numbers = {(tuple(one.prompt), one.images): number for number, one in enumerate(prompts)}
        of_row = torch.tensor([numbers[tuple(one.prompt), one.images] for one in rows.requests], device=device)
        if layers:
            chosen = _chosen(layers).unflatten(0, mask.shape).numpy()
            rows.keep_experts_of_prompts([chosen[number] for number in of_row.tolist()])
        logits, mask, positions = _select((logits, mask, positions), cache, of_row)
        while True:
            drawn = rows.draw(logits)
            going, stops = self._in_step.sum([rows.num_going, self._is_over(deadline_s)])
            if not going:
                return rows.completions(policy_version)
            if stops:
                return None
            kept = rows.drop_complete()
            if kept is not None:
                drawn, mask, positions = _select((drawn, mask, positions), cache, torch.tensor(kept, device=device))
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            positions = positions + 1
            with self._recording() as layers:
                logits = self._predict(
                    input_ids=drawn[:, None],
                    attention_mask=mask,
                    position_ids=positions if positions.dim() == 2 else positions.transpose(0, 1),
                    past_key_values=cache,
                )
            if layers:
                rows.keep_experts(_chosen(layers).numpy())

    def _is_over(self, deadline_s: float) -> bool:
        return self._is_told_to_stop() or time.monotonic() > deadline_s

    def _recording(self) -> AbstractContextManager[list[LayerRouting]]:
        return nullcontext([]) if self._routing is None else self._routing.recording()


def _late(of_ranks: Sequence[tuple[bool, list[str]]], missing: int, timeout_s: float) -> Finding:
    """`of_ranks`: whether each one's time was over, and the rows whose completions it lacks."""
    prompts = {str(rank): places[:MOST_NAMED] for rank, (_, places) in enumerate(of_ranks) if places}
    return Finding(
        "SF801",
        f"{missing} completions of a rollout were not generated in the {timeout_s:g} s of rollout_timeout_s",
        {
            "missing": missing,
            "rollout_timeout_s": timeout_s,
            "late_ranks": [rank for rank, (was_late, _) in enumerate(of_ranks) if was_late],
            "prompts_by_rank": prompts,
        },
        "Raise rollout_timeout_s, lower max_completion_length or the batch, or let a server generate "
        "(rollout_engine: vllm).",
    )


def _chosen(layers: Sequence[LayerRouting]) -> Tensor:
    """int16 [tokens, layers, K], on the host."""
    return torch.stack([layer.index for layer in layers], dim=1).short().cpu()


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
        self._stop_tail = max([STOP_TAIL, *(len(stop.encode()) for stop in sampling.stops)])
        self._tokenizer = tokenizer
        self._is_real = is_real
        self._in_batch = list(range(len(requests)))
        self._ids: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._experts: list[list[Experts]] = [[] for _ in requests]
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
        if self._sampling.banned:
            scores = SuppressTokensLogitsProcessor(sorted(self._sampling.banned))(None, scores)
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
        text = self._tokenizer.decode(self._ids[row][-self._stop_tail :])
        return any(stop in text for stop in self._sampling.stops)

    def keep_experts_of_prompts(self, chosen: Sequence[Experts]) -> None:
        """Shapes: [width, layers, K] for each row, padded on the left like its prompt."""
        for row, request in enumerate(self.requests):
            self._experts[row].append(chosen[row][-len(request.prompt) :])

    def keep_experts(self, chosen: Experts) -> None:
        """Of the newest token of each row of the batch, [R, layers, K]; a row that is complete needs none."""
        for row, of_row in zip(self._in_batch, chosen, strict=True):
            if self._is_going(row):
                self._experts[row].append(of_row[None])

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
            Completion(
                ids,
                logprobs,
                "stop" if has_stopped else "length",
                policy_version,
                as_text(np.concatenate(experts)) if experts else None,
            )
            for ids, logprobs, has_stopped, experts in zip(
                self._ids, self._logprobs, self._has_stopped, self._experts, strict=True
            )
        ]
