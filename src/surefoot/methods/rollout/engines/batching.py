"""Which requests the local engine generates together: those whose completions do not depend on it."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import ModelError, one_line
from surefoot.methods.rollout.engines.generation_cache import REMEDY
from surefoot.methods.rollout.types import Request
from surefoot.models.pretrained import BAD_CONFIG
from surefoot.system.allocators import is_out_of_memory

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
LOW_PRECISION_TOLERANCE = 0.2
"""Largest relative difference (of norms) of logits that rounding explains, an expert chosen otherwise included."""
SHORT_TOKENS, LONG_TOKENS = 3, 8
"""Number of tokens of the probe's first prompt, mostly padding beside the others, and least number of theirs."""
THRESHOLD = re.compile("window|chunk|topk|local_attention")
"""Fields of a config.json that may be numbers of tokens beyond which attention changes."""
PROBE_TOKENS = 2
"""Number of tokens that are generated after each prompt of the probe."""
MOST_TOKENS = 1000
"""Number of tokens of the vocabulary that the probe draws from."""
NO_TOKENS = torch.empty(1, 0, dtype=torch.long)


class Batching(Enum):
    """Condition on the completions of a batch. The value: the probe's prompts of such a batch."""

    ANY_PROMPTS = (0, 1)
    """No condition: the model ignores padding."""
    EQUAL_LENGTHS = (1, 2)
    """Their prompts have one length: padding would change the states of the model."""
    ONE_BY_ONE = (1,)
    """A batch is one completion: the model keeps states outside its cache."""


ReadPrompts = Callable[[Sequence[list[int]], Sequence[int], Tensor], Tensor]
"""Logits [R, V] after prompts, of which rows are selected, and the further tokens [R, T] of each row."""


def probe_length(config: Mapping[str, Any], most_tokens: int | None) -> int:
    """Return a number of tokens beyond the thresholds of a model that completions of `most_tokens` may reach.

    Caches of windows and chunks are wrong in some models of transformers once they are full (Moshi, Doge).
    """
    room = (most_tokens or 0) - PROBE_TOKENS - 2
    values = [value for name, value in config.items() if THRESHOLD.search(name) and type(value) is int]
    return max([LONG_TOKENS, *(value + 2 for value in values if value <= room)])


def choose_batching(
    read: ReadPrompts,
    vocabulary: Sequence[int],
    agree: Callable[[bool], bool],
    model_name: str,
    long_tokens: int = LONG_TOKENS,
) -> Batching:
    """Return the first batching in which each row has the logits that it has alone. Collective.

    `read` runs on the model; `agree`: whether a condition holds on all ranks; `long_tokens`: see `probe_length`.
    Raises: ModelError, on all ranks, if the model's own forwards fail or the cache changes what it computes.
    """
    prompts, tokens = _draw_probe(vocabulary, (SHORT_TOKENS, long_tokens, long_tokens))
    try:
        uncached = torch.stack(
            [read([prompt + end], [0], NO_TOKENS)[0] for prompt, end in zip(prompts, tokens, strict=True)]
        )
        alone = torch.stack(
            [read([prompt], [0], torch.tensor([end]))[0] for prompt, end in zip(prompts, tokens, strict=True)]
        )
        difference = _largest_difference(alone, uncached)
        if not agree(difference <= TOLERANCE.get(uncached.dtype, LOW_PRECISION_TOLERANCE)):  # also for NaN
            raise ModelError(
                f"rollout_engine: local cannot generate with {model_name}: with its cache, the logits of transformers' "
                f"implementation differ by {difference:.2g} (relative) from those without, and completions would not "
                f"be the policy's. {REMEDY}"
            )
        for batching in (Batching.ANY_PROMPTS, Batching.EQUAL_LENGTHS):
            members = batching.value
            rows = [1, 0, 1]
            row_tokens = torch.tensor([tokens[members[row]] for row in rows])
            logits = read([prompts[member] for member in members], rows, row_tokens)
            difference = _largest_difference(logits, alone[[members[row] for row in rows]])
            if agree(difference <= TOLERANCE.get(logits.dtype, LOW_PRECISION_TOLERANCE)):
                return batching
    except BAD_CONFIG as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"rollout_engine: local cannot generate with {model_name}: the forward of transformers' implementation "
            f"with a cache fails ({one_line(error)}). {REMEDY}"
        ) from error
    return Batching.ONE_BY_ONE


def _draw_probe(vocabulary: Sequence[int], lengths: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts of the probe and the tokens after each."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        picks = torch.randint(min(len(vocabulary), MOST_TOKENS), (count,), generator=generator)
        return [vocabulary[pick] for pick in picks.tolist()]

    return [draw(length) for length in lengths], [draw(PROBE_TOKENS) for _ in lengths]


def _largest_difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest relative difference of a row, by norms. Shapes: [R, V]."""
    return float(((logits - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)).max())


def split_requests(requests: Sequence[Request], batch_size: int | None, batching: Batching) -> list[list[int]]:
    """Return the indices of the requests of each batch."""
    if batching is Batching.ONE_BY_ONE:
        return [[index] for index in range(len(requests))]
    groups: dict[int, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        groups[len(request.prompt) if batching is Batching.EQUAL_LENGTHS else 0].append(index)
    size = batch_size or max(len(requests), 1)
    return [group[begin : begin + size] for group in groups.values() for begin in range(0, len(group), size)]
