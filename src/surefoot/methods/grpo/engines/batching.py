"""Which requests the local engine generates together: those whose completions do not depend on it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.methods.grpo.types import Request

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
LOW_PRECISION_TOLERANCE = 0.2
"""Largest relative difference (of norms) of logits that rounding explains, an expert chosen otherwise included."""
PROBE_LENGTHS = (3, 8, 8)
"""Number of tokens of the probe's prompts. The first is mostly padding beside the others."""
PROBE_TOKENS = 2
"""Number of tokens that are generated after each prompt of the probe."""
MOST_TOKENS = 1000
"""Number of tokens of the vocabulary that the probe draws from."""


class Batching(Enum):
    """What the completions of a batch must have in common. The value: the probe's prompts of such a batch."""

    ANY_PROMPTS = (0, 1)
    """Nothing: the model ignores padding."""
    EQUAL_LENGTHS = (1, 2)
    """The length of their prompts: padding would change the states of the model."""
    ONE_BY_ONE = (1,)
    """A batch is one completion: the model keeps states outside its cache."""


ReadPrompts = Callable[[Sequence[list[int]], Sequence[int], Tensor], Tensor]
"""Logits [R, V] after prompts, of which rows are selected, and the further tokens [R, T] of each row."""


def choose_batching(
    read: ReadPrompts, vocabulary: Sequence[int], agree: Callable[[bool], bool], model_name: str
) -> Batching:
    """Return the first batching with which cached generation agrees with each sequence read alone. Collective.

    `read` runs on the model; `agree`: whether a condition holds on all ranks.
    Raises: ModelError if there is none, on all ranks.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        picks = torch.randint(min(len(vocabulary), MOST_TOKENS), (count,), generator=generator)
        return [vocabulary[pick] for pick in picks.tolist()]

    prompts = [draw(length) for length in PROBE_LENGTHS]
    tokens = [draw(PROBE_TOKENS) for _ in prompts]
    nothing = torch.empty(1, 0, dtype=torch.long)
    alone = [read([prompt + end], [0], nothing)[0] for prompt, end in zip(prompts, tokens, strict=True)]
    differences: dict[str, float] = {}
    for batching in Batching:
        members = batching.value
        rows = [*reversed(range(len(members))), 0] if len(members) > 1 else [0]
        logits = read([prompts[member] for member in members], rows, torch.tensor([tokens[members[r]] for r in rows]))
        expected = torch.stack([alone[members[row]] for row in rows])
        difference = float(((logits - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)).max())
        differences[batching.name.lower()] = difference
        if agree(difference <= TOLERANCE.get(logits.dtype, LOW_PRECISION_TOLERANCE)):  # also false for NaN
            return batching
    raise ModelError(
        f"rollout_engine: local cannot generate with {model_name}: with its cache it computes other logits than "
        f"without (relative differences: {', '.join(f'{name} {value:.2g}' for name, value in differences.items())}), "
        "so completions would not be those of the policy. Set rollout_engine: vllm if vLLM serves this model."
    )


def split_requests(requests: Sequence[Request], batch_size: int | None, batching: Batching) -> list[list[int]]:
    """Return the indices of the requests of each batch."""
    if batching is Batching.ONE_BY_ONE:
        return [[index] for index in range(len(requests))]
    groups: dict[int, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        groups[len(request.prompt) if batching is Batching.EQUAL_LENGTHS else 0].append(index)
    size = batch_size or max(len(requests), 1)
    return [group[begin : begin + size] for group in groups.values() for begin in range(0, len(group), size)]
