"""The evidence that the recorded events of one rank give, for the live monitor and for a run that has ended."""

from collections.abc import Sequence

from surefoot.diagnostics.monitor.event_log import Entry, newest_starts
from surefoot.diagnostics.rules.device_memory import DeviceMemory
from surefoot.diagnostics.rules.memory import MemoryTrend
from surefoot.diagnostics.rules.memory_spike import Peaks
from surefoot.diagnostics.rules.numerics import Numbers
from surefoot.diagnostics.rules.speed import find_slow
from surefoot.diagnostics.rules.step_times import RankTimes
from surefoot.findings import Finding


class RankTrends:
    """The evidence that the events of one start of one rank give, while it runs or afterwards."""

    def __init__(self, rank: int, *, with_numbers: bool) -> None:
        """`with_numbers`: collect the losses and the use of experts too, which all ranks report alike."""
        self.memory = MemoryTrend(rank)
        self.device_memory = DeviceMemory(rank)
        self.peaks = Peaks(rank)
        self.times = RankTimes()
        self.numbers = Numbers()
        self._with_numbers = with_numbers

    def observe(self, entry: Entry) -> None:
        """Take one event, in the order of events."""
        kind, step, values = entry.kind, entry.step, entry.values
        self.times.add(kind, entry.phase, step, entry.time_s, values)
        self.device_memory.add(kind, step, values)
        self.peaks.add(kind, step, values)
        if self._with_numbers:
            self.numbers.add(kind, step, values)
        if kind == "phase ended" and entry.phase in ("save", "evaluate"):
            self.peaks.between()
        if "anonymous_bytes" in values:
            self.memory.add(kind, entry.phase, step, values["anonymous_bytes"])


def find_in_history(entries: Sequence[Entry]) -> list[Finding]:
    """Return the findings of a complete history, for the newest start of each rank."""
    newest = newest_starts(entries)
    first = min((entry.rank for entry in newest), default=0)
    ranks: dict[int, RankTrends] = {}
    for entry in newest:
        if entry.rank not in ranks:
            ranks[entry.rank] = RankTrends(entry.rank, with_numbers=entry.rank == first)
        ranks[entry.rank].observe(entry)
    leaks = [finding for rank in ranks.values() if (finding := rank.memory.finding()) is not None]
    on_devices = [finding for rank in ranks.values() for finding in rank.device_memory.findings()]
    slow = find_slow({number: rank.times for number, rank in ranks.items()})
    numbers = [finding for rank in ranks.values() for finding in rank.numbers.findings()]
    return [*leaks, *on_devices, *slow, *numbers]
