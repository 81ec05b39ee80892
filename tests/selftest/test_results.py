"""What is made of what ranks say: reports written by hand, of eight ranks on two machines and of two on one."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import load_config
from surefoot.diagnostics.preflight.check import Check
from surefoot.diagnostics.selftest.launch import _check_other_machines
from surefoot.diagnostics.selftest.results import WHAT, Report, checks_of, expected_gb_s, read_report
from surefoot.system.machine import Interface
from tests.support.machines import NODE, PORT, SOUND

RANKS = range(8)


def machines(**changed: Any) -> dict[int, Any]:
    """Ranks 0 to 3 on node1, 4 to 7 on node2; `changed` on rank 6."""
    cards = tuple(replace(SOUND, index=index) for index in range(4))
    ports = (replace(PORT, link_layer="InfiniBand"),)
    plain = replace(
        NODE, cards=cards, gpus=4, ports=ports, environment={"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0"}
    )
    said = {
        rank: {**asdict(replace(plain, host="node1" if rank < 4 else "node2")), "local_rank": rank % 4}
        for rank in RANKS
    }
    said[6] |= changed
    return said


BUSY = asdict(replace(SOUND, pcie_generation=5, pcie_most_generation=5, temperature_c=61))
"""A GPU in the midst of products."""


def bandwidth(largest: float) -> dict[str, dict[str, float]]:
    return {"all-reduce": {"1048576": 5.0, "1073741824": largest}, "all-to-all": {"1048576": 4.0, "1073741824": 9.0}}


def report(**stages: Any) -> Report:
    """A sound run of all stages, but for what is given."""
    sound = {
        "machine": machines(),
        "clock": {rank: [0.002 if rank == 4 else 0.0, 0.001] for rank in RANKS},
        "reach": {rank: {} for rank in RANKS},
        "join": {rank: {"nccl": "2.28.3", "loaded": ["/lib/libnccl.so.2"]} for rank in RANKS},
        "exchange": {rank: {"pairs": 7, "wrong": []} for rank in RANKS},
        "collectives": {rank: {"wrong": {}} for rank in RANKS},
        "bandwidth": {rank: bandwidth(47.0) for rank in RANKS},
        "product": {rank: {"tflops": 700.0 + rank, "card": BUSY} for rank in RANKS},
        "storage": {
            rank: {"write": 900.0, "read": 2000.0, "is_same": True} if rank % 4 == 0 else None for rank in RANKS
        },
    }
    return Report(8, "nccl", {**sound, **stages})


def found(checks: list[Check]) -> dict[str, tuple[str, str]]:
    """Code -> (status, text) of what is wrong."""
    return {check.finding.code: (check.status, check.text) for check in checks if check.finding is not None}


def test_sound_ranks_have_no_finding() -> None:
    checks = checks_of(report())
    assert found(checks) == {}
    assert [check.status for check in checks] == ["ok"] * 11
    said = {check.name: check.text for check in checks}
    assert said["ranks are alike"].startswith("8 ranks on 2 machines ")
    assert " 2 ms " in said["clocks"]
    assert said["pairs of ranks"].startswith("56 ")
    figures, _, expected = said["bus bandwidth, GB/s"].partition(" (")
    assert figures == "all-reduce 1 MiB: 5, 1 GiB: 47; all-to-all 1 MiB: 4, 1 GiB: 9"
    assert re.fullmatch(r"45 .* all-reduce: 1 InfiniBand ports of 400 Gbit/s\)", expected)
    assert "61 °C" in said["GPU clocks under load"]
    assert said["PCIe under load"].startswith("generation 5,")


@pytest.mark.parametrize(
    ("changed", "what", "there", "elsewhere"),
    [
        ({"environment": {"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE", "1", "not set"),
        ({"versions": {**NODE.versions, "torch": "2.12.0"}}, "torch", "2.12.0", "2.13.0"),
        ({"kernel": "5.4.0"}, "kernel", "5.4.0", NODE.kernel),
        ({"device": "NVIDIA A100"}, "GPU", "NVIDIA A100", "none"),
        (
            {"interfaces": {"eth0": {"addresses": NODE.host_addresses, "is_up": True, "mtu": 9000, "speed_mbit": 0}}},
            "MTU",
            "9000",
            "1500",
        ),
        (
            {"ports": [{**asdict(PORT), "interface": "eth0"}]},
            "MTU of RoCE",
            "1500",
            "not set",
        ),
    ],
)
def test_a_rank_that_differs_is_named_with_its_machine(
    changed: dict[str, Any], what: str, there: str, elsewhere: str
) -> None:
    (check,) = [one for one in checks_of(report(machine=machines(**changed))) if one.finding is not None]
    assert check.finding is not None
    assert (check.finding.code, check.status) == ("SF730", "warning")
    assert check.finding.evidence["differing"][what] == {there: [6], elsewhere: [0, 1, 2, 3, 4, 5, 7]}
    named = rf"{what} .*{there} on rank 6 \(node2\), .*{elsewhere} on ranks 0, 1, 2, 3, 4, 5, 7 \(node1, node2\)"
    assert re.search(named, check.text)


def test_what_may_differ_is_no_finding() -> None:
    own = {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "eth7"}
    assert found(checks_of(report(machine=machines(environment=own)))) == {}


@pytest.mark.parametrize(
    ("stage", "changed", "code", "status", "said"),
    [
        ("clock", [-7.5, 0.1], "SF731", "warning", r"rank 6 \(node2\) .*7\.5 s ahead "),
        ("reach", {"0": "10.0.0.5: timed out"}, "SF732", "failed", r"rank 6 \(node2\) .* rank 0 \(node1\): "),
        ("join", {"nccl": "2.18.1", "loaded": ["/opt/libnccl.so.2"]}, "SF741", "warning",
         r"rank 6 \(node2\) .* NCCL 2\.18\.1 "),
        ("exchange", {"pairs": 7, "wrong": [2]}, "SF734", "failed", r"rank 6 \(node2\) .* rank 2 \(node1\) "),
        ("collectives", {"wrong": {"all-gather": "number 3"}}, "SF734", "failed", r"^all-gather .*rank 6 \(node2\): "),
        ("bandwidth", bandwidth(11.0), "SF733", "warning",
         "all-reduce .* 11 GB/s .* 45 .*: 1 InfiniBand ports"),
        ("product", {"tflops": 400.0, "card": BUSY}, "SF735", "warning",
         r"rank 6 \(node2\) 400 TFLOP/s, .* 702 .* 8 ranks"),
        ("product", {"tflops": 700.0, "card": {**BUSY, "slowed_by": ["too hot (hardware)"]}}, "SF723", "warning",
         r" rank 6 \(node2\) .*: too hot \(hardware\)"),
        ("product", {"tflops": 700.0, "card": {**BUSY, "pcie_generation": 1}}, "SF725", "warning",
         r" rank 6 \(node2\) .* generation 1 of 5 "),
        ("storage", {"write": 3.0, "read": 9.0, "is_same": True}, "SF711", "warning", r"rank 6 \(node2\) .*\b3 MB/s "),
        ("storage", {"write": 900.0, "read": 9.0, "is_same": False}, "SF711", "failed", r"rank 6 \(node2\) read "),
    ],
)  # fmt: skip
def test_what_one_rank_says_becomes_a_finding(stage: str, changed: Any, code: str, status: str, said: str) -> None:
    told = report()
    told.by_stage[stage][6] = changed
    (one,) = found(checks_of(told)).items()
    assert (one[0], one[1][0]) == (code, status)
    assert re.search(said, one[1][1])


def test_machines_of_one_name_are_told_apart() -> None:
    told = report(machine={rank: {**said, "host": "localhost"} for rank, said in machines().items()})
    told.by_stage["reach"][4] = {"0": "10.0.0.5: timed out"}
    text = found(checks_of(told))["SF732"][1]
    assert re.fullmatch(r"rank 4 \(localhost #2\) .* rank 0 \(localhost #1\): 10\.0\.0\.5: timed out", text)


def test_a_clock_that_is_not_known_better_is_not_blamed() -> None:
    told = report()
    told.by_stage["clock"][6] = [1.5, 0.9]
    assert found(checks_of(told)) == {}


def test_the_stage_that_was_not_gone_through_names_who_did_not() -> None:
    told = report()
    del told.by_stage["collectives"], told.by_stage["bandwidth"], told.by_stage["product"], told.by_stage["storage"]
    told.stopped_in, told.within_s, told.silent = "collectives", 60.0, [5]
    status, text = found(checks_of(told))["SF742"]
    assert status == "failed"
    assert re.fullmatch(rf"rank 5 \(node2\) .*{WHAT['collectives']} .* 60 s", text)
    told.errors = {3: "RuntimeError: Connection closed by peer"}
    text = found(checks_of(told))["SF742"][1]
    assert re.match(rf"rank 5 \(node2\) .*{WHAT['collectives']} .* 60 s \(rank 3 \(node1\) ", text)
    told.errors = {3: "RuntimeError: Connection closed by peer", 2: "OutOfMemoryError: no"}
    text = found(checks_of(told))["SF742"][1]
    assert re.fullmatch(rf"rank 2 \(node1\): OutOfMemoryError: no, .*{WHAT['collectives']}", text)


def one_machine(name: str, ranks: int = 8, gpus: int = 8, **changed: Any) -> Report:
    card = asdict(replace(SOUND, name=name, **changed))
    machine = {**asdict(NODE), "cards": [card] * gpus}
    return Report(ranks, "nccl", {"machine": {rank: {**machine, "local_rank": rank} for rank in range(ranks)}})


@pytest.mark.parametrize(
    ("told", "least"),
    [
        (one_machine("NVIDIA H200"), 431.0),
        (one_machine("NVIDIA A100-SXM4-80GB"), 228.0),
        (one_machine("NVIDIA H200", ranks=2), None),
        (one_machine("NVIDIA H200", ranks=4, gpus=4), None),
        (one_machine("NVIDIA H100 NVL"), None),
        (one_machine("NVIDIA A100 80GB PCIe"), None),
        (one_machine("NVIDIA GH200 480GB"), None),
        (one_machine("NVIDIA B300"), None),
        (one_machine("NVIDIA L40S", links=(), pcie_most_generation=4), 12.0),
        (one_machine("NVIDIA L40S", links=(False,), pcie_most_generation=3), 6.0),
        (one_machine("NVIDIA L40S", links=(), pcie_most_generation=None), None),
        (Report(2, "gloo", {"machine": machines()}), None),
    ],
)
def test_what_a_way_gives(told: Report, least: float | None) -> None:
    assert expected_gb_s(told)[0] == least


def network(**changed: Any) -> Report:
    told = report()
    for said in told.by_stage["machine"].values():
        said.update(changed)
    return told


def test_what_a_network_gives() -> None:
    port = replace(PORT, link_layer="InfiniBand")
    slow, down = replace(port, rate="100 Gb/sec"), replace(port, state="DOWN")
    assert expected_gb_s(network(ports=[asdict(one) for one in (port, port, slow, down)]))[0] == 90.0
    assert expected_gb_s(network(ports=[asdict(port)] * 9))[0] == 180.0, "four ranks use four ports"
    least, why = expected_gb_s(network(ports=[asdict(PORT)]))
    assert (least, "RoCE" in why) == (None, True)
    bridge = {"docker0": asdict(Interface(("172.17.0.1",), True, 1500, 10_000))}
    nothing = network(ports=[], interfaces=bridge)
    least, why = expected_gb_s(nothing)
    assert (least, "speed of the network" in why) == (None, True)
    own = {**bridge, "eth0": asdict(Interface(("10.0.0.5",), True, 1500, 1000))}
    assert expected_gb_s(network(ports=[], interfaces=own)) == (0.0625, "Ethernet of 1 Gbit/s")


def test_what_could_not_be_read_is_not_compared() -> None:
    blind = machines(versions={}, environment={}, unknown={"versions": "no answer", "environment": "no answer"})
    assert found(checks_of(report(machine=blind))) == {}


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    told = report()
    told.stopped_in, told.errors, told.silent = "product", {3: "no"}, [5]
    told.write(tmp_path / "report.json")
    assert checks_of(read_report(tmp_path / "report.json")) == checks_of(
        Report(**{**asdict(told), "by_stage": json.loads(json.dumps(told.by_stage), object_hook=_with_ranks)})
    )


def _with_ranks(values: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() and len(key) == 1 else key: value for key, value in values.items()}


def test_what_is_wrong_on_another_machine_is_shown_with_its_name() -> None:
    said = machines()
    said[4]["peer_memory"] = False
    said[6]["peer_memory"] = False  # not asked: rank 4 speaks for the machine
    run = load_config(None, (), {"model": "m", "dataset": "d", "output_dir": "o", "nproc_per_node": 4, "nnodes": 2,
                                 "rdzv_endpoint": "node1:29500"})  # fmt: skip
    (check,) = [one for one in _check_other_machines(report(machine=said), run) if one.name.startswith("GPU memory")]
    assert check.finding is not None
    assert (check.finding.code, "(node2, rank 4)" in check.name) == ("SF707", True)
