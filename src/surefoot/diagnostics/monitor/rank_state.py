"""The supervisor's state of one rank: the events of its ring, and samples of its process from outside."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from surefoot.diagnostics.monitor.event_log import decode_record
from surefoot.diagnostics.monitor.processes import EXITED, GONE, ProcessSample, growth, uses_gpus
from surefoot.diagnostics.monitor.rank_trends import RankTrends
from surefoot.diagnostics.monitor.ring_buffer import RingReader
from surefoot.diagnostics.rules.data_waits import DataWaits
from surefoot.diagnostics.rules.leak_trend import MOST_STEPS
from surefoot.diagnostics.rules.limits import LimitTrend

IDLE_SHARE = 0.1
"""Share of a core below which a process is idle; waiting in gloo takes a few hundredths."""
READY_SHARE = 0.5
"""Share of the samples of a window from which on a process that is ready to run is not idle."""
IDLE_BYTES_PER_S = 1 << 16
"""Bytes read and written per second below which a process is idle."""
WINDOW_S = 6.0
"""Seconds over which both are measured."""
BUSY_OVER_S = 20.0
USUAL_STEPS = 32

T = TypeVar("T")


class SampleWindow(deque[tuple[float, T]]):
    """(time, sample) over the last seconds, and the newest sample before them."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def add(self, time_s: float, sample: T) -> None:
        """Add a sample, and drop those that are too old."""
        self.append((time_s, sample))
        while len(self) > 2 and time_s - self[1][0] >= self._seconds:
            self.popleft()

    @property
    def span_s(self) -> float:
        """Seconds from the oldest sample to the newest."""
        return self[-1][0] - self[0][0] if self else 0.0


class RankState(RankTrends):
    """The state of the present start of one rank: its events, and samples of its process."""

    def __init__(self, ring: RingReader, start: int) -> None:
        super().__init__(ring.rank, with_numbers=ring.rank == 0)
        self.ring, self.process = ring, ring.process
        self._start = start
        self.last_s = 0.0
        """Time of its newest event."""
        self.step = 0
        self.open: list[tuple[str, float]] = []
        """Its current phases, outermost first, each with the time at which it began."""
        self.longest_step_s = 0.0
        """Duration of its longest step, including the first."""
        self.longest_save_s = 0.0
        self.has_ended = False
        self.offloads = False
        """Whether it keeps weights or the optimizer state in host memory."""
        self.load: dict[str, float] | None = None
        """Host memory that its model took, if it reported it."""
        self.expert_load = 1.0
        """Rows of the rank with the busiest experts, relative to the mean rank."""
        self.open_files = LimitTrend(ring.rank, "open files")
        self.threads = LimitTrend(ring.rank, "threads")
        self.children: deque[tuple[int, float]] = deque(maxlen=MOST_STEPS)
        """(step, bytes of the processes that it started)."""
        self.data_waits = DataWaits()
        self.sample: ProcessSample = GONE
        self.samples = SampleWindow[ProcessSample](WINDOW_S)
        """Samples of its process, while it is silent."""
        self._next_record = self._num_steps = 0
        self._cpu_s = SampleWindow[float](BUSY_OVER_S)
        """CPU seconds that its process had used."""

    @property
    def phase(self) -> str:
        return self.open[-1][0] if self.open else ""

    def read(self) -> list[float]:
        """Read the ring's new records; return the durations of the steps that ended, without the first."""
        steps = []
        for record in self.ring.records(self._next_record):
            self._next_record = record.number + 1
            entry = decode_record(self.ring, self._start, record)
            if entry is None:
                continue
            self.last_s, self.step = entry.time_s, entry.step or self.step
            self.observe(entry)
            values = entry.values
            if entry.kind == "phase began":
                self.open.append((entry.phase, entry.time_s))
            elif entry.kind == "phase ended" and self.open:
                phase, began_s = self.open.pop()
                if phase == "save":
                    self.longest_save_s = max(self.longest_save_s, entry.time_s - began_s)
            elif entry.kind == "step":
                if self._num_steps:
                    steps.append(values["step_time_s"])
                self._num_steps += 1
                self.longest_step_s = max(self.longest_step_s, values["step_time_s"])
            elif entry.kind == "model loaded":
                self.load = values
            elif entry.kind == "expert ranks":
                self.expert_load = values["load"]
            elif entry.kind == "run started":
                self.offloads = bool(values["offloads"])
            elif entry.kind == "run ended":
                self.has_ended = True
        return steps

    def add_sample(self, now_s: float, sample: ProcessSample, *, is_silent: bool) -> None:
        """Add a sample of its process. The window holds samples of one silence, because only they are comparable."""
        self.sample = sample
        if self.phase == "data_wait":
            self.data_waits.add(sample.state, sample.children, waits_for_disk=sample.waits_for_disk)
        self._cpu_s.add(now_s, sample.cpu_s.get(self.process, 0.0))
        if is_silent:
            self.samples.add(now_s, sample)
        else:
            self.samples.clear()

    @property
    def is_gone(self) -> bool:
        """Whether its process has exited."""
        return self.sample.state in EXITED

    @property
    def is_live(self) -> bool:
        """Whether its process exists and has not reported its end."""
        return not self.is_gone and not self.has_ended

    @property
    def busy_cores(self) -> float | None:
        """Mean number of cores that its own process used in the last `BUSY_OVER_S`; None before that."""
        span_s = self._cpu_s.span_s
        return (self._cpu_s[-1][1] - self._cpu_s[0][1]) / span_s if span_s >= BUSY_OVER_S else None

    @property
    def cpu_share(self) -> float:
        """Share of a core over the window, including the processes it started; 0 without a window."""
        return self._measure_rate(lambda sample: sample.cpu_s)

    @property
    def is_served(self) -> bool:
        """Whether processes that it started, such as those that prepare its data, are busy."""
        own = self.process
        share = self._measure_rate(lambda sample: {process: s for process, s in sample.cpu_s.items() if process != own})
        return share >= IDLE_SHARE

    @property
    def is_idle(self) -> bool:
        """Whether it was idle for a whole window. A process that is ready but gets no core is not."""
        if self.samples.span_s < WINDOW_S or any(sample.waits_for_disk for _, sample in self.samples):
            return False
        if sum(sample.state == "running" for _, sample in self.samples) > READY_SHARE * len(self.samples):
            return False
        return self.cpu_share < IDLE_SHARE and not self.moves_data

    @property
    def moves_data(self) -> bool:
        """Whether it read or wrote data over the window."""
        return self._measure_rate(lambda sample: sample.io_bytes) >= IDLE_BYTES_PER_S

    @property
    def waited_for_disk(self) -> bool:
        """Whether a thread was in uninterruptible sleep in every sample of the window."""
        return len(self.samples) > 1 and all(sample.waits_for_disk for _, sample in self.samples)

    def _measure_rate(self, used: Callable[[ProcessSample], Mapping[int, float]]) -> float:
        if len(self.samples) < 2:
            return 0.0
        grown = sum(growth(used(before), used(after)) for (_, before), (_, after) in pairwise(self.samples))
        return grown / self.samples.span_s


@dataclass(frozen=True)
class WatchedRun:
    """One start of a run, as its supervisor sees it."""

    folder: Path
    num_ranks: int
    num_elsewhere: int
    """Number of its ranks on other machines."""
    ranks: dict[int, RankState] = field(default_factory=dict)
    """The ranks of this machine that have begun."""
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_STEPS))
    """Durations of the newest steps, without the first."""

    @property
    def num_here(self) -> int:
        return self.num_ranks - self.num_elsewhere

    @property
    def processes(self) -> list[int]:
        return [rank.process for rank in self.ranks.values()]

    @property
    def is_own(self) -> bool:
        """Whether Surefoot trains it, and no other trainer that is watched."""
        return (self.folder / "run.yaml").is_file()

    def uses_gpus(self) -> bool:
        """Return whether a rank uses a GPU."""
        return any(uses_gpus(process) for process in self.processes)
