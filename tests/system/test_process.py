"""Signals that stop a program."""

import subprocess
import sys

FORK = """
import multiprocessing
from surefoot.system.process import handle_stop_signals
handle_stop_signals()
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, 2]))
"""


def test_workers_of_a_library_end_without_a_word() -> None:
    """A pool ends its forked workers by SIGTERM; in the program itself that would be an interruption."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2]\n", "")
