"""Watches a run from outside: reads the ranks' rings, samples their processes, and finds out why nothing goes on.

Silence is late when no rank has said anything for much longer than it usually takes here. What is usual comes from the
run's own history; before there is one, and in phases that are long and say little, a rank that computes, or reads and
writes, is not late. Imports no torch.
"""

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from surefoot.diagnostics.monitor import evidence as evidence_folder
from surefoot.diagnostics.monitor.detectors import LONG_PHASES, Detectors
from surefoot.diagnostics.monitor.evidence import RankEvidence, StallEvidence
from surefoot.diagnostics.monitor.evidence_client import Witnesses
from surefoot.diagnostics.monitor.evidence_server import FLIGHT, STACKS, read_stacks, stacks_path
from surefoot.diagnostics.monitor.flight_recorder import read_flight
from surefoot.diagnostics.monitor.native_stacks import begin_native_stacks
from surefoot.diagnostics.monitor.processes import (
    GONE,
    Processes,
    syscall_of,
    uses_gpus,
)
from surefoot.diagnostics.monitor.rank_state import RankState
from surefoot.diagnostics.monitor.ring_buffer import RingError, RingReader
from surefoot.diagnostics.rules.accelerators import in_words
from surefoot.diagnostics.rules.stall import find_stall
from surefoot.errors import StorageError
from surefoot.events import Phase
from surefoot.findings import Finding
from surefoot.system import cgroup

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
BOUNDED_PHASES = frozenset({"reward", "sync", "wait for completions"})
"""Waits for programs of others, at which the run itself looks at the clock: it ends them, and says why."""
QUIET_PHASES = LONG_PHASES | {""}
"""Phases in which a rank may be silent for long; a process between phases is loading Python or torch."""
TALKING = frozenset({"save", "evaluate", "rollout"})
"""Long phases that say something between their parts, or, as saves, take about as long each time."""
WHOLE_STEP = "forward and backward"
"""All that other trainers do in a training step."""
BUSY_S = 120.0
"""How much longer than a step of another trainer usually takes one that computes may take."""
COLLECTIVE_S = 540.0
"""Silence of several ranks that is late in the first steps, in evaluations, rollouts and first saves, even where they
compute: whoever waits for a GPU seems to. After ten minutes NCCL ends the processes, and says less."""
LONGEST_BUSY_S = 1800.0
"""The same in other long phases (data that are prepared say something between their parts)."""
LONGEST_S = 600.0
"""Silence that is late of ranks that wait for a disk, or for processes that work for them; in the first steps of one
rank alone; before the first rank has begun, and after the last has ended."""


class Supervisor:
    """Watches one start of one run. `poll` it about once a second; it returns the findings since the last poll."""

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
        self._ranks: dict[int, RankState] = {}
        self._rings: dict[int, Path] = {}
        self._processes = Processes()
        self._witnesses = Witnesses(run_folder)
        self._trends = Detectors(run_folder, self._ranks, num_ranks, num_elsewhere, began_s)
        self._native_stacks = threading.Thread()
        """Writes them, once it is begun."""
        self._last_s = began_s
        self._waited_since_s, self._are_waiting = math.nan, False
        self._moved_s = began_s
        """When a rank in a long phase last read or wrote."""
        self._looked_s = time.time()
        self._oom_kills = cgroup.oom_kills()
        self.stalled_since_s: float | None = None
        """When the stall began, while there is one."""
        self.recovered_after_s: float | None = None
        """Length of the stall, at the poll that finds the run going again."""

    @property
    def limit_s(self) -> float:
        """Silence that is late in a step."""
        steps = self._trends.steps_s
        return max(LEAST_S, TIMES_USUAL * median(steps), TIMES_LONGEST * max(steps)) if len(steps) > 1 else math.inf

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
        self._trends.end()

    def poll(self, now_s: float) -> list[Finding]:
        """Read what is new; return a stall or a leak once, when it is found."""
        if now_s - self._looked_s > BLIND_S:
            self._last_s = max(self._last_s, now_s)
        began_s = time.monotonic()
        try:
            return self._poll(now_s)
        finally:
            self._looked_s = now_s + time.monotonic() - began_s

    def mark_reported(self) -> None:
        """Do not take the time since the poll, in which findings were reported, for one in which this process slept."""
        self._looked_s = max(self._looked_s, time.time())

    def _poll(self, now_s: float) -> list[Finding]:
        self._open_rings()
        for rank in self._ranks.values():
            self._read(rank)
            rank.last_s = min(rank.last_s, now_s)  # the clock was set back
        self._last_s, self._moved_s = min(self._last_s, now_s), min(self._moved_s, now_s)
        is_silent = now_s - self._last_s > LEAST_S / 2
        for rank in self._ranks.values():
            sample = self._processes.sample(rank.ring.process, with_children=is_silent)
            rank.took(now_s, sample, is_silent=is_silent)
        trends = self._trends.look(now_s)
        self.recovered_after_s = None
        going = [rank for rank in self._ranks.values() if not rank.has_ended]
        if any(rank.moves_data for rank in going) and any(rank.phase in QUIET_PHASES for rank in going):
            self._moved_s = now_s
        late_after_s = self._late_after_s(going)
        # A deadline that a user gave holds whatever a rank does.
        since_s = self._last_s if self._given_s is not None else max(self._last_s, self._moved_s)
        if now_s - since_s <= late_after_s:
            if self.stalled_since_s is not None:
                self.recovered_after_s, self.stalled_since_s = now_s - self.stalled_since_s, None
            return trends
        if self.stalled_since_s is not None:
            return trends
        self.stalled_since_s = now_s
        return [*trends, self._diagnose(now_s, late_after_s)]

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
                    self._ranks[int(number)] = RankState(ring)

    def _read(self, rank: RankState) -> None:
        self._trends.steps_s.extend(rank.read())
        self._last_s = max(self._last_s, rank.last_s)

    def _late_after_s(self, going: Sequence[RankState]) -> float:
        """Silence that is late, for what the ranks do now."""
        if not going:  # no rank has begun, or none leaves
            return LONGEST_S
        if any(rank.sample.state in ("gone", "zombie") for rank in going):
            return self._gone_s  # whoever started it sees it first and says more, or starts it again
        if self._num_elsewhere and any(not rank.step for rank in going):
            return LONGEST_BUSY_S  # they may wait for other machines, which load or prepare
        given_s = self._given_s
        if given_s is not None:
            return given_s
        if any(rank.is_served for rank in going if rank.phase == "wait for data"):
            return LONGEST_S
        if any(rank.phase in BOUNDED_PHASES for rank in going):
            return LONGEST_S
        quiet = [rank for rank in going if rank.phase in QUIET_PHASES]
        if quiet:  # the others wait for these, if at all
            return self._late_in_long_phases_s(going, quiet)
        if len(self._trends.steps_s) < 2:
            if any(rank.phase == "wait for data" and not rank.is_idle for rank in going):
                return LONGEST_BUSY_S  # trainers that resume go through all that they have seen
            is_known = all(rank.phase != WHOLE_STEP for rank in going)  # it may wait for a server that generates
            if is_known and all(rank.is_idle for rank in going):
                return IDLE_S
            return COLLECTIVE_S if self._num_ranks > 1 else LONGEST_S
        limit_s = max(self.limit_s, self._whole_step_s(going))
        # Ranks of our own say something in each micro-batch, and their collectives have a deadline.
        has_deadline = self._num_ranks > 1 and all(rank.phase != WHOLE_STEP for rank in going)
        return min(limit_s, COLLECTIVE_S) if has_deadline else limit_s

    def _late_in_long_phases_s(self, going: Sequence[RankState], quiet: Sequence[RankState]) -> float:
        if all(rank.is_idle for rank in quiet):
            if self._num_elsewhere and self._wait_together(going):
                return LONGEST_BUSY_S  # for a rank on another machine, which has a supervisor of its own
            return IDLE_S if all(rank.step for rank in quiet) else STARTING_IDLE_S
        if any(rank.moves_data for rank in going):
            return math.inf
        return LONGEST_S if any(rank.waited_for_disk for rank in quiet) else self._longest_busy_s(quiet)

    def _wait_together(self, going: Sequence[RankState]) -> bool:
        """Whether each rank of this machine is in a collective. Asked once in each silence."""
        if self._waited_since_s != self._last_s:
            self._waited_since_s, self._are_waiting = self._last_s, False
            with suppress(OSError, ValueError):  # a full disk, or another version of torch: this cannot be told
                there = {rank.ring.rank: rank for rank in going}
                answers = self._witnesses.answers(self._witnesses.ask(FLIGHT), there)
                records = [read_flight(answers.get(number)) for number in there]
                self._are_waiting = all(record is not None and record.waiting for record in records)
        return self._are_waiting

    def _longest_busy_s(self, quiet: Sequence[RankState]) -> float:
        if self._num_ranks == 1 or any(rank.phase not in TALKING for rank in quiet):
            return LONGEST_BUSY_S
        saves_s = max((rank.longest_s.get("save", 0.0) for rank in quiet if rank.phase == "save"), default=0.0)
        return max(COLLECTIVE_S, TIMES_USUAL * saves_s)

    def _whole_step_s(self, going: Sequence[RankState]) -> float:
        """In other trainers steps differ in kind: some make completions first, as the first one did, or compile."""
        inside = [rank for rank in going if rank.phase == WHOLE_STEP]
        is_busy = any(not rank.is_idle for rank in inside)
        return max((TIMES_LONGEST * rank.longest_step_s for rank in inside), default=0.0) + (BUSY_S if is_busy else 0.0)

    def _diagnose(self, now_s: float, late_after_s: float) -> Finding:
        evidence = self._collect(now_s, late_after_s)
        finding = find_stall(evidence)
        looks = self._trends.looks_at_gpus()
        if looks and any(uses_gpus(rank.ring.process) for rank in self._ranks.values()):
            finding.evidence["gpus"] = in_words(looks[-1])
        try:
            path = evidence_folder.keep(self._folder / "evidence", evidence)
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

    def _collect(self, now_s: float, late_after_s: float) -> StallEvidence:
        """Ask every rank that is there for its flight record and its stacks."""
        syscalls = {number: syscall_of(rank.ring.process) for number, rank in self._ranks.items()}
        begins = {number: _size(stacks_path(self._folder, number)) for number in self._ranks}
        request = ""
        with suppress(OSError):  # a full disk: no flight records then
            request = self._witnesses.ask(FLIGHT)
        for rank in self._ranks.values():
            if rank.sample.state not in ("gone", "zombie") and not rank.has_ended:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.ring.process, STACKS)
        answers = self._witnesses.answers(request, self._ranks)
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
                layer=rank.ring.layer,
            )
            for number, rank in sorted(self._ranks.items())
        ]
        before, after = self._oom_kills, cgroup.oom_kills()
        return StallEvidence(
            time_s=now_s,
            quiet_s=now_s - self._last_s,
            limit_s=late_after_s,
            ranks=tuple(seen),
            num_ranks=self._num_ranks,
            oom_kills=after - before if before is not None and after is not None else None,
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
