"""Inside a rank: gives evidence when the supervisor asks for it, from a thread, while the run may stand still.

    events/request-MACHINE             its number, what it asks for and of whom (of all, where that is missing);
                                       written by the supervisor of this machine
    events/rank-00000.flight.json      {"request": ..., "flight": the dump of the Flight Recorder, or null}
    events/rank-00000.objects.json     {"request": ..., "objects": how many there are of each kind, and where}
    events/rank-00000.stacks           Python stacks of all threads at each signal, and at a crash

The thread answers only while Python can run; that it does not is evidence too. The stacks are written by a signal
handler in C, which runs while another thread holds Python's lock.
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
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.object_census import take_census
from surefoot.diagnostics.monitor.ring_buffer import this_machine

EVERY_S = 0.25
PR_SET_PTRACER = 0x59616D61
"""Of Linux; refused, without harm, where there is no Yama."""
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""What dumps the Flight Recorder of gloo, and that of NCCL, which builds without CUDA do not have."""
STACKS = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""The signal that asks for stacks: one that users' own handlers and schedulers do not use, where there is one."""


FLIGHT, OBJECTS = "flight", "objects"
"""What a request may ask for."""


def request_path(run_folder: Path) -> Path:
    return run_folder / "events" / f"request-{this_machine().hex()[:8]}"


def flight_path(run_folder: Path, rank: int) -> Path:
    return run_folder / "events" / f"rank-{rank:05d}.flight.json"


def objects_path(run_folder: Path, rank: int) -> Path:
    return run_folder / "events" / f"rank-{rank:05d}.objects.json"


def stacks_path(run_folder: Path, rank: int) -> Path:
    return run_folder / "events" / f"rank-{rank:05d}.stacks"


def read_stacks(run_folder: Path, rank: int, since: int = 0) -> str:
    """What was written to a rank's stacks from byte `since` on; nothing where that cannot be read."""
    try:
        with open(stacks_path(run_folder, rank), encoding="utf-8", errors="replace") as file:
            file.seek(since)
            return file.read()
    except OSError:
        return ""


def record_collectives() -> None:
    """Ask for the Flight Recorder, before torch is loaded; it costs nothing that can be measured."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")


class EvidenceServer:
    """Answers from when it is made until `end`."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self._run_folder, self._rank = run_folder, rank
        self._is_over = threading.Event()
        self._answered = _asked(run_folder)  # left by an earlier start; read before anyone asks this one
        _allow_to_be_seen()
        self._stacks = open(stacks_path(run_folder, rank), "w")  # noqa: SIM115 - the handlers write to it
        faulthandler.register(STACKS, self._stacks, all_threads=True)
        self._is_enabler = not faulthandler.is_enabled()
        if self._is_enabler:
            faulthandler.enable(self._stacks, all_threads=True)
        self._thread = threading.Thread(target=self._answer, name="witness", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(2.0)  # it may be writing to a file system that does not answer
        # A signal that is still on its way must not end this process, as it would without a handler.
        faulthandler.register(STACKS, _nowhere(), all_threads=True)
        if self._is_enabler:
            faulthandler.disable()
        self._stacks.close()

    def _answer(self) -> None:
        while not self._is_over.wait(EVERY_S):
            asked = _asked(self._run_folder)
            if asked and asked != self._answered:
                self._answered = asked
                with suppress(OSError):  # a full disk: the supervisor says that there was no answer
                    self._say(asked)

    def _say(self, asked: str) -> None:
        _, what, *ranks = asked.split()
        if ranks and str(self._rank) not in ranks:
            return
        if what == OBJECTS:
            _write(objects_path(self._run_folder, self._rank), {"request": asked, "objects": _objects()})
        else:
            _write(flight_path(self._run_folder, self._rank), {"request": asked, **_flight()})


def _allow_to_be_seen() -> None:
    """Let a supervisor that is no ancestor take native stacks, where the kernel's Yama allows ancestors alone."""
    with suppress(OSError, AttributeError):  # a system without prctl
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def _asked(run_folder: Path) -> str:
    try:
        return request_path(run_folder).read_text()
    except OSError:
        return ""


@functools.cache
def _nowhere() -> int:
    """Where stacks go that no one asks for any more."""
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _flight() -> dict[str, Any]:
    """The dump; null where torch has none, with the reason where it fails: the functions are private and may change.

    gloo's collectives and NCCL's are in recorders of their own. A group that has both counts them apart.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = [dump for name in RECORDERS if (dump := getattr(c10d, name, None)) is not None]
    try:
        found = [json.loads(dump(includeCollectives=True)) for dump in dumps]
    except (RuntimeError, TypeError, ValueError) as error:
        return {"flight": None, "error": f"{type(error).__name__}: {error}"}
    entries: list[dict[str, Any]] = []
    for one in found:
        known = {entry["process_group"][0] for entry in entries}
        for entry in one.get("entries", ()):
            name, *about = entry["process_group"]
            entries.append({**entry, "process_group": [f"{name} of NCCL" if name in known else name, *about]})
    return {"flight": {**found[0], "entries": entries} if entries else found[0] if found else None}


def _objects() -> dict[str, Any] | None:
    """The census; null where it cannot be taken: whatever an object does when it is looked at, the witness goes on."""
    try:
        census = take_census()
    except Exception:
        logging.getLogger(__name__).warning("Python's objects could not be counted", exc_info=True)
        return None
    return census.as_dict() if census is not None else None


def _write(path: Path, value: dict[str, Any]) -> None:
    unseen = path.with_suffix(".tmp")
    unseen.write_text(json.dumps(value))
    os.replace(unseen, path)
