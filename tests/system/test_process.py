"""Signals that stop a program."""

import subprocess
import sys

import pytest

FORK = """
import multiprocessing
from contextlib import ExitStack
from surefoot.system.process import StopSignal, handle_stop_signals
handle_stop_signals()
with ExitStack() as stack:
    if IN_A_RUN:
        stop = stack.enter_context(StopSignal().watching())
        stack.enter_context(stop.deferred())
    pool = stack.enter_context(multiprocessing.get_context("fork").Pool(2))
    print(pool.map(abs, [-1, 2]))
"""


@pytest.mark.parametrize("in_a_run", [False, True])
def test_workers_of_a_library_end_without_a_word(in_a_run: bool) -> None:
    """A pool ends its forked workers by SIGTERM; in the program itself that would be an interruption."""
    done = subprocess.run(
        [sys.executable, "-c", FORK.replace("IN_A_RUN", str(in_a_run))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2]\n", "")
