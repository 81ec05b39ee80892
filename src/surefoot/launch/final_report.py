"""The report.html that a run leaves: written at its end, in another process."""

import subprocess

from surefoot.config import RunConfig
from surefoot.system.console import say
from surefoot.system.process import PYTHON
from surefoot.training.run_summary import METRICS

REPORT_WITHIN_S = 120.0


def write_final_report(run: RunConfig) -> None:
    """Write report.html of a run that took steps, in another process: a plotting library is larger than this one.

    A failure is reported and ends nothing.
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
