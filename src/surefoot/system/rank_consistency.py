"""What is not the same at every rank of a run, of what should be. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.findings import CATALOGUE, Finding

MAY_DIFFER = re.compile(r"^(OMP|MKL)_|^CUDA_VISIBLE_DEVICES$|(_IFNAME|_HCA|_DIR|_PATH|_FILE|_PRELOAD)$")
"""Variables that are of a rank or of a machine: which CPUs, cards and folders it has."""
CODE = "SF730"
Facts = Mapping[str, Mapping[str, str]]
"""Kind of fact -> name -> value; without a kind that could not be read."""


def facts_of(machine: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Of a rank's snapshot (`Snapshot.as_dict`, and the name of its `device`) what must be the same at all of them."""
    found = {"machine": {"kernel": str(machine["kernel"]), "GPU": str(machine.get("device") or "none")}}
    own = set(machine["host_addresses"])
    mtus = {str(one["mtu"]) for one in machine["interfaces"].values() if own & set(one["addresses"])}
    if mtus:
        found["network"] = {"MTU": " and ".join(sorted(mtus))}
    for kind in ("environment", "versions"):
        if kind not in machine["unknown"]:
            found[kind] = {name: str(value) for name, value in machine[kind].items() if not MAY_DIFFER.search(name)}
    return found


def ranks_differ(facts: Sequence[Facts], hosts: Sequence[str]) -> Finding | None:
    """The finding, where ranks are not alike; most ranks are taken to be right.

    `facts` and `hosts`: of each rank, in order.
    """
    differing: dict[str, dict[str, list[int]]] = {}
    names = {(kind, name) for said in facts for kind, values in said.items() for name in values}
    for kind, name in sorted(names, key=lambda one: one[1]):
        values: dict[str, list[int]] = {}
        for rank, said in enumerate(facts):
            if kind in said:
                values.setdefault(said[kind].get(name, "not set"), []).append(rank)
        if len(values) > 1:
            differing[name] = values
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
