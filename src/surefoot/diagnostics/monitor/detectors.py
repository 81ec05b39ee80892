"""Detectors of losses in a live run: growing memory, wasted time, wrong numbers, GPUs in trouble.

The rules are in `diagnostics.rules`. A detector collects the inputs of some rules every few seconds.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from surefoot.diagnostics.monitor import processes
from surefoot.diagnostics.monitor.evidence_client import EvidenceClient
from surefoot.diagnostics.monitor.evidence_server import FLIGHT
from surefoot.diagnostics.monitor.flight_recorder import FlightRecord, read_flight
from surefoot.diagnostics.monitor.gpus import GpuSampler, GpuSnapshot
from surefoot.diagnostics.monitor.leaks import LeakDetector
from surefoot.diagnostics.monitor.rank_state import (
    BUSY_OVER_S,
    USUAL_STEPS,
    WINDOW_S,
    RankState,
    SampleWindow,
    WatchedRun,
)
from surefoot.diagnostics.rules import accelerators, memory, speed, stragglers
from surefoot.findings import Finding
from surefoot.findings.reported import ReportedFindings
from surefoot.system import cgroup
from surefoot.system.kernel_log import KernelLog, gpu_errors
from surefoot.system.memory import memory_bytes, room_bytes

DETECT_EVERY_S = 5.0
COMPARE_EVERY_S = 45.0
"""Seconds between two comparisons of when the ranks entered their collectives.

Each comparison costs a rank some hundredths of a second.
"""
COMPARE_IDLE_EVERY_S = 15.0
"""The same interval while all ranks are idle: they are then as slow as their network, with steps of seconds, and 45 s
would be too long.
"""
CHILDREN_EVERY_S = 30.0
THROTTLED_OVER_S = 20.0
COMPUTING = ("forward", "backward", "optimizer", "forward_backward")
CAUSES_OF_WAITING = frozenset({"SF302", "SF304", "SF305", "SF306", "SF313"})
"""Codes of causes that also make ranks wait for each other."""
LONG_PHASES = frozenset({"launch", "load", "tokenize", "save", "evaluate", "export", "rollout"})


class Detector(Protocol):
    """Some rules, with the evidence that they need besides the events of the ranks."""

    def find(self, now_s: float) -> Iterable[Finding | None]:
        """Take new samples; return what the evidence shows now, whether it was reported before or not."""


class Detectors:
    """The detectors of one start of one run."""

    def __init__(self, run: WatchedRun, began_s: float) -> None:
        """Start to sample the GPUs and the kernel log."""
        self._reported = ReportedFindings(_make_report_key)
        """Each code is reported once, and each number of a GPU's errors."""
        client = EvidenceClient(run.folder)
        self._leaks = LeakDetector(client, run.ranks, run.num_here)
        self.gpus = GpuDetector(run, began_s)
        self._detectors: tuple[Detector, ...] = (
            SlowSteps(run, client, self._reported, began_s),
            RankDetector(run, began_s),
            self.gpus,
            Swapping(run),
        )
        self._timer = Timer(DETECT_EVERY_S, began_s)

    def end(self) -> None:
        """Stop sampling."""
        self.gpus.end()

    def find(self, now_s: float) -> list[Finding]:
        """Return the findings that were not reported yet; look for them only every few seconds."""
        if not self._timer.is_due(now_s):
            return []
        leaks = self._leaks.find()
        findings = [finding for detector in self._detectors for finding in detector.find(now_s) if finding is not None]
        return leaks + self._reported.select_new(findings)


class Timer:
    """A timer that is due every few seconds, and at once after the clock was set back."""

    def __init__(self, every_s: float, first_s: float) -> None:
        self._every_s, self._next_s = every_s, first_s

    def is_due(self, now_s: float) -> bool:
        if now_s < self._next_s <= now_s + self._every_s:
            return False
        self._next_s = now_s + self._every_s
        return True


class SlowSteps:
    """Causes of slow steps: in a rank's own phases, and in the times at which ranks enter shared collectives."""

    def __init__(self, run: WatchedRun, client: EvidenceClient, reported: ReportedFindings, began_s: float) -> None:
        self._run, self._client, self._reported = run, client, reported
        self._compared_s = began_s
        """Time of the last comparison of the ranks' collectives."""
        self._core_waits = SampleWindow[dict[int, float | None]](BUSY_OVER_S)
        """Rank -> seconds for which its threads have waited for a core so far."""
        self._throttled = SampleWindow[tuple[int, int]](THROTTLED_OVER_S)
        """The kernel's counts of periods in which the cgroup was throttled, and in which it ran."""

    def find(self, now_s: float) -> list[Finding]:
        waits_s = {number: processes.run_queue_wait_s(rank.process) for number, rank in self._run.ranks.items()}
        self._core_waits.add(now_s, waits_s)
        run = self._run
        times = {number: rank.times for number, rank in run.ranks.items() if not rank.has_ended}
        slow = [
            self._explain_data_wait(finding) if finding.code == "SF302" else finding
            for finding in speed.find_slow(times, self._measure_throttled_share(now_s), num_ranks=run.num_ranks)
        ]
        if any(finding.code in CAUSES_OF_WAITING for finding in slow) or not len(times) == run.num_ranks > 1:
            return slow
        idle = self._find_idle_ranks()
        is_idle = idle is not None and not self._reported.codes & {"SF303", "SF304", "SF313"}
        if len(run.steps_s) < USUAL_STEPS and not is_idle:
            return slow
        is_slowed = any(finding.code == "SF301" and finding not in self._reported for finding in slow)
        every_s = COMPARE_IDLE_EVERY_S if is_idle else COMPARE_EVERY_S
        if not is_slowed and now_s - self._compared_s < every_s:
            return slow
        self._compared_s = now_s
        straggler = self._find_straggler(idle)
        if straggler is None:
            return slow
        # The steps became slow because of it.
        self._reported.add([finding for finding in slow if finding.code == "SF301"])
        return [*(finding for finding in slow if finding.code != "SF301"), straggler]

    def _explain_data_wait(self, finding: Finding) -> Finding:
        """Return the finding that data are late with what the rank that it names does meanwhile."""
        if "rank" not in finding.evidence:  # several are late in turn
            return finding
        waits = self._run.ranks[finding.evidence["rank"]].data_waits
        return waits.explain(finding, is_own_run=self._run.is_own)

    def _find_straggler(self, idle: Finding | None) -> Finding | None:
        """Return a finding on the rank that the others wait for, if it is always the same rank, else `idle`."""
        flights = self._read_flights()
        if len(flights) < self._run.num_ranks:
            return None
        load = max(rank.expert_load for rank in self._run.ranks.values())
        in_line = {number: rank.times.newest.core_wait_share for number, rank in self._run.ranks.items()}
        straggler = stragglers.find_straggler(flights, are_idle=idle is not None, in_line=in_line)
        finding = stragglers.find_uneven_experts(flights, load) or straggler or idle
        if finding is None or finding.code != "SF303":
            return finding
        # The cause that makes that rank slow is reported soon.
        return None if speed.has_own_cause(self._run.ranks[finding.evidence["rank"]].times) else finding

    def _read_flights(self) -> dict[int, FlightRecord]:
        """Return rank -> its collectives; empty if they cannot be read."""
        try:
            responses = self._client.fetch(FLIGHT, self._run.ranks)
            records = {number: read_flight(flight) for number, flight in responses.items()}
        except (OSError, ValueError):  # a full disk, or another version of torch
            return {}
        return {number: record for number, record in records.items() if record is not None}

    def _find_idle_ranks(self) -> Finding | None:
        """Return a finding if all ranks are idle.

        A slow network or one sleeping rank causes this; `find_straggler` distinguishes the two.
        """
        if self._is_waiting_for_cores() or self._run.uses_gpus():
            return None  # other processes use the cores; a rank that waits for a device uses one core, or none
        times = {number: rank.times for number, rank in self._run.ranks.items()}
        return speed.find_idle_ranks(times, {number: rank.busy_cores for number, rank in self._run.ranks.items()})

    def _is_waiting_for_cores(self) -> bool:
        """Return whether a rank's threads waited for cores that other processes used; True if this is unknown."""
        before, after = self._core_waits[0][1], self._core_waits[-1][1]
        waits = [(before.get(number), after.get(number)) for number in self._run.ranks]
        span_s = self._core_waits.span_s
        return span_s <= 0 or any(
            before_s is None or after_s is None or after_s - before_s > speed.MOST_IN_LINE * span_s
            for before_s, after_s in waits
        )

    def _measure_throttled_share(self, now_s: float) -> float | None:
        """Return the share of the last kernel periods in which the cgroup exhausted its CPU quota; None if unknown."""
        counts = cgroup.throttled_periods()
        if counts is None:
            return None
        self._throttled.add(now_s, counts)
        throttled, periods = (after - before for before, after in zip(self._throttled[0][1], counts, strict=True))
        return throttled / periods if self._throttled.span_s >= THROTTLED_OVER_S and periods > 0 else None


class GpuDetector:
    """GPUs that work badly while the ranks train, and errors of GPUs in the kernel log."""

    def __init__(self, run: WatchedRun, began_s: float) -> None:
        self._run = run
        self._sampler = GpuSampler(run.folder, run.num_here)
        self._kernel_log = KernelLog()
        self._long_phase_s = began_s
        """Time at which a rank was last in a long phase, in which other ranks wait for it."""

    def end(self) -> None:
        """Stop sampling."""
        self._sampler.end()
        self._kernel_log.end()

    def snapshots(self) -> list[GpuSnapshot]:
        """Return the newest samples of the GPUs, whatever the ranks do."""
        return self._sampler.snapshots()

    def find(self, now_s: float) -> list[Finding | None]:
        snapshots = self._select_training_snapshots(now_s)
        return [
            *accelerators.find_in_gpus(snapshots),
            self._find_launch_bound(snapshots),
            *accelerators.find_worse_gpus(self._sampler.first, snapshots),
            *self._find_gpu_errors(),
        ]

    def _select_training_snapshots(self, now_s: float) -> list[GpuSnapshot]:
        """Return the samples of GPUs that ranks train on; none while a rank may save, evaluate or compile."""
        is_long = any(rank.phase in LONG_PHASES for rank in self._run.ranks.values())
        if is_long or len(self._run.steps_s) < USUAL_STEPS:
            self._long_phase_s = now_s
        if now_s - self._long_phase_s < WINDOW_S or not self._run.uses_gpus():
            return []
        return [snapshot for snapshot in self._sampler.snapshots() if snapshot.time_s > self._long_phase_s]

    def _find_launch_bound(self, snapshots: list[GpuSnapshot]) -> Finding | None:
        """Return a finding if the GPUs wait for kernel launches, judged by the rank whose process is busiest."""
        rank = max(self._run.ranks.values(), key=lambda state: state.busy_cores or 0.0, default=None)
        if rank is None or not snapshots or rank.offloads:  # then the device waits for copies and for the CPU's update
            return None
        window = rank.times.window
        computing = window.share(*COMPUTING) if window is not None else None
        return accelerators.find_launch_bound(snapshots, rank.busy_cores, computing)

    def _find_gpu_errors(self) -> list[Finding]:
        """Return the errors of GPUs that the run may use; none if no rank uses a GPU.

        A rollout server may use other GPUs than the ranks.
        """
        errors = [error for error in gpu_errors(self._kernel_log.read()) if self._sampler.may_use(error.device)]
        return accelerators.find_gpu_errors(errors, self._run.processes) if errors and self._run.uses_gpus() else []


class RankDetector:
    """Wrong numbers and growing memory of single ranks, and limits that their processes approach."""

    def __init__(self, run: WatchedRun, began_s: float) -> None:
        self._run = run
        self._children_timer = Timer(CHILDREN_EVERY_S, began_s)

    def find(self, now_s: float) -> Iterator[Finding | None]:
        ranks, num_here = self._run.ranks, self._run.num_here
        for rank in ranks.values():
            yield from rank.numbers.findings()
        for rank in ranks.values():
            yield from rank.device_memory.findings()
            on_device = rank.device_memory.room_bytes
            yield rank.peaks.finding(on_device if on_device is not None else room_bytes() / num_here)
        loads = {number: rank.load for number, rank in ranks.items() if rank.load is not None}
        if len(loads) == num_here:
            yield memory.find_replicated_load(loads, memory_bytes())
        is_due = self._children_timer.is_due(now_s)  # counting the pages of processes takes time
        for rank in ranks.values():
            yield from self._check_limits(rank)
            if is_due and rank.step:
                yield self._check_children(rank)

    def _check_limits(self, rank: RankState) -> Iterator[Finding | None]:
        """Yield findings on a rank's open files and threads that approach their limits."""
        files, threads = processes.count_open_files(rank.process), processes.count_threads(rank.process)
        if files is not None:
            rank.open_files.add(rank.step, files)
            most = processes.max_open_files(rank.process)
            yield rank.open_files.finding(files, most, "It") if most is not None else None
        if threads is not None:
            rank.threads.add(rank.step, threads)
            group = cgroup.tasks()
            yield rank.threads.finding(*group, "Its cgroup") if group is not None else None

    def _check_children(self, rank: RankState) -> Finding | None:
        """Return a finding if the memory of a rank's child processes grows."""
        children = processes.list_descendants(rank.process)
        rank.children.append((rank.step, sum(map(processes.proportional_bytes, children))))
        names, room = list(map(processes.name_of, children)), room_bytes() / self._run.num_here
        return memory.find_growing_helpers(rank.ring.rank, list(rank.children), names, room)


class Swapping:
    """Memory of the ranks that the machine reads back from swap, between two calls."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._before: tuple[float, int] | None = None
        """(time, bytes that the machine had read back from swap by then) at the last call."""
        self._major_faults = 0
        """Number of major page faults of the ranks at the last call."""

    def find(self, now_s: float) -> Iterator[Finding | None]:
        before, swapped_in = self._before, processes.swapped_in_bytes()
        self._before = (now_s, swapped_in) if swapped_in is not None else None
        if before is None or swapped_in is None or now_s - before[0] < DETECT_EVERY_S / 2:
            return
        took_s, swapped = now_s - before[0], sum(map(processes.swapped_bytes, self._run.processes))
        faults = sum(map(processes.count_major_faults, self._run.processes))
        faults_before, self._major_faults = self._major_faults, faults
        yield speed.find_swapping((swapped_in - before[1]) / took_s, swapped, (faults - faults_before) / took_s)


def _make_report_key(finding: Finding) -> str:
    names = ("device", "xid", "what", *(("rank",) if finding.code.startswith("SF20") else ()))
    which = (finding.evidence.get(name, "") for name in names)
    return f"{finding.code} {' '.join(map(str, which))}"
