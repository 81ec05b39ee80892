"""Supervisor of `surefoot train`: a light process that starts the run, watches it, and reports its findings.

The run is a session of its own, so that signals reach it once, through this process. Imports no torch.
"""

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
from surefoot.diagnostics.monitor.explain import explain_death, history_since
from surefoot.diagnostics.monitor.supervisor import GONE_S
from surefoot.errors import InputError, StoppedOnFinding
from surefoot.findings import Finding
from surefoot.launch.final_report import write_final_report
from surefoot.launch.run_verb import CRASHED, DONE, FAILED
from surefoot.launch.sidecar import SUPERVISED
from surefoot.launch.watcher import POLL_S, Watcher, WatchSpec, add_restart, start_module, was_written_since
from surefoot.system import cgroup
from surefoot.system.console import say
from surefoot.system.process import describe_end, restore_handlers, stop_signals, was_for_memory
from surefoot.training.run_summary import SUMMARY, FindingLog, read_result, write_end


def train_supervised(loaded: LoadedConfig, *, as_json: bool) -> int:
    """Run to the end and watch; return the exit status."""
    run, began_s = loaded.run, time.time()
    restarts = 0
    findings: list[Finding] = []
    signals = _SignalForwarding()
    with signals.forwarding():
        while True:
            attempt = _Attempt(loaded, signals, as_json=as_json)
            status = attempt.run_to_end()
            is_last = signals.was_received or restarts >= attempt.max_restarts(status)
            if not is_last:
                restarts += 1
                attempt.report_restart(status, restarts)
            findings += attempt.findings
            if is_last:
                break
            if attempt.has_begun:  # continue from its checkpoints; before its first step nothing has changed
                changes: dict[str, object] = {"overwrite_output_dir": False}
                if (run.run_folder / "checkpoints").is_dir():
                    changes["resume_from_checkpoint"] = "auto"
                loaded = replace(loaded, run=run.model_copy(update=changes))
    try:
        return _write_end(run, attempt, status, findings, began_s)
    finally:
        write_final_report(run)
        if attempt.was_stopped:
            say(findings[-1].as_text())  # repeated, so that the cause is the last line


def _write_end(run: RunConfig, attempt: "_Attempt", status: int, findings: list[Finding], began_s: float) -> int:
    """Complete summary.json; return the exit status."""
    if attempt.was_stopped:
        write_end(run.run_folder, findings=findings, error=findings[-1].as_text(), since_s=began_s)
        return StoppedOnFinding.exit_status
    if status != CRASHED and _has_died(status):
        return attempt.report_death(status, findings)
    if findings:
        write_end(run.run_folder, findings=findings, since_s=began_s)
    return FAILED if status == CRASHED else status


def _has_died(status: int) -> bool:
    """Return whether an exit status is that of a process that was killed or crashed, or left without a report."""
    return status not in (DONE, FAILED, InputError.exit_status, StoppedOnFinding.exit_status)


class _Attempt:
    """One start of the run."""

    def __init__(self, loaded: LoadedConfig, signals: "_SignalForwarding", *, as_json: bool) -> None:
        self._run = loaded.run
        self._signals = signals
        self._began_s = time.time()
        self._oom_kills = cgroup.oom_kills()
        self._num_ranks = self._run.nproc_per_node * self._run.nnodes
        spec = WatchSpec(
            FindingLog.of(self._run),
            self._num_ranks,
            num_elsewhere=self._num_ranks - self._run.nproc_per_node,
            gone_s=GONE_S,
            deadlines_s=self._run.phase_timeout_s,
        )
        self._watcher = Watcher(spec, self._began_s)
        self._request = {**loaded.as_json(), "as_json": as_json, "supervisor": os.getpid()}
        self.was_stopped = False
        """Whether the run was killed because it stalled."""

    @property
    def findings(self) -> list[Finding]:
        return self._watcher.findings

    @property
    def has_begun(self) -> bool:
        """Whether this attempt reached its first step and so owns the run folder."""
        return was_written_since(self._run.run_folder / "environment.json", self._began_s)

    def run_to_end(self) -> int:
        """Start the run and watch it; return its exit status, negative for a signal."""
        environment = {**os.environ, SUPERVISED: str(os.getpid())}
        process = self._signals.process = start_module(
            "surefoot.launch.run_process", self._request, start_new_session=True, env=environment
        )
        if self._signals.undelivered is not None:  # received between the end of the previous attempt and this start
            process.send_signal(self._signals.undelivered)
        while True:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(POLL_S)
                self._watcher.supervisor.end()
                return status
            now_s = time.time()
            self._watcher.poll(now_s)
            if not self._watcher.is_blind:
                self._act_on_stall(process, now_s)

    def _act_on_stall(self, process: "subprocess.Popen[bytes]", now_s: float) -> None:
        """Report a run that recovered; kill one that has stalled for `stall_timeout_s`."""
        supervisor = self._watcher.supervisor
        if supervisor.recovered_after_s is not None:
            say(f"recovered after a {supervisor.recovered_after_s:.0f} s stall")
        since_s = supervisor.stalled_since_s
        is_late = since_s is not None and now_s - since_s >= self._run.stall_timeout_s
        if is_late and self._run.on_stall != "report":
            self.was_stopped = True
            _kill_tree(process)

    def max_restarts(self, status: int) -> int:
        """Return how often a run may restart after this end. Several ranks are restarted by their launcher instead."""
        if self.was_stopped:
            return max(1, self._run.max_restarts) if self._run.on_stall == "restart" else 0
        has_died = self._num_ranks == 1 and _has_died(status) and not _was_interrupted(status)
        return self._run.max_restarts if has_died else 0

    def report_restart(self, status: int, restart: int) -> None:
        """Report why the run restarts. `restart`: the number of the restart, from 1."""
        if self.was_stopped:
            say(f"restarting after a stall (restart {restart})")
            return
        finding, is_recorded = self._explain(status)
        finding = add_restart(finding, restart, self._run.max_restarts)
        if is_recorded:
            self._watcher.report(finding)
        else:  # there may be no run folder
            say(finding.as_text())

    def report_death(self, status: int, earlier: list[Finding]) -> int:
        """Report a run that was killed before it could report anything itself; return the exit status.

        `earlier`: findings of the run that summary.json lists as well.
        """
        if _was_interrupted(status):
            say("interrupted")
            if earlier:
                write_end(self._run.run_folder, findings=earlier, since_s=self._began_s)
            return FAILED
        finding, is_recorded = self._explain(status)
        if is_recorded:
            self._watcher.report_death(finding, earlier)
        else:  # there may be no run folder
            say(finding.as_text())
        return StoppedOnFinding.exit_status

    def _explain(self, status: int) -> tuple[Finding, bool]:
        """Return the finding for the death of the run's process, and whether the process recorded any event."""
        folder = self._run.run_folder
        history = history_since(folder, self._began_s)
        if status == CRASHED:
            result = read_result(folder) if was_written_since(folder / SUMMARY, self._began_s) else None
            error = result.error if result is not None else None
            reason = f"rank 0: {error or 'an unexpected error before the run had begun'}"
            return Finding("SF101", reason, {"reason": reason}), bool(history)
        rank = 0 if self._num_ranks == 1 else None
        for_memory = was_for_memory(status, self._oom_kills)
        finding = explain_death(folder, rank, describe_end(status), for_memory=for_memory, history=history)
        return finding, bool(history)


def _was_interrupted(status: int) -> bool:
    """Return whether a stop signal ended the process before it could handle it."""
    return -status in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all that it started: a stalled run handles no other signal."""
    children = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()


class _SignalForwarding:
    """Forwards stop signals of this process to the run, from its start to its end and across restarts."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.was_received = False
        self.undelivered: int | None = None
        """Last signal that arrived after the process had ended."""

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Install the handlers before the run starts: it would inherit a signal that is ignored."""
        before = {number: signal.signal(number, self._forward) for number in stop_signals()}
        try:
            yield
        finally:
            restore_handlers(before)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.was_received = True
        if self.process is None:
            raise KeyboardInterrupt(signal.Signals(number).name)
        if self.process.poll() is not None:
            self.undelivered = number
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
