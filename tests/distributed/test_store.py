"""Ranks that wait for the store of their run."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

WAIT = """
from datetime import timedelta
from surefoot.distributed.store import shared_store
from surefoot.system.process import handle_stop_signals
handle_stop_signals()
try:
    print("waiting", flush=True)
    shared_store(1, 2, timedelta(seconds=SECONDS))
except (KeyboardInterrupt, RuntimeError) as error:
    print(type(error).__name__, error)
"""


def wait_for_store(seconds: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    program = [sys.executable, "-c", WAIT.replace("SECONDS", str(seconds))]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    return process


def test_a_rank_that_waits_for_its_store_hears_a_signal() -> None:
    process = wait_for_store(600)
    try:
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0].startswith("KeyboardInterrupt SIGTERM")
    finally:
        process.kill()


def test_a_store_that_nobody_serves_ends_the_wait() -> None:
    assert "nobody answers at 127.0.0.1:1 within 1 s" in wait_for_store(1).communicate(timeout=20)[0]
