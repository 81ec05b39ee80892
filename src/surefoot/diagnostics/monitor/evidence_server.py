"""A thread inside each rank that gives evidence when the supervisor asks for it, also while the run is stalled.

    events/request-MACHINE             number of the request, what it requests and from which ranks (from all if
                                       none is named); written by the supervisor of this machine
    events/rank-00000.flight.json      {"request": ..., "flight": the dump of the Flight Recorder, or null}
    events/rank-00000.objects.json     {"request": ..., "objects": number of objects of each kind, and their holders}
    events/rank-00000.stacks           Python stacks of all threads at each signal, and at a crash

The thread responds only while Python can run; a missing response is evidence too. A signal handler in C writes the
stacks: it runs even while another thread holds the GIL.
"""

import ctypes
import faulthandler
import functools
import json
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.object_census import take_census
from surefoot.diagnostics.monitor.ring_buffer import this_machine

EVERY_S = 0.25
PR_SET_PTRACER = 0x59616D61
"""A constant of Linux. A kernel without Yama refuses it, which does no harm."""
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions that dump the Flight Recorders of gloo and of NCCL; builds without CUDA lack the second."""
STACKS = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""The signal that requests stacks: where real-time signals exist, one that users and schedulers do not use."""


FLIGHT, OBJECTS = "flight", "objects"
"""The kinds of evidence that can be requested."""


def request_path(run_folder: Path) -> Path:
    return run_folder / "events" / f"request-{this_machine().hex()[:8]}"


def response_path(run_folder: Path, rank: int, kind: str) -> Path:
    return run_folder / "events" / f"rank-{rank:05d}.{kind}.json"


def stacks_path(run_folder: Path, rank: int) -> Path:
    return run_folder / "events" / f"rank-{rank:05d}.stacks"


def read_stacks(run_folder: Path, rank: int, since: int = 0) -> str:
    """Return what was written to a rank's stacks from byte `since` on; nothing if the file cannot be read."""
    try:
        with open(stacks_path(run_folder, rank), encoding="utf-8", errors="replace") as file:
            file.seek(since)
            return file.read()
    except OSError:
        return ""


def record_collectives() -> None:
    """Switch the Flight Recorder on, before torch is loaded. Its cost is too small to measure.

    With NCCL it also notes when each collective starts on its GPU.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


class EvidenceServer:
    """A thread that responds to requests from its creation until `end`."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self._run_folder, self._rank = run_folder, rank
        self._stop = threading.Event()
        self._last_request = _read_request(run_folder)  # left by an earlier start
        _allow_ptrace()
        self._stacks = open(stacks_path(run_folder, rank), "w")  # noqa: SIM115 - the handlers write to it
        faulthandler.register(STACKS, self._stacks, all_threads=True)
        self._is_enabler = not faulthandler.is_enabled()
        if self._is_enabler:
            faulthandler.enable(self._stacks, all_threads=True)
        self._thread = threading.Thread(target=self._serve, name="evidence-server", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(2.0)  # it may be writing to a file system that does not answer
        # A signal that is still on its way must not end this process, as it would without a handler.
        faulthandler.register(STACKS, _open_devnull(), all_threads=True)
        if self._is_enabler:
            faulthandler.disable()
        self._stacks.close()

    def _serve(self) -> None:
        while not self._stop.wait(EVERY_S):
            request = _read_request(self._run_folder)
            if request and request != self._last_request:
                self._last_request = request
                with suppress(OSError):  # a full disk: the supervisor reports that there was no response
                    self._respond(request)

    def _respond(self, request: str) -> None:
        _, kind, *ranks = request.split()
        if ranks and str(self._rank) not in ranks:
            return
        evidence = {OBJECTS: _count_objects()} if kind == OBJECTS else _dump_flight()
        response = json.dumps({"request": request, **evidence})
        replace_text(response_path(self._run_folder, self._rank, kind), response)


def _allow_ptrace() -> None:
    """Let a supervisor that is no ancestor take native stacks, where the kernel's Yama allows only ancestors."""
    with suppress(OSError, AttributeError):  # a system without prctl
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def _read_request(run_folder: Path) -> str:
    try:
        return request_path(run_folder).read_text()
    except OSError:
        return ""


@functools.cache
def _open_devnull() -> int:
    """Open /dev/null once, for stacks that nobody needs any more; return the file descriptor."""
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _dump_flight() -> dict[str, Any]:
    """Return the dump of the Flight Recorder, or null if torch has none.

    If the dump fails, the reason is returned too: torch's functions are private and may change. gloo and NCCL have
    separate recorders, and a group that uses both numbers their collectives separately.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = [dump for name in RECORDERS if (dump := getattr(c10d, name, None)) is not None]
    try:
        records = [json.loads(dump(includeCollectives=True)) for dump in dumps]
    except (RuntimeError, TypeError, ValueError) as error:
        return {"flight": None, "error": f"{type(error).__name__}: {error}"}
    entries: list[dict[str, Any]] = []
    for record in records:
        groups = {entry["process_group"][0] for entry in entries}
        for entry in record.get("entries", ()):
            name, *about = entry["process_group"]
            entries.append({**entry, "process_group": [f"{name} of NCCL" if name in groups else name, *about]})
    return {"flight": {**records[0], "entries": entries} if entries else records[0] if records else None}


def _count_objects() -> dict[str, Any] | None:
    """Return the census; null if it fails: whatever an object does when it is inspected, the server continues."""
    try:
        census = take_census()
    except Exception:
        logging.getLogger(__name__).warning("cannot count the Python objects of this process", exc_info=True)
        return None
    return asdict(census) if census is not None else None


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step. It need not survive lost power. Raises: OSError."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
