"""Probe of a vLLM server: whether it uses the weights of the trainer.

After each sync the trainer and the server score a sequence, which reveals another base model or another precision. A
new adapter changes nothing, and one step changes a policy less than kernels differ. So the first adapter that is sent
has noise in it, and both sides must show the same effect of it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.methods.rollout.engines.vllm_client import CompletionClient
from surefoot.methods.rollout.types import Request, Sampling

PROBE_TOKENS = 24
PROBE_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
"""Mean difference of logprobs, in nats, that other kernels of this precision may cause."""
FORMAT_TOLERANCE = {"int8": 0.1, "nf4": 0.5}
"""The same where the trainer's frozen weights are quantised and the server's are not. NF4 changed the loss of
SmolLM2-135M by 0.26, and changes larger models less."""
NOISE_EFFECT_FACTOR = 5.0
"""Factor by which noise in an adapter must change logprobs more than kernels do, so that its effect is visible."""
TRIAL_TOLERANCE_FACTOR, TRIAL_CHANGE_SHARE = 2.0, 0.25
"""Allowed difference in that trial: this factor of the tolerance, or this share of the change, whichever is larger."""
NOISE_LEVELS = tuple(2.0**power for power in range(-16, 5, 2))
"""Standard deviations of the noise to try, in turn."""

Score = Callable[[Request, list[int]], list[float]]
"""(prompt, tokens that follow) -> the trainer's logprobs of these tokens. Collective."""
AddNoise = Callable[[float], AbstractContextManager[object]]
"""(standard deviation) -> a context in which all trained parameters have such noise added."""


def tolerance_of(dtype: torch.dtype, quantization: str | None = None) -> float:
    """Return the mean difference of logprobs that is usual in a precision, and beside a format of the trainer alone."""
    kernels = PROBE_TOLERANCE.get(dtype, max(PROBE_TOLERANCE.values()))
    return max(kernels, FORMAT_TOLERANCE.get(quantization or "", 0.0))


class PolicyProbe:
    """Comparison of the trainer's and the server's logprobs of a sequence that the server draws."""

    def __init__(
        self,
        client: CompletionClient,
        score: Score,
        prompt: Request,
        sampling: Sampling,
        *,
        dtype: torch.dtype,
        quantization: str | None = None,
        add_noise: AddNoise | None = None,
        ranks: World = SINGLE_PROCESS,
    ) -> None:
        """Create the probe.

        `sampling`: of the run. `dtype`: of the server's model. `quantization`: of the trainer's frozen weights.
        `add_noise`: set for an adapter, whose effect is tested before the first policy is sent.
        """
        self._client = client
        self._score = score
        self._prompt = prompt
        self._sampling = Sampling(PROBE_TOKENS, sampling.temperature, banned=sampling.banned)
        self._tolerance = tolerance_of(dtype, quantization)
        self._add_noise = add_noise
        self._ranks = ranks
        self._must_check_logprobs_mode = bool(sampling.top_p < 1 or sampling.top_k)

    def check_adapter_is_applied(self, send: Callable[[str], str]) -> None:
        """Check once that the server applies adapters. `send`: see `Sync.send`. Collective.

        Raises: StoppedOnFinding (SF805, SF801).
        """
        if self._add_noise is None:
            return
        tokens = [token for token in self._prompt.prompt[-PROBE_TOKENS:] if token not in self._sampling.banned]
        threshold, change = NOISE_EFFECT_FACTOR * self._tolerance, 0.0
        without_noise = self._score(self._prompt, tokens)
        for noise in NOISE_LEVELS:
            with self._add_noise(noise):
                change = self._broadcast_difference(self._score(self._prompt, tokens), without_noise)
                if not change >= threshold:
                    continue
                policy_name = send("trial")
                drawn_tokens, server_logprobs = self._draw_sequence(policy_name)
                trainer_logprobs = self._score(self._prompt, drawn_tokens)
            clean_logprobs = self._score(self._prompt, drawn_tokens)
            change = self._broadcast_difference(trainer_logprobs, clean_logprobs)
            if change >= threshold:  # for the tokens that the server drew, too
                self._ranks.broadcast_from_rank0(
                    partial(self._check_trial, policy_name, trainer_logprobs, server_logprobs, clean_logprobs)
                )
                self._add_noise = None
                return

        def stop_without_effect() -> None:
            raise self._client.server.stopped(
                "SF805",
                f"noise of {NOISE_LEVELS[-1]:g} in the adapter changes the trainer's own logprobs by {change:.3g}, "
                "which cannot show whether the server applies it",
            )

        self._ranks.broadcast_from_rank0(stop_without_effect)

    def check(self, policy_name: str) -> None:
        """Compare the logprobs of a sequence that the server draws. Collective.

        Raises: StoppedOnFinding (SF805, SF801) on all ranks.
        """
        if self._must_check_logprobs_mode:
            self._ranks.broadcast_from_rank0(lambda: self._check_logprobs_mode(policy_name))
            self._must_check_logprobs_mode = False
        tokens, server_logprobs = self._draw_sequence(policy_name)
        trainer_logprobs = self._score(self._prompt, tokens)
        # The logprobs of ranks may differ by rounding errors; rank 0 decides.
        self._ranks.broadcast_from_rank0(
            lambda: self._check_agreement(policy_name, trainer_logprobs, server_logprobs, self._tolerance)
        )

    def _check_trial(
        self,
        policy_name: str,
        trainer_logprobs: Sequence[float],
        server_logprobs: Sequence[float],
        clean_logprobs: Sequence[float],
    ) -> None:
        change = _mean_difference(trainer_logprobs, clean_logprobs)
        server_change = _mean_difference(server_logprobs, clean_logprobs)
        if server_change <= min(2 * self._tolerance, change / 2):
            raise self._client.server.stopped(
                "SF805",
                f"the server does not apply the adapter: noise in it changes the trainer's logprobs by {change:.3g} on "
                f"average, but the server's are those without it (they differ by {server_change:.3g})",
                model=policy_name,
                change=float(f"{change:.4g}"),
            )
        tolerance = max(TRIAL_TOLERANCE_FACTOR * self._tolerance, TRIAL_CHANGE_SHARE * change)
        note = f". The adapter had noise in it, which changes the trainer's by {change:.3g}"
        self._check_agreement(policy_name, trainer_logprobs, server_logprobs, tolerance, note)

    def _draw_sequence(self, policy_name: str) -> tuple[list[int], list[float]]:
        """Return tokens that the server draws after the probe's prompt, and their logprobs. Collective."""

        def draw() -> list[list[float]]:
            completion = self._client.complete_probe(self._prompt, self._sampling, policy_name)
            return [list(completion.ids), completion.logprobs]

        ids, logprobs = self._ranks.broadcast_from_rank0(draw)
        return [int(token) for token in ids], logprobs

    def _check_logprobs_mode(self, policy_name: str) -> None:
        """Check that the server's logprobs are normalised over all tokens, not over those that top_p and top_k leave.

        If top_k leaves a single token, the latter are all 0. Raises: StoppedOnFinding (SF805, SF801).
        """
        completion = self._client.complete_probe(self._prompt, replace(self._sampling, top_k=1), policy_name)
        if not any(completion.logprobs):
            raise self._client.server.stopped(
                "SF805",
                "the server normalises logprobs over the tokens that top_p and top_k leave: with a single token left, "
                "each is 0. Start it with --logprobs-mode raw_logprobs",
            )

    def _broadcast_difference(self, first: Sequence[float], second: Sequence[float]) -> float:
        """Return rank 0's mean difference, so that all ranks take the same branch. Collective."""
        return float(self._ranks.broadcast_from_rank0(partial(_mean_difference, first, second)))

    def _check_agreement(
        self,
        policy_name: str,
        trainer_logprobs: Sequence[float],
        server_logprobs: Sequence[float],
        tolerance: float,
        note: str = "",
    ) -> None:
        mean = _mean_difference(trainer_logprobs, server_logprobs)
        pairs = zip(trainer_logprobs, server_logprobs, strict=True)
        largest = max(abs(trainer_logprob - server_logprob) for trainer_logprob, server_logprob in pairs)
        if not mean <= tolerance:  # NaN is no agreement
            raise self._client.server.stopped(
                "SF805",
                f"the server gives the tokens of a probe other probabilities than the trainer: their logprobs differ "
                f"by {mean:.3g} on average, {largest:.3g} at most, where {tolerance:.3g} is usual{note}",
                model=policy_name,
                mean_difference=float(f"{mean:.4g}"),
                largest_difference=float(f"{largest:.4g}"),
                tolerance=tolerance,
            )


def _mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(abs(value - other_value) for value, other_value in zip(first, second, strict=True)) / len(first)
