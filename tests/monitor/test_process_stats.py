"""Looking at a process changes nothing for it."""

import gc
import os
import signal
import subprocess
import time
from typing import Any

import pytest

from surefoot.diagnostics.monitor.process_stats import GarbageTime


def by_name(number: int, _frame: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def collect_until_told(number: signal.Signals) -> None:
    with subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -{number.value} {os.getpid()}"]) as sender:
        while sender.poll() is None:
            gc.collect()
    time.sleep(5)


def other_callback(_phase: str, _info: Any) -> None:
    """Of a library that listens to the collector, too, and hears it first."""
    time.perf_counter()


@pytest.mark.long
@pytest.mark.parametrize("callbacks", [[], [other_callback]], ids=["ours alone", "beside another"])
@pytest.mark.parametrize(
    ("number", "handler", "says"),
    [(signal.SIGINT, signal.default_int_handler, ""), (signal.SIGTERM, by_name, "SIGTERM")],
)
def test_an_interrupt_during_a_collection_is_not_lost(
    number: signal.Signals, handler: Any, says: str, callbacks: list[Any]
) -> None:
    """The next line of Python after it is then our callback's, and Python lets no exception out of that."""
    gc.callbacks[:0] = callbacks
    before = signal.signal(number, handler)
    garbage = GarbageTime()
    objects = [[n] for n in range(1_000_000)]
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            collect_until_told(number)
        assert str(raised.value) == says
    finally:
        garbage.end()
        signal.signal(number, before)
        del gc.callbacks[: len(callbacks)]
    assert len(objects) == 1_000_000


def test_what_else_is_ignored_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", told.append)
    garbage = GarbageTime()

    class Bad:
        def __del__(self) -> None:
            raise ValueError

    Bad()
    garbage.end()
    Bad()
    assert [type(one.exc_value) for one in told] == [ValueError, ValueError]
