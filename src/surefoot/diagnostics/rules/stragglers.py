"""Rules for ranks that the others wait for, from the times at which the ranks enter the collectives they share. Pure.

The ranks must share a clock, so they must be on one machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from surefoot.diagnostics.monitor.flight_recorder import MEANINGS, TRAVELLING, FlightRecord
from surefoot.diagnostics.rules.step_times import MOST_OF
from surefoot.findings import Finding

LEAST_COLLECTIVES = 40
WINDOW_S = 5.0
"""Fewest collectives, and shortest time, from which a finding follows."""
BEHIND_SHARE = 0.2
IDLE_BEHIND_SHARE = 0.5
"""Shares of the time that the others must lose; the second if a slow network or a lack of cores explains less."""
FOR_CORES_SHARE = 0.5
"""Share of the lost time from which a lack of cores is its cause."""
MOST_AT_ONCE = 0.2
"""Largest share of a straggler's lost time in a single collective: such a loss is due to a save or an evaluation."""
UNEVEN_LOAD = 1.25
"""Load of the rank with the busiest experts from which it may be the reason why others wait."""
OF_SHARDED_WEIGHTS = (MEANINGS["mesh_fsdp"], MEANINGS["mesh_dp_replicate"])

Key = tuple[str, int]
Span = tuple[float, float]


@dataclass(frozen=True)
class _Arrivals:
    """The ranks' arrivals at the collectives that they share."""

    num_shared: int
    took_s: float
    """Seconds from the first arrival to the last."""
    waits: dict[int, list[tuple[Key, Span]]]
    """Rank -> the collectives that it entered last, each with the span from the others' median arrival to its own."""


def find_straggler(
    flights: Mapping[int, FlightRecord], *, are_idle: bool = False, in_line: Mapping[int, float] | None = None
) -> Finding | None:
    """Return a finding on the rank that the others wait for again and again.

    `are_idle`: no rank computes; then a slow network, which also makes one rank the last, must be excluded. `in_line`:
    rank -> share of its time in which it waited for a core; if that is why it is late, the others must lose half of the
    time, and SF313 is the finding.
    """
    arrivals = _compare_arrivals(flights)
    if arrivals is None:
        return None
    took_s = arrivals.took_s
    waits_s = {rank: _merge_spans([span for _, span in waits]) for rank, waits in arrivals.waits.items()}
    rank = max(waits_s, key=lambda number: sum(waits_s[number]))
    lost_s = sum(waits_s[rank])
    core_waits = in_line or {}
    others = [share for other, share in core_waits.items() if other != rank]
    longer_in_line = core_waits[rank] - median(others) if rank in core_waits and others else 0.0
    is_for_cores = bool(others) and took_s > 0 and longer_in_line >= FOR_CORES_SHARE * lost_s / took_s
    is_regular = max(waits_s[rank], default=0.0) < MOST_AT_ONCE * lost_s
    is_dominant = lost_s >= MOST_OF * sum(map(sum, waits_s.values()))
    least_share = IDLE_BEHIND_SHARE if are_idle or is_for_cores else BEHIND_SHARE
    if took_s < WINDOW_S or lost_s < least_share * took_s or not (is_regular and is_dominant):
        return None
    evidence = {"rank": rank, "collectives": arrivals.num_shared, "seconds": round(took_s, 1)}
    lost = f"{lost_s / took_s:.0%} of the time"
    if is_for_cores:
        share = f"{core_waits[rank]:.0%}"
        return Finding(
            "SF313",
            f"rank {rank} is ready but gets no core in {share} of the time, and the other ranks wait for it in {lost}",
            {**evidence, "in_line": share},
            confidence=0.9,
        )
    by_rank = ", ".join(f"rank {other}: {sum(seconds):.1f}" for other, seconds in waits_s.items())
    return Finding(
        "SF303",
        f"rank {rank} is slower than the others again and again: they wait for it in {lost}",
        {**evidence, "waited_s_by_last_rank": by_rank},
        confidence=0.9,
    )


def find_uneven_experts(flights: Mapping[int, FlightRecord], load: float) -> Finding | None:
    """Return a finding if ranks wait for others whose experts got more rows.

    `load`: rows of the busiest rank relative to the mean rank.
    """
    arrivals = _compare_arrivals(flights) if load >= UNEVEN_LOAD else None
    if arrivals is None:
        return None
    calls = {key: call for flight in flights.values() for key, call in flight.finished.items()}
    # With gloo the same call reduces gradients.
    of_weights = {
        group
        for flight in flights.values()
        for group, meaning in flight.meanings.items()
        if meaning in OF_SHARDED_WEIGHTS
    }
    spans = [
        span
        for waits in arrivals.waits.values()
        for key, span in waits
        if TRAVELLING in calls.get(key, "") and key[0] not in of_weights
    ]
    took_s, lost_s = arrivals.took_s, sum(_merge_spans(spans))
    if took_s < WINDOW_S or lost_s < BEHIND_SHARE * took_s or len(spans) < LEAST_COLLECTIVES:
        return None
    return Finding(
        "SF312",
        f"ranks wait for those with busier experts in {lost_s / took_s:.0%} of the time: the busiest gets {load:.1f} "
        "times as many rows as the mean one",
        {"load": round(load, 2), "waited_s": round(lost_s, 1), "seconds": round(took_s, 1), "exchanges": len(spans)},
        confidence=0.8,
    )


def _compare_arrivals(flights: Mapping[int, FlightRecord]) -> _Arrivals | None:
    """Compare the ranks' arrivals at their shared collectives; return None if there are too few."""
    if len(flights) < 2:
        return None
    shared = set.intersection(*(set(flight.called_s) for flight in flights.values()))
    if len(shared) < LEAST_COLLECTIVES:
        return None
    waits: dict[int, list[tuple[Key, Span]]] = {rank: [] for rank in flights}
    for key in shared:
        arrivals = {rank: flight.called_s[key] for rank, flight in flights.items()}
        last = max(arrivals, key=lambda rank: arrivals[rank])
        waits[last].append((key, (median(time_s for rank, time_s in arrivals.items() if rank != last), arrivals[last])))
    times = [flight.called_s[key] for flight in flights.values() for key in shared]
    return _Arrivals(len(shared), max(times) - min(times), waits)


def _merge_spans(spans: Sequence[Span]) -> list[float]:
    """Return the lengths of time spans, with overlapping ones merged: collectives may be called at the same time."""
    merged: list[list[float]] = []
    for began, ended in sorted(spans):
        if merged and began <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], ended)
        else:
            merged.append([began, ended])
    return [ended - began for began, ended in merged]
