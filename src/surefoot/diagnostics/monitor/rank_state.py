"""The supervisor's state of one rank: the events of its ring, and samples of its process from outside."""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise

from surefoot.diagnostics.monitor.event_log import KINDS, PHASES, VALUE_NAMES
from surefoot.diagnostics.monitor.processes import GONE, ProcessSample, growth
from surefoot.diagnostics.monitor.ring_buffer import Record, RingReader
from surefoot.diagnostics.rules.device_memory import DeviceMemory
from surefoot.diagnostics.rules.leak_trend import MOST_STEPS
from surefoot.diagnostics.rules.limits import LimitTrend
from surefoot.diagnostics.rules.memory import MemoryTrend
from surefoot.diagnostics.rules.memory_spike import Peaks
from surefoot.diagnostics.rules.numerics import Numbers
from surefoot.diagnostics.rules.step_times import RankTimes

IDLE_SHARE = 0.1
"""Share of a core below which a process is idle; waiting in gloo takes a few hundredths."""
IDLE_BYTES_PER_S = 1 << 16
"""Bytes read and written per second below which a process is idle."""
WINDOW_S = 6.0
"""Seconds over which both are measured."""
BUSY_OVER_S = 20.0


class RankState:
    """The state of the present start of one rank."""

    def __init__(self, ring: RingReader) -> None:
        self.ring = ring
        self.memory = MemoryTrend(ring.rank)
        self.device_memory = DeviceMemory(ring.rank)
        self.peaks = Peaks(ring.rank)
        self.times = RankTimes()
        self.numbers = Numbers()
        self.last_s = 0.0
        """Time of its newest event."""
        self.step = 0
        self.open: list[str] = []
        """Its current phases, outermost first."""
        self.took_a_step = False
        self.longest_step_s = 0.0
        """Duration of its longest step, including the first."""
        self.longest_s: dict[str, float] = {}
        """Phase -> its longest duration so far."""
        self._began_s: list[float] = []
        self.has_ended = False
        self.offloads = False
        """Whether it keeps weights or the optimizer state in host memory."""
        self.load: dict[str, float] | None = None
        """Host memory that its model took, if it reported it."""
        self.expert_load = 1.0
        """Rows of the rank with the busiest experts, relative to the mean rank."""
        self.open_files = LimitTrend(ring.rank, "open files")
        self.threads = LimitTrend(ring.rank, "threads")
        self.helpers: deque[tuple[int, float]] = deque(maxlen=MOST_STEPS)
        """(step, bytes of the processes that it started)."""
        self.sample: ProcessSample = GONE
        self.samples: deque[tuple[float, ProcessSample]] = deque()
        """(time, sample) of the last `WINDOW_S`, while it is silent."""
        self._next_record = 0
        self._cpu_s: deque[tuple[float, float]] = deque()
        """(time, CPU seconds that its process had used then) over the last `BUSY_OVER_S`."""

    @property
    def phase(self) -> str:
        return self.open[-1] if self.open else ""

    def read(self) -> list[float]:
        """Read the ring's new records; return the durations of the steps that ended, without the first."""
        steps = []
        for record in self.ring.records(self._next_record):
            self._next_record, self.last_s, self.step = record.number + 1, record.time_s, record.step or self.step
            kind = KINDS[record.kind]
            values = dict(zip(VALUE_NAMES.get(kind, ()), record.values, strict=False))
            self._update_trends(record, kind, values)
            if kind == "phase began":
                self.open.append(PHASES[record.phase])
                self._began_s.append(record.time_s)
            elif kind == "phase ended" and self.open:
                phase, took_s = self.open.pop(), record.time_s - self._began_s.pop()
                self.longest_s[phase] = max(took_s, self.longest_s.get(phase, 0.0))
            elif kind == "step":
                self.longest_step_s = max(self.longest_step_s, values["step_time_s"])
                if self.took_a_step:
                    steps.append(values["step_time_s"])
                self.took_a_step = True
            elif kind == "model loaded":
                self.load = values
            elif kind == "expert ranks":
                self.expert_load = values["load"]
            elif kind == "run started":
                self.offloads = bool(values["offloads"])
            elif kind == "run ended":
                self.has_ended = True
        return steps

    def _update_trends(self, record: Record, kind: str, values: Mapping[str, float]) -> None:
        """Pass a record to the trends."""
        self.times.add(kind, PHASES[record.phase], record.step, record.time_s, values)
        self.numbers.add(kind, record.step, values)
        self.device_memory.add(kind, record.step, values)
        self.peaks.add(kind, record.step, values)
        if kind == "phase ended" and PHASES[record.phase] in ("save", "evaluate"):
            self.peaks.between()
        if kind in ("phase began", "phase ended"):
            self.memory.add(kind, PHASES[record.phase], record.step, values["anonymous_bytes"])

    def took(self, now_s: float, sample: ProcessSample, *, is_silent: bool) -> None:
        """Add a sample. The window keeps only samples of one silence, because only they are comparable."""
        self.sample = sample
        self._cpu_s.append((now_s, sample.cpu_s.get(self.ring.process, 0.0)))
        while len(self._cpu_s) > 2 and now_s - self._cpu_s[1][0] >= BUSY_OVER_S:
            self._cpu_s.popleft()
        if not is_silent:
            self.samples.clear()
            return
        self.samples.append((now_s, sample))
        while len(self.samples) > 1 and now_s - self.samples[1][0] >= WINDOW_S:
            self.samples.popleft()

    @property
    def busy_cores(self) -> float | None:
        """Mean number of cores that its own process used in the last `BUSY_OVER_S`; None before that."""
        if not self._cpu_s or self._cpu_s[-1][0] - self._cpu_s[0][0] < BUSY_OVER_S:
            return None
        (began_s, before), (ended_s, after) = self._cpu_s[0], self._cpu_s[-1]
        return (after - before) / (ended_s - began_s)

    @property
    def cpu_share(self) -> float:
        """Share of a core over the window, including the processes it started; 0 without a window."""
        return self._measure_rate(lambda sample: sample.cpu_s)

    @property
    def is_served(self) -> bool:
        """Whether processes that it started, such as those that prepare its data, are busy."""
        own = self.ring.process
        share = self._measure_rate(lambda sample: {process: s for process, s in sample.cpu_s.items() if process != own})
        return share >= IDLE_SHARE

    @property
    def is_idle(self) -> bool:
        """Whether it was idle for a whole window."""
        is_full = bool(self.samples) and self.samples[-1][0] - self.samples[0][0] >= WINDOW_S
        return is_full and not self.waits_for_disk and self.cpu_share < IDLE_SHARE and not self.moves_data

    @property
    def moves_data(self) -> bool:
        """Whether it read or wrote data over the window."""
        return self._measure_rate(lambda sample: sample.io_bytes) >= IDLE_BYTES_PER_S

    @property
    def waits_for_disk(self) -> bool:
        """Whether a thread of it was in uninterruptible sleep during the window."""
        return any(sample.waits_for_disk for _, sample in self.samples)

    @property
    def waited_for_disk(self) -> bool:
        """Whether a thread was in uninterruptible sleep in every sample of the window."""
        return len(self.samples) > 1 and all(sample.waits_for_disk for _, sample in self.samples)

    def _measure_rate(self, used: Callable[[ProcessSample], Mapping[int, float]]) -> float:
        if len(self.samples) < 2:
            return 0.0
        grown = sum(growth(used(before), used(after)) for (_, before), (_, after) in pairwise(self.samples))
        return grown / (self.samples[-1][0] - self.samples[0][0])
