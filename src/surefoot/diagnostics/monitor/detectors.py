"""Detectors of losses in a live run: growing memory, wasted time, wrong numbers, GPUs in trouble.

The rules are in `diagnostics.rules`. This module gives them their inputs every few seconds and reports each finding
once.
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
"""Seconds between two comparisons of when the ranks entered their collectives.

Each comparison costs a rank some hundredths of a second.
"""
MEETINGS_OF_IDLE_S = 15.0
"""The same interval while all ranks are idle: they are then as slow as their network, with steps of seconds, and 45 s
would be too long.
"""
HELPERS_EVERY_S = 30.0
THROTTLED_OVER_S = 20.0
USUAL_STEPS = 32
COMPUTING = ("forward", "backward", "optimizer", "forward_backward")
EXPLAINED = frozenset({"SF302", "SF304", "SF305", "SF306", "SF313"})
"""Codes of causes that also make ranks wait for each other."""
LONG_PHASES = frozenset({"launch", "load", "tokenize", "save", "evaluate", "export", "rollout"})


class Detectors:
    """The detectors of one start of one run."""

    def __init__(
        self, run_folder: Path, ranks: Mapping[int, RankState], num_ranks: int, num_elsewhere: int, began_s: float
    ) -> None:
        """Start to sample the GPUs and the kernel log.

        `ranks`: the ranks of this machine; the caller adds them as they start. `num_elsewhere`: number of the run's
        ranks on other machines.
        """
        self._ranks, self._num_ranks, self._num_here = ranks, num_ranks, num_ranks - num_elsewhere
        self.steps_s: deque[float] = deque(maxlen=USUAL_STEPS)
        """Durations of the newest steps, without the first."""
        self._witnesses = Witnesses(run_folder)
        self._accelerators = Accelerators(run_folder, self._num_here)
        self._kernel_log = KernelLog()
        self._swapped_in: tuple[float, int] | None = None
        """(time, bytes that the machine had read back from swap by then) at the last poll."""
        self._major_faults = 0
        """Number of major page faults of the ranks at the last poll."""
        self._long_phase_s = began_s
        """Time at which a rank was last in a long phase, in which other ranks wait for it."""
        self._leaks = LeakDetector(self._witnesses, ranks, self._num_here)
        self._core_waits: deque[tuple[float, dict[int, float | None]]] = deque()
        """(time, rank -> seconds for which its threads had waited for a core by then) over the last `BUSY_OVER_S`."""
        self._reported: set[str] = set()
        """Keys of the findings reported so far: each code is reported once, and each number of a GPU's errors."""
        self._throttled: deque[tuple[float, tuple[int, int]]] = deque()
        """(time, the kernel's counts then) over the last `THROTTLED_OVER_S`."""
        self._next_s = began_s
        self._next_meeting_s = began_s + MEETINGS_EVERY_S
        self._next_helpers_s = began_s

    def end(self) -> None:
        """Stop sampling."""
        self._accelerators.end()
        self._kernel_log.end()

    def looks_at_gpus(self) -> list[Look]:
        """Return the newest samples of the GPUs, whatever the ranks do."""
        return self._accelerators.looks()

    def look(self, now_s: float) -> list[Finding]:
        """Return the findings that were not reported yet; look for them only every few seconds."""
        if now_s < self._next_s <= now_s + TRENDS_EVERY_S:  # later than that: the clock was set back
            return []
        self._next_s = now_s + TRENDS_EVERY_S
        leaks = self._leaks.look()
        self._sample_core_waits(now_s)
        times = {number: rank.times for number, rank in self._ranks.items() if not rank.has_ended}
        slow = find_slow(times, self._measure_throttled_share(now_s), num_ranks=self._num_ranks)
        is_slowed = any(finding.code == "SF301" and _make_report_key(finding) not in self._reported for finding in slow)
        is_explained = any(finding.code in EXPLAINED for finding in slow)
        is_reported = any(key.startswith(("SF303", "SF304", "SF313")) for key in self._reported)
        is_idle = not is_explained and not is_reported and self._find_idle_ranks() is not None
        if not is_explained and len(times) == self._num_ranks > 1 and (len(self.steps_s) == USUAL_STEPS or is_idle):
            since_s = now_s - self._next_meeting_s + MEETINGS_EVERY_S
            stragglers = self._find_stragglers(now_s, at_once=is_slowed or (is_idle and since_s >= MEETINGS_OF_IDLE_S))
            if stragglers:  # the steps became slow because of them
                self._reported.update(_make_report_key(finding) for finding in slow if finding.code == "SF301")
            slow = [finding for finding in slow if finding.code != "SF301" or not stragglers] + stragglers
        # These are the same on all ranks: the machine of rank 0 reports them.
        numbers = self._ranks[0].numbers.findings() if 0 in self._ranks else []
        looks = self._select_training_looks(now_s)
        worse = find_worse_gpus(self._accelerators.first, looks)
        gpus = [
            *find_in_gpus(looks),
            *self._find_launch_bound(looks),
            *worse,
            *find_gpu_errors(*self._read_gpu_errors()),
        ]
        memory = [finding for rank in self._ranks.values() for finding in self._check_device_memory(rank)]
        loads = {number: rank.load for number, rank in self._ranks.items() if rank.load is not None}
        replicated = find_replicated_load(loads, memory_bytes()) if len(loads) == self._num_here else None
        memory += [replicated] if replicated is not None else []
        is_due = not now_s < self._next_helpers_s <= now_s + HELPERS_EVERY_S
        self._next_helpers_s = now_s + HELPERS_EVERY_S if is_due else self._next_helpers_s
        for number, rank in self._ranks.items():
            memory += [*self._check_limits(rank), *(self._check_helpers(number, rank) if is_due else ())]
        findings = (*slow, *numbers, *gpus, *memory, *self._find_swapping(now_s))
        new = [finding for finding in findings if _make_report_key(finding) not in self._reported]
        self._reported.update(_make_report_key(finding) for finding in new)
        return leaks + new

    def _check_device_memory(self, rank: RankState) -> list[Finding]:
        on_device = rank.device_memory.room_bytes
        spike = rank.peaks.finding(on_device if on_device is not None else room_bytes() / self._num_here)
        return [*rank.device_memory.findings(), *([spike] if spike is not None else [])]

    def _check_limits(self, rank: RankState) -> list[Finding]:
        """Return findings on a rank's open files and threads that approach their limits."""
        process = rank.ring.process
        files, threads, findings = open_files(process), num_threads(process), []
        if files is not None:
            rank.open_files.add(rank.step, files)
            most = most_open_files(process)
            findings += [rank.open_files.finding(files, most, "It")] if most is not None else []
        if threads is not None:
            rank.threads.add(rank.step, threads)
            group = cgroup.tasks()
            findings += [rank.threads.finding(*group, "Its cgroup")] if group is not None else []
        return [finding for finding in findings if finding is not None]

    def _check_helpers(self, number: int, rank: RankState) -> list[Finding]:
        """Return a finding if the memory of a rank's child processes grows. Counting their pages takes time."""
        if not rank.step:
            return []
        helpers = started_by(rank.ring.process)
        rank.helpers.append((rank.step, sum(map(proportional_bytes, helpers))))
        room = room_bytes() / self._num_here
        finding = find_growing_helpers(number, list(rank.helpers), list(map(name_of, helpers)), room)
        return [finding] if finding is not None else []

    def _find_launch_bound(self, looks: list[Look]) -> list[Finding]:
        """Return a finding if the GPUs wait for kernel launches, judged by the rank whose process is busiest."""
        rank = max(self._ranks.values(), key=lambda state: state.busy_cores or 0.0, default=None)
        if rank is None or not looks or rank.offloads:  # then the device waits for copies and for the CPU's update
            return []
        finding = find_launch_bound(looks, rank.busy_cores, share_of_steps(rank.times, COMPUTING))
        return [finding] if finding is not None else []

    def _read_gpu_errors(self) -> tuple[list[GpuError], list[int]]:
        """Return (errors in the kernel log of GPUs that the run may use, the ranks' processes).

        There are no errors if no rank uses a GPU. A rollout server may use other GPUs than the ranks.
        """
        errors = [error for error in gpu_errors(self._kernel_log.read()) if self._accelerators.may_be(error.device)]
        processes = [rank.ring.process for rank in self._ranks.values()]
        return (errors if any(map(uses_gpus, processes)) else []), processes

    def _find_swapping(self, now_s: float) -> list[Finding]:
        """Return a finding if the machine reads much of the ranks' memory back from swap between two polls."""
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

    def _select_training_looks(self, now_s: float) -> list[Look]:
        """Return the samples of GPUs that ranks train on; none while a rank may save, evaluate or compile."""
        ranks = self._ranks.values()
        if len(self.steps_s) < USUAL_STEPS or any(rank.phase in LONG_PHASES for rank in ranks):
            self._long_phase_s = now_s
        if now_s - self._long_phase_s < WINDOW_S or not any(uses_gpus(rank.ring.process) for rank in ranks):
            return []
        return [look for look in self._accelerators.looks() if look[0] > self._long_phase_s]

    def _find_stragglers(self, now_s: float, *, at_once: bool) -> list[Finding]:
        """Return a finding on the rank that the others wait for, if it is always the same rank.

        Compares the ranks' flight records now and then, and before SF301 is reported.
        """
        if now_s < self._next_meeting_s and not at_once:
            return []
        self._next_meeting_s = now_s + MEETINGS_EVERY_S
        try:
            records = {
                number: read_flight(flight)
                for number, flight in self._witnesses.answers(self._witnesses.ask(FLIGHT), self._ranks).items()
            }
        except (OSError, ValueError):  # a full disk, or another version of torch: this cannot be decided
            return []
        present = {number: record for number, record in records.items() if record is not None}
        if len(present) < self._num_ranks:
            return []
        load = max(rank.expert_load for rank in self._ranks.values())
        idle = self._find_idle_ranks()
        in_line = {number: share_in_line(rank.times) for number, rank in self._ranks.items()}
        straggler = find_straggler(present, are_idle=idle is not None, in_line=in_line)
        finding = find_uneven_experts(present, load) or straggler or idle
        if finding is None or (finding.code == "SF303" and has_own_cause(self._ranks[finding.evidence["rank"]].times)):
            return []  # the cause that makes that rank slow is reported soon
        return [finding]

    def _find_idle_ranks(self) -> Finding | None:
        """Return a finding if all ranks are idle.

        A slow network or one sleeping rank causes this; `find_straggler` distinguishes the two.
        """
        if self._is_waiting_for_cores() or any(uses_gpus(rank.ring.process) for rank in self._ranks.values()):
            return None  # other processes use the cores; a rank that waits for a device uses one core, or none
        times = {number: rank.times for number, rank in self._ranks.items()}
        return find_idle_ranks(times, {number: rank.busy_cores for number, rank in self._ranks.items()})

    def _sample_core_waits(self, now_s: float) -> None:
        self._core_waits.append((now_s, {number: in_line_s(rank.ring.process) for number, rank in self._ranks.items()}))
        while len(self._core_waits) > 2 and now_s - self._core_waits[1][0] >= BUSY_OVER_S:
            self._core_waits.popleft()

    def _is_waiting_for_cores(self) -> bool:
        """Return whether a rank's threads waited for cores that other processes used; True if this is unknown."""
        (began_s, before), (ended_s, after) = self._core_waits[0], self._core_waits[-1]
        waits = [(before.get(number), after.get(number)) for number in self._ranks]
        return ended_s <= began_s or any(
            before_s is None or after_s is None or after_s - before_s > MOST_IN_LINE * (ended_s - began_s)
            for before_s, after_s in waits
        )

    def _measure_throttled_share(self, now_s: float) -> float | None:
        """Return the share of the last kernel periods in which the cgroup exhausted its CPU quota; None if unknown."""
        counts = cgroup.throttled_periods()
        if counts is None:
            return None
        self._throttled.append((now_s, counts))
        while len(self._throttled) > 2 and now_s - self._throttled[1][0] >= THROTTLED_OVER_S:
            self._throttled.popleft()
        throttled, periods = (after - before for before, after in zip(self._throttled[0][1], counts, strict=True))
        is_whole = now_s - self._throttled[0][0] >= THROTTLED_OVER_S
        return throttled / periods if is_whole and periods > 0 else None


def _make_report_key(finding: Finding) -> str:
    names = ("device", "xid", "what", *(("rank",) if finding.code.startswith("SF20") else ()))
    which = (finding.evidence.get(name, "") for name in names)
    return f"{finding.code} {' '.join(map(str, which))}"
