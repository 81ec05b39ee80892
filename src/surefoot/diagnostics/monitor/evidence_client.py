"""A client of the evidence servers of this machine's ranks: sends requests and waits a few seconds for responses."""

import json
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.evidence_server import FLIGHT, OBJECTS, replace_text, request_path, response_path

WITHIN_S = {FLIGHT: 3.0, OBJECTS: 8.0}
"""Seconds to wait for responses, by request: a rank with millions of objects takes seconds to count them."""


class EvidenceClient:
    """A client of the evidence servers of one run on this machine."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder

    def fetch(self, kind: str, ranks: Collection[int]) -> dict[int, Any]:
        """Request `FLIGHT` or `OBJECTS` from ranks; return rank -> its response, for those that respond in time.

        Raises: OSError if the request cannot be written.
        """
        return self.wait(self.request(kind, ranks), ranks)

    def request(self, kind: str, ranks: Collection[int] = ()) -> str:
        """Request `FLIGHT` or `OBJECTS` from ranks, or from all of this machine if none is given; return the request.

        Raises: OSError if it cannot be written.
        """
        request = " ".join([secrets.token_hex(8), kind, *map(str, ranks)])
        replace_text(request_path(self._folder), request)
        return request

    def wait(self, request: str, ranks: Collection[int]) -> dict[int, Any]:
        """Return rank -> its response, for those of `ranks` that respond in time; empty if `request` is empty."""
        responses: dict[int, Any] = {}
        if not request:
            return responses
        kind = request.split()[1]
        deadline = time.monotonic() + WITHIN_S[kind]
        while len(responses) < len(ranks) and time.monotonic() < deadline:
            for number in set(ranks) - responses.keys():
                with suppress(OSError, ValueError):  # it wrote nothing yet
                    response = json.loads(response_path(self._folder, number, kind).read_text("utf-8"))
                    if response.get("request") == request:  # not an older one
                        responses[number] = response[kind]
            time.sleep(0.05)
        return responses
