"""What travels between prompts, engines, rewards and training, as frozen records; and how ranks leave a wait together.

Knows no engine.
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
    """What a group of completions answers."""

    ids: list[int]
    place: str
    """Of its row: `data.jsonl:203`."""
    columns: Mapping[str, Any]
    """What its reward functions are given: `prompt` as messages or text, and the row's own columns."""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probabilities are those of logits / temperature without `banned` tokens, before top_p
    and top_k."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: of all tokens."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a completion; they belong to it."""
    stops: tuple[str, ...] = ()
    """Texts that do."""
    banned: frozenset[int] = frozenset()
    """Tokens that are never drawn: those that stand for images, which no answer can hold."""


@dataclass(frozen=True)
class Request:
    """One completion to be generated."""

    prompt: list[int]
    seed: tuple[int, ...]
    """Draws depend on this, the prompt and the weights alone: not on the rank, nor on what else is generated."""
    images: tuple[Image, ...] = ()
    """Those that the prompt's image tokens stand for, in order."""
    place: str = ""
    """Of the prompt's row, for errors."""


@dataclass(frozen=True)
class Completion:
    """One answer. Shapes: ids and logprobs [n], n >= 1."""

    ids: list[int]
    logprobs: list[float]
    """Of each token when it was drawn, in nats."""
    finish: Literal["stop", "length"]
    policy_version: int
    """Optimizer steps that the weights had seen."""
    experts: str | None = None
    """Those that its tokens and its prompt's went to, where they are wanted: see `chosen_experts`."""


Wait = Callable[[float], list[Completion] | None]
"""Seconds -> completions that were asked for, or None on all ranks where some are not there by then. Collective."""


class Engine(Protocol):
    """Generates completions under the policy's weights."""

    @property
    def phase(self) -> Phase:
        """What a rank is doing while it generates."""

    @property
    def bytes_sent(self) -> int:
        """What the published policy gave the engine to read; 0 where it has the weights themselves."""

    def publish(self, policy_version: int) -> None:
        """Let further completions be of the weights as they are now. Collective.

        Raises: StoppedOnFinding (SF801, SF805) on all ranks where the engine does not get them.
        """

    def ask(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> Wait:
        """Ask for a completion for each request, of the published policy, in order. Collective, also without a request.

        Waiting for them raises: StoppedOnFinding (SF801, SF806) on all ranks where one is late, missing, or not as
        asked for.
        """

    def end(self) -> None:
        """The run is over, well or not."""


def run_interruptible(ranks: World, work: Callable[[], T], is_told_to_stop: Callable[[], bool] = lambda: False) -> T:
    """Return the value of `work`. Collective: one sum. Raises: Interrupted on all ranks if one was told to stop."""
    made: list[T] = []
    with suppress(Interrupted):
        made.append(work())
    if ranks.sum([not made or is_told_to_stop()])[0]:
        raise Interrupted
    return made[0]
