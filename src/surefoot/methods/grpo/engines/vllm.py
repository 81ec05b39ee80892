"""Completions from a vLLM server: tokens in, tokens and logprobs out.

After each sync the trainer and the server score a sequence, which reveals another base model or another precision. A
new adapter changes nothing, and one step changes a policy less than kernels differ. So the first adapter that is sent
has noise in it, and both sides must show the same effect of it.
"""

import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch

from surefoot.data.image_processor import PixelReader
from surefoot.data.images import Image
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import StoppedOnFinding, SurefootError
from surefoot.events import Phase
from surefoot.methods.grpo.engines.server import Server, ServerFailed
from surefoot.methods.grpo.engines.vllm_protocol import Call, RoutingLayers, call_for, completion_of
from surefoot.methods.grpo.engines.vllm_sync import Sync
from surefoot.methods.grpo.types import Completion, Request, Sampling, Wait

PAUSES_S = (0.5, 2.0, 5.0)
"""Seconds before each retry of a request that the server did not take."""
MAX_CONCURRENT_REQUESTS = 256
"""Largest number of requests in flight; the server batches them as it can."""
PROBE_TOKENS = 24
PROBE_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
"""Mean difference of logprobs, in nats, that other kernels of this precision may cause."""


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the `PROBE_TOLERANCE` of a precision; the largest for one that is not listed."""
    return PROBE_TOLERANCE.get(dtype, max(PROBE_TOLERANCE.values()))


CLEAR_TIMES = 5.0
"""Factor by which noise in an adapter must change logprobs more than kernels do, so that its effect is visible."""
TRIAL_TIMES, TRIAL_SHARE = 2.0, 0.25
"""Allowed difference in that trial: this factor of the tolerance, or this share of the change, whichever is larger."""
NOISES = tuple(2.0**power for power in range(-16, 5, 2))
"""Standard deviations of the noise to try, in turn."""

Score = Callable[[Request, list[int]], list[float]]
"""(prompt, tokens that follow) -> the trainer's logprobs of these tokens. Collective."""
Noisy = Callable[[float], AbstractContextManager[object]]
"""(standard deviation) -> a context in which all trained parameters have such noise added."""


class VllmEngine:
    """`Engine` on a vLLM server. Each rank requests its own completions; rank 0 sends weights."""

    phase: Phase = "rollout_wait"

    def __init__(
        self,
        server: Server,
        sync: Sync,
        score: Score,
        *,
        timeout_s: float,
        probe: Request,
        sampling: Sampling,
        dtype: torch.dtype,
        vocab_size: int,
        has_seeds: bool = True,
        sleeps: bool = False,
        routing: RoutingLayers | None = None,
        reader: PixelReader | None = None,
        ranks: World = SINGLE_PROCESS,
        noisy: Noisy | None = None,
    ) -> None:
        """Create the engine.

        `timeout_s`: for a whole rollout. `probe`: prompt of the sequence that both sides score. `sampling`: how its
        tokens are drawn. `has_seeds`: whether each request has its own seed; vLLM's CPU build (0.32) ends when it gets
        several. `sleeps`: whether the server frees its GPU memory between rollouts. `routing`: set if completions must
        record the experts of their tokens. `reader`: opens images; None for a model without vision. `noisy`: set for
        an adapter, whose effect is tested before the first policy is sent.
        """
        self._server = server
        self._sync = sync
        self._score = score
        self._timeout_s = timeout_s
        self._probe_prompt = probe
        self._probe_sampling = Sampling(PROBE_TOKENS, sampling.temperature, banned=sampling.banned)
        self._must_check_logprobs_mode = bool(sampling.top_p < 1 or sampling.top_k)
        """Whether `_check_logprobs_mode` has yet to run."""
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._has_seeds = has_seeds
        self._sleeps = sleeps
        self._routing = routing
        self._reader = reader
        self._ranks = ranks
        self._noisy = noisy
        self._version: int | None = None
        self._model = ""
        """Name of the published policy on the server."""
        self._is_asleep: bool | None = None
        """None until the first request: an earlier start may have left the server asleep."""
        self._queue = _RequestQueue()

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
        if self._version == policy_version:
            return
        self._version = None  # until the probe has passed
        if self._noisy is not None:
            self._check_adapter_is_applied(self._noisy)
            self._noisy = None
        self._model = self._sync.send(f"policy-{policy_version:08d}")
        if self._must_check_logprobs_mode:
            self._ranks.broadcast_from_rank0(self._check_logprobs_mode)
            self._must_check_logprobs_mode = False
        self._check_probe()
        self._ranks.broadcast_from_rank0(self._sync.settle)
        self._version = policy_version

    def ask(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> Wait:
        """See `Engine`. The server starts on them now, and has `timeout_s` for all of them."""
        assert self._version == policy_version
        model, deadline = self._model, time.monotonic() + self._timeout_s
        image_urls = self._ranks.run_or_raise_on_all(lambda: self._encode_images(requests))

        def complete(request: Request) -> Completion:
            request_urls = [image_urls[image] for image in request.images]
            return self._request_completion(request, sampling, model, policy_version, deadline, request_urls)

        futures = self._queue.start(complete, requests)

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
        self._queue.drop()
        if self._ranks.is_first:
            with suppress(StoppedOnFinding):  # the run may be over because the server has ended
                self._wake()
            self._sync.end()

    def _encode_images(self, requests: Sequence[Request]) -> dict[Image, str]:
        """Return the images of requests as data: URLs, scaled as in training."""
        places = {image: request.place for request in requests for image in request.images}
        if not places:
            return {}
        assert self._reader is not None
        return {
            image: "data:image/png;base64," + b64encode(self._reader.png(image, place)).decode()
            for image, place in places.items()
        }

    def _wake(self) -> None:
        if self._sleeps and self._is_asleep is not False:
            self._server.wake()
            self._is_asleep = False

    def _sleep(self) -> None:
        if self._sleeps:
            self._server.sleep()
            self._is_asleep = True

    def _check_adapter_is_applied(self, noisy: Noisy) -> None:
        """Check that the server applies adapters. Collective. Raises: StoppedOnFinding (SF805, SF801)."""
        request, threshold = self._probe_prompt, CLEAR_TIMES * tolerance_of(self._dtype)
        tokens = [token for token in request.prompt[-PROBE_TOKENS:] if token not in self._probe_sampling.banned]
        without_noise, change = self._score(request, tokens), 0.0
        for noise in NOISES:
            with noisy(noise):
                change = self._broadcast_difference(self._score(request, tokens), without_noise)
                if not change >= threshold:
                    continue
                self._model = self._sync.send("trial")
                drawn_tokens, server_logprobs = self._draw_sequence()
                trainer_logprobs = self._score(request, drawn_tokens)
            clean_logprobs = self._score(request, drawn_tokens)
            change = self._broadcast_difference(trainer_logprobs, clean_logprobs)
            if change >= threshold:  # for the tokens that the server drew, too
                self._ranks.broadcast_from_rank0(
                    partial(self._check_trial, trainer_logprobs, server_logprobs, clean_logprobs)
                )
                return

        def stop_without_effect() -> None:
            raise self._server.stopped(
                "SF805",
                f"noise of {NOISES[-1]:g} in the adapter changes the trainer's own logprobs by {change:.3g}: nothing "
                "can show whether the server applies it",
            )

        self._ranks.broadcast_from_rank0(stop_without_effect)

    def _check_trial(
        self,
        trainer_logprobs: Sequence[float],
        server_logprobs: Sequence[float],
        clean_logprobs: Sequence[float],
    ) -> None:
        change, tolerance = _mean_difference(trainer_logprobs, clean_logprobs), tolerance_of(self._dtype)
        server_change = _mean_difference(server_logprobs, clean_logprobs)
        if server_change <= min(2 * tolerance, change / 2):
            raise self._server.stopped(
                "SF805",
                f"the server does not apply the adapter: noise in it changes the trainer's logprobs by {change:.3g} on "
                f"average, and the server's are those without it ({server_change:.3g} apart)",
                model=self._model,
                change=float(f"{change:.4g}"),
            )
        note = f". The adapter had noise in it, which changes the trainer's by {change:.3g}"
        self._check_agreement(
            trainer_logprobs, server_logprobs, max(TRIAL_TIMES * tolerance, TRIAL_SHARE * change), note
        )

    def _check_probe(self) -> None:
        """Compare the logprobs of a sequence that the server draws. Collective.

        Raises: StoppedOnFinding (SF805, SF801).
        """
        tokens, server_logprobs = self._draw_sequence()
        trainer_logprobs = self._score(self._probe_prompt, tokens)
        # The logprobs of ranks may differ by rounding errors; rank 0 decides.
        self._ranks.broadcast_from_rank0(
            lambda: self._check_agreement(trainer_logprobs, server_logprobs, tolerance_of(self._dtype))
        )

    def _draw_sequence(self) -> tuple[list[int], list[float]]:
        """Return tokens that the server draws after the probe's prompt, and their logprobs. Collective."""

        def draw() -> list[list[float]]:
            completion = self._request_probe(self._probe_sampling)
            return [list(completion.ids), completion.logprobs]

        ids, logprobs = self._ranks.broadcast_from_rank0(draw)
        return [int(token) for token in ids], logprobs

    def _check_logprobs_mode(self) -> None:
        """Check that the server's logprobs are normalised over all tokens, not over those that top_p and top_k leave.

        If top_k leaves a single token, the latter are all 0. Raises: StoppedOnFinding (SF805, SF801).
        """
        if not any(self._request_probe(replace(self._probe_sampling, top_k=1)).logprobs):
            raise self._server.stopped(
                "SF805",
                "the server's logprobs are those of the tokens that top_p and top_k leave: each is 0 where the "
                "likeliest alone is left. Start it with --logprobs-mode raw_logprobs",
            )

    def _request_probe(self, sampling: Sampling) -> Completion:
        """Request the probe's completion. Called on one rank. Raises: StoppedOnFinding (SF801, SF806)."""
        image_urls = list(self._encode_images([self._probe_prompt]).values())
        deadline = time.monotonic() + self._timeout_s
        return self._request_completion(
            self._probe_prompt, sampling, self._model, 0, deadline, image_urls, is_probe=True
        )

    def _broadcast_difference(self, first: Sequence[float], second: Sequence[float]) -> float:
        """Return rank 0's mean difference, so that all ranks take the same branch. Collective."""
        return float(self._ranks.broadcast_from_rank0(partial(_mean_difference, first, second)))

    def _check_agreement(
        self,
        trainer_logprobs: Sequence[float],
        server_logprobs: Sequence[float],
        tolerance: float,
        note: str = "",
    ) -> None:
        mean = _mean_difference(trainer_logprobs, server_logprobs)
        pairs = zip(trainer_logprobs, server_logprobs, strict=True)
        largest = max(abs(trainer_logprob - server_logprob) for trainer_logprob, server_logprob in pairs)
        if not mean <= tolerance:  # NaN is no agreement
            raise self._server.stopped(
                "SF805",
                f"the server gives the tokens of a probe other probabilities than the trainer: their logprobs differ "
                f"by {mean:.3g} on average, {largest:.3g} at most, where {tolerance:.3g} is usual{note}",
                model=self._model,
                mean_difference=float(f"{mean:.4g}"),
                largest_difference=float(f"{largest:.4g}"),
                tolerance=tolerance,
            )

    def _request_completion(
        self,
        request: Request,
        sampling: Sampling,
        model: str,
        policy_version: int,
        deadline: float,
        image_urls: Sequence[str],
        *,
        is_probe: bool = False,
    ) -> Completion:
        """Request a completion and wait for it. Raises: StoppedOnFinding (SF801, SF806)."""
        call = call_for(
            request,
            sampling,
            model,
            pictures=image_urls,
            image_token=self._reader.settings.token_id if self._reader is not None else None,
            has_seed=self._has_seeds,
            ignores_ends=is_probe,
        )
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise self._server.stopped(
                "SF801",
                f"the {self._timeout_s:.0f} s of rollout_timeout_s were over before the last completions were asked "
                f"for: {MAX_CONCURRENT_REQUESTS} are under way at a time",
            )
        response = self._post_with_retries(call, deadline, request.place)
        try:
            layers = None if is_probe else self._routing
            return completion_of(response, request, sampling, model, policy_version, self._vocab_size, layers)
        except ValueError as error:
            raise self._server.stopped("SF806", str(error), model=model) from error

    def _post_with_retries(self, call: Call, deadline: float, place: str) -> dict[str, Any]:
        """Return the response. Retrying a request that was not taken changes no result. Raises: StoppedOnFinding."""
        for pause_s in (*PAUSES_S, None):
            try:
                return self._server.post(call.path, call.body, max(deadline - time.monotonic(), 0.0))
            except ServerFailed as error:
                has_time = pause_s is not None and time.monotonic() + pause_s < deadline
                if not error.may_pass or not has_time or not self._server.is_running:
                    raise self._server.stopped(
                        "SF801",
                        f"a completion is missing: {error}",
                        prompt=place,
                        waited_s=round(self._timeout_s - (deadline - time.monotonic()), 1),
                    ) from error
                time.sleep(pause_s or 0.0)
        raise AssertionError("the last try answers or raises")


def _mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(abs(value - other_value) for value, other_value in zip(first, second, strict=True)) / len(first)


def _free_cached_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _RequestQueue:
    """Requests in flight, in daemon threads: a run that ends does not wait for them."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Completion], Future[Completion]]] = SimpleQueue()

    def start(self, work: Callable[[Request], Completion], requests: Sequence[Request]) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = []
        for request in requests:
            futures.append(Future())
            self._waiting.put((lambda request=request: work(request), futures[-1]))  # type: ignore[misc]
        for _ in range(min(MAX_CONCURRENT_REQUESTS, len(requests))):
            Thread(target=self._run_requests, daemon=True).start()
        return futures

    def drop(self) -> None:
        """Cancel the requests that are not in flight yet."""
        try:
            while True:
                self._waiting.get_nowait()[1].cancel()
        except Empty:
            return

    def _run_requests(self) -> None:
        while True:
            try:
                work, future = self._waiting.get_nowait()
            except Empty:
                return
            try:
                future.set_result(work())
            except SurefootError as error:
                future.set_exception(error)
            finally:
                if not future.done():  # the thread's own trace is printed; the waiting thread must not wait forever
                    future.set_exception(
                        SurefootError("a request to the server ended in the error that is printed above")
                    )
