"""Requests of completions to a vLLM server: many at a time, with a deadline."""

import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from surefoot.data.image_processor import PixelReader
from surefoot.data.images import Image
from surefoot.methods.rollout.engines.request_threads import MAX_CONCURRENT_REQUESTS, RequestThreads
from surefoot.methods.rollout.engines.server import Server, ServerFailed
from surefoot.methods.rollout.engines.vllm_protocol import Call, Policy, ServedModel, build_call, parse_completion
from surefoot.methods.rollout.types import Completion, Request, Sampling


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
        self.threads: RequestThreads[Completion] = RequestThreads()

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
        """Request completions.

        `images`: see `encode_images`. `deadline`: by `time.monotonic`.
        """
        return self.threads.start(
            [partial(self._complete, request, sampling, policy, images, deadline) for request in requests]
        )

    def complete_probe(self, request: Request, sampling: Sampling, policy_name: str) -> Completion:
        """Return a completion of full length, without experts. Raises: StoppedOnFinding (SF801, SF806)."""
        images, deadline = self.encode_images([request]), time.monotonic() + self.timeout_s
        return self._complete(request, sampling, Policy(policy_name, 0), images, deadline, is_probe=True)

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
        """Return the response. Raises: StoppedOnFinding (SF801)."""
        try:
            return self.server.post_with_retries(call.path, call.body, deadline)
        except ServerFailed as error:
            raise self.server.stopped(
                "SF801",
                f"a completion is missing: {error}",
                prompt=place,
                waited_s=round(self.timeout_s - (deadline - time.monotonic()), 1),
            ) from error
