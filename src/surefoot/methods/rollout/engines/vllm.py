"""Completions from a vLLM server: tokens in, tokens and logprobs out."""

import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from math import inf

import torch

from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import StoppedOnFinding
from surefoot.events import Phase
from surefoot.methods.rollout.engines.vllm_client import CompletionClient
from surefoot.methods.rollout.engines.vllm_probe import PolicyProbe
from surefoot.methods.rollout.engines.vllm_protocol import Policy
from surefoot.methods.rollout.engines.vllm_sync import Sync
from surefoot.methods.rollout.types import Completion, Request, Sampling, Wait


class VllmEngine:
    """`Engine` on a vLLM server. Each rank requests its own completions; rank 0 sends weights."""

    phase: Phase = "rollout_wait"

    def __init__(
        self,
        client: CompletionClient,
        sync: Sync,
        probe: PolicyProbe,
        *,
        sleeps: bool = False,
        ranks: World = SINGLE_PROCESS,
    ) -> None:
        """Create the engine. `sleeps`: whether the server frees its GPU memory between rollouts."""
        self._client = client
        self._sync = sync
        self._probe = probe
        self._sleeps = sleeps
        self._ranks = ranks
        self._policy: Policy | None = None
        """The published policy, once the probe has passed."""
        self._is_asleep: bool | None = None
        """None until the first request: an earlier start may have left the server asleep."""

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that the server reads of the published policy."""
        return self._sync.bytes_sent

    def publish(self, policy_version: int) -> None:
        """Send the current weights, and check that the server uses them. Collective.

        Raises: StoppedOnFinding (SF801, SF805) on all ranks.
        """
        if self._sleeps:  # every rank frees torch's cached memory before the server takes its share
            self._ranks.run_or_raise_on_all(_free_cached_memory)
        self._ranks.broadcast_from_rank0(self._wake)
        if self._policy is not None and self._policy.version == policy_version:
            return
        self._policy = None
        self._probe.check_adapter_is_applied(self._sync.send)
        name = self._sync.send(f"policy-{policy_version:08d}")
        self._probe.check(name)
        self._ranks.broadcast_from_rank0(self._sync.remove_older)
        self._policy = Policy(name, policy_version)

    def submit(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> Wait:
        """See `Engine`. The server starts on them now, and has `rollout_timeout_s` for all of them."""
        policy = self._policy
        assert policy is not None
        assert policy.version == policy_version
        deadline = time.monotonic() + self._client.timeout_s
        images = self._ranks.run_or_raise_on_all(lambda: self._client.encode_images(requests))
        futures = self._client.start(requests, sampling, policy, images, deadline)

        def wait_for(seconds: float) -> list[Completion] | None:
            _, pending = wait(futures, None if seconds == inf else seconds)
            if self._ranks.sum([len(pending)])[0]:
                return None
            completions = self._ranks.run_or_raise_on_all(
                lambda: [future.result() for future in futures], names_rank=False
            )
            self._ranks.broadcast_from_rank0(self._sleep)
            return completions

        return wait_for

    def end(self) -> None:
        """Drop queued requests at the end of the run, and remove its policies from a server that keeps running."""
        self._client.threads.cancel_waiting()
        if self._ranks.is_first:
            with suppress(StoppedOnFinding):  # the run may be over because the server has ended
                self._wake()
            self._sync.end()

    def _wake(self) -> None:
        if self._sleeps and self._is_asleep is not False:
            self._client.server.wake()
            self._is_asleep = False

    def _sleep(self) -> None:
        if self._sleeps:
            self._client.server.sleep()
            self._is_asleep = True


def _free_cached_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
