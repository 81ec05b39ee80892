"""Results of the ranks of a self-test, and the checks of them. Pure, except that a report is written and read."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from surefoot.diagnostics.preflight.check import Check, NotApplicable, Result, fail, ok, run_check
from surefoot.diagnostics.preflight.gpus import JOINED_GPUS, NOT_JOINED
from surefoot.distributed.rank_notes import GONE
from surefoot.system.atomic_io import write_json
from surefoot.system.rank_consistency import facts_of, ranks_differ

GIB = 1 << 30
MOST_OFFSET_S = 1.0
"""Largest difference between the clocks of two machines: beyond it, timelines of a run would be out of order."""
LEAST_OF_MEDIAN = {"nccl": 0.85, "gloo": 0.5}
"""Least share of the median speed of matrix products: GPUs of one kind differ by a few percent; cores are shared."""
SLOW_WRITE = 20.0
"""Write speed in MB/s below which storage is slow: a checkpoint of 1 GB would take a minute."""
NVLINK = (("H200", 431.0), ("H100", 431.0), ("A100", 228.0), ("V100", 110.0))
"""(GPU, bus bandwidth in GB/s that a large all-reduce between the eight GPUs of one machine must reach, all joined by
NVLink). Source: Azure's node health checks (AzureHPC azurehpc-health-checks), read 2026-11"""
PCIE = {3: 6.0, 4: 12.0}
"""PCIe generation -> the same bandwidth in GB/s without NVLink. Source: NVIDIA/nccl#766"""
PORT_SHARE = 0.9
"""Least share of an InfiniBand port's rate, with GPUDirect RDMA. Source: as for NVLINK"""
ETHERNET_SHARE = 0.5
"""Least share of an Ethernet interface's speed: an estimate, TCP reaches more."""


@dataclass
class Report:
    """Results of the ranks in each stage, and where the test ended if it did not complete."""

    ranks: int
    backend: str
    by_stage: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Stage -> rank -> its result, for stages that all ranks completed."""
    stopped_in: str = ""
    """Stage that not all ranks completed; empty if all did."""
    within_s: float = 0.0
    """Deadline of that stage in seconds."""
    errors: dict[int, str] = field(default_factory=dict)
    """Rank -> its error, for ranks that failed in that stage."""
    is_over: bool = False
    """Whether rank 0 has told the others that the test is over."""
    silent: list[int] = field(default_factory=list)
    """Ranks without a result at that deadline that had progressed least."""

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    def of(self, stage: str) -> Mapping[int, Any]:
        return self.by_stage.get(stage, {})

    def hosts(self) -> dict[int, str]:
        """Return rank -> its host name, with a number if several machines have the same name, as containers may."""
        numbers: dict[int, int] = {}
        for rank, machine in self.of("machine").items():
            numbers[rank] = max(numbers.values(), default=0) + (machine["local_rank"] == 0)
        names = {rank: str(machine["host"]) for rank, machine in self.of("machine").items()}
        is_plain = len(set(names.values())) == len(set(numbers.values()))
        return names if is_plain else {rank: f"{name} #{numbers[rank]}" for rank, name in names.items()}

    def num_machines(self) -> int:
        return len(set(self.hosts().values()))

    def name_rank(self, rank: int) -> str:
        """Return a rank with its machine if there are several machines."""
        hosts = self.hosts()
        return f"rank {rank} ({hosts[rank]})" if len(set(hosts.values())) > 1 and rank in hosts else f"rank {rank}"


def read_report(path: Path) -> Report:
    """Read a report. Raises: OSError if the file cannot be read."""
    payload = json.loads(path.read_text("utf-8"))
    results = {
        stage: {int(rank): value for rank, value in ranks.items()} for stage, ranks in payload["by_stage"].items()
    }
    errors = {int(rank): text for rank, text in payload["errors"].items()}
    return Report(**{**payload, "by_stage": results, "errors": errors})


def checks_of(report: Report) -> list[Check]:
    """Return the checks of each completed stage, and one that names who did not complete the stage that stopped."""
    checks = [run_check(name, check, report) for stage, name, check in CHECKS if stage in report.by_stage]
    return [*checks, run_check("self-test", _check_stop, report)] if report.stopped_in else checks


def _check_consistency(report: Report) -> Result:
    facts = [facts_of(machine) for machine in report.of("machine").values()]
    finding = ranks_differ(facts, list(report.hosts().values()))
    if finding is not None:
        return Result("warning", finding.cause, finding)
    count = report.num_machines()
    where = "one machine" if count == 1 else f"{count} machines"
    return ok(f"{report.ranks} ranks on {where} have the same versions and variables")


def _check_clocks(report: Report) -> Result:
    offsets, far = report.of("clock"), []
    for rank, (offset_s, error_s) in offsets.items():
        if abs(offset_s) - error_s > MOST_OFFSET_S:
            way = "behind" if offset_s > 0 else "ahead of"
            far.append(f"{report.name_rank(rank)} is {abs(offset_s):.1f} s {way} rank 0")
    if far:
        return fail("SF731", "; ".join(far), offsets_s={str(rank): offset_s for rank, (offset_s, _) in offsets.items()})
    if report.num_machines() == 1:
        raise NotApplicable("one machine")
    most = max(abs(offset_s) for offset_s, _ in offsets.values())
    return ok(f"at most {most * 1000:.0f} ms apart")


def _check_reachability(report: Report) -> Result:
    problems = [
        f"{report.name_rank(rank)} does not reach {report.name_rank(int(other))}: {why}"
        for rank, failures in report.of("reach").items()
        for other, why in failures.items()
    ]
    if problems:
        return fail("SF732", "; ".join(problems[:4]), is_fatal=True, pairs=len(problems))
    if report.num_machines() == 1:
        raise NotApplicable("one machine")
    return ok("each on a free port of every other")


def _check_nccl(report: Report) -> Result:
    """Check the NCCL that was loaded against the one that torch was installed with."""
    if report.backend != "nccl":
        raise NotApplicable(f"the ranks use {report.backend}")
    joined, machines = report.of("join"), report.of("machine")
    for rank, library in joined.items():
        installed = machines[rank]["versions"].get("nccl", "")
        if installed and library["nccl"] and not installed.startswith(library["nccl"]):
            cause = (
                f"{report.name_rank(rank)} has loaded NCCL {library['nccl']} ({', '.join(library['loaded'])}), and "
                f"{installed} is installed with torch"
            )
            return fail("SF741", cause, loaded=library["loaded"], installed=installed)
    if len({library["nccl"] for library in joined.values()}) > 1:
        versions = {str(rank): library["nccl"] for rank, library in joined.items()}
        return fail("SF741", f"the ranks have loaded different NCCLs: {versions}", loaded=versions)
    return ok(f"{next(iter(joined.values()))['nccl']} at all ranks")


def _check_exchange(report: Report) -> Result:
    wrong_pairs = [
        f"{report.name_rank(rank)} received other values than {report.name_rank(source)} sent"
        for rank, result in report.of("exchange").items()
        for source in result["wrong"]
    ]
    if wrong_pairs:
        return fail("SF734", "; ".join(wrong_pairs[:4]), is_fatal=True, pairs=len(wrong_pairs))
    return ok(f"{report.ranks * next(iter(report.of('exchange').values()))['pairs']} exchanges arrived intact")


def _check_collectives(report: Report) -> Result:
    problems = [
        f"{what} at {report.name_rank(rank)}: {how}"
        for rank, result in report.of("collectives").items()
        for what, how in result["wrong"].items()
    ]
    if problems:
        return fail("SF734", "; ".join(problems[:4]), is_fatal=True, problems=len(problems))
    return ok("all-reduce, all-gather, reduce-scatter, uneven all-to-all, broadcast: every number is right")


def _check_bandwidth(report: Report) -> Result:
    """Check the largest all-reduce, for which reference values are published; other collectives are only shown."""
    rated = "all-reduce"
    slowest = {kind: _find_slowest(report, kind) for kind in next(iter(report.of("bandwidth").values()))}
    summary = "; ".join(
        f"{kind} " + ", ".join(f"{_format_bytes(length)}: {speed:.3g}" for length, speed in speeds.items())
        for kind, speeds in slowest.items()
    )
    least, why = expected_gb_s(report)
    if least is None:
        return ok(f"{summary} ({why})")
    reached = slowest[rated][max(slowest[rated])]
    if reached < least:
        cause = f"a large {rated} has {reached:.3g} GB/s of bus bandwidth, and {least:.4g} are expected: {why}"
        return fail("SF733", f"{cause}; all of them: {summary}", bus_bandwidth_gb_s=slowest, expected_gb_s=least)
    return ok(f"{summary} ({least:.4g} expected of a large {rated}: {why})")


def _find_slowest(report: Report, kind: str) -> dict[int, float]:
    """Return bytes -> GB/s of the slowest rank, which limits a collective. All ranks ended with the same size."""
    rank_speeds = [speeds[kind] for speeds in report.of("bandwidth").values()]
    return {int(length): min(speeds[length] for speeds in rank_speeds) for length in sorted(rank_speeds[0], key=int)}


def expected_gb_s(report: Report) -> tuple[float | None, str]:
    """Return (least bus bandwidth of the link between these ranks in GB/s or None if unknown, the link in words).

    Only links with published measurements are rated; for all others the figures are shown.
    """
    machines = list(report.of("machine").values())
    if report.backend != "nccl":
        return None, f"what {report.backend} should reach here is not known"
    nodes = sum(machine["local_rank"] == 0 for machine in machines)
    ranks_each = report.ranks // nodes
    if nodes > 1:
        return _estimate_network_gb_s(machines[0], ranks_each)
    cards = machines[0]["cards"]
    if not cards:
        return None, "NVML does not report how the GPUs are joined"
    kind = cards[0]["name"]
    if any(any(card["links"]) for card in cards):
        expected = next((least for name, least in NVLINK if re.search(rf"\b{name}\b", kind)), None)
        is_measured = ranks_each == len(cards) == JOINED_GPUS and not NOT_JOINED.search(kind)
        return (expected, f"NVLink of {kind}") if is_measured else (None, f"{ranks_each} {kind} with NVLink: not known")
    generation = min(card["pcie_most_generation"] or 0 for card in cards)
    return PCIE.get(generation), f"PCIe of generation {generation or 'unknown'}"


def _estimate_network_gb_s(machine: Mapping[str, Any], ranks_each: int) -> tuple[float | None, str]:
    """Return the same between machines with `ranks_each` ranks each, which can use that many ports at a time."""
    active = [port for port in machine["ports"] if "ACTIVE" in port["state"] and port["link_layer"] == "InfiniBand"]
    rates = [float(port["rate"].split()[0]) for port in active if port["rate"]]
    if rates:
        used_rates = [rate for rate in rates if rate == max(rates)][:ranks_each]
        return sum(used_rates) / 8 * PORT_SHARE, f"{len(used_rates)} InfiniBand ports of {used_rates[0]:g} Gbit/s"
    if machine["ports"]:
        return None, "which RoCE ports carry it is not known"
    host_addresses = set(machine["host_addresses"])
    speeds = [
        interface["speed_mbit"]
        for interface in machine["interfaces"].values()
        if host_addresses & set(interface["addresses"])
    ]
    if any(speeds):
        return max(speeds) / 8000 * ETHERNET_SHARE, f"Ethernet of {max(speeds) / 1000:g} Gbit/s"
    return None, "the speed of the network is not known"


def _format_bytes(length: int) -> str:
    return f"{length / GIB:g} GiB" if length >= GIB else f"{length / (1 << 20):g} MiB"


def _check_product(report: Report) -> Result:
    tflops = {rank: result["tflops"] for rank, result in report.of("product").items()}
    usual = median(tflops.values())
    slow = [rank for rank, speed in tflops.items() if speed < LEAST_OF_MEDIAN[report.backend] * usual]
    speeds = ", ".join(f"{speed:.3g}" for speed in tflops.values())
    if slow:
        shown = ", ".join(f"{report.name_rank(rank)} {tflops[rank]:.3g}" for rank in slow)
        cause = f"{shown} TFLOP/s, and {usual:.3g} is usual among {report.ranks} ranks"
        return fail("SF735", cause, tflops={str(rank): round(speed, 2) for rank, speed in tflops.items()})
    return ok(f"{speeds} TFLOP/s, all ranks at a time")


def _collect_gpus(report: Report) -> dict[int, Mapping[str, Any]]:
    """Return rank -> its GPU as observed during the matrix products."""
    return {rank: result["card"] for rank, result in report.of("product").items() if result["card"] is not None}


def _check_clocks_under_load(report: Report) -> Result:
    """Check the GPU clocks under load, because an idle card is never too hot."""
    cards = _collect_gpus(report)
    if not cards:
        raise NotApplicable("no GPU was queried")
    slowed = {rank: ", ".join(card["slowed_by"]) for rank, card in cards.items() if card["slowed_by"]}
    if slowed:
        cause = "; ".join(f"the GPU of {report.name_rank(rank)} is slowed down: {why}" for rank, why in slowed.items())
        return fail("SF723", cause, cards=[cards[rank]["index"] for rank in slowed])
    hottest = max((card["temperature_c"] or 0 for card in cards.values()), default=0)
    return ok(f"nothing slows them down{f', the hottest has {hottest} °C' if hottest else ''}")


def _check_pcie_under_load(report: Report) -> Result:
    """Check the PCIe link under load, because an idle card lowers its link speed."""
    cards = _collect_gpus(report)
    measured = {rank: card for rank, card in cards.items() if card["pcie_generation"] and card["pcie_most_generation"]}
    if not measured:
        raise NotApplicable("no GPU was queried, or none answered")
    low = [rank for rank, card in measured.items() if card["pcie_generation"] < card["pcie_most_generation"]]
    if low:
        cause = "; ".join(
            f"the GPU of {report.name_rank(rank)} uses generation {measured[rank]['pcie_generation']} of "
            f"{measured[rank]['pcie_most_generation']} while it computes"
            for rank in low
        )
        return fail("SF725", cause, cards=[measured[rank]["index"] for rank in low])
    generations = ", ".join(sorted({str(card["pcie_generation"]) for card in measured.values()}))
    return ok(f"generation {generations}, as card and slot can")


def _check_storage(report: Report) -> Result:
    results = {rank: result for rank, result in report.of("storage").items() if result is not None}
    if not results:
        raise NotApplicable("no run is given")
    damaged = [rank for rank, result in results.items() if not result["is_same"]]
    if damaged:
        cause = f"{report.name_rank(damaged[0])} read other bytes than it had written"
        return fail("SF711", cause, is_fatal=True, error="other bytes")
    slowest = min(results, key=lambda rank: results[rank]["write"])
    write, read = results[slowest]["write"], results[slowest]["read"]
    shown = f"{report.name_rank(slowest)} writes {write:.0f} MB/s and reads {read:.0f}"
    if write < SLOW_WRITE:
        return fail("SF711", shown, write_mb_s=round(write, 1))
    return ok(shown)


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


def _check_stop(report: Report) -> Result:
    """Name the ranks that stopped the test: those that failed by themselves, or else those that are silent."""
    what, within = WHAT[report.stopped_in], f"within {report.within_s:.0f} s"
    own_errors = {rank: error for rank, error in report.errors.items() if not any(sign in error for sign in GONE)}
    if own_errors:
        cause = f"{_list_errors(report, own_errors)}, in {what}"
    elif report.silent:
        silent = ", ".join(report.name_rank(rank) for rank in report.silent)
        first = next(iter(report.errors.items()), None)
        lost = f" ({report.name_rank(first[0])} lost the connection: {first[1]})" if first is not None else ""
        cause = f"{silent} did not complete {what} {within}{lost}"
    else:
        cause = _list_errors(report, report.errors) or f"the ranks' connection ended in {what}"
    errors = {str(rank): error for rank, error in report.errors.items()}
    return fail("SF742", cause, is_fatal=True, stage=report.stopped_in, silent=report.silent, errors=errors)


def _list_errors(report: Report, errors: Mapping[int, str]) -> str:
    return "; ".join(f"{report.name_rank(rank)}: {error}" for rank, error in list(errors.items())[:3])


CHECKS = (
    ("machine", "ranks are alike", _check_consistency),
    ("clock", "clocks", _check_clocks),
    ("reach", "machines reach each other", _check_reachability),
    ("join", "NCCL", _check_nccl),
    ("exchange", "pairs of ranks", _check_exchange),
    ("collectives", "collectives", _check_collectives),
    ("bandwidth", "bus bandwidth, GB/s", _check_bandwidth),
    ("product", "matrix product", _check_product),
    ("product", "GPU clocks under load", _check_clocks_under_load),
    ("product", "PCIe under load", _check_pcie_under_load),
    ("storage", "speed of output_dir", _check_storage),
)
"""(stage, name, check) of each check, in the order of the report."""
