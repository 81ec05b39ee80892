"""`surefoot train` as a person starts it: a light process that starts the run, watches it, and says what it finds.

The run is a session of its own, so that signals reach it once, through here. Imports no torch.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

import psutil

from surefoot.config import LoadedConfig, RunConfig
from surefoot.diagnostics.monitor.event_log import read_history
from surefoot.diagnostics.monitor.evidence_server import read_stacks
from surefoot.diagnostics.monitor.supervisor import Supervisor
from surefoot.diagnostics.rules.rank_death import find_death
from surefoot.errors import StoppedOnFinding, StorageError
from surefoot.findings import Finding
from surefoot.launch.sidecar import SUPERVISED
from surefoot.system import cgroup
from surefoot.system.console import say
from surefoot.system.kernel_log import killed_for_memory
from surefoot.system.process import PYTHON, describe_end, restore_handlers, stop_signals, was_for_memory
from surefoot.training.run_summary import METRICS, FindingLog, write_end

REPORT_WITHIN_S = 120.0
EVERY_S = 1.0
"""Between two looks."""


def train_supervised(loaded: LoadedConfig, *, as_json: bool) -> int:
    """Run to the end, watching; returns the exit status, with what the run printed before it."""
    run, began_s = loaded.run, time.time()
    restarts = 0
    found: list[Finding] = []
    signals = _PassedSignals()
    with signals.passing():
        while True:
            watch = _Watch(loaded, signals, as_json=as_json)
            status = watch.until_it_ends()
            found += watch.found
            may_restart = run.on_stall == "restart" and not signals.was_received
            if not watch.was_stopped or not may_restart or restarts >= max(1, run.max_restarts):
                break
            restarts += 1
            say(f"restarting after a stall (restart {restarts})")
            if watch.has_begun:  # go on from what it has saved; before that, everything is as it was
                changes: dict[str, object] = {"overwrite_output_dir": False}
                if (run.run_folder / "checkpoints").is_dir():
                    changes["resume_from_checkpoint"] = "auto"
                loaded = replace(loaded, run=run.model_copy(update=changes))
    try:
        return _ended(run, watch, status, found, began_s)
    finally:
        _report(run)
        if watch.was_stopped:
            say(found[-1].as_text())  # once more: the last thing said


def _ended(run: RunConfig, watch: "_Watch", status: int, found: list[Finding], began_s: float) -> int:
    """Write down how it ended; returns the exit status."""
    if watch.was_stopped:
        write_end(run.run_folder, findings=found, error=found[-1].as_text(), since_s=began_s)
        return StoppedOnFinding.exit_status
    if found:
        write_end(run.run_folder, findings=found, since_s=began_s)
    if status < 0:
        return watch.died(status)
    return status


def _report(run: RunConfig) -> None:
    """The page of a run that took steps, by another process: a plotting library is much larger than this one.

    What goes wrong with it is said and ends nothing.
    """
    metrics = run.run_folder / METRICS
    if not run.report or not metrics.is_file() or not metrics.stat().st_size:
        return
    command = [*PYTHON, "-m", "surefoot", "report", str(run.run_folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPORT_WITHIN_S)
    except subprocess.TimeoutExpired:
        say(f"report.html was not written within {REPORT_WITHIN_S:.0f} s")
        return
    if done.returncode != 0:
        say(f"report.html was not written: {done.stderr.strip()}")


class _Watch:
    """One start of the run."""

    def __init__(self, loaded: LoadedConfig, signals: "_PassedSignals", *, as_json: bool) -> None:
        self._run = loaded.run
        self._signals = signals
        self._log = FindingLog.of(loaded.run)
        self._began_s = time.time()
        self._oom_kills = cgroup.oom_kills()
        self.found: list[Finding] = []
        self.was_stopped = False
        self._is_blind = False
        self._job: subprocess.Popen[bytes] | None = None
        self._told = {**loaded.as_json(), "as_json": as_json, "supervisor": os.getpid()}

    def until_it_ends(self) -> int:
        """Start it and look at it until then; returns its exit status, negative for a signal."""
        self._job = self._signals.job = subprocess.Popen(
            [*PYTHON, "-m", "surefoot.launch.run_process"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, SUPERVISED: str(os.getpid())},
        )
        assert self._job.stdin is not None
        with suppress(BrokenPipeError), self._job.stdin as told:
            told.write(json.dumps(self._told).encode())
        if self._signals.was_received:  # after the start before this one had ended
            self._job.send_signal(signal.SIGTERM)
        return self._watched()

    def _watched(self) -> int:
        assert self._job is not None
        ranks = self._run.nproc_per_node * self._run.nnodes
        elsewhere = ranks - self._run.nproc_per_node
        supervisor = Supervisor(
            self._run.run_folder,
            ranks,
            self._began_s,
            num_elsewhere=elsewhere,
            deadlines_s=self._run.phase_timeout_s,
        )
        while True:
            with suppress(subprocess.TimeoutExpired):
                status = self._job.wait(EVERY_S)
                supervisor.end()
                return status
            now_s = time.time()
            for finding in self._looked(supervisor, now_s):
                self.found.append(finding)
                self._log.note(finding)
                say(finding.as_text())
            supervisor.told()
            if supervisor.stood_s is not None and not self._is_blind:
                say(f"the run goes on again, {supervisor.stood_s:.0f} s later")
            since_s = supervisor.stalled_since_s
            is_over = since_s is not None and now_s - since_s >= self._run.stall_timeout_s
            if is_over and self._run.on_stall != "report" and not self._is_blind:
                self.was_stopped = True
                self._kill()

    def _looked(self, supervisor: Supervisor, now_s: float) -> list[Finding]:
        """What a look found. A defect in looking must not end the run, and is said once."""
        if self._is_blind:
            return []
        try:
            return supervisor.look(now_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            self._is_blind = True
            say(f"the run goes on without a supervisor: {type(error).__name__}: {error}")
            return []

    @property
    def has_begun(self) -> bool:
        """Whether this start came to its first step, and the run folder is its own."""
        about = self._run.run_folder / "environment.json"
        return about.is_file() and about.stat().st_mtime >= self._began_s

    def died(self, status: int) -> int:
        """The run was killed where nothing in it could say so."""
        if -status in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # before it could handle them
            say("interrupted")
            return 1
        for_memory = was_for_memory(status, self._oom_kills)
        folder, how = self._run.run_folder, describe_end(status)
        history = [entry for entry in read_history(folder).entries if entry.time_s >= self._began_s]
        rank = 0 if self._run.nproc_per_node * self._run.nnodes == 1 else None
        stacks = read_stacks(folder, rank) if rank is not None else ""
        finding = find_death(
            rank,
            how,
            for_memory=for_memory,
            has_limit=cgroup.memory_limit_bytes() is not None,
            history=history,
            last_stacks=stacks,
            killed=killed_for_memory(),
        )
        if history:
            self._log.note(finding)
            with suppress(OSError, StorageError):  # a full disk: it is said all the same
                write_end(folder, findings=[finding], error=finding.cause, since_s=self._began_s)
        say(finding.as_text())
        return StoppedOnFinding.exit_status

    def _kill(self) -> None:
        """End every process of the run: what stands still hears no other signal."""
        assert self._job is not None
        processes = []
        with suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self._job.pid).children(recursive=True)
        self._job.kill()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


class _PassedSignals:
    """Stop signals of this process. They are for the run, from its start to its end and across restarts."""

    def __init__(self) -> None:
        self.job: subprocess.Popen[bytes] | None = None
        self.was_received = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Pass signals on. The run must not inherit that one is ignored, so this comes before its start."""
        before = {number: signal.signal(number, self._pass_on) for number in stop_signals()}
        try:
            yield
        finally:
            restore_handlers(before)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.was_received = True
        if self.job is None:
            raise KeyboardInterrupt(signal.Signals(number).name)
        with suppress(ProcessLookupError):
            self.job.send_signal(number)
