"""What a run loses while it goes on: memory that grows, time that is wasted, numbers that go wrong, GPUs in trouble.

The rules are in `diagnose`; here is what they are asked with, every few seconds, and that each thing is said once.
"""

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from surefoot.diagnostics.monitor.evidence_client import Witnesses
from surefoot.diagnostics.monitor.evidence_server import FLIGHT
from surefoot.diagnostics.monitor.flight_recorder import read_flight
from surefoot.diagnostics.monitor.gpus import Accelerators, Look
from surefoot.diagnostics.monitor.leaks import LeakDetector
from surefoot.diagnostics.monitor.processes import (
    in_line_s,
    major_faults,
    memory_bytes,
    most_open_files,
    name_of,
    num_threads,
    open_files,
    proportional_bytes,
    room_bytes,
    started_by,
    swapped_bytes,
    swapped_in_bytes,
    uses_gpus,
)
from surefoot.diagnostics.monitor.rank_state import BUSY_OVER_S, WINDOW_S, RankState
from surefoot.diagnostics.rules.accelerators import find_gpu_errors, find_in_gpus, find_launch_bound, find_worse_gpus
from surefoot.diagnostics.rules.memory import find_growing_helpers, find_replicated_load
from surefoot.diagnostics.rules.speed import (
    MOST_IN_LINE,
    find_idle_ranks,
    find_slow,
    find_straggler,
    find_swapping,
    find_uneven_experts,
    has_own_cause,
    share_in_line,
    share_of_steps,
)
from surefoot.findings import Finding
from surefoot.system import cgroup
from surefoot.system.kernel_log import GpuError, KernelLog, gpu_errors

TRENDS_EVERY_S = 5.0
MEETINGS_EVERY_S = 45.0
"""Between two looks at when the ranks came to their collectives; each costs a rank some hundredths of a second."""
MEETINGS_OF_IDLE_S = 15.0
"""The same while all ranks are idle, which are as slow as their network: with steps of seconds 45 would be too many."""
HELPERS_EVERY_S = 30.0
THROTTLED_OVER_S = 20.0
USUAL_STEPS = 32
COMPUTING = ("forward", "backward", "optimizer", "forward and backward")
EXPLAINED = frozenset({"SF302", "SF304", "SF305", "SF306", "SF313"})
"""Causes that make ranks wait for each other, too."""
LONG_PHASES = frozenset({"launch", "load", "tokenise", "save", "evaluate", "export", "rollout"})


class Detectors:
    """Of one start of one run."""

    def __init__(
        self, run_folder: Path, ranks: Mapping[int, RankState], num_ranks: int, num_elsewhere: int, began_s: float
    ) -> None:
        """`ranks`: those of this machine, as they become known; `num_elsewhere` of the run's are on other machines."""
        self._ranks, self._num_ranks, self._num_here = ranks, num_ranks, num_ranks - num_elsewhere
        self.steps_s: deque[float] = deque(maxlen=USUAL_STEPS)
        """Of the newest steps, without the first."""
        self._witnesses = Witnesses(run_folder)
        self._accelerators = Accelerators(run_folder, self._num_here)
        self._kernel_log = KernelLog()
        self._swapped_in: tuple[float, int] | None = None
        """When, and what the machine had read back from swap by then."""
        self._major_faults = 0
        """Of the ranks, by then."""
        self._long_phase_s = began_s
        """When a rank was last seen in a long phase, where others wait for it."""
        self._leaks = LeakDetector(self._witnesses, ranks, self._num_here)
        self._in_line: deque[tuple[float, dict[int, float | None]]] = deque()
        """When, and how long each rank's threads had waited for a core by then, of the last `BUSY_OVER_S`."""
        self._said: set[str] = set()
        """What was found in the run's times and numbers: each code is said once, and each number of a GPU's errors."""
        self._throttled: deque[tuple[float, tuple[int, int]]] = deque()
        """When, and the kernel's counts then, of the last `THROTTLED_OVER_S`."""
        self._next_s = began_s
        self._next_meeting_s = began_s + MEETINGS_EVERY_S
        self._next_helpers_s = began_s

    def end(self) -> None:
        """Look no more."""
        self._accelerators.end()
        self._kernel_log.end()

    def looks_at_gpus(self) -> list[Look]:
        """The newest ones, whatever the ranks do."""
        return self._accelerators.looks()

    def look(self, now_s: float) -> list[Finding]:
        """Leaks and losses of time that were not known; looked for every few seconds."""
        if now_s < self._next_s <= now_s + TRENDS_EVERY_S:  # later than that: the clock was set back
            return []
        self._next_s = now_s + TRENDS_EVERY_S
        found = self._leaks.look()
        self._count_waits_for_cores(now_s)
        times = {number: rank.times for number, rank in self._ranks.items() if not rank.has_ended}
        slow = find_slow(times, self._throttled_share(now_s), num_ranks=self._num_ranks)
        is_slowed = any(finding.code == "SF301" and _key(finding) not in self._said for finding in slow)
        is_known = any(finding.code in EXPLAINED for finding in slow)
        is_told = any(key.startswith(("SF303", "SF304", "SF313")) for key in self._said)
        is_idle = not is_known and not is_told and self._idle() is not None
        if not is_known and len(times) == self._num_ranks > 1 and (len(self.steps_s) == USUAL_STEPS or is_idle):
            since_s = now_s - self._next_meeting_s + MEETINGS_EVERY_S
            stragglers = self._stragglers(now_s, at_once=is_slowed or (is_idle and since_s >= MEETINGS_OF_IDLE_S))
            if stragglers:  # the steps became slow because of them
                self._said.update(_key(finding) for finding in slow if finding.code == "SF301")
            slow = [finding for finding in slow if finding.code != "SF301" or not stragglers] + stragglers
        # These are the same on all ranks: the machine of the first one says them.
        numbers = self._ranks[0].numbers.findings() if 0 in self._ranks else []
        looks = self._looks_at_gpus(now_s)
        worse = find_worse_gpus(self._accelerators.first, looks)
        gpus = [*find_in_gpus(looks), *self._launch_bound(looks), *worse, *find_gpu_errors(*self._gpu_errors())]
        memory = [finding for rank in self._ranks.values() for finding in self._device_memory(rank)]
        loads = {number: rank.load for number, rank in self._ranks.items() if rank.load is not None}
        replicated = find_replicated_load(loads, memory_bytes()) if len(loads) == self._num_here else None
        memory += [replicated] if replicated is not None else []
        is_due = not now_s < self._next_helpers_s <= now_s + HELPERS_EVERY_S
        self._next_helpers_s = now_s + HELPERS_EVERY_S if is_due else self._next_helpers_s
        for number, rank in self._ranks.items():
            memory += [*self._using_up(rank), *(self._helpers(number, rank) if is_due else ())]
        all_of_them = (*slow, *numbers, *gpus, *memory, *self._swapping(now_s))
        new = [finding for finding in all_of_them if _key(finding) not in self._said]
        self._said.update(_key(finding) for finding in new)
        return found + new

    def _device_memory(self, rank: RankState) -> list[Finding]:
        on_device = rank.device_memory.room_bytes
        spike = rank.peaks.finding(on_device if on_device is not None else room_bytes() / self._num_here)
        return [*rank.device_memory.findings(), *([spike] if spike is not None else [])]

    def _using_up(self, rank: RankState) -> list[Finding]:
        """What a rank has open, and its threads."""
        process = rank.ring.process
        files, threads, found = open_files(process), num_threads(process), []
        if files is not None:
            rank.open_files.add(rank.step, files)
            most = most_open_files(process)
            found += [rank.open_files.finding(files, most, "It")] if most is not None else []
        if threads is not None:
            rank.threads.add(rank.step, threads)
            group = cgroup.tasks()
            found += [rank.threads.finding(*group, "Its cgroup")] if group is not None else []
        return [finding for finding in found if finding is not None]

    def _helpers(self, number: int, rank: RankState) -> list[Finding]:
        """The processes that a rank started; to count their pages takes time."""
        if not rank.step:
            return []
        helpers = started_by(rank.ring.process)
        rank.helpers.append((rank.step, sum(map(proportional_bytes, helpers))))
        room = room_bytes() / self._num_here
        finding = find_growing_helpers(number, list(rank.helpers), list(map(name_of, helpers)), room)
        return [finding] if finding is not None else []

    def _launch_bound(self, looks: list[Look]) -> list[Finding]:
        """By the rank whose process is busiest."""
        rank = max(self._ranks.values(), key=lambda one: one.busy_cores or 0.0, default=None)
        if rank is None or not looks or rank.offloads:  # then the device waits for copies and for the CPU's update
            return []
        finding = find_launch_bound(looks, rank.busy_cores, share_of_steps(rank.times, COMPUTING))
        return [finding] if finding is not None else []

    def _gpu_errors(self) -> tuple[list[GpuError], list[int]]:
        """(what the kernel's log says of GPUs that the run may use, the ranks' processes); nothing where they use none.

        A server of rollouts may use others than the ranks.
        """
        errors = [one for one in gpu_errors(self._kernel_log.read()) if self._accelerators.may_be(one.device)]
        processes = [rank.ring.process for rank in self._ranks.values()]
        return (errors if any(map(uses_gpus, processes)) else []), processes

    def _swapping(self, now_s: float) -> list[Finding]:
        """Memory of the ranks that the machine reads back from swap, over the time between two looks."""
        before, now = self._swapped_in, swapped_in_bytes()
        self._swapped_in = (now_s, now) if now is not None else None
        if before is None or now is None or now_s - before[0] < TRENDS_EVERY_S / 2:
            return []
        processes = [rank.ring.process for rank in self._ranks.values()]
        swapped, faults = sum(map(swapped_bytes, processes)), sum(map(major_faults, processes))
        faults_before, self._major_faults = self._major_faults, faults
        took_s = now_s - before[0]
        finding = find_swapping((now - before[1]) / took_s, swapped, (faults - faults_before) / took_s)
        return [finding] if finding is not None else []

    def _looks_at_gpus(self, now_s: float) -> list[Look]:
        """Those at GPUs that ranks train on; none while ranks may wait for one that saves, evaluates or compiles."""
        ranks = self._ranks.values()
        if len(self.steps_s) < USUAL_STEPS or any(rank.phase in LONG_PHASES for rank in ranks):
            self._long_phase_s = now_s
        if now_s - self._long_phase_s < WINDOW_S or not any(uses_gpus(rank.ring.process) for rank in ranks):
            return []
        return [look for look in self._accelerators.looks() if look[0] > self._long_phase_s]

    def _stragglers(self, now_s: float, *, at_once: bool) -> list[Finding]:
        """The rank the others wait for, if it is always one; asked for now and then, or before SF301 is said."""
        if now_s < self._next_meeting_s and not at_once:
            return []
        self._next_meeting_s = now_s + MEETINGS_EVERY_S
        try:
            records = {
                number: read_flight(flight)
                for number, flight in self._witnesses.answers(self._witnesses.ask(FLIGHT), self._ranks).items()
            }
        except (OSError, ValueError):  # a full disk, or another version of torch: this cannot be told
            return []
        there = {number: record for number, record in records.items() if record is not None}
        if len(there) < self._num_ranks:
            return []
        load = max(rank.expert_load for rank in self._ranks.values())
        idle = self._idle()
        in_line = {number: share_in_line(rank.times) for number, rank in self._ranks.items()}
        straggler = find_straggler(there, are_idle=idle is not None, in_line=in_line)
        finding = find_uneven_experts(there, load) or straggler or idle
        if finding is None or (finding.code == "SF303" and has_own_cause(self._ranks[finding.evidence["rank"]].times)):
            return []  # what makes that rank slow is told soon
        return [finding]

    def _idle(self) -> Finding | None:
        """That all ranks are: of a slow network, or of one of them that sleeps, which `find_straggler` tells apart."""
        if self._are_in_line() or any(uses_gpus(rank.ring.process) for rank in self._ranks.values()):
            return None  # others have the cores; who waits for a device uses one, or none
        times = {number: rank.times for number, rank in self._ranks.items()}
        return find_idle_ranks(times, {number: rank.busy_cores for number, rank in self._ranks.items()})

    def _count_waits_for_cores(self, now_s: float) -> None:
        self._in_line.append((now_s, {number: in_line_s(rank.ring.process) for number, rank in self._ranks.items()}))
        while len(self._in_line) > 2 and now_s - self._in_line[1][0] >= BUSY_OVER_S:
            self._in_line.popleft()

    def _are_in_line(self) -> bool:
        """Whether a rank's threads waited for cores that others had; so it is where that cannot be known."""
        (began_s, before), (ended_s, after) = self._in_line[0], self._in_line[-1]
        waits = [(before.get(number), after.get(number)) for number in self._ranks]
        return ended_s <= began_s or any(
            one is None or other is None or other - one > MOST_IN_LINE * (ended_s - began_s) for one, other in waits
        )

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


def _key(finding: Finding) -> str:
    names = ("device", "xid", "what", *(("rank",) if finding.code.startswith("SF20") else ()))
    which = (finding.evidence.get(name, "") for name in names)
    return f"{finding.code} {' '.join(map(str, which))}"
