"""Generation with the trained model itself, in its own process, however it is sharded.

Why this loop and not transformers' continuous batching: draws must depend on a completion's seed alone, whatever the
rank and the rest of the batch; ranks that share parameters must take their forwards together; and the prompt of a
group is read once. (On two CPU cores it takes half the time of continuous batching: docs/grpo.md.)
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.data.image_processor import PixelReader, Vision
from surefoot.distributed.fsdp import as_fsdp_forward, reshard
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import StoppedOnFinding
from surefoot.events import Phase
from surefoot.findings import Finding
from surefoot.methods.base import Interrupted
from surefoot.methods.rollout.engines.batching import Batching, choose_batching, probe_length, split_requests
from surefoot.methods.rollout.engines.generation_cache import (
    WITHOUT_ATTENTION,
    cache_argument,
    cache_of,
    select_cache_rows,
)
from surefoot.methods.rollout.engines.row_sampler import RowSampler
from surefoot.methods.rollout.types import Completion, Request, Sampling, Wait
from surefoot.models.decoder_layers import class_name
from surefoot.models.generate import generating
from surefoot.models.routing import LayerRouting, RoutingRecorder
from surefoot.models.vision import embed_images, image_tokens

MAX_PROMPTS_IN_FINDING = 4
"""Number of prompts of a rank that a finding lists."""


@dataclass(frozen=True)
class RolloutLimits:
    """Limits of a rollout on a rank."""

    batch_size: int | None = None
    """Largest number of completions that are generated at a time."""
    timeout_s: float = inf
    most_tokens: int | None = None
    """Tokens of the longest prompt with its completion; None if unknown."""
    stop_requested: Callable[[], bool] = field(default=lambda: False)
    """Called at each token; if true, `Interrupted` is raised on all ranks."""


class LocalEngine:
    """`Engine` on the trained model itself."""

    phase: Phase = "rollout"
    bytes_sent = 0

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ranks: World = SINGLE_PROCESS,
        in_lockstep: bool = False,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        reader: PixelReader | None = None,
        routing: RoutingRecorder | None = None,
        limits: RolloutLimits = RolloutLimits(),
    ) -> None:
        """Create the engine, and find out what the model can generate together. Collective.

        `in_lockstep`: each forward of a rank needs the others (ZeRO 3, expert parallelism), so all take as many.
        `reader`: opens images; None for a model without vision. `routing`: set if completions must record the experts
        of their tokens.
        Raises: ModelError if the model cannot generate with its cache.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._lockstep_ranks = ranks if in_lockstep else SINGLE_PROCESS
        self._limits = limits
        self._forward_context = forward_context
        self._reader = reader
        self._routing = routing
        self._run_vision_prompts = as_fsdp_forward(model, self._predict_with_images)
        self._cache_argument = cache_argument(model)
        self.batching = self._choose_batching()

    @torch.no_grad()
    def _choose_batching(self) -> Batching:
        num_tokens = self._model.config.get_text_config().vocab_size
        vocabulary = sorted(set(range(num_tokens)) - image_tokens(self._model))
        with generating(self._model), self._forward_context():
            try:
                return choose_batching(
                    self._read_probe,
                    vocabulary,
                    lambda holds: self._ranks.sum([holds])[0] == self._ranks.size,
                    class_name(self._model),
                    probe_length(self._model.config.get_text_config().to_dict(), self._limits.most_tokens),
                )
            finally:
                reshard(self._model)

    def _read_probe(self, prompts: Sequence[list[int]], rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Return the logits after some rows of prompts and further tokens: [R, V]. See `choose_batching`."""
        logits, state = self._read_prompts([Request(prompt, (0,)) for prompt in prompts])
        device = self._model.device
        state.select(torch.tensor(rows, device=device))
        for column in tokens.to(device).unbind(1):
            logits = self._read_tokens(column, state)
        return logits

    def publish(self, policy_version: int) -> None:
        """Do nothing: the weights are the model's own."""

    def submit(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> Wait:
        """See `Engine`. Completions are generated in the wait for them."""
        return lambda _seconds: self.generate(requests, sampling, policy_version)

    def end(self) -> None:
        """Do nothing: the engine does not own the model."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> list[Completion]:
        """Return a completion for each request, in order. Collective, also without a request.

        Raises: StoppedOnFinding (SF801), Interrupted; on all ranks.
        """
        deadline_s = time.monotonic() + self._limits.timeout_s
        waves = split_requests(requests, self._limits.batch_size, self.batching)
        order = [index for wave in waves for index in wave]
        most = max(self._ranks.gather(len(waves)))
        waves += [[] for _ in range(max(most, 1) - len(waves))]
        completions: list[Completion] = []
        with generating(self._model), self._forward_context():
            try:
                for number, wave in enumerate(waves):
                    if self._reader is not None:  # prompts are read together, so ranks stop together: between waves
                        if self._ranks.sum([self._is_over(deadline_s)])[0]:
                            break
                    elif number and self._lockstep_ranks is SINGLE_PROCESS and self._is_over(deadline_s):
                        break  # no other rank waits for its forwards; the first may have gathered weights with them
                    wave_completions = self._generate_wave(
                        [requests[index] for index in wave], sampling, policy_version, deadline_s
                    )
                    completions += wave_completions or []
                    if wave_completions is None and self._lockstep_ranks is not SINGLE_PROCESS:
                        break  # all ranks in lockstep have stopped
            finally:
                was_late = time.monotonic() > deadline_s
                reshard(self._model)
        num_interrupted, missing = self._ranks.sum([self._limits.stop_requested(), len(requests) - len(completions)])
        if num_interrupted:
            raise Interrupted
        if missing:
            missing_requests = [requests[index] for index in order[len(completions) :]]
            places = list(dict.fromkeys(request.place for request in missing_requests if request.place))
            rank_states = self._ranks.gather([was_late, places])
            finding = _timeout_finding(rank_states, round(missing), self._limits.timeout_s)
            raise StoppedOnFinding(finding, is_agreed=True)
        return [completion for _, completion in sorted(zip(order, completions, strict=True), key=lambda pair: pair[0])]

    def _predict(self, **inputs: Any) -> tuple[Tensor, Any]:
        """Return the logits of the next token, [R, V], and the cache, which the model makes at the first forward.

        The model is called without `as_fsdp_forward`, in which ranks would gather their weights anew for each token,
        and a rank that has finished its completions would leave the others waiting.
        """
        output = self._model(**inputs, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1], cache_of(self._model, output)

    def _read_prompts(self, prompts: Sequence[Request]) -> tuple[Tensor, "_State"]:
        """Return the logits [R, V] after each prompt, and the state of the batch. Prompts are padded on the left.

        Raises: DataError for an image that cannot be read, on all ranks.
        """
        width = max(len(request.prompt) for request in prompts)
        device = self._model.device
        padding = [width - len(request.prompt) for request in prompts]
        ids = torch.tensor(
            [[0] * n + request.prompt for n, request in zip(padding, prompts, strict=True)], device=device
        )
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=device)
        if self._reader is None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            logits, cache = self._predict(**inputs)
            return logits, _State(cache, mask, positions[:, -1:])
        reader = self._reader

        def read_images() -> tuple[list[Tensor], Vision]:
            positions = [
                reader.positions(np.array(request.prompt, np.int32), request.images, request.place)
                for request in prompts
            ]
            return positions, reader.read([(request.place, request.images) for request in prompts])

        prompt_positions, vision = self._ranks.run_or_raise_on_all(read_images)
        padded = [F.pad(row_positions, (n, 0)) for n, row_positions in zip(padding, prompt_positions, strict=True)]
        positions, vision = torch.stack(padded).to(device), vision.to(device)
        last = positions.flatten(1).amax(1)
        logits, cache = self._run_vision_prompts(ids, vision, mask, positions)
        last = last.view(-1, *[1] * (positions.dim() - 1)).expand(*positions.shape[:-1], 1)
        return logits, _State(cache, mask, last)

    def _predict_with_images(self, ids: Tensor, vision: Vision, mask: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
        """Return the logits after prompts with images. All ranks run the vision tower, which may be sharded."""
        inputs = embed_images(self._model, ids, vision.tensors, is_blank=vision.is_blank)
        return self._predict(**inputs, attention_mask=mask, position_ids=positions.movedim(0, -2))

    def _read_tokens(self, tokens: Tensor, state: "_State") -> Tensor:
        """Return the logits [R, V] after the next token of each row [R], and move the state past it."""
        state.mask = torch.cat([state.mask, state.mask.new_ones(len(state.mask), 1)], dim=1)
        state.positions = state.positions + 1
        logits, state.cache = self._predict(
            input_ids=tokens[:, None],
            attention_mask=None if self._cache_argument in WITHOUT_ATTENTION else state.mask,
            position_ids=state.positions.movedim(0, -2),
            **{self._cache_argument: state.cache},
        )
        return logits

    def _generate_wave(
        self, requests: Sequence[Request], sampling: Sampling, policy_version: int, deadline_s: float
    ) -> list[Completion] | None:
        """Return completions of some requests; None if this rank, or one in lockstep with it, must stop or is late."""
        is_dummy = not requests  # other ranks may need the forwards of this one
        requests = requests or [Request([0], (0,))]
        rows = RowSampler(requests, sampling, self._tokenizer, is_dummy=is_dummy)
        keys = [(tuple(request.prompt), request.images) for request in requests]
        prompts = dict(zip(keys, requests, strict=True))
        device = self._model.device
        with self._record_routing() as layers:
            logits, state = self._read_prompts(list(prompts.values()))
        numbers = {key: number for number, key in enumerate(prompts)}
        prompt_of_row = torch.tensor([numbers[key] for key in keys], device=device)
        if layers:
            experts = _stack_experts(layers).unflatten(0, state.mask.shape).numpy()
            rows.append_prompt_experts([experts[number] for number in prompt_of_row.tolist()])
        logits = logits[prompt_of_row]
        state.select(prompt_of_row)
        while True:
            tokens = rows.draw(logits)
            num_running, stops = self._lockstep_ranks.sum([rows.num_running, self._is_over(deadline_s)])
            if not num_running:
                return [] if is_dummy else rows.completions(policy_version)
            if stops:
                return None
            remaining = rows.drop_complete()
            if remaining is not None:
                index = torch.tensor(remaining, device=device)
                tokens = tokens[index]
                state.select(index)
            with self._record_routing() as layers:
                logits = self._read_tokens(tokens, state)
            if layers:
                rows.append_experts(_stack_experts(layers).numpy())

    def _is_over(self, deadline_s: float) -> bool:
        return self._limits.stop_requested() or time.monotonic() > deadline_s

    def _record_routing(self) -> AbstractContextManager[list[LayerRouting]]:
        return nullcontext([]) if self._routing is None else self._routing.recording()


def _timeout_finding(rank_states: Sequence[tuple[bool, list[str]]], missing: int, timeout_s: float) -> Finding:
    """Return the finding. `rank_states`: whether each rank was late, and the rows whose completions it lacks."""
    prompts = {str(rank): places[:MAX_PROMPTS_IN_FINDING] for rank, (_, places) in enumerate(rank_states) if places}
    return Finding(
        "SF801",
        f"{missing} completions of a rollout were not generated in the {timeout_s:g} s of rollout_timeout_s",
        {
            "missing": missing,
            "rollout_timeout_s": timeout_s,
            "late_ranks": [rank for rank, (was_late, _) in enumerate(rank_states) if was_late],
            "prompts_by_rank": prompts,
        },
        "Raise rollout_timeout_s, lower max_completion_length or the batch, or let a server generate "
        "(rollout_engine: vllm).",
    )


def _stack_experts(layers: Sequence[LayerRouting]) -> Tensor:
    """Return the chosen experts: int16 [tokens, layers, K], on the host."""
    return torch.stack([layer.index for layer in layers], dim=1).short().cpu()


@dataclass
class _State:
    """The state of a batch between two tokens."""

    cache: Any
    mask: Tensor
    """[R, n]: zero where a prompt is padded."""
    positions: Tensor
    """Position of the last token: [R, 1], or [R, 3, 1] for a model that counts rows and columns of images."""

    def select(self, index: Tensor) -> None:
        """Select rows of the batch; a row may be selected several times."""
        select_cache_rows(self.cache, index)
        self.mask, self.positions = self.mask[index], self.positions[index]
