"""What is not the same at every rank of a run, of what should be. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.findings import CATALOGUE, Finding

OWN_VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""That may differ between the ranks of a run."""
CODE = "SF730"


def facts_of(machine: Mapping[str, Any]) -> dict[str, str]:
    """Of a rank's snapshot (`Snapshot.as_dict`) what must be the same at all of them."""
    found = {"kernel": str(machine["kernel"]), "GPU": str(machine.get("device", "none"))}
    for field in ("environment", "versions"):
        found |= {name: str(value) for name, value in machine[field].items() if name not in OWN_VARIABLES}
    return found


def ranks_differ(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> Finding | None:
    """The finding, where ranks are not alike; most ranks are taken to be right.

    `facts` and `hosts`: of each rank, in order.
    """
    differing: dict[str, dict[str, list[int]]] = {}
    for key in sorted({key for said in facts for key in said}):
        values: dict[str, list[int]] = {}
        for rank, said in enumerate(facts):
            values.setdefault(said.get(key, "not set"), []).append(rank)
        if len(values) > 1:
            differing[key] = values
    if not differing:
        return None
    lines = []
    for key, values in differing.items():
        usual = max(values, key=lambda value: (len(values[value]), -values[value][0]))
        odd = [f"{value} on {_named(ranks, hosts)}" for value, ranks in values.items() if value != usual]
        lines.append(f"{key} is {', '.join(odd)}, and {usual} on {_named(values[usual], hosts)}")
    return Finding(CODE, "; ".join(lines), {"differing": differing}, CATALOGUE[CODE].fix, 0.7)


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks, with their machines where there are several."""
    said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(str(rank) for rank in ranks)}"
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{said} ({', '.join(names)})" if len(set(hosts)) > 1 else said
