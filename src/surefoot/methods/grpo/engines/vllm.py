"""Completions from a vLLM server: tokens in, tokens and logprobs out.

After each sync a sequence is scored by both sides, which shows another base model or another precision. A new adapter
does nothing, and one step changes a policy less than kernels differ: so the first that is sent is one with noise in it,
whose effect both sides must see alike.
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
"""Before a request that the server did not take is sent again."""
MOST_AT_ONCE = 256
"""Requests under way at a time; the server batches them as it can."""
PROBE_TOKENS = 24
PROBE_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
"""Mean difference of logprobs, in nats, that other kernels of this precision may make."""


def tolerance_of(dtype: torch.dtype) -> float:
    """See `PROBE_TOLERANCE`."""
    return PROBE_TOLERANCE.get(dtype, max(PROBE_TOLERANCE.values()))


CLEAR_TIMES = 5.0
"""How many times more than kernels noise in an adapter must change logprobs, for its effect to be seen."""
TRIAL_TIMES, TRIAL_SHARE = 2.0, 0.25
"""What both sides may differ by then: times their usual difference, or this share of the change where that is more."""
NOISES = tuple(2.0**power for power in range(-16, 5, 2))
"""Standard deviations to try, in turn."""

Score = Callable[[Request, list[int]], list[float]]
"""(prompt, tokens that follow) -> the trainer's logprobs of these. Collective."""
Noisy = Callable[[float], AbstractContextManager[object]]
"""(standard deviation) -> the policy with such noise in all that is trained, for as long as it lasts."""


class VllmEngine:
    """`Engine` that asks a server. Ranks ask for their own completions; rank 0 sends weights."""

    phase: Phase = "wait for completions"

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
        """`timeout_s`: for a whole rollout. `probe`: the prompt of the sequence that both sides score; `sampling`: how
        its tokens are drawn.

        `has_seeds`: each request has a seed of its own; vLLM's CPU build (0.32) ends when it gets several. `sleeps`:
        between rollouts the server gives up its memory. `routing`: of a model whose completions shall say which experts
        their tokens went to. `reader`: of images, where the model sees. `noisy`: of an adapter, whose effect is tried
        before the first policy is sent.
        """
        self._server = server
        self._sync = sync
        self._score = score
        self._timeout_s = timeout_s
        self._probe_prompt = probe
        self._probe_sampling = Sampling(PROBE_TOKENS, sampling.temperature, banned=sampling.banned)
        self._must_see_mode = bool(sampling.top_p < 1 or sampling.top_k)
        """Of the server's logprobs: see `_see_mode`."""
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
        """What the server calls the published policy."""
        self._is_asleep: bool | None = None
        """Not known before it was asked: an earlier start may have left it asleep."""
        self._calls = _Calls()

    @property
    def bytes_sent(self) -> int:
        """What the server was given to read of the published policy."""
        return self._sync.bytes_sent

    def publish(self, policy_version: int) -> None:
        """Send the weights as they are now, and see that they arrived. Collective.

        Raises: StoppedOnFinding (SF801, SF805) on all ranks.
        """
        if self._sleeps:  # what torch keeps for later is given back on every rank before the server takes its share
            self._ranks.run_or_raise_on_all(_give_back_cached_memory)
        self._ranks.broadcast_from_rank0(self._wake)
        if self._version == policy_version:
            return
        self._version = None  # until it is seen to work
        if self._noisy is not None:
            self._try_adapter(self._noisy)
            self._noisy = None
        self._model = self._sync.send(f"policy-{policy_version:08d}")
        if self._must_see_mode:
            self._ranks.broadcast_from_rank0(self._see_mode)
            self._must_see_mode = False
        self._probe()
        self._ranks.broadcast_from_rank0(self._sync.settle)
        self._version = policy_version

    def ask(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> Wait:
        """See `Engine`. The server works on them from now on, and has `timeout_s` for all of them."""
        assert self._version == policy_version
        model, deadline = self._model, time.monotonic() + self._timeout_s
        pictures = self._ranks.run_or_raise_on_all(lambda: self._pictures(requests))

        def complete(request: Request) -> Completion:
            shown = [pictures[image] for image in request.images]
            return self._complete(request, sampling, model, policy_version, deadline, shown)

        under_way = self._calls.start(complete, requests)

        def wait_for(seconds: float) -> list[Completion] | None:
            _, late = wait(under_way, None if seconds == inf else seconds)
            if self._ranks.sum([len(late)])[0]:
                return None
            made = self._ranks.run_or_raise_on_all(lambda: [one.result() for one in under_way], names_rank=False)
            self._ranks.broadcast_from_rank0(self._sleep)
            return made

        return wait_for

    def end(self) -> None:
        """The run is over: nothing more is asked for, and a server that goes on does not keep what is ours."""
        self._calls.drop()
        if self._ranks.is_first:
            with suppress(StoppedOnFinding):  # the run may be over because the server is gone
                self._wake()
            self._sync.end()

    def _pictures(self, requests: Sequence[Request]) -> dict[Image, str]:
        """The images of requests as data: addresses, scaled as training sees them."""
        wanted = {image: request.place for request in requests for image in request.images}
        if not wanted:
            return {}
        assert self._reader is not None
        return {
            image: "data:image/png;base64," + b64encode(self._reader.png(image, place)).decode()
            for image, place in wanted.items()
        }

    def _wake(self) -> None:
        if self._sleeps and self._is_asleep is not False:
            self._server.wake()
            self._is_asleep = False

    def _sleep(self) -> None:
        if self._sleeps:
            self._server.sleep()
            self._is_asleep = True

    def _try_adapter(self, noisy: Noisy) -> None:
        """See that the server applies adapters. Collective. Raises: StoppedOnFinding (SF805, SF801)."""
        request, clear = self._probe_prompt, CLEAR_TIMES * tolerance_of(self._dtype)
        tokens = [token for token in request.prompt[-PROBE_TOKENS:] if token not in self._probe_sampling.banned]
        without, change = self._score(request, tokens), 0.0
        for noise in NOISES:
            with noisy(noise):
                change = self._first_difference(self._score(request, tokens), without)
                if not change >= clear:
                    continue
                self._model = self._sync.send("trial")
                made, theirs = self._sequence()
                ours = self._score(request, made)
            clean = self._score(request, made)
            change = self._first_difference(ours, clean)
            if change >= clear:  # of the tokens that the server drew, too
                self._ranks.broadcast_from_rank0(partial(self._judge_trial, ours, theirs, clean))
                return

        def tell() -> None:
            raise self._server.stopped(
                "SF805",
                f"noise of {NOISES[-1]:g} in the adapter changes the trainer's own logprobs by {change:.3g}: nothing "
                "can show whether the server applies it",
            )

        self._ranks.broadcast_from_rank0(tell)

    def _judge_trial(self, ours: Sequence[float], theirs: Sequence[float], clean: Sequence[float]) -> None:
        change, tolerance = _mean_difference(ours, clean), tolerance_of(self._dtype)
        if _mean_difference(theirs, clean) <= min(2 * tolerance, change / 2):
            raise self._server.stopped(
                "SF805",
                f"the server does not apply the adapter: noise in it changes the trainer's logprobs by {change:.3g} on "
                f"average, and the server's are those without it ({_mean_difference(theirs, clean):.3g} apart)",
                model=self._model,
                change=float(f"{change:.4g}"),
            )
        note = f". The adapter had noise in it, which changes the trainer's by {change:.3g}"
        self._compare(ours, theirs, max(TRIAL_TIMES * tolerance, TRIAL_SHARE * change), note)

    def _probe(self) -> None:
        """Let both sides score a sequence that the server made. Collective. Raises: StoppedOnFinding (SF805, SF801)."""
        made, theirs = self._sequence()
        ours = self._score(self._probe_prompt, made)
        # Ranks' own numbers may differ in a rounding: those of the first count.
        self._ranks.broadcast_from_rank0(lambda: self._compare(ours, theirs, tolerance_of(self._dtype)))

    def _sequence(self) -> tuple[list[int], list[float]]:
        """Tokens that the server draws after the probe's prompt, and their logprobs. Collective."""

        def made() -> list[list[float]]:
            one = self._probed(self._probe_sampling)
            return [list(one.ids), one.logprobs]

        ids, logprobs = self._ranks.broadcast_from_rank0(made)
        return [int(token) for token in ids], logprobs

    def _see_mode(self) -> None:
        """See that the server tells logprobs of all tokens, not of those that top_p and top_k leave.

        Where they leave one token alone, the latter are all 0. Raises: StoppedOnFinding (SF805, SF801).
        """
        if not any(self._probed(replace(self._probe_sampling, top_k=1)).logprobs):
            raise self._server.stopped(
                "SF805",
                "the server's logprobs are those of the tokens that top_p and top_k leave: each is 0 where the "
                "likeliest alone is left. Start it with --logprobs-mode raw_logprobs",
            )

    def _probed(self, sampling: Sampling) -> Completion:
        """What the server answers the probe. On one rank. Raises: StoppedOnFinding (SF801, SF806)."""
        pictures = list(self._pictures([self._probe_prompt]).values())
        deadline = time.monotonic() + self._timeout_s
        return self._complete(self._probe_prompt, sampling, self._model, 0, deadline, pictures, is_probe=True)

    def _first_difference(self, some: Sequence[float], others: Sequence[float]) -> float:
        """The mean difference as rank 0 sees it, so that all ranks take the same way. Collective."""
        return float(self._ranks.broadcast_from_rank0(partial(_mean_difference, some, others)))

    def _compare(self, ours: Sequence[float], theirs: Sequence[float], tolerance: float, note: str = "") -> None:
        mean = _mean_difference(ours, theirs)
        largest = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
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

    def _complete(
        self,
        request: Request,
        sampling: Sampling,
        model: str,
        policy_version: int,
        deadline: float,
        pictures: Sequence[str],
        *,
        is_probe: bool = False,
    ) -> Completion:
        """Raises: StoppedOnFinding (SF801, SF806)."""
        call = call_for(
            request,
            sampling,
            model,
            pictures=pictures,
            image_token=self._reader.settings.token_id if self._reader is not None else None,
            has_seed=self._has_seeds,
            ignores_ends=is_probe,
        )
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise self._server.stopped(
                "SF801",
                f"the {self._timeout_s:.0f} s of rollout_timeout_s were over before the last completions were asked "
                f"for: {MOST_AT_ONCE} are under way at a time",
            )
        answer = self._answer(call, deadline, request.place)
        try:
            layers = None if is_probe else self._routing
            return completion_of(answer, request, sampling, model, policy_version, self._vocab_size, layers)
        except ValueError as error:
            raise self._server.stopped("SF806", str(error), model=model) from error

    def _answer(self, call: Call, deadline: float, place: str) -> dict[str, Any]:
        """Asks again where a request was not taken: the same question has the same answer. Raises: StoppedOnFinding."""
        for pause_s in (*PAUSES_S, None):
            try:
                return self._server.post(call.path, call.body, max(deadline - time.monotonic(), 0.0))
            except ServerFailed as error:
                has_time = pause_s is not None and time.monotonic() + pause_s < deadline
                if not error.may_pass or not has_time or not self._server.is_there:
                    raise self._server.stopped(
                        "SF801",
                        f"a completion is missing: {error}",
                        prompt=place,
                        waited_s=round(self._timeout_s - (deadline - time.monotonic()), 1),
                    ) from error
                time.sleep(pause_s or 0.0)
        raise AssertionError("the last try answers or raises")


def _mean_difference(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(abs(one - other) for one, other in zip(some, others, strict=True)) / len(some)


def _give_back_cached_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Calls:
    """Requests under way, in threads that a run which ends does not wait for."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Completion], Future[Completion]]] = SimpleQueue()

    def start(self, work: Callable[[Request], Completion], requests: Sequence[Request]) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = []
        for request in requests:
            futures.append(Future())
            self._waiting.put((lambda request=request: work(request), futures[-1]))  # type: ignore[misc]
        for _ in range(min(MOST_AT_ONCE, len(requests))):
            Thread(target=self._work, daemon=True).start()
        return futures

    def drop(self) -> None:
        """Begin no further one."""
        try:
            while True:
                self._waiting.get_nowait()[1].cancel()
        except Empty:
            return

    def _work(self) -> None:
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
                if not future.done():  # the thread's own trace is printed; whoever waits must not wait for ever
                    future.set_exception(
                        SurefootError("a request to the server ended in the error that is printed above")
                    )
