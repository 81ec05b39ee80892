"""Detection of ranks whose memory grows with every step; the ranks count their objects twice to name what grows."""

from collections import Counter
from collections.abc import Collection, Mapping

from surefoot.diagnostics.monitor.evidence_client import EvidenceClient
from surefoot.diagnostics.monitor.evidence_server import OBJECTS
from surefoot.diagnostics.monitor.object_census import Census, read_census
from surefoot.diagnostics.monitor.rank_state import RankState
from surefoot.diagnostics.rules.memory import UNCOUNTED, name_owner
from surefoot.findings import Finding
from surefoot.system.memory import room_bytes

MOST_ASKS = 4
"""Number of requests to a rank that does not respond, as on a busy machine: one at each poll."""

Key = tuple[int, int]
"""(rank, process)"""


class LeakDetector:
    """The detector of memory leaks in one start of one run."""

    def __init__(self, client: EvidenceClient, ranks: Mapping[int, RankState], num_here: int) -> None:
        """Start without suspects. `ranks`: the ranks of this machine, `num_here` in all; the caller adds them later."""
        self._client, self._ranks, self._num_here = client, ranks, num_here
        self._first: dict[Key, Census | None] = {}
        """(rank, process) -> its objects when its memory first grew like a leak; None: too many to count."""
        self._first_requests: Counter[Key] = Counter()
        self._requests: Counter[Key] = Counter()
        self._reported: set[Key] = set()

    def find(self) -> list[Finding]:
        """Return the leaks that are certain and not reported yet.

        Objects are counted when a leak is first suspected, and when it is certain.
        """
        watched = {
            key: rank for number, rank in self._ranks.items()
            if (key := (number, rank.process)) not in self._reported and not rank.has_ended
        }  # fmt: skip
        with_first_census = set(self._first)
        suspects = {
            key for key, rank in watched.items()
            if rank.memory.is_suspect and key not in self._first and self._first_requests[key] < MOST_ASKS
        }  # fmt: skip
        self._first_requests.update(suspects)
        self._first |= self._count_objects(suspects)

        sure = {key for key, rank in watched.items() if rank.memory.finding() is not None}
        self._requests.update(sure)
        second, findings = self._count_objects(sure & with_first_census), []
        for key in sorted(sure):
            if key not in second and self._requests[key] < MOST_ASKS:
                continue
            is_uncounted = key in second and second[key] is None
            owner = UNCOUNTED if is_uncounted else name_owner(self._first.get(key), second.get(key))
            finding = watched[key].memory.finding(room_bytes() / self._num_here, owner)
            findings += [finding] if finding is not None else []
            self._reported.add(key)
        return findings

    def _count_objects(self, keys: Collection[Key]) -> dict[Key, Census | None]:
        """Return the objects of the processes that respond in time; None: too many to count."""
        if not keys:
            return {}
        processes = dict(keys)
        try:
            responses = self._client.fetch(OBJECTS, processes)
        except OSError:  # a full disk: the leak is named without its owner
            return {}
        return {
            (number, processes[number]): read_census(census) if census is not None else None
            for number, census in responses.items()
        }
