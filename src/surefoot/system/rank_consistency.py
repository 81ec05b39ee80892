"""Comparison of facts that should be equal at every rank of a run. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.findings import Finding

MAY_DIFFER = re.compile(r"^(OMP|MKL)_|^CUDA_VISIBLE_DEVICES$|(_IFNAME|_HCA|_DIR|_PATH|_FILE|_PRELOAD)$")
"""Variables that may differ between ranks or machines, because they name their CPUs, GPUs, network cards and paths."""
CODE = "SF730"
Facts = Mapping[str, Mapping[str, str]]
"""Kind of fact -> name -> value, without the kinds that could not be read."""


def facts_of(machine: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the facts of a rank's snapshot that must be equal at all ranks.

    `machine`: `Snapshot.as_dict`, with the name of the rank's `device`.
    """
    facts = {"machine": {"kernel": str(machine["kernel"]), "GPU": str(machine.get("device") or "none")}}
    host_addresses = set(machine["host_addresses"])
    mtus = {
        str(interface["mtu"])
        for interface in machine["interfaces"].values()
        if host_addresses & set(interface["addresses"])
    }
    if mtus:
        facts["network"] = {"MTU": " and ".join(sorted(mtus))}
    roce = {
        str(machine["interfaces"][port["interface"]]["mtu"])
        for port in machine["ports"]
        if "ACTIVE" in port["state"] and port["link_layer"] == "Ethernet" and port["interface"] in machine["interfaces"]
    }
    if roce:
        facts.setdefault("network", {})["MTU of RoCE"] = " and ".join(sorted(roce))
    for kind in ("environment", "versions"):
        if kind not in machine["unknown"]:
            facts[kind] = {name: str(value) for name, value in machine[kind].items() if not MAY_DIFFER.search(name)}
    return facts


def ranks_differ(facts: Sequence[Facts], hosts: Sequence[str]) -> Finding | None:
    """Return a finding if ranks differ, or None; the value of most ranks is taken to be right.

    `facts` and `hosts`: those of each rank, in order.
    """
    differing: dict[str, dict[str, list[int]]] = {}
    names = {(kind, name) for rank_facts in facts for kind, values in rank_facts.items() for name in values}
    for kind, name in sorted(names, key=lambda fact: fact[1]):
        values: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts):
            if kind in rank_facts:
                values.setdefault(rank_facts[kind].get(name, "not set"), []).append(rank)
        if len(values) > 1:
            differing[name] = values
    if not differing:
        return None
    lines = []
    for name, values in differing.items():
        most_common = max(values, key=lambda value: (len(values[value]), -values[value][0]))
        deviating = [
            f"{value} on {_name_ranks(ranks, hosts)}" for value, ranks in values.items() if value != most_common
        ]
        lines.append(
            f"{name} is {', '.join(deviating)}, and {most_common} on {_name_ranks(values[most_common], hosts)}"
        )
    return Finding(CODE, "; ".join(lines), {"differing": differing}, confidence=0.7)


def _name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the ranks in words, with their machines if the run has several."""
    text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(str(rank) for rank in ranks)}"
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{text} ({', '.join(names)})" if len(set(hosts)) > 1 else text
