"""Watches a run from outside: reads the ranks' rings, samples their processes, and finds out why nothing goes on.

Silence is late when no rank has said anything for much longer than it usually takes here. What is usual comes from the
run's own history; before there is one, and in phases that are long and say little, a rank that computes, or reads and
writes, is not late. Imports no torch.
"""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from surefoot import cgroup
from surefoot.errors import StorageError
from surefoot.events import Phase
from surefoot.findings import Finding
from surefoot.health import evidence as kept
from surefoot.health.accelerators import Accelerators, Look
from surefoot.health.diagnose.accelerators import find_in_gpus, in_words
from surefoot.health.diagnose.memory import MemoryTrend
from surefoot.health.diagnose.numerics import Numbers
from surefoot.health.diagnose.speed import RankTimes, find_slow, find_straggler
from surefoot.health.diagnose.stall import find_stall
from surefoot.health.evidence import RankEvidence, StallEvidence
from surefoot.health.flight import read_flight
from surefoot.health.native import begin_native_stacks
from surefoot.health.processes import GONE, Processes, ProcessSample, growth, room_bytes, syscall_of, uses_gpus
from surefoot.health.recorder import KINDS, PHASES, VALUE_NAMES
from surefoot.health.ring import RingError, RingReader
from surefoot.health.witness import STACKS, flight_path, read_stacks, request_path, stacks_path

GONE_S = 60.0
"""How long a rank may be gone while the run goes on: ranks that are started again take their time."""
BLIND_S = 10.0
"""Between two looks: more, and this process itself was stopped, and knows nothing of that time."""
LEAST_S = 10.0
"""Silence that is never late."""
TIMES_USUAL, TIMES_LONGEST = 8.0, 2.0
"""Silence is late after so many times the median of the last steps, and the longest of them."""
IDLE_S = 12.0
"""How long a rank may do nothing at all in a phase that says little."""
STARTING_IDLE_S = 30.0
"""The same before the first step, where it may wait for a download."""
QUIET_PHASES = frozenset({"load", "tokenise", "save", "evaluate", "export", ""})
"""Phases in which a rank may be silent for long; a process between phases is loading Python or torch."""
LONG_PHASES = QUIET_PHASES - {""}
WHOLE_STEP = "forward and backward"
"""All that other trainers do in a training step."""
IDLE_SHARE = 0.1
"""Of a core: below it a process does nothing; waiting in gloo takes a few hundredths."""
IDLE_BYTES_PER_S = 1 << 16
"""Read and written: the same."""
WINDOW_S = 6.0
"""Over which both are judged."""
LONGEST_S = 600.0
"""Silence that is late in the first steps, even of ranks that compute; of ranks that wait for a disk, for processes
that work for them, or for other machines that load; before the first rank has begun, and after the last has ended."""
ANSWER_WITHIN_S = 3.0
TRENDS_EVERY_S = 5.0
MEETINGS_EVERY_S = 45.0
"""Between two looks at when the ranks came to their collectives; each costs a rank some hundredths of a second."""
THROTTLED_OVER_S = 20.0
USUAL_STEPS = 32


@dataclass
class _Rank:
    """What the supervisor knows of one rank of the present start."""

    ring: RingReader
    memory: MemoryTrend
    times: RankTimes = field(default_factory=RankTimes)
    numbers: Numbers = field(default_factory=Numbers)
    said: int = 0
    last_s: float = 0.0
    step: int = 0
    open: list[str] = field(default_factory=list)
    took_a_step: bool = False
    has_ended: bool = False
    sample: ProcessSample = GONE
    samples: deque[tuple[float, ProcessSample]] = field(default_factory=deque)
    """Of the last `WINDOW_S`, while it is silent."""

    @property
    def phase(self) -> str:
        return self.open[-1] if self.open else ""

    def took(self, now_s: float, sample: ProcessSample, *, is_silent: bool) -> None:
        """Another sample; only those of one silence are kept, for only they are comparable."""
        self.sample = sample
        if not is_silent:
            self.samples.clear()
            return
        self.samples.append((now_s, sample))
        while len(self.samples) > 1 and now_s - self.samples[1][0] >= WINDOW_S:
            self.samples.popleft()

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
        moved = self._per_s(lambda sample: sample.io_bytes)
        return is_whole and not self.waits_for_disk and self.cpu_share < IDLE_SHARE and moved < IDLE_BYTES_PER_S

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


class Supervisor:
    """Of one start of one run. `look` once a second or so; it returns what was found since."""

    def __init__(
        self,
        run_folder: Path,
        num_ranks: int,
        began_s: float,
        *,
        num_elsewhere: int = 0,
        gone_s: float = GONE_S,
        early_s: float = 0.0,
        deadlines_s: Mapping[Phase, float] | None = None,
    ) -> None:
        """`num_ranks` of the run, of which `num_elsewhere` are on other machines; a rank may be gone for `gone_s`.

        A rank that began so much as `early_s` before `began_s` belongs to the run if its process is there.
        `deadlines_s`: by phase, silence in it that is late whatever the rank does, in place of what is usual.
        """
        self._deadlines_s = deadlines_s or {}
        self._gone_s, self._early_s = gone_s, early_s
        self._folder, self._num_ranks, self._num_elsewhere = run_folder, num_ranks, num_elsewhere
        self._num_here = num_ranks - num_elsewhere
        self._began_s = began_s
        self._ranks: dict[int, _Rank] = {}
        self._rings: dict[int, Path] = {}
        self._processes = Processes()
        self._accelerators = Accelerators(run_folder, num_ranks - num_elsewhere)
        self._native_stacks = threading.Thread()
        """Writes them, once it is begun."""
        self._long_phase_s = began_s
        """When a rank was last seen in a long phase, where others wait for it."""
        self._last_s = began_s
        self._looked_s = time.time()
        self._steps: deque[float] = deque(maxlen=USUAL_STEPS)
        """Seconds of the newest steps, without the first."""
        self._leaking: set[int] = set()
        self._said: set[str] = set()
        """Codes of what was found in the run's times and numbers: each is said once."""
        self._throttled: deque[tuple[float, tuple[int, int]]] = deque()
        """When, and the kernel's counts then, of the last `THROTTLED_OVER_S`."""
        self._next_trends_s = began_s
        self._next_meeting_s = began_s + MEETINGS_EVERY_S
        self._oom_kills = cgroup.oom_kills()
        self.stalled_since_s: float | None = None
        """Since when the run stands still, if it does."""
        self.stood_s: float | None = None
        """How long it stood still, at the look after which it goes on again."""

    @property
    def limit_s(self) -> float:
        """Silence that is late in a step."""
        if len(self._steps) < 2:
            return float("inf")
        return max(LEAST_S, TIMES_USUAL * median(self._steps), TIMES_LONGEST * max(self._steps))

    @property
    def _given_s(self) -> float | None:
        """The deadline that a user gave for a phase in which a rank is now."""
        inside = {phase for rank in self._ranks.values() if not rank.has_ended for phase in rank.open}
        return min((s for phase, s in self._deadlines_s.items() if phase in inside), default=None)

    @property
    def was_memory_killed(self) -> bool | None:
        """Whether the kernel killed a process of the cgroup for memory since the start; None if that is not known."""
        before, now = self._oom_kills, cgroup.oom_kills()
        return now > before if before is not None and now is not None else None

    def gone(self) -> list[int]:
        """Ranks of this machine whose process is gone, and that had not said that they are through."""
        self._open_rings()
        for rank in self._ranks.values():
            self._read(rank)
        return [
            number
            for number, rank in sorted(self._ranks.items())
            if not rank.has_ended
            and self._processes.sample(rank.ring.process, with_children=False).state in ("gone", "zombie")
        ]

    def end(self) -> None:
        """Look no more."""
        self._accelerators.end()

    def look(self, now_s: float) -> list[Finding]:
        """Read what is new; a stall or a leak is returned once, when it is found."""
        if now_s - self._looked_s > BLIND_S:
            self._last_s = max(self._last_s, now_s)
        self._looked_s = now_s
        self._open_rings()
        for rank in self._ranks.values():
            self._read(rank)
        is_silent = now_s - self._last_s > LEAST_S / 2
        for rank in self._ranks.values():
            sample = self._processes.sample(rank.ring.process, with_children=is_silent)
            rank.took(now_s, sample, is_silent=is_silent)
        trends = self._trends(now_s)
        self.stood_s = None
        if not self._is_late(now_s):
            if self.stalled_since_s is not None:
                self.stood_s, self.stalled_since_s = now_s - self.stalled_since_s, None
            return trends
        if self.stalled_since_s is not None:
            return trends
        self.stalled_since_s = now_s
        return [*trends, self._diagnose(now_s)]

    def _trends(self, now_s: float) -> list[Finding]:
        """Leaks and losses of time that were not known; looked for every few seconds."""
        if now_s < self._next_trends_s:
            return []
        self._next_trends_s = now_s + TRENDS_EVERY_S
        found = []
        for number in self._ranks.keys() - self._leaking:
            finding = self._ranks[number].memory.finding(room_bytes() / self._num_here)
            if finding is not None:
                self._leaking.add(number)
                found.append(finding)
        times = {number: rank.times for number, rank in self._ranks.items() if not rank.has_ended}
        slow = find_slow(times, self._throttled_share(now_s), num_ranks=self._num_ranks)
        if not slow and len(times) == self._num_ranks > 1 and len(self._steps) == USUAL_STEPS:
            slow = self._stragglers(now_s)
        # These are the same on all ranks: the machine of the first one says them.
        numbers = self._ranks[0].numbers.findings() if 0 in self._ranks else []
        gpus = find_in_gpus(self._looks_at_gpus(now_s))
        new = [finding for finding in (*slow, *numbers, *gpus) if finding.code not in self._said]
        self._said.update(finding.code for finding in new)
        return found + new

    def _looks_at_gpus(self, now_s: float) -> list[Look]:
        """Those at GPUs that ranks train on; none while ranks may wait for one that saves, evaluates or compiles."""
        ranks = self._ranks.values()
        if len(self._steps) < USUAL_STEPS or any(rank.phase in LONG_PHASES for rank in ranks):
            self._long_phase_s = now_s
        if now_s - self._long_phase_s < WINDOW_S or not any(uses_gpus(rank.ring.process) for rank in ranks):
            return []
        return [look for look in self._accelerators.looks() if look[0] > self._long_phase_s]

    def _stragglers(self, now_s: float) -> list[Finding]:
        """The rank the others wait for, if it is always one; asked for now and then."""
        if now_s < self._next_meeting_s:
            return []
        self._next_meeting_s = now_s + MEETINGS_EVERY_S
        try:
            records = {number: read_flight(flight) for number, flight in self._answers(self._ask()).items()}
        except (OSError, ValueError):  # a full disk, or another version of torch: this cannot be told
            return []
        there = {number: record for number, record in records.items() if record is not None}
        finding = find_straggler(there) if len(there) == self._num_ranks else None
        return [finding] if finding is not None else []

    def _throttled_share(self, now_s: float) -> float | None:
        """Of the kernel's periods of the last seconds, those in which the cgroup had used up its share of the CPUs."""
        counts = cgroup.throttled_periods()
        if counts is None:
            return None
        self._throttled.append((now_s, counts))
        while len(self._throttled) > 2 and now_s - self._throttled[1][0] >= THROTTLED_OVER_S:
            self._throttled.popleft()
        throttled, periods = (after - before for before, after in zip(self._throttled[0][1], counts, strict=True))
        is_whole = now_s - self._throttled[0][0] >= THROTTLED_OVER_S
        return throttled / periods if is_whole and periods > 0 else None

    def _open_rings(self) -> None:
        """The newest ring of each rank that was begun since this start."""
        for path in sorted((self._folder / "events").glob("rank-*.ring")):
            _, number, begun_ns = path.stem.split("-")
            before_s = self._began_s - int(begun_ns) / 1e9
            if before_s > self._early_s or self._rings.get(int(number), Path()) >= path:
                continue
            with suppress(RingError):  # its header is being written
                ring = RingReader(path)
                if before_s > 0 and self._processes.sample(ring.process, with_children=False) == GONE:
                    continue  # of an earlier run
                self._rings[int(number)] = path
                self._ranks.pop(int(number), None)
                if ring.is_of_this_machine:
                    self._ranks[int(number)] = _Rank(ring, MemoryTrend(ring.rank))

    def _read(self, rank: _Rank) -> None:
        for record in rank.ring.records(rank.said):
            rank.said, rank.last_s, rank.step = record.number + 1, record.time_s, record.step or rank.step
            self._last_s = max(self._last_s, record.time_s)
            kind = KINDS[record.kind]
            values = dict(zip(VALUE_NAMES.get(kind, ()), record.values, strict=False))
            rank.times.add(kind, PHASES[record.phase], record.step, record.time_s, values)
            rank.numbers.add(kind, record.step, values)
            if kind in ("phase began", "phase ended"):
                rank.memory.add(kind, PHASES[record.phase], record.step, record.values[0])
            if kind == "phase began":
                rank.open.append(PHASES[record.phase])
            elif kind == "phase ended" and rank.open:
                rank.open.pop()
            elif kind == "step":
                if rank.took_a_step:
                    self._steps.append(record.values[2])
                rank.took_a_step = True
            elif kind == "run ended":
                rank.has_ended = True

    def _is_late(self, now_s: float) -> bool:
        going = [rank for rank in self._ranks.values() if not rank.has_ended]
        quiet_s = now_s - self._last_s
        if not going:  # no rank has begun, or none leaves
            return quiet_s > LONGEST_S
        if any(rank.sample.state in ("gone", "zombie") for rank in going):
            return quiet_s > self._gone_s  # whoever started it sees it first and says more, or starts it again
        if self._num_elsewhere and any(not rank.step for rank in going):
            return quiet_s > LONGEST_S  # they may wait for other machines, which load or prepare
        given_s = self._given_s
        if given_s is not None:
            return quiet_s > given_s
        if any(rank.is_served for rank in going if rank.phase == "wait for data"):
            return quiet_s > LONGEST_S
        quiet = [rank for rank in going if rank.phase in QUIET_PHASES]
        if quiet:  # the others wait for these, if at all
            patience_s = IDLE_S if all(rank.step for rank in quiet) else STARTING_IDLE_S
            is_stuck = any(rank.sample.waits_for_disk for rank in quiet) and quiet_s > LONGEST_S
            return is_stuck or (quiet_s > patience_s and all(rank.is_idle for rank in quiet))
        if len(self._steps) < 2:
            is_known = all(rank.phase != WHOLE_STEP for rank in going)  # it may wait for a server that generates
            return quiet_s > LONGEST_S or (is_known and quiet_s > IDLE_S and all(rank.is_idle for rank in going))
        return quiet_s > self.limit_s

    def _diagnose(self, now_s: float) -> Finding:
        evidence = self._collect(now_s)
        finding = find_stall(evidence)
        looks = self._accelerators.looks()
        if looks and any(uses_gpus(rank.ring.process) for rank in self._ranks.values()):
            finding.evidence["gpus"] = in_words(looks[-1])
        try:
            path = kept.keep(self._folder / "evidence", evidence)
            finding.evidence["evidence"] = str(path.relative_to(self._folder))
            there = {
                number: rank.ring.process
                for number, rank in sorted(self._ranks.items())
                if rank.sample.state not in ("gone", "zombie") and not rank.has_ended
            }
            native = path.with_name(path.stem.replace("stall", "native") + ".txt")
            if not self._native_stacks.is_alive():
                said, self._native_stacks = begin_native_stacks(native, there)
                finding.evidence["native_stacks"] = said
        except (StorageError, OSError) as error:  # the disk may be the cause
            finding.evidence["evidence"] = f"not kept: {error}"
        return finding

    def _collect(self, now_s: float) -> StallEvidence:
        """Ask every rank that is there for its flight record and its stacks."""
        syscalls = {number: syscall_of(rank.ring.process) for number, rank in self._ranks.items()}
        begins = {number: _size(stacks_path(self._folder, number)) for number in self._ranks}
        request = ""
        with suppress(OSError):  # a full disk: no flight records then
            request = self._ask()
        for rank in self._ranks.values():
            if rank.sample.state not in ("gone", "zombie") and not rank.has_ended:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.ring.process, STACKS)
        answers = self._answers(request)
        is_held = self._native_stacks.is_alive()  # by our own look at an earlier stall
        seen = [
            RankEvidence(
                rank=number,
                process=rank.ring.process,
                state="sleeping" if is_held and rank.sample.state == "tracing-stop" else rank.sample.state,
                has_ended=rank.has_ended,
                phase=rank.phase,
                step=rank.step,
                quiet_s=now_s - rank.last_s,
                cpu_share=rank.cpu_share,
                children=rank.sample.children,
                waits_for_disk=rank.waited_for_disk,
                answered=number in answers,
                flight=answers.get(number),
                syscall=syscalls[number],
                stacks=read_stacks(self._folder, number, begins[number]),
            )
            for number, rank in sorted(self._ranks.items())
        ]
        before, after = self._oom_kills, cgroup.oom_kills()
        return StallEvidence(
            time_s=now_s,
            quiet_s=now_s - self._last_s,
            limit_s=self._given_s or min(self.limit_s, 1e9),
            ranks=tuple(seen),
            num_ranks=self._num_ranks,
            oom_kills=after - before if before is not None and after is not None else None,
        )

    def _ask(self) -> str:
        """Ask the ranks of this machine for their flight records; returns the request's number."""
        request = secrets.token_hex(8)
        unseen = request_path(self._folder).with_suffix(".tmp")
        unseen.write_text(request)
        os.replace(unseen, request_path(self._folder))
        return request

    def _answers(self, request: str) -> dict[int, object]:
        """The flight records of those that answer soon."""
        answers: dict[int, object] = {}
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while len(answers) < len(self._ranks) and time.monotonic() < deadline:
            for number in self._ranks.keys() - answers.keys():
                answer = kept.answer_to(request, flight_path(self._folder, number))
                if answer is not None:
                    answers[number] = answer["flight"]
            time.sleep(0.05)
        return answers


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
