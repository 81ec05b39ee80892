"""Recorded histories of a run."""

from collections.abc import Callable, Iterator

from surefoot.diagnostics.monitor.event_log import Entry

MIB = 1 << 20


def history(grown_by: Callable[[int, str], float], steps: int = 200) -> Iterator[Entry]:
    """A rank whose memory changes in its phases as `grown_by(step, phase)` says, in MiB."""
    now = 500.0
    for step in range(1, steps + 1):
        for phase in ("forward", "backward", "optimizer"):
            yield Entry(0, 7, 7, float(step), "phase began", phase, step, {"anonymous_bytes": now * MIB})
            now += grown_by(step, phase)
            yield Entry(0, 7, 7, float(step), "phase ended", phase, step, {"anonymous_bytes": now * MIB})
