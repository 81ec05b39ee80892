"""A client of the evidence servers of this machine's ranks: sends requests and waits a few seconds for responses."""

import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.evidence import answer_to
from surefoot.diagnostics.monitor.evidence_server import FLIGHT, OBJECTS, flight_path, objects_path, request_path

WITHIN_S = {FLIGHT: 3.0, OBJECTS: 8.0}
"""Seconds to wait for responses, by request: a rank with millions of objects takes seconds to count them."""
PATHS = {FLIGHT: flight_path, OBJECTS: objects_path}


class Witnesses:
    """A client of the evidence servers of one run."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder

    def ask(self, what: str, ranks: Collection[int] = ()) -> str:
        """Request `FLIGHT` or `OBJECTS` from the given ranks, or from all ranks of this machine; return the request."""
        request = " ".join([secrets.token_hex(8), what, *map(str, ranks)])
        temporary = request_path(self._folder).with_suffix(".tmp")
        temporary.write_text(request)
        os.replace(temporary, request_path(self._folder))
        return request

    def answers(self, request: str, ranks: Collection[int]) -> dict[int, Any]:
        """Return rank -> its response, for those of `ranks` that respond in time; empty if `request` is empty."""
        responses: dict[int, Any] = {}
        if not request:
            return responses
        kind = request.split()[1]
        deadline = time.monotonic() + WITHIN_S[kind]
        while len(responses) < len(ranks) and time.monotonic() < deadline:
            for number in set(ranks) - responses.keys():
                response = answer_to(request, PATHS[kind](self._folder, number))
                if response is not None:
                    responses[number] = response[kind]
            time.sleep(0.05)
        return responses
