"""What a self-test means: checks, from what its ranks said. Pure."""

import re
from collections.abc import Mapping
from statistics import median
from typing import Any

from surefoot.diagnostics.preflight.check import Check, fail, not_applicable, ok
from surefoot.diagnostics.preflight.gpus import JOINED_GPUS, NOT_JOINED
from surefoot.diagnostics.selftest.report import Report
from surefoot.distributed.elastic_launch import GONE
from surefoot.system.rank_consistency import facts_of, ranks_differ

GIB = 1 << 30
MOST_OFFSET_S = 1.0
"""Between the clocks of two machines: timelines of a run would be out of order."""
LEAST_OF_MEDIAN = {"nccl": 0.85, "gloo": 0.5}
"""Of the ranks' matrix products: GPUs of one kind are alike within some percent; cores are shared with others."""
SLOW_WRITE = 20.0
"""MB/s: a checkpoint of 1 GB would take a minute."""
NVLINK = (("H200", 431.0), ("H100", 431.0), ("A100", 228.0), ("V100", 110.0))
"""GPU -> the bus bandwidth, GB/s, that a large all-reduce between the eight GPUs of one machine must reach, all of them
joined by NVLink. Source: Azure's node health checks (AzureHPC azurehpc-health-checks), read 2026-11"""
PCIE = {3: 6.0, 4: 12.0}
"""Generation -> the same without NVLink. Source: NVIDIA/nccl#766"""
OF_A_PORT = 0.9
"""Of an InfiniBand port's rate, with GPU memory read by the card. Source: as for NVLINK"""
OF_ETHERNET = 0.5
"""Of an interface's speed: a judgement, TCP reaches more."""


def checks_of(report: Report) -> list[Check]:
    """One check for each stage that was reached; the one that was not gone through says who did not."""
    checks = [
        look(report)
        for stage, look in (
            ("machine", _alike),
            ("clock", _clocks),
            ("reach", _reach),
            ("join", _nccl),
            ("exchange", _exchange),
            ("collectives", _collectives),
            ("bandwidth", _bandwidth),
            ("product", _product),
            ("product", _clocks_under_load),
            ("product", _pcie_under_load),
            ("storage", _storage),
        )
        if stage in report.said
    ]
    return [*checks, _stopped(report)] if report.stopped_in else checks


def _hosts(report: Report) -> dict[int, str]:
    """Rank -> its machine: by its name, and by a number where several have the same name, as containers may."""
    numbers: dict[int, int] = {}
    for rank, said in report.of("machine").items():
        numbers[rank] = max(numbers.values(), default=0) + (said["local_rank"] == 0)
    names = {rank: str(said["host"]) for rank, said in report.of("machine").items()}
    is_plain = len(set(names.values())) == len(set(numbers.values()))
    return names if is_plain else {rank: f"{name} #{numbers[rank]}" for rank, name in names.items()}


def _named(report: Report, rank: int) -> str:
    """A rank with its machine, where there are several."""
    hosts = _hosts(report)
    return f"rank {rank} ({hosts[rank]})" if len(set(hosts.values())) > 1 and rank in hosts else f"rank {rank}"


def _alike(report: Report) -> Check:
    name, machines = "ranks are alike", report.of("machine")
    hosts = _hosts(report)
    finding = ranks_differ([facts_of(machine) for machine in machines.values()], list(hosts.values()))
    if finding is not None:
        return Check(name, "warning", finding.cause, finding)
    count = len(set(hosts.values()))
    where = "one machine" if count == 1 else f"{count} machines"
    return ok(name, f"{report.ranks} ranks on {where} have the same versions and variables")


def _clocks(report: Report) -> Check:
    name, far = "clocks", []
    for rank, (offset_s, error_s) in report.of("clock").items():
        if abs(offset_s) - error_s > MOST_OFFSET_S:
            way = "behind" if offset_s > 0 else "ahead of"
            far.append(f"{_named(report, rank)} is {abs(offset_s):.1f} s {way} rank 0")
    if far:
        return fail(name, "SF731", "; ".join(far), offsets_s={str(r): v[0] for r, v in report.of("clock").items()})
    if len(set(_hosts(report).values())) == 1:
        return not_applicable(name, "one machine")
    most = max(abs(offset_s) for offset_s, _ in report.of("clock").values())
    return ok(name, f"at most {most * 1000:.0f} ms apart")


def _reach(report: Report) -> Check:
    name = "machines reach each other"
    problems = [
        f"{_named(report, rank)} does not reach {_named(report, int(other))}: {why}"
        for rank, said in report.of("reach").items()
        for other, why in said.items()
    ]
    if problems:
        return fail(name, "SF732", "; ".join(problems[:4]), is_fatal=True, pairs=len(problems))
    if len(set(_hosts(report).values())) == 1:
        return not_applicable(name, "one machine")
    return ok(name, "each on a free port of each")


def _nccl(report: Report) -> Check:
    """NCCL as it was loaded, against the one that torch was installed with."""
    name = "NCCL"
    if report.backend != "nccl":
        return not_applicable(name, f"the ranks talk over {report.backend}")
    joined, machines = report.of("join"), report.of("machine")
    for rank, said in joined.items():
        installed = machines[rank]["versions"].get("nccl", "")
        if installed and said["nccl"] and not installed.startswith(said["nccl"]):
            cause = (
                f"{_named(report, rank)} has loaded NCCL {said['nccl']} ({', '.join(said['loaded'])}), and {installed} "
                "is installed with torch"
            )
            return fail(name, "SF741", cause, loaded=said["loaded"], installed=installed)
    if len({said["nccl"] for said in joined.values()}) > 1:
        versions = {str(rank): said["nccl"] for rank, said in joined.items()}
        return fail(name, "SF741", f"the ranks have loaded different NCCLs: {versions}", loaded=versions)
    return ok(name, f"{next(iter(joined.values()))['nccl']} at all ranks")


def _exchange(report: Report) -> Check:
    name = "pairs of ranks"
    wrong_pairs = [
        f"{_named(report, rank)} got something else than {_named(report, source)} sent"
        for rank, said in report.of("exchange").items()
        for source in said["wrong"]
    ]
    if wrong_pairs:
        return fail(name, "SF734", "; ".join(wrong_pairs[:4]), is_fatal=True, pairs=len(wrong_pairs))
    return ok(name, f"{report.ranks * next(iter(report.of('exchange').values()))['pairs']} exchanges arrived whole")


def _collectives(report: Report) -> Check:
    name = "collectives"
    problems = [
        f"{what} at {_named(report, rank)}: {how}"
        for rank, said in report.of("collectives").items()
        for what, how in said["wrong"].items()
    ]
    if problems:
        return fail(name, "SF734", "; ".join(problems[:4]), is_fatal=True, problems=len(problems))
    return ok(name, "all-reduce, all-gather, reduce-scatter, uneven all-to-all, broadcast: every number is right")


def _bandwidth(report: Report) -> Check:
    """Judged by the largest all-reduce, of which others have told what it reaches; the other collectives are shown."""
    name, judged = "bus bandwidth, GB/s", "all-reduce"
    slowest = {kind: _slowest(report, kind) for kind in next(iter(report.of("bandwidth").values()))}
    seen = "; ".join(
        f"{kind} " + ", ".join(f"{_bytes(length)}: {speed:.3g}" for length, speed in speeds.items())
        for kind, speeds in slowest.items()
    )
    least, why = expected_gb_s(report)
    if least is None:
        return ok(name, f"{seen} ({why})")
    reached = slowest[judged][max(slowest[judged])]
    if reached < least:
        cause = f"a large {judged} has {reached:.3g} GB/s of bus bandwidth, and {least:.4g} are to be expected: {why}"
        return fail(name, "SF733", f"{cause}; all of them: {seen}", bus_bandwidth_gb_s=slowest, expected_gb_s=least)
    return ok(name, f"{seen} ({least:.4g} to be expected of a large {judged}: {why})")


def _slowest(report: Report, kind: str) -> dict[int, float]:
    """Bytes -> GB/s of its slowest rank, which a collective is as fast as. All ranks ended with the same size."""
    said = [one[kind] for one in report.of("bandwidth").values()]
    return {int(length): min(one[length] for one in said) for length in sorted(said[0], key=int)}


def expected_gb_s(report: Report) -> tuple[float | None, str]:
    """(the least bus bandwidth that the way between these ranks gives, the way); None where it is not known.

    Only ways that somebody has measured are judged; of all others the figures are shown.
    """
    machines = list(report.of("machine").values())
    if report.backend != "nccl":
        return None, f"what {report.backend} should reach here is not known"
    nodes = sum(machine["local_rank"] == 0 for machine in machines)
    ranks_each = report.ranks // nodes
    if nodes > 1:
        return _of_network(machines[0], ranks_each)
    cards = machines[0]["cards"]
    if not cards:
        return None, "NVML does not tell how the GPUs are joined"
    kind = cards[0]["name"]
    if any(any(card["links"]) for card in cards):
        known = next((least for name, least in NVLINK if re.search(rf"\b{name}\b", kind)), None)
        is_measured = ranks_each == len(cards) == JOINED_GPUS and not NOT_JOINED.search(kind)
        return (known, f"NVLink of {kind}") if is_measured else (None, f"{ranks_each} {kind} with NVLink: not known")
    generation = min(card["pcie_most_generation"] or 0 for card in cards)
    return PCIE.get(generation), f"PCIe of generation {generation or 'unknown'}"


def _of_network(machine: Mapping[str, Any], ranks_each: int) -> tuple[float | None, str]:
    """Between machines with so many ranks each: as many ports as there are ranks can be in use at a time."""
    active = [port for port in machine["ports"] if "ACTIVE" in port["state"] and port["link_layer"] == "InfiniBand"]
    rates = [float(port["rate"].split()[0]) for port in active if port["rate"]]
    if rates:
        used = [rate for rate in rates if rate == max(rates)][:ranks_each]
        return sum(used) / 8 * OF_A_PORT, f"{len(used)} InfiniBand ports of {used[0]:g} Gbit/s"
    if machine["ports"]:
        return None, "which RoCE ports carry it is not known"
    own = set(machine["host_addresses"])
    speeds = [one["speed_mbit"] for one in machine["interfaces"].values() if own & set(one["addresses"])]
    if any(speeds):
        return max(speeds) / 8000 * OF_ETHERNET, f"Ethernet of {max(speeds) / 1000:g} Gbit/s"
    return None, "the speed of the network is not known"


def _bytes(length: int) -> str:
    return f"{length / GIB:g} GiB" if length >= GIB else f"{length / (1 << 20):g} MiB"


def _product(report: Report) -> Check:
    name, said = "matrix product", {rank: one["tflops"] for rank, one in report.of("product").items()}
    usual = median(said.values())
    slow = [rank for rank, speed in said.items() if speed < LEAST_OF_MEDIAN[report.backend] * usual]
    speeds = ", ".join(f"{speed:.3g}" for speed in said.values())
    if slow:
        shown = ", ".join(f"{_named(report, rank)} {said[rank]:.3g}" for rank in slow)
        return fail(name, "SF735", f"{shown} TFLOP/s, and {usual:.3g} is usual among {report.ranks} ranks",
                     tflops={str(rank): round(speed, 2) for rank, speed in said.items()})  # fmt: skip
    return ok(name, f"{speeds} TFLOP/s, all ranks at a time")


def _cards(report: Report) -> dict[int, Mapping[str, Any]]:
    """Rank -> its GPU as it was in the midst of products."""
    return {rank: one["card"] for rank, one in report.of("product").items() if one["card"] is not None}


def _clocks_under_load(report: Report) -> Check:
    """An idle card is never too hot."""
    name, cards = "GPU clocks under load", _cards(report)
    if not cards:
        return not_applicable(name, "no GPU was asked")
    slowed = {rank: ", ".join(card["slowed_by"]) for rank, card in cards.items() if card["slowed_by"]}
    if slowed:
        cause = "; ".join(f"the GPU of {_named(report, rank)} is slowed down: {why}" for rank, why in slowed.items())
        return fail(name, "SF723", cause, cards=[cards[rank]["index"] for rank in slowed])
    hottest = max((card["temperature_c"] or 0 for card in cards.values()), default=0)
    return ok(name, f"nothing slows them down{f', the warmest has {hottest} °C' if hottest else ''}")


def _pcie_under_load(report: Report) -> Check:
    """An idle card lowers its link."""
    name, cards = "PCIe under load", _cards(report)
    known = {rank: card for rank, card in cards.items() if card["pcie_generation"] and card["pcie_most_generation"]}
    if not known:
        return not_applicable(name, "no GPU was asked, or none told")
    low = [rank for rank, card in known.items() if card["pcie_generation"] < card["pcie_most_generation"]]
    if low:
        cause = "; ".join(
            f"the GPU of {_named(report, rank)} uses generation {known[rank]['pcie_generation']} of "
            f"{known[rank]['pcie_most_generation']} while it computes"
            for rank in low
        )
        return fail(name, "SF725", cause, cards=[known[rank]["index"] for rank in low])
    generations = ", ".join(sorted({str(card["pcie_generation"]) for card in known.values()}))
    return ok(name, f"generation {generations}, as card and slot can")


def _storage(report: Report) -> Check:
    name = "speed of output_dir"
    said = {rank: one for rank, one in report.of("storage").items() if one is not None}
    if not said:
        return not_applicable(name, "no run is given")
    damaged = [rank for rank, one in said.items() if not one["is_same"]]
    if damaged:
        return fail(name, "SF711", f"{_named(report, damaged[0])} read something else than it had written",
                     is_fatal=True, error="other bytes")  # fmt: skip
    slowest = min(said, key=lambda rank: said[rank]["write"])
    shown = f"{_named(report, slowest)} writes {said[slowest]['write']:.0f} MB/s and reads {said[slowest]['read']:.0f}"
    if said[slowest]["write"] < SLOW_WRITE:
        return fail(name, "SF711", shown, write_mb_s=round(said[slowest]["write"], 1))
    return ok(name, shown)


WHAT = {
    "arrive": "arriving",
    "machine": "looking at their machines",
    "clock": "comparing clocks",
    "reach": "connecting to each other",
    "join": "joining one process group",
    "exchange": "exchanging data in pairs",
    "collectives": "their first collectives",
    "bandwidth": "large collectives",
    "product": "a matrix product",
    "storage": "writing a file",
}


def _stopped(report: Report) -> Check:
    """Who kept the others from coming through: one that failed by itself, else those who are silent."""
    what, within = WHAT[report.stopped_in], f"within {report.within_s:.0f} s"
    silent = ", ".join(_named(report, rank) for rank in report.silent)
    own = {rank: error for rank, error in report.errors.items() if not any(sign in error for sign in GONE)}
    if own:
        said = "; ".join(f"{_named(report, rank)}: {error}" for rank, error in list(own.items())[:3]) + f", in {what}"
    elif silent:
        lost = "; ".join(f"{_named(report, rank)} lost it: {error}" for rank, error in list(report.errors.items())[:1])
        said = f"{silent} did not come through {what} {within}{f' ({lost})' if lost else ''}"
    else:
        said = "; ".join(f"{_named(report, rank)}: {error}" for rank, error in list(report.errors.items())[:3]) or (
            f"the ranks' connection ended in {what}"
        )
    return fail("self-test", "SF742", said, is_fatal=True, stage=report.stopped_in,
                 silent=report.silent, errors={str(rank): error for rank, error in report.errors.items()})  # fmt: skip
