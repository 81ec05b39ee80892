"""What the supervisor knows of one rank: what its ring said, and how its process was seen from outside."""

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
from surefoot.diagnostics.rules.speed import RankTimes

IDLE_SHARE = 0.1
"""Of a core: below it a process does nothing; waiting in gloo takes a few hundredths."""
IDLE_BYTES_PER_S = 1 << 16
"""Read and written: the same."""
WINDOW_S = 6.0
"""Over which both are judged."""
BUSY_OVER_S = 20.0


class RankState:
    """Of the present start of one rank."""

    def __init__(self, ring: RingReader) -> None:
        self.ring = ring
        self.memory = MemoryTrend(ring.rank)
        self.device_memory = DeviceMemory(ring.rank)
        self.peaks = Peaks(ring.rank)
        self.times = RankTimes()
        self.numbers = Numbers()
        self.last_s = 0.0
        """When it last said something."""
        self.step = 0
        self.open: list[str] = []
        """The phases it is in, the outer first."""
        self.took_a_step = False
        self.longest_step_s = 0.0
        """The first included."""
        self.longest_s: dict[str, float] = {}
        """Phase -> the longest time it took here so far."""
        self._began_s: list[float] = []
        self.has_ended = False
        self.offloads = False
        """Whether it keeps weights or the optimizer in host memory."""
        self.load: dict[str, float] | None = None
        """What its model took of host memory, where it said so."""
        self.expert_load = 1.0
        """Rows of the rank with the busiest experts over the mean one's."""
        self.open_files = LimitTrend(ring.rank, "open files")
        self.threads = LimitTrend(ring.rank, "threads")
        self.helpers: deque[tuple[int, float]] = deque(maxlen=MOST_STEPS)
        """(step, memory of the processes that it started)."""
        self.sample: ProcessSample = GONE
        self.samples: deque[tuple[float, ProcessSample]] = deque()
        """Of the last `WINDOW_S`, while it is silent."""
        self._said = 0
        self._cpu_s: deque[tuple[float, float]] = deque()
        """When, and what its process had used then, of the last `BUSY_OVER_S`."""

    @property
    def phase(self) -> str:
        return self.open[-1] if self.open else ""

    def read(self) -> list[float]:
        """What its ring says since the last time; returns the seconds of the steps it took, without the first."""
        steps = []
        for record in self.ring.records(self._said):
            self._said, self.last_s, self.step = record.number + 1, record.time_s, record.step or self.step
            kind = KINDS[record.kind]
            values = dict(zip(VALUE_NAMES.get(kind, ()), record.values, strict=False))
            self._tell(record, kind, values)
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

    def _tell(self, record: Record, kind: str, values: Mapping[str, float]) -> None:
        """Those who look for trends."""
        self.times.add(kind, PHASES[record.phase], record.step, record.time_s, values)
        self.numbers.add(kind, record.step, values)
        self.device_memory.add(kind, record.step, values)
        self.peaks.add(kind, record.step, values)
        if kind == "phase ended" and PHASES[record.phase] in ("save", "evaluate"):
            self.peaks.between()
        if kind in ("phase began", "phase ended"):
            self.memory.add(kind, PHASES[record.phase], record.step, values["anonymous_bytes"])

    def took(self, now_s: float, sample: ProcessSample, *, is_silent: bool) -> None:
        """Another sample; the window keeps only those of one silence, for only they are comparable."""
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
        """How many cores its own process used in the last `BUSY_OVER_S`; None before that."""
        if not self._cpu_s or self._cpu_s[-1][0] - self._cpu_s[0][0] < BUSY_OVER_S:
            return None
        (began_s, before), (ended_s, after) = self._cpu_s[0], self._cpu_s[-1]
        return (after - before) / (ended_s - began_s)

    @property
    def cpu_share(self) -> float:
        """Of a core, over the window, with the processes it started; 0 where there is no window."""
        return self._per_s(lambda sample: sample.cpu_s)

    @property
    def is_served(self) -> bool:
        """Whether processes that it started work: those that prepare its data."""
        mine = self.ring.process
        share = self._per_s(lambda sample: {process: s for process, s in sample.cpu_s.items() if process != mine})
        return share >= IDLE_SHARE

    @property
    def is_idle(self) -> bool:
        """Whether it did nothing for all of a window."""
        is_whole = bool(self.samples) and self.samples[-1][0] - self.samples[0][0] >= WINDOW_S
        return is_whole and not self.waits_for_disk and self.cpu_share < IDLE_SHARE and not self.moves_data

    @property
    def moves_data(self) -> bool:
        """Whether it reads or writes, over the window."""
        return self._per_s(lambda sample: sample.io_bytes) >= IDLE_BYTES_PER_S

    @property
    def waits_for_disk(self) -> bool:
        """Whether a thread of it was in uninterruptible sleep during the window."""
        return any(sample.waits_for_disk for _, sample in self.samples)

    @property
    def waited_for_disk(self) -> bool:
        """Whether one was in it through all of the window."""
        return len(self.samples) > 1 and all(sample.waits_for_disk for _, sample in self.samples)

    def _per_s(self, used: Callable[[ProcessSample], Mapping[int, float]]) -> float:
        if len(self.samples) < 2:
            return 0.0
        grown = sum(growth(used(before), used(after)) for (_, before), (_, after) in pairwise(self.samples))
        return grown / (self.samples[-1][0] - self.samples[0][0])
