"""The observer that writes a rank's events into its ring, and the reader that decodes them.

While the observer writes, an evidence server waits for the supervisor's requests.

The order of `VALUE_NAMES` and of the phases is the file format: append a new kind or phase at the end.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import nan
from pathlib import Path
from typing import get_args

from surefoot import events
from surefoot.diagnostics.monitor.evidence_server import EvidenceServer
from surefoot.diagnostics.monitor.process_stats import GarbageTime, OwnMemory, RunQueueWait
from surefoot.diagnostics.monitor.ring_buffer import Record, RingError, RingReader, RingWriter, Values
from surefoot.errors import StorageError
from surefoot.events import Event, Phase, PhaseBegan, PhaseEnded
from surefoot.system.json_files import MAX_SIZE

VALUES_PER_RECORD = 5


def _list_values(event: type[Event]) -> tuple[str, ...]:
    """Return the names of an event's values: its fields without the rank and the step."""
    return tuple(field.name for field in fields(event) if field.name not in ("rank", "step"))


VALUE_NAMES: dict[str, tuple[str, ...]] = {
    "phase began": ("anonymous_bytes",),
    "phase ended": ("anonymous_bytes",),
    "batch": _list_values(events.BatchDescribed)[:VALUES_PER_RECORD],
    "step": ("loss", "grad_norm", "step_time_s", "peak_memory_bytes", "garbage_s"),
    "evaluated": ("measured", "is_loss"),
    "checkpoint": ("save_time_s",),
    "run started": ("offloads",),
    "run ended": ("failed",),
    "preparing": (),
    "memory": _list_values(events.MemorySampled),
    "experts": _list_values(events.ExpertsUsed),
    "device memory": _list_values(events.DeviceMemorySampled),
    "learning rate": ("learning_rate", "in_line_s"),
    "images": _list_values(events.BatchDescribed)[VALUES_PER_RECORD:],
    "expert ranks": _list_values(events.ExpertRanksUsed),
    "model loaded": _list_values(events.ModelLoaded),
}
"""Kind of a record -> the names of its values: fields of the event, or measured by the recorder."""
KINDS = tuple(VALUE_NAMES)
PHASES: tuple[str, ...] = ("", *get_args(Phase))
LAST_TIME_S = 1e11
"""Seconds since 1970 beyond which a record is damaged."""


KEPT_STARTS = 5
"""Number of starts of one rank whose rings are kept; older rings are deleted."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One decoded record."""

    rank: int
    start: int
    """Number of this start of the rank; later starts have greater numbers."""
    process: int
    time_s: float
    kind: str
    phase: str
    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class History:
    """The decoded rings of a run."""

    entries: list[Entry]
    """Records of all ranks and starts, oldest first."""
    unreadable: list[str]
    """Rings that could not be read, each with the reason."""
    away: frozenset[tuple[int, int]] = frozenset()
    """(rank, start) of each process of another machine."""


def read_history(run_folder: Path, newest: int | None = None) -> History:
    """Read the rings of a run, during or after it; only the `newest` records of each ring, if that is set."""
    entries, unreadable, away = [], [], set()
    for path in sorted((run_folder / "events").glob("rank-*.ring")):
        try:
            reader = RingReader(path)
        except RingError as error:
            unreadable.append(str(error))
            continue
        since = max(0, reader.count - newest) if newest else 0
        start = int(path.stem.rpartition("-")[2])  # not its process number: in containers these repeat
        decoded = [decode_record(reader, start, record) for record in reader.records(since)]
        entries += [entry for entry in decoded if entry is not None]
        if None in decoded:
            unreadable.append(f"{path}: {decoded.count(None)} of {len(decoded)} records are damaged")
        if not reader.is_of_this_machine:
            away.add((reader.rank, start))
        reader.close()
    return History(sorted(entries, key=lambda entry: entry.time_s), unreadable, frozenset(away))


def newest_starts(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of each rank since it was last started."""
    newest: dict[int, int] = {}
    for entry in entries:
        newest[entry.rank] = max(newest.get(entry.rank, 0), entry.start)
    return [entry for entry in entries if entry.start == newest[entry.rank]]


def last_start(entries: Sequence[Entry], rank: int) -> list[Entry]:
    """Return the entries of one rank since it was last started, oldest first."""
    return newest_starts([entry for entry in entries if entry.rank == rank])


def this_run(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without earlier runs in the folder: drop a rank's starts before its last one at step 1."""
    last_begun: dict[int, int] = {}
    for entry in entries:
        if entry.kind == "run started" and entry.step == 1:
            last_begun[entry.rank] = max(last_begun.get(entry.rank, 0), entry.start)
    return [entry for entry in entries if entry.start >= last_begun.get(entry.rank, 0)]


def open_phases(entries: Sequence[Entry]) -> list[str]:
    """Return the phases that began and have not ended, outermost first. `entries` belong to one start of one rank."""
    phases: list[str] = []
    for entry in entries:
        if entry.kind == "phase began":
            phases.append(entry.phase)
        elif entry.kind == "phase ended" and phases:
            phases.pop()
    return phases


def decode_record(ring: RingReader, start: int, record: Record) -> Entry | None:
    """Return a record of a ring with names for its numbers, or None for a damaged record.

    `start`: number of this start of the rank.
    """
    is_named = 0 <= record.kind < len(KINDS) and 0 <= record.phase < len(PHASES)
    if not (is_named and 0 <= record.time_s < LAST_TIME_S and 0 <= record.step < MAX_SIZE):
        return None
    kind = KINDS[record.kind]
    values = dict(zip(VALUE_NAMES.get(kind, ()), record.values, strict=False))
    return Entry(ring.rank, start, ring.process, record.time_s, kind, PHASES[record.phase], record.step, values)


BETWEEN_STEPS = ("evaluate", "save")
"""Phases whose waits for a core do not count for the step that ends after them."""


class Recorder:
    """An observer that writes the events of one rank to a ring, a new one for each start.

    An event costs microseconds and the run is not changed. If the ring cannot be written, the run continues without it
    after a warning.
    """

    def __init__(self, run_folder: Path, rank: int) -> None:
        self._folder, self._rank = run_folder / "events", rank
        self._ring: RingWriter | None = None
        """The ring; the first event after the launch opens it, because this process then holds the run folder."""
        self._launch_events: list[tuple[float, str]] = []
        """(time, kind) of the launch's beginning and end."""
        self._evidence_server: EvidenceServer | None = None
        self._memory = OwnMemory()
        self._garbage = GarbageTime()
        self._core_wait: RunQueueWait | None = None
        """Waits of the training thread for a core."""
        self._has_ended = False

    def observe(self, event: Event) -> None:
        if self._has_ended:
            return
        match event:
            case events.LayerEntered():
                if self._ring is not None:
                    self._ring.enter_layer(event.layer)
            case PhaseBegan() | PhaseEnded():
                self._observe_phase(event)
            case events.BatchDescribed():
                self._write("batch", event)
                if event.images:
                    self._write("images", event)
            case events.MemorySampled():
                total = event.total if event.total is not None else self._memory.anonymous_bytes()
                self._write("memory", event, total=total)
            case events.DeviceMemorySampled():
                self._write("device memory", event)
            case events.ExpertsUsed():
                self._write("experts", event)
            case events.ExpertRanksUsed():
                self._write("expert ranks", event)
            case events.ModelLoaded():
                self._write("model loaded", event)
            case events.StepEnded():
                self._core_wait = self._core_wait or RunQueueWait()
                self._write("learning rate", event, in_line_s=self._core_wait.since_last_s())
                self._write("step", event, garbage_s=self._garbage.since_last_s())
            case events.Evaluated():
                reward = event.metrics.get("eval_reward", nan)  # nan where no completion has one
                is_loss = "eval_loss" in event.metrics
                self._write("evaluated", event, measured=event.metrics.get("eval_loss", reward), is_loss=is_loss)
            case events.CheckpointSaved():
                self._write("checkpoint", event)
            case events.Heartbeat():
                self._write("preparing", event)
            case events.RunStarted():
                self._write("run started", event, offloads=float(event.config.get("offload") is not None))
            case events.RunEnded():
                self._write("run ended", event, failed=float(event.summary.get("status") == "failed"))
                self._end()

    def _observe_phase(self, event: PhaseBegan | PhaseEnded) -> None:
        kind = "phase began" if isinstance(event, PhaseBegan) else "phase ended"
        if event.phase == "launch":
            self._launch_events.append((time.time(), kind))
            return
        self._write(kind, event, anonymous_bytes=self._memory.anonymous_bytes())
        if kind == "phase ended" and event.phase in BETWEEN_STEPS and self._core_wait is not None:
            self._core_wait.since_last_s()  # these waits belong to no step
        if self._ring is not None:
            self._ring.enter_layer(None)

    def _write(self, kind: str, event: Event, **measured: float) -> None:
        """Write the values of a kind: those that were `measured` here, and fields of the event."""
        if self._ring is None:
            self._open()
        if self._ring is not None:
            step = event.first_step if isinstance(event, events.RunStarted) else getattr(event, "step", 0)
            values = [measured[name] if name in measured else getattr(event, name) for name in VALUE_NAMES[kind]]
            padded: Values = (*values, *(0.0,) * (VALUES_PER_RECORD - len(values)))  # type: ignore[assignment]
            phase = PHASES.index(getattr(event, "phase", ""))
            self._ring.write(time.time(), KINDS.index(kind), phase, step, padded)

    def _open(self) -> None:
        name = f"rank-{self._rank:05d}"
        try:
            older = sorted(self._folder.glob(f"{name}-*.ring"))
            for path in older[: max(0, len(older) - KEPT_STARTS + 1)]:
                path.unlink()
            # The evidence server handles signals and comes first: the supervisor signals every process that has a ring.
            self._folder.mkdir(parents=True, exist_ok=True)
            self._evidence_server = EvidenceServer(self._folder.parent, self._rank)
            self._ring = RingWriter(self._folder / f"{name}-{time.time_ns()}.ring", self._rank)
            memory = self._memory.anonymous_bytes()
            for time_s, kind in self._launch_events:
                self._ring.write(time_s, KINDS.index(kind), PHASES.index("launch"), 0, (memory, 0.0, 0.0, 0.0, 0.0))
        except (StorageError, OSError) as error:
            logging.getLogger(__name__).warning("the run continues without a record of its events: %s", error)
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._garbage.end()
        self._core_wait = None
        if self._evidence_server is not None:
            self._evidence_server.end()
            self._evidence_server = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None
