"""Requests of completions to a vLLM server: many at a time, with retries and a deadline."""

import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from surefoot.data.image_processor import PixelReader
from surefoot.data.images import Image
from surefoot.errors import SurefootError
from surefoot.methods.rollout.engines.server import Server, ServerFailed
from surefoot.methods.rollout.engines.vllm_protocol import Call, Policy, ServedModel, build_call, parse_completion
from surefoot.methods.rollout.types import Completion, Request, Sampling

PAUSES_S = (0.5, 2.0, 5.0)
"""Seconds before each retry of a request that the server did not take."""
MAX_CONCURRENT_REQUESTS = 256
"""Largest number of requests in flight; the server batches them as it can."""


class CompletionClient:
    """Client of a vLLM server for completions."""

    def __init__(
        self, server: Server, model: ServedModel, *, timeout_s: float, reader: PixelReader | None = None
    ) -> None:
        """Create the client. `timeout_s`: for a whole rollout. `reader`: opens images; None for a model of text."""
        self.server = server
        self._model = model
        self.timeout_s = timeout_s
        self._reader = reader
        self._waiting: SimpleQueue[tuple[Callable[[], Completion], Future[Completion]]] = SimpleQueue()
        """Requests that are not in flight yet."""

    def encode_images(self, requests: Sequence[Request]) -> dict[Image, str]:
        """Return the images of requests as data: URLs, scaled as in training. Raises: DataError."""
        places = {image: request.place for request in requests for image in request.images}
        if not places:
            return {}
        assert self._reader is not None
        return {
            image: "data:image/png;base64," + b64encode(self._reader.png(image, place)).decode()
            for image, place in places.items()
        }

    def start(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        policy: Policy,
        images: Mapping[Image, str],
        deadline: float,
    ) -> list[Future[Completion]]:
        """Request completions in daemon threads: a run that ends does not wait for them.

        `images`: see `encode_images`. `deadline`: by `time.monotonic`.
        """
        futures: list[Future[Completion]] = []
        for request in requests:
            futures.append(Future())
            self._waiting.put((partial(self._complete, request, sampling, policy, images, deadline), futures[-1]))
        for _ in range(min(MAX_CONCURRENT_REQUESTS, len(requests))):
            Thread(target=self._run_requests, daemon=True).start()
        return futures

    def complete_probe(self, request: Request, sampling: Sampling, policy_name: str) -> Completion:
        """Return a completion of full length, without experts. Raises: StoppedOnFinding (SF801, SF806)."""
        images, deadline = self.encode_images([request]), time.monotonic() + self.timeout_s
        return self._complete(request, sampling, Policy(policy_name, 0), images, deadline, is_probe=True)

    def cancel_waiting(self) -> None:
        """Cancel the requests that are not in flight yet."""
        try:
            while True:
                self._waiting.get_nowait()[1].cancel()
        except Empty:
            return

    def _run_requests(self) -> None:
        while True:
            try:
                complete, future = self._waiting.get_nowait()
            except Empty:
                return
            try:
                future.set_result(complete())
            except SurefootError as error:
                future.set_exception(error)
            finally:
                if not future.done():  # the thread's own trace is printed; the waiting thread must not wait forever
                    future.set_exception(SurefootError("a request to the server failed with the error printed above"))

    def _complete(
        self,
        request: Request,
        sampling: Sampling,
        policy: Policy,
        images: Mapping[Image, str],
        deadline: float,
        *,
        is_probe: bool = False,
    ) -> Completion:
        """Request a completion and wait for it. Raises: StoppedOnFinding (SF801, SF806)."""
        image_urls = [images[image] for image in request.images]
        call = build_call(request, sampling, policy.name, self._model, image_urls, is_probe=is_probe)
        if time.monotonic() >= deadline:
            raise self.server.stopped(
                "SF801",
                f"the {self.timeout_s:.0f} s of rollout_timeout_s were over before the last completions were "
                f"requested: at most {MAX_CONCURRENT_REQUESTS} requests are in flight at a time",
            )
        response = self._post_with_retries(call, deadline, request.place)
        try:
            return parse_completion(response, request, sampling, policy, self._model, is_probe=is_probe)
        except ValueError as error:
            raise self.server.stopped("SF806", str(error), model=policy.name) from error

    def _post_with_retries(self, call: Call, deadline: float, place: str) -> dict[str, Any]:
        """Return the response. Retrying a request that was not taken changes no result. Raises: StoppedOnFinding."""
        for pause_s in (*PAUSES_S, None):
            try:
                return self.server.post(call.path, call.body, max(deadline - time.monotonic(), 0.0))
            except ServerFailed as error:
                has_time = pause_s is not None and time.monotonic() + pause_s < deadline
                if not error.may_pass or not has_time or not self.server.is_running:
                    raise self.server.stopped(
                        "SF801",
                        f"a completion is missing: {error}",
                        prompt=place,
                        waited_s=round(self.timeout_s - (deadline - time.monotonic()), 1),
                    ) from error
                time.sleep(pause_s or 0.0)
        raise AssertionError("the last attempt returns or raises")
