"""Requests of completions to an engine, and the waits for them, which stop signals end and which send heartbeats."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

import numpy as np

from surefoot.data.dataset import Dataset, Sample, SampleKey
from surefoot.data.images import Image
from surefoot.data.row_formats import IN_THE_ROW
from surefoot.errors import DataError
from surefoot.events import Heartbeat
from surefoot.methods.base import LAST_WAIT_S, Interrupted, MethodContext
from surefoot.methods.rollout.types import (
    Completion,
    Engine,
    Prompt,
    Request,
    Sampling,
    Wait,
    run_interruptible,
)

POLL_S = 5.0
"""Seconds between two checks of the stop signal, with a heartbeat, in a wait for a server."""
EVALUATION = 1 << 32
"""Part of the seeds of evaluations; the seeds of steps have the step's number in its place."""
T = TypeVar("T")


class Generator:
    """An engine with the parameters by which it draws tokens."""

    def __init__(
        self, engine: Engine, sampling: Sampling, context: MethodContext, *, longest_context: int | None
    ) -> None:
        """`longest_context`: of the model, in tokens."""
        self.engine = engine
        self._sampling = sampling
        self._context = context
        self._ranks = context.ranks
        self._longest_context = longest_context

    def read_prompts(
        self,
        dataset: Dataset,
        keys: Sequence[SampleKey],
        take_prompt: Callable[[Sample], Sample] = lambda sample: sample,
    ) -> list[Prompt]:
        """Return the prompts of some samples. `take_prompt`: returns that of a sample with an answer. Collective.

        Raises: DataError on all ranks for one that is too long.
        """
        with self._context.phase("data_wait"):
            return self._ranks.run_or_raise_on_all(
                lambda: [self._read_prompt(dataset, key, take_prompt) for key in keys]
            )

    def _read_prompt(self, dataset: Dataset, key: SampleKey, take_prompt: Callable[[Sample], Sample]) -> Prompt:
        sample = take_prompt(dataset.sample(*key))
        ids = [int(token) for token in sample.ids]
        longest = len(ids) + self._sampling.max_tokens
        if self._longest_context is not None and longest > self._longest_context:
            raise DataError(
                f"{sample.place}: a prompt of {len(ids)} tokens and max_completion_length={self._sampling.max_tokens} "
                f"are {longest} tokens, more than the {self._longest_context} that the model can see. Lower "
                "max_completion_length, or max_prompt_length with truncation: drop."
            )
        columns = _replace_embedded_images(dataset.columns(*key), sample.images)
        return Prompt(ids, sample.place, columns, sample.images)

    def request(self, requests: Sequence[Request], step: int) -> Wait:
        """Request completions by the policy after `step` steps. Collective."""
        with self._context.phase("sync"):
            self.engine.publish(step)
        with self._context.phase(self.engine.phase):
            return self.engine.submit(requests, self._sampling, step)

    def wait(self, wait: Wait) -> list[Completion]:
        """Return this rank's completions; the engine has its own deadline. Collective.

        Raises: Interrupted; StoppedOnFinding (SF801, SF806).
        """
        with self._context.phase(self.engine.phase):
            completions = poll(wait, self._context)
        assert completions is not None
        return completions

    def wait_for_save(self, wait: Wait, timeout_s: float) -> list[Completion] | None:
        """Return the engine's completions; None after `timeout_s`, or `LAST_WAIT_S` after a stop signal. Collective."""
        with self._context.phase(self.engine.phase):
            try:
                return poll(wait, self._context, timeout_s)
            except Interrupted:
                return poll(wait, self._context, min(timeout_s, LAST_WAIT_S), ignores_signals=True)


def poll(
    wait: Callable[[float], T | None], context: MethodContext, timeout_s: float = inf, *, ignores_signals: bool = False
) -> T | None:
    """Return what is waited for, with heartbeats meanwhile; None after `timeout_s`. Collective. Raises: Interrupted.

    `wait`: seconds -> the result, or None on all ranks if it is not there by then; collective.
    """
    left_s = timeout_s
    while left_s > 0:
        result = run_interruptible(
            context.ranks,
            partial(wait, min(left_s, POLL_S)),
            (lambda: False) if ignores_signals else context.stop_requested,
        )
        if result is not None:
            return result
        left_s -= POLL_S
        context.emit(Heartbeat())  # the supervisor must not see a stall: what is waited for has its own deadline
    return None


def complete_prompt(prompt: Sequence[int], ids: Sequence[int], images: tuple[Image, ...], place: str) -> Sample:
    """Return a prompt with its completion as a sample, of which the completion's tokens are trained."""
    weights = np.concatenate([np.zeros(len(prompt), np.float32), np.ones(len(ids), np.float32)])
    return Sample(np.array([*prompt, *ids], np.int32), weights, place, images=images)


def _replace_embedded_images(columns: Mapping[str, Any], images: Sequence[Image]) -> Mapping[str, Any]:
    """Return the columns, with the path of the extracted file for each image whose bytes are in the row."""
    if not images or "images" not in columns:
        return columns
    pairs = zip(columns["images"], images, strict=True)
    return {**columns, "images": [image.path if source == IN_THE_ROW else source for source, image in pairs]}
