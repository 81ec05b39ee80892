"""Asks the witnesses of the ranks of this machine, from outside, and waits a little for what they say."""

import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.evidence import answer_to
from surefoot.diagnostics.monitor.evidence_server import FLIGHT, OBJECTS, flight_path, objects_path, request_path

WITHIN_S = {FLIGHT: 3.0, OBJECTS: 8.0}
"""A rank with millions of objects takes seconds to count them."""
PATHS = {FLIGHT: flight_path, OBJECTS: objects_path}


class Witnesses:
    """Of one run."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder

    def ask(self, what: str, ranks: Collection[int] = ()) -> str:
        """Ask the ranks of this machine, or these alone, for `FLIGHT` or `OBJECTS`; returns the request."""
        request = " ".join([secrets.token_hex(8), what, *map(str, ranks)])
        unseen = request_path(self._folder).with_suffix(".tmp")
        unseen.write_text(request)
        os.replace(unseen, request_path(self._folder))
        return request

    def answers(self, request: str, ranks: Collection[int]) -> dict[int, Any]:
        """What those of `ranks` say that answer soon; nothing where `request` is empty, as it could not be made."""
        answers: dict[int, Any] = {}
        if not request:
            return answers
        what = request.split()[1]
        deadline = time.monotonic() + WITHIN_S[what]
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            for number in set(ranks) - answers.keys():
                answer = answer_to(request, PATHS[what](self._folder, number))
                if answer is not None:
                    answers[number] = answer[what]
            time.sleep(0.05)
        return answers
