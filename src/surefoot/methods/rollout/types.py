"""Types that prompts, engines, rewards and training exchange, and a wait that ranks leave together.

It imports no engine.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from surefoot.data.images import Image
from surefoot.distributed.process_group import World
from surefoot.events import Phase
from surefoot.methods.base import Interrupted

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """The prompt of a group of completions."""

    ids: list[int]
    place: str
    """File and line of its row: `data.jsonl:203`."""
    columns: Mapping[str, Any]
    """Arguments of its reward functions: `prompt` as messages or text, and the row's own columns."""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """Parameters by which tokens are drawn.

    Log-probabilities are those of logits / temperature without `banned` tokens, before top_p and top_k.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0 draws from all."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a completion; they belong to it."""
    stops: tuple[str, ...] = ()
    """Texts that end a completion."""
    banned: frozenset[int] = frozenset()
    """Tokens that are never drawn: those that stand for images, which no completion can contain."""


@dataclass(frozen=True)
class Request:
    """One completion to be generated."""

    prompt: list[int]
    seed: tuple[int, ...]
    """Seed of the draws, which depend on it, the prompt and the weights alone: not on the rank or the batch."""
    images: tuple[Image, ...] = ()
    """Images of the prompt's image tokens, in order."""
    place: str = ""
    """File and line of the prompt's row, for errors."""


@dataclass(frozen=True)
class Completion:
    """One generated completion. Shapes: ids and logprobs [n], n >= 1."""

    ids: list[int]
    logprobs: list[float]
    """Log-probability of each token when it was drawn, in nats."""
    finish: Literal["stop", "length"]
    policy_version: int
    """Number of optimizer steps of the weights that drew it."""
    experts: str | None = None
    """Experts of the prompt's and its own tokens, if they are recorded: see `routed_experts`."""


Wait = Callable[[float], list[Completion] | None]
"""Seconds -> the requested completions, or None on all ranks if some are not finished by then. Collective.

An engine that generates during training returns them again in later calls."""


class Engine(Protocol):
    """Generator of completions under the policy's weights."""

    @property
    def phase(self) -> Phase:
        """Phase of a rank while it generates."""

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that the engine reads of the published policy; 0 if it shares the trained weights."""

    def publish(self, policy_version: int) -> None:
        """Use the current weights for further completions. Collective.

        Raises: StoppedOnFinding (SF801, SF805) on all ranks if the engine does not get them.
        """

    def submit(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> Wait:
        """Request a completion of the published policy for each request, in order. Collective, also without a request.

        Waiting for them raises: StoppedOnFinding (SF801, SF806) on all ranks if one is late, missing, or not as
        requested.
        """

    def end(self) -> None:
        """Release the engine at the end of the run, whether it succeeded or not."""


def run_interruptible(ranks: World, work: Callable[[], T], stop_requested: Callable[[], bool] = lambda: False) -> T:
    """Return the value of `work`. Collective: one sum. Raises: Interrupted on all ranks if one got a stop signal."""
    values: list[T] = []
    with suppress(Interrupted):
        values.append(work())
    if ranks.sum([not values or stop_requested()])[0]:
        raise Interrupted
    return values[0]
