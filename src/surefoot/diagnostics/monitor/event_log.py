"""The observer that writes a rank's events into its ring, and the reader that decodes them.

While the observer writes, an evidence server waits for the supervisor's requests.

The lists below are the file format: append a new kind or phase at the end.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import get_args

from surefoot.diagnostics.monitor.evidence_server import EvidenceServer
from surefoot.diagnostics.monitor.process_stats import GarbageTime, OwnMemory, TimeInLine
from surefoot.diagnostics.monitor.ring_buffer import Record, RingError, RingReader, RingWriter, Values
from surefoot.errors import StorageError
from surefoot.events import (
    BatchDescribed,
    CheckpointSaved,
    DeviceMemorySampled,
    Evaluated,
    Event,
    ExpertRanksUsed,
    ExpertsUsed,
    Heartbeat,
    LayerEntered,
    MemorySampled,
    ModelLoaded,
    Phase,
    PhaseBegan,
    PhaseEnded,
    RunEnded,
    RunStarted,
    StepEnded,
)  # fmt: skip

KINDS = (
    "phase began", "phase ended", "batch", "step", "evaluated", "checkpoint", "run started", "run ended", "preparing",
    "memory", "experts", "device memory", "learning rate", "images",
    "expert ranks", "model loaded",
)  # fmt: skip
PHASES: tuple[str, ...] = ("", *get_args(Phase))
VALUE_NAMES: dict[str, tuple[str, ...]] = {
    "phase began": ("anonymous_bytes",),
    "phase ended": ("anonymous_bytes",),
    "batch": ("tokens", "trained", "sequences", "fillers", "padding"),
    "images": ("images", "patches"),
    "step": ("loss", "grad_norm", "step_time_s", "peak_memory_bytes", "garbage_s"),
    "experts": ("layer", "share", "even_share", "silent", "rows"),
    "model loaded": ("whole", "kept", "peak"),
    "expert ranks": ("load", "ranks"),
    "device memory": ("allocated", "reserved", "inactive", "retries", "free"),
    "learning rate": ("learning_rate", "in_line_s"),
    "memory": ("frozen", "trained", "gradients", "optimizer", "total"),
    "evaluated": ("measured",),
    "checkpoint": ("save_time_s",),
    "run started": ("offloads",),
    "run ended": ("failed",),
}
"""Kind of a record -> the names of its values."""


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
        entries += [_decode_record(reader, start, record) for record in reader.records(since)]
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


def _decode_record(ring: RingReader, start: int, record: Record) -> Entry:
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
        self._in_line: TimeInLine | None = None
        """Waits of the training thread for a core."""
        self._has_ended = False

    def observe(self, event: Event) -> None:
        if self._has_ended:
            return
        if isinstance(event, LayerEntered):
            if self._ring is not None:
                self._ring.enter_layer(event.layer)
        elif isinstance(event, PhaseBegan | PhaseEnded):
            kind = "phase began" if isinstance(event, PhaseBegan) else "phase ended"
            if event.phase == "launch":
                self._launch_events.append((time.time(), kind))
                return
            self._write(kind, event.step, self._memory.anonymous_bytes(), phase=event.phase)
            if kind == "phase ended" and event.phase in BETWEEN_STEPS and self._in_line is not None:
                self._in_line.since_last_s()  # these waits belong to no step
            if self._ring is not None:
                self._ring.enter_layer(None)
        elif isinstance(event, BatchDescribed):
            batch_counts = (event.tokens, event.trained, event.sequences, event.fillers, event.padding)
            self._write("batch", event.step, *batch_counts)
            if event.images:
                self._write("images", event.step, event.images, event.patches)
        elif isinstance(event, MemorySampled):
            total = event.total if event.total is not None else self._memory.anonymous_bytes()
            self._write("memory", event.step, event.frozen, event.trained, event.gradients, event.optimizer, total)
        elif isinstance(event, DeviceMemorySampled):
            batch_counts = (event.allocated, event.reserved, event.inactive, event.retries, event.free)
            self._write("device memory", event.step, *batch_counts)
        elif isinstance(event, ExpertsUsed):
            spread = (event.layer, event.share, event.even_share, event.silent, event.rows)
            self._write("experts", event.step, *spread)
        elif isinstance(event, ExpertRanksUsed):
            self._write("expert ranks", event.step, event.load, event.ranks)
        elif isinstance(event, ModelLoaded):
            self._write("model loaded", 0, event.whole, event.kept, event.peak)
        elif isinstance(event, StepEnded):
            self._in_line = self._in_line or TimeInLine()
            self._write("learning rate", event.step, event.learning_rate, self._in_line.since_last_s())
            numbers = (event.loss, event.grad_norm, event.step_time_s, event.peak_memory_bytes)
            self._write("step", event.step, *numbers, self._garbage.since_last_s())
        elif isinstance(event, Evaluated):
            reward = event.metrics.get("eval_reward", nan)  # nan where no completion has one
            self._write("evaluated", event.step, event.metrics.get("eval_loss", reward))
        elif isinstance(event, CheckpointSaved):
            self._write("checkpoint", event.step, event.save_time_s)
        elif isinstance(event, Heartbeat):
            self._write("preparing", 0)
        elif isinstance(event, RunStarted):
            self._write("run started", event.first_step, float(event.config.get("offload") is not None))
        elif isinstance(event, RunEnded):
            self._write("run ended", 0, float(event.summary.get("status") == "failed"))
            self._end()

    def _write(self, kind: str, step: int, *values: float, phase: str = "") -> None:
        if self._ring is None:
            self._open()
        if self._ring is not None:
            padded: Values = (*values, *(0.0,) * (5 - len(values)))  # type: ignore[assignment]
            self._ring.write(time.time(), KINDS.index(kind), PHASES.index(phase), step, padded)

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
            logging.getLogger(__name__).warning("the run goes on without a record of its events: %s", error)
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._garbage.end()
        if self._in_line is not None:
            self._in_line.end()
            self._in_line = None
        if self._evidence_server is not None:
            self._evidence_server.end()
            self._evidence_server = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None
