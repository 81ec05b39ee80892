"""Ranks whose memory grows with every step, and the objects it grows by: the ranks count theirs twice."""

from collections import Counter
from collections.abc import Collection, Mapping

from surefoot.diagnostics.monitor.evidence_client import Witnesses
from surefoot.diagnostics.monitor.evidence_server import OBJECTS
from surefoot.diagnostics.monitor.object_census import Census, read_census
from surefoot.diagnostics.monitor.processes import room_bytes
from surefoot.diagnostics.monitor.rank_state import RankState
from surefoot.diagnostics.rules.memory import UNCOUNTED, name_owner
from surefoot.findings import Finding

MOST_ASKS = 4
"""A rank that does not answer, as on a busy machine, is asked again at the next look, so often."""

Key = tuple[int, int]
"""(rank, process)"""


class LeakDetector:
    """Of one start of one run."""

    def __init__(self, witnesses: Witnesses, ranks: Mapping[int, RankState], num_here: int) -> None:
        """`ranks`: those of this machine, as they become known, of `num_here` that will."""
        self._witnesses, self._ranks, self._num_here = witnesses, ranks, num_here
        self._first: dict[Key, Census | None] = {}
        """Of ranks' objects, when their memory first grew as a leak does; None: too many to count."""
        self._asked_first: Counter[Key] = Counter()
        self._asked: Counter[Key] = Counter()
        self._named: set[Key] = set()

    def look(self) -> list[Finding]:
        """Those that are sure and not named yet; objects are counted when it begins to look so, and when it is sure."""
        watched = {
            key: rank for number, rank in self._ranks.items()
            if (key := (number, rank.ring.process)) not in self._named and not rank.has_ended
        }  # fmt: skip
        known = set(self._first)
        suspects = {
            key for key, rank in watched.items()
            if rank.memory.is_suspect and key not in self._first and self._asked_first[key] < MOST_ASKS
        }  # fmt: skip
        self._asked_first.update(suspects)
        self._first |= self._count(suspects)

        sure = {key for key, rank in watched.items() if rank.memory.finding() is not None}
        self._asked.update(sure)
        now, found = self._count(sure & known), []
        for key in sorted(sure):
            if key not in now and self._asked[key] < MOST_ASKS:
                continue
            is_uncounted = key in now and now[key] is None
            owner = UNCOUNTED if is_uncounted else name_owner(self._first.get(key), now.get(key))
            finding = watched[key].memory.finding(room_bytes() / self._num_here, owner)
            found += [finding] if finding is not None else []
            self._named.add(key)
        return found

    def _count(self, keys: Collection[Key]) -> dict[Key, Census | None]:
        """The objects of those that answer in time; None: too many."""
        if not keys:
            return {}
        processes = dict(keys)
        try:
            answers = self._witnesses.answers(self._witnesses.ask(OBJECTS, processes), processes)
        except OSError:  # a full disk: the leak is named without its owner
            return {}
        return {
            (number, processes[number]): read_census(said) if said is not None else None
            for number, said in answers.items()
        }
