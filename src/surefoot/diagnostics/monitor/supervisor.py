"""The supervisor of a run: reads the ranks' rings, samples their processes, and diagnoses stalls from outside.

A run is stalled when no rank has recorded an event for much longer than usual. The usual time comes from the run's own
history. Before the run has a history, and in long phases with few events, a rank that computes, reads or writes is not
stalled. Imports no torch.
"""

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from surefoot.diagnostics.monitor.detectors import LONG_PHASES, Detectors
from surefoot.diagnostics.monitor.evidence import RankEvidence, StallEvidence, write_evidence
from surefoot.diagnostics.monitor.evidence_client import EvidenceClient
from surefoot.diagnostics.monitor.evidence_server import FLIGHT, STACKS, read_stacks, stacks_path
from surefoot.diagnostics.monitor.flight_recorder import read_flight
from surefoot.diagnostics.monitor.native_stacks import begin_native_stacks
from surefoot.diagnostics.monitor.processes import EXITED, GONE, Processes, syscall_of
from surefoot.diagnostics.monitor.rank_state import RankState, WatchedRun
from surefoot.diagnostics.monitor.ring_buffer import RingError, RingReader
from surefoot.diagnostics.rules.accelerators import in_words
from surefoot.diagnostics.rules.stall import find_stall
from surefoot.errors import StorageError
from surefoot.events import Phase
from surefoot.findings import Finding
from surefoot.system import cgroup

GONE_S = 60.0
"""Seconds that a rank may be gone while the run continues: a restarted rank takes time."""
BLIND_S = 10.0
"""Longest gap between two polls; after a longer one this process was paused itself, and silence is counted anew."""
LEAST_S = 10.0
"""Seconds of silence that never count as a stall."""
TIMES_USUAL, TIMES_LONGEST = 8.0, 2.0
"""Silence is a stall after this multiple of the median of the last steps, and of the longest of them."""
IDLE_S = 12.0
"""Seconds for which a rank may be idle in a phase with few events."""
STARTING_IDLE_S = 30.0
"""Seconds for which a rank may be idle in such a phase before the first step, when it may wait for a download."""
BOUNDED_PHASES = frozenset({"reward", "sync", "rollout_wait"})
"""Phases in which the run waits for another program under a deadline of its own, and reports why (SF801 to SF806)."""
QUIET_PHASES = LONG_PHASES | {""}
"""Phases in which a rank may be silent for a long time; a process between phases is loading Python or torch."""
TALKING = frozenset({"save", "evaluate", "rollout"})
"""Long phases that record events between their parts, or, like saves, take about as long each time."""
WHOLE_STEP = "forward_backward"
"""The single phase that other trainers report for a training step."""
BUSY_S = 120.0
"""Seconds by which a step of another trainer may exceed its usual duration while a rank computes."""
COLLECTIVE_S = 540.0
"""Seconds of silence of several ranks that are a stall in the first steps, in evaluations, rollouts and first saves,
even if they compute: a rank that waits for a GPU seems to compute. After ten minutes NCCL ends the processes, with less
information."""
LONGEST_BUSY_S = 1800.0
"""Seconds of silence that are a stall in other long phases, even if ranks compute. Data preparation records events
between its parts."""
LONGEST_S = 600.0
"""Seconds of silence that are a stall of ranks that wait for a disk or for their worker processes; in the first steps
of a single rank; before the first rank has begun, and after the last has ended."""


class Supervisor:
    """The supervisor of one start of one run. Call `poll` about once a second: it returns the new findings."""

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
        """Watch the run that began at `began_s`.

        `num_ranks`: number of ranks of the run, of which `num_elsewhere` are on other machines. `gone_s`: seconds for
        which a rank may be gone. `early_s`: a rank that began up to this long before `began_s` belongs to the run if
        its process runs. `deadlines_s`: phase -> silence in it that is a stall whatever the rank does, in place of the
        usual limit.
        """
        self._deadlines_s = deadlines_s or {}
        self._began_s, self._gone_s, self._early_s = began_s, gone_s, early_s
        self._run = WatchedRun(run_folder, num_ranks, num_elsewhere)
        self._ranks = self._run.ranks
        self._rings: dict[int, Path] = {}
        self._processes = Processes()
        self._client = EvidenceClient(run_folder)
        self._detectors = Detectors(self._run, began_s)
        self._native_stacks = threading.Thread()
        """The thread that writes native stacks, once it is started."""
        self._last_event_s = began_s
        self._waited_since_s, self._are_waiting = math.nan, False
        self._last_io_s = began_s
        """Time at which a rank in a long phase last read or wrote."""
        self._last_poll_s = time.time()
        self._oom_kills = cgroup.oom_kills()
        self.stalled_since_s: float | None = None
        """Time at which the current stall began; None if there is none."""
        self.recovered_after_s: float | None = None
        """Length of the stall, at the poll that notices the recovery; None otherwise."""

    @property
    def _user_deadline_s(self) -> float | None:
        """Shortest deadline that the user set for a phase in which a rank is now; None if there is none."""
        inside = {phase for rank in self._ranks.values() if not rank.has_ended for phase, _ in rank.open}
        return min((s for phase, s in self._deadlines_s.items() if phase in inside), default=None)

    @property
    def was_memory_killed(self) -> bool | None:
        """Whether the kernel killed a process of the cgroup for memory since the start; None if unknown."""
        kills = self._count_oom_kills()
        return kills > 0 if kills is not None else None

    def _count_oom_kills(self) -> int | None:
        before, now = self._oom_kills, cgroup.oom_kills()
        return now - before if before is not None and now is not None else None

    def gone(self) -> list[int]:
        """Return the ranks of this machine whose process is gone and that did not report their end."""
        self._read_events()
        return [
            number
            for number, rank in sorted(self._ranks.items())
            if not rank.has_ended and self._processes.sample(rank.process, with_children=False).state in EXITED
        ]

    def end(self) -> None:
        """Stop watching."""
        self._detectors.end()

    def poll(self, now_s: float) -> list[Finding]:
        """Read new events and samples; return each finding once."""
        if now_s - self._last_poll_s > BLIND_S:
            self._last_event_s = max(self._last_event_s, now_s)
        began_s = time.monotonic()
        try:
            return self._poll(now_s)
        finally:
            self._last_poll_s = now_s + time.monotonic() - began_s

    def mark_reported(self) -> None:
        """Do not mistake the time since the poll, in which findings were reported, for sleep of this process."""
        self._last_poll_s = max(self._last_poll_s, time.time())

    def _poll(self, now_s: float) -> list[Finding]:
        self._read_events()
        self._last_event_s, self._last_io_s = min(self._last_event_s, now_s), min(self._last_io_s, now_s)
        is_silent = now_s - self._last_event_s > LEAST_S / 2
        for rank in self._ranks.values():
            rank.last_s = min(rank.last_s, now_s)  # the clock was set back
            sample = self._processes.sample(rank.process, with_children=is_silent or rank.phase == "data_wait")
            rank.add_sample(now_s, sample, is_silent=is_silent)
        findings = self._detectors.find(now_s)
        self.recovered_after_s = None
        going = [rank for rank in self._ranks.values() if not rank.has_ended]
        if any(rank.moves_data for rank in going) and any(rank.phase in QUIET_PHASES for rank in going):
            self._last_io_s = now_s
        late_after_s = self._choose_limit_s(going)
        # A deadline that the user set holds whatever a rank does.
        since_s = self._last_event_s if self._user_deadline_s is not None else max(self._last_event_s, self._last_io_s)
        if now_s - since_s <= late_after_s:
            if self.stalled_since_s is not None:
                self.recovered_after_s, self.stalled_since_s = now_s - self.stalled_since_s, None
            return findings
        if self.stalled_since_s is not None:
            return findings
        self.stalled_since_s = now_s
        return [*findings, self._diagnose(now_s, late_after_s)]

    def _open_rings(self) -> None:
        """Open the newest ring of each rank that began since this start."""
        for path in sorted((self._run.folder / "events").glob("rank-*.ring")):
            _, number, began_ns = path.stem.split("-")
            before_s = self._began_s - int(began_ns) / 1e9
            if before_s > self._early_s or self._rings.get(int(number), Path()) >= path:
                continue
            with suppress(RingError):  # its header is being written
                ring = RingReader(path)
                if before_s > 0 and self._processes.sample(ring.process, with_children=False) == GONE:
                    continue  # the ring belongs to an earlier run
                self._rings[int(number)] = path
                self._ranks.pop(int(number), None)
                if ring.is_of_this_machine:
                    self._ranks[int(number)] = RankState(ring, int(began_ns))

    def _read_events(self) -> None:
        self._open_rings()
        for rank in self._ranks.values():
            self._run.steps_s.extend(rank.read())
            self._last_event_s = max(self._last_event_s, rank.last_s)

    def _choose_limit_s(self, going: Sequence[RankState]) -> float:
        """Return the seconds of silence that are a stall in the ranks' current phases."""
        if not going:  # no rank has begun, or all have ended and none exits
            return LONGEST_S
        if any(rank.is_gone for rank in going):
            return self._gone_s  # its launcher notices it first and reports more, or restarts it
        if self._run.num_elsewhere and any(not rank.step for rank in going):
            return LONGEST_BUSY_S  # they may wait for other machines, which load or prepare
        user_deadline_s = self._user_deadline_s
        if user_deadline_s is not None:
            return user_deadline_s
        if any(rank.is_served for rank in going if rank.phase == "data_wait"):
            return LONGEST_S
        if any(rank.phase in BOUNDED_PHASES for rank in going):
            return LONGEST_S
        quiet = [rank for rank in going if rank.phase in QUIET_PHASES]
        if quiet:  # the other ranks can only wait for these
            return self._choose_long_phase_limit_s(going, quiet)
        if len(self._run.steps_s) < 2:
            if any(rank.phase == "data_wait" and not rank.is_idle for rank in going):
                return LONGEST_BUSY_S  # trainers that resume skip through the data of earlier steps
            has_phases = all(rank.phase != WHOLE_STEP for rank in going)  # it may wait for a server that generates
            if has_phases and all(rank.is_idle for rank in going):
                return IDLE_S
            return COLLECTIVE_S if self._run.num_ranks > 1 else LONGEST_S
        usual_s = max(LEAST_S, TIMES_USUAL * median(self._run.steps_s), TIMES_LONGEST * max(self._run.steps_s))
        limit_s = max(usual_s, self._estimate_whole_step_s(going))
        # Surefoot's own ranks record events in each micro-batch, and their collectives have a deadline.
        has_deadline = self._run.num_ranks > 1 and all(rank.phase != WHOLE_STEP for rank in going)
        return min(limit_s, COLLECTIVE_S) if has_deadline else limit_s

    def _choose_long_phase_limit_s(self, going: Sequence[RankState], quiet: Sequence[RankState]) -> float:
        if all(rank.is_idle for rank in quiet):
            if self._run.num_elsewhere and self._is_waiting_in_collectives(going):
                return LONGEST_BUSY_S  # they wait for a rank on another machine, which has its own supervisor
            return IDLE_S if all(rank.step for rank in quiet) else STARTING_IDLE_S
        if any(rank.moves_data for rank in going):
            return math.inf
        if any(rank.waited_for_disk for rank in quiet):
            return LONGEST_S
        if self._run.num_ranks == 1 or any(rank.phase not in TALKING for rank in quiet):
            return LONGEST_BUSY_S
        saves_s = [rank.longest_save_s for rank in quiet if rank.phase == "save"]
        return max([COLLECTIVE_S, *(TIMES_USUAL * save_s for save_s in saves_s)])

    def _is_waiting_in_collectives(self, going: Sequence[RankState]) -> bool:
        """Return whether each rank of this machine is in a collective. Asks the ranks once in each silence."""
        if self._waited_since_s != self._last_event_s:
            self._waited_since_s, self._are_waiting = self._last_event_s, False
            with suppress(OSError, ValueError):  # a full disk, or another version of torch: this cannot be decided
                states = {rank.ring.rank: rank for rank in going}
                responses = self._client.fetch(FLIGHT, states)
                records = [read_flight(responses.get(number)) for number in states]
                self._are_waiting = all(record is not None and record.waiting for record in records)
        return self._are_waiting

    def _estimate_whole_step_s(self, going: Sequence[RankState]) -> float:
        """Return the longest plausible duration of a step of another trainer.

        Such steps differ in kind: some generate completions first, as the first one did, or compile.
        """
        inside = [rank for rank in going if rank.phase == WHOLE_STEP]
        is_busy = any(not rank.is_idle for rank in inside)
        return max((TIMES_LONGEST * rank.longest_step_s for rank in inside), default=0.0) + (BUSY_S if is_busy else 0.0)

    def _diagnose(self, now_s: float, late_after_s: float) -> Finding:
        evidence = self._collect_evidence(now_s, late_after_s)
        finding = find_stall(evidence)
        snapshots = self._detectors.gpus.snapshots()
        if snapshots and self._run.uses_gpus():
            finding.evidence["gpus"] = in_words(snapshots[-1])
        try:
            path = write_evidence(self._run.folder / "evidence", evidence)
            finding.evidence["evidence"] = str(path.relative_to(self._run.folder))
            native = path.with_name(path.stem.replace("stall", "native") + ".txt")
            if not self._native_stacks.is_alive():
                live = {number: rank.process for number, rank in sorted(self._ranks.items()) if rank.is_live}
                native_stacks, self._native_stacks = begin_native_stacks(native, live)
                finding.evidence["native_stacks"] = native_stacks
        except (StorageError, OSError) as error:  # the disk may be the cause
            finding.evidence["evidence"] = f"not kept: {error}"
        return finding

    def _collect_evidence(self, now_s: float, late_after_s: float) -> StallEvidence:
        """Collect the flight record and the stacks of every live rank."""
        syscalls = {number: syscall_of(rank.process) for number, rank in self._ranks.items()}
        offsets = {number: _read_size(stacks_path(self._run.folder, number)) for number in self._ranks}
        request = ""
        with suppress(OSError):  # a full disk: no flight records then
            request = self._client.request(FLIGHT)
        for rank in self._ranks.values():
            if rank.is_live:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.process, STACKS)
        responses = self._client.wait(request, self._ranks)
        is_held = self._native_stacks.is_alive()  # py-spy still stops processes for an earlier stall
        ranks = [
            RankEvidence(
                rank=number,
                process=rank.process,
                state="sleeping" if is_held and rank.sample.state == "tracing-stop" else rank.sample.state,
                has_ended=rank.has_ended,
                phase=rank.phase,
                step=rank.step,
                quiet_s=now_s - rank.last_s,
                cpu_share=rank.cpu_share,
                children=rank.sample.children,
                waits_for_disk=rank.waited_for_disk,
                answered=number in responses,
                flight=responses.get(number),
                syscall=syscalls[number],
                stacks=read_stacks(self._run.folder, number, offsets[number]),
                layer=rank.ring.layer,
            )
            for number, rank in sorted(self._ranks.items())
        ]
        return StallEvidence(
            time_s=now_s,
            quiet_s=now_s - self._last_event_s,
            limit_s=late_after_s,
            ranks=tuple(ranks),
            num_ranks=self._run.num_ranks,
            oom_kills=self._count_oom_kills(),
        )


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
