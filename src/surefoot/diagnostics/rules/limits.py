"""Rules for limited resources of a process: open files and threads. Pure."""

from surefoot.diagnostics.rules.leak_trend import LEAST_GROWING_PARTS, PARTS, count_growing_parts
from surefoot.findings import Finding

USED = 0.5
"""Share of a limit from which a count that grows towards it is reported."""
GROWN = 0.25
"""Share of the limit by which the count must have grown since the first step."""
MOST_POINTS = 2000


class LimitTrend:
    """The trend of one count of one rank: `open files` or `threads`."""

    def __init__(self, rank: int, what: str) -> None:
        self._rank, self._what = rank, what
        self._points: list[tuple[int, int]] = []
        """(step, count at that step), over the whole run."""

    def add(self, step: int, count: int) -> None:
        """Add a count, sampled every few seconds; counts before the first step are not part of the trend."""
        if step:
            self._points.append((step, count))
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]

    def finding(self, used: int, most: int, whose: str) -> Finding | None:
        """Return a finding if the count approaches its limit.

        `used` of `most` are in use now by `whose`: the rank alone, or all processes that share the limit.
        """
        if len(self._points) <= PARTS or used < USED * most:
            return None
        (first_step, first), (last_step, last) = self._points[0], self._points[-1]
        growing = count_growing_parts([count for _, count in self._points])
        if last - first < GROWN * most or growing < LEAST_GROWING_PARTS or last_step == first_step:
            return None
        per_step = (last - first) / (last_step - first_step)
        return Finding(
            "SF207",
            f"{self._what} of rank {self._rank} grow by {per_step:.2g} a step: {first} in step {first_step}, {last} in "
            f"step {last_step}. {whose} has {used} of {most}: the rest is used up at about step "
            f"{last_step + round((most - used) / per_step)}",
            {
                "rank": self._rank,
                "what": self._what,
                "steps": f"{first_step} to {last_step}",
                "count": f"{first} -> {last}",
                "used": used,
                "limit": most,
            },
            confidence=0.9,
        )
