"""Checks of GPUs: on snapshots written by hand, and through NVIDIA's bindings from a library that a test compiles."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import LoadedConfig, load_config
from surefoot.diagnostics.preflight.check import Check, CheckContext
from surefoot.diagnostics.preflight.runner import changes, examine
from surefoot.system.machine import Snapshot, snapshot_of
from surefoot.system.nvml import visible
from tests.support.machines import NODE, SOUND, bad

GIB = 1 << 30
PAIRS = {f"{i}-{j}": "ok" for i in range(8) for j in range(i + 1, 8)}


def node(peers: dict[str, str] | None = None, xids: tuple[str, ...] = (), **changed: Any) -> Snapshot:
    """Eight GPUs, of which number 3 is not as the others are."""
    cards = [replace(SOUND, index=index, uuid=f"GPU-{index}") for index in range(8)]
    cards[3] = replace(cards[3], **changed)
    return replace(NODE, cards=tuple(cards), peers={**PAIRS, **(peers or {})}, xids=xids)


@pytest.fixture
def run(settings: dict[str, Any]) -> Any:
    def load(**changes: Any) -> LoadedConfig:
        return load_config(None, (), {**settings, "device": "auto", "nproc_per_node": 8, **changes})

    return load


def line(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_sound_gpus_have_no_finding(run: Any) -> None:
    for loaded in (run(), None):
        checks = examine(node(), loaded)
        assert bad(checks) == {}
        for name in ("GPU errors", "GPU clocks", "NVLink", "PCIe", "GPU to GPU", "GPUs are free"):
            assert line(checks, name).status == "ok", name


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"uncorrected_errors": 2}, "SF722", "GPU 3 | 2 times"),
        ({"remap": "pending"}, "SF722", "GPU 3 | pending"),
        ({"xids": ("0000:1b:00: 79",)}, "SF722", "Xid 0000:1b:00: 79"),
        ({"slowed_by": ("power brake",)}, "SF723", "GPU 3 | power brake"),
        ({"power_limit_w": 500.0}, "SF723", "GPU 3 | 500 W | 700 W"),
        ({"temperature_c": 84}, "SF723", "GPU 3 | 84 °C | 87 °C"),
        ({"links": (True,) * 17 + (False,)}, "SF724", "GPU 3 | 17 NVLinks | 18"),
        ({"links": ()}, "SF724", "GPU 3 | 0 NVLinks | 18"),
        ({"fabric": "in progress"}, "SF724", "GPU 3 | NVSwitches | in progress"),
        ({"pcie_width": 8}, "SF725", "GPU 3 | 8 of 16 lanes"),
        ({"pcie_most_generation": 4}, "SF725", "GPU 3 | generation 5 | 4"),
        ({"peers": {"2-3": "the chipset does not support it"}}, "SF726", "1 of 28 pairs | 2-3: the chipset"),
        ({"memory_used_bytes": 40 * GIB, "processes": (4711,)}, "SF727", "GPU 3 | 40.0 of 80 GiB | 4711"),
    ],
)
def test_what_is_wrong_with_one_gpu_is_named(run: Any, changed: Any, code: str, said: str) -> None:
    checks = examine(node(**changed), run())
    assert bad(checks) == {code: "warning"}, "no judgement of a card keeps a run from starting"
    (text,) = [check.text for check in checks if check.finding is not None]
    assert [one for one in said.split(" | ") if one not in text] == []


@pytest.mark.parametrize(
    ("capability", "cuda", "is_known"),
    [("12.0", "12.6", False), ("12.0", "12.8", True), ("7.0", "13.0", False), ("7.0", "12.6", True),
     ("7.0", "12.8", False), ("10.0", "11.8", True), ("9.0", "12.1", True), ("12.1", "13.1", True), ("", "13.0", True)],
)  # fmt: skip
def test_a_gpu_that_torch_was_not_built_for_is_named(run: Any, capability: str, cuda: str, is_known: bool) -> None:
    versions = {"torch": "2.13.0", "cuda": cuda, "driver": "595.1"}
    checks = examine(replace(node(capability=capability), versions=versions), run())
    assert bad(checks) == ({} if is_known else {"SF709": "warning"})
    check = line(checks, "versions")
    assert (check.finding.evidence.get("capability") if check.finding else None) == (None if is_known else capability)
    assert is_known or "GPU 3, NVIDIA H100 80GB HBM3, " in check.text
    assert bad(examine(replace(node(capability=capability), versions=versions), run(nproc_per_node=3))) == {}


def header_of(parameters: int) -> bytes:
    """A safetensors file that says how large a model is, without its weights."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        (["--gpu-memory-utilization=0.2", "-tp", "8"], {}, None),
        (["--gpu-memory-utilization=0.4", "-tp", "8"], {}, "32.0 GiB | 59.6 GiB | keeps | 80.0 GiB"),
        (["--gpu-memory-utilization=0.4", "-tp", "8"], {"zero_stage": 3}, None),
        (["--gpu-memory-utilization=0.4", "-tp", "1"], {"zero_stage": 3}, "weights are 59.6 GiB | 32.0 GiB"),
        (["--gpu-memory-utilization=0.2", "-tp", "16"], {"zero_stage": 3}, "16 GPUs, and has 8"),
        (["--gpu-memory-utilization=0.2", "-pp", "8"], {}, None),
        (["--gpu-memory-utilization=0.2", "--quantization", "fp8"], {}, None),
        (["-tp", "4"], {"vllm_devices": "0"}, "4 GPUs, and has 1"),
        (["--gpu-memory-utilization=0.2", "-tp", "16"], {"vllm_devices": ",".join(map(str, range(16)))}, None),
    ],
)
def test_a_server_and_training_must_fit_on_a_gpu_together(
    run: Any, tmp_path: Path, arguments: list[str], more: dict[str, Any], said: str | None
) -> None:
    """Of a model of 32 G parameters, on eight cards of 80 GiB."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model/model.safetensors").write_bytes(header_of(32 * 10**9))
    grpo = {"method": "grpo", "reward_funcs": ["length"], "rollout_engine": "vllm", "num_generations": 8}
    sizes = {"global_batch_size": 8, "packing": False}
    loaded = run(model=str(tmp_path / "model"), vllm_args=arguments, **grpo, **sizes, **more)
    check = line(examine(node(), loaded), "rollout server")
    assert check.status == ("ok" if said is None else "failed")
    assert [one for one in (said or "").split(" | ") if one not in check.text] == []


@pytest.mark.parametrize(
    ("named", "count"),
    [
        ("7", 0),
        ("GPU-9", 0),
        ("0 1", 0),
        ("a", 0),
        ("1,-1,0", 1),
        ("0,0", 1),
        ("GPU-3,2", 2),
        ("", 0),
        ("MIG-b1,MIG-b2", 1),
    ],
)
def test_gpus_are_counted_as_cuda_reads_their_names(named: str, count: int) -> None:
    two = replace(node(), gpus=8, environment={"CUDA_VISIBLE_DEVICES": named})
    seen = CheckContext(replace(two, cards=two.cards[:4], gpus=4))
    assert seen.gpus == count


def test_gpus_that_the_run_does_not_use_are_not_judged(run: Any) -> None:
    broken = node(remap="failed", pcie_width=4, links=())
    assert bad(examine(broken, run(nproc_per_node=3))) == {}
    assert bad(examine(broken, run(device="cpu"))) == {}
    others = {"xids": ("0000:1b:00: 79",)}
    assert bad(examine(node(pci="00000000:1B:00.0", **others), run())) == {"SF722": "warning"}
    elsewhere = replace(node(**others), cards=tuple(replace(SOUND, pci="00000000:3A:00.0") for _ in range(8)))
    assert bad(examine(elsewhere, run())) == {}
    for named, codes in (
        ("0,1,2", set()),
        ("GPU-3", {"SF722", "SF725", "SF724"}),
        ("2,3", {"SF722", "SF725", "SF724"}),
    ):
        shown = replace(broken, environment={"CUDA_VISIBLE_DEVICES": named})
        ranks = len(named.split(","))
        found = set(bad(examine(shown, run(nproc_per_node=ranks))))
        assert found == codes, named


def test_cards_without_bridges_have_no_finding(run: Any) -> None:
    bridged = replace(SOUND, name="NVIDIA H100 NVL", links=(False,) * 12)
    alone = replace(NODE, cards=tuple(replace(bridged, index=index) for index in range(8)))
    assert bad(examine(alone, run())) == {}
    assert line(examine(alone, run()), "NVLink").text == "none"


@pytest.mark.parametrize("up", [0, 17])
def test_a_board_all_of_whose_cards_lack_links_is_told_of(run: Any, up: int) -> None:
    links = (True,) * up + (False,) * (18 - up)
    board = replace(NODE, cards=tuple(replace(SOUND, index=index, links=links) for index in range(8)))
    check = line(examine(board, run()), "NVLink")
    assert check.status == "warning"
    assert check.finding is not None
    assert check.finding.evidence["links"]["7"] == up
    assert "NVIDIA H100 80GB HBM3 has 18" in check.text
    half = replace(board, cards=board.cards[:4])  # of which nobody knows what joins them
    assert line(examine(half, run(nproc_per_node=4)), "NVLink").status == "ok"


def test_parts_of_gpus_are_not_judged(run: Any) -> None:
    parts = replace(node(remap="failed"), environment={"CUDA_VISIBLE_DEVICES": "MIG-0a1b"})
    check = line(examine(parts, run(nproc_per_node=1)), "GPU errors")
    assert (check.status, "(MIG)" in check.text) == ("not applicable", True)


def test_gpus_that_never_could_read_each_other_are_no_finding(run: Any) -> None:
    geforce = node(peers=dict.fromkeys(PAIRS, "these GPUs do not support it"))
    assert bad(examine(geforce, run())) == {}
    assert "0 of 28 " in line(examine(geforce, run()), "GPU to GPU").text


def test_without_nvml_the_reason_is_said(run: Any) -> None:
    blind = replace(NODE, unknown={"cards": "NVMLError_LibraryNotFound: no library"})
    check = line(examine(blind, run()), "NVLink")
    assert (check.status, check.text) == ("not applicable", "NVMLError_LibraryNotFound: no library")


def test_what_lies_between_gpus_is_told(run: Any) -> None:
    ways = {pair: "several processors" if pair[0] < "4" <= pair[2] else "one PCIe switch" for pair in PAIRS}
    seen = replace(node(), topology=ways)
    (said,) = [check.text for check in examine(seen, run()) if check.name == "GPU to GPU"]
    assert said.startswith("28 of 28 ")
    assert said.endswith("one PCIe switch: 12, several processors: 16")
    moved = replace(seen, topology={**ways, "0-1": "several processors"})
    assert changes(seen, moved) == ["topology.0-1: one PCIe switch -> several processors"]
    assert changes(seen, node()) == [], "an older version did not look"
    assert changes(node(), node(capability="9.0")) == [], "nor at this"
    assert changes(node(capability="8.0"), node(capability="9.0")) == ["cards.3.capability: 8.0 -> 9.0"]


def test_a_snapshot_with_cards_comes_back_from_json() -> None:
    seen = node(processes=(1, 2), slowed_by=("power brake",), xids=("0000:1b:00: 79",))
    assert snapshot_of(seen.as_dict()) == seen
    assert changes(seen, node(temperature_c=60, memory_used_bytes=GIB, xids=("0000:1b:00: 79",))) == [], (
        "these come and go"
    )


def test_nvml_is_read_through_its_own_bindings(nvml_driver: dict[str, str]) -> None:
    code = (
        "from surefoot.system.nvml import read_cards, read_peers, read_topology\n"
        "print(read_cards()); print(read_peers(), read_topology())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **nvml_driver}, capture_output=True, text=True, timeout=60
    )
    first = replace(SOUND, uuid="GPU-a0000000", temperature_c=None, memory_used_bytes=3 * GIB, pci="00000000:1B:00.0",
                    capability="9.0", pcie_generation=1)  # fmt: skip
    second = replace(
        first,
        index=1,
        uuid="GPU-b0000000",
        slowed_by=("too hot (hardware)",),
        uncorrected_errors=2,
        remap="pending",
        links=(True,) * 17 + (False,),
        fabric="completed with error 15",
        pci="00000000:2B:00.0",
        pcie_width=8,
        pcie_generation=5,
        processes=(4711,),
    )
    between = "{'0-1': 'the chipset does not support it'} {'0-1': 'several processors'}"
    assert done.stdout == f"{(first, second)}\n{between}\n", done.stderr


@pytest.mark.parametrize(
    ("named", "left"),
    [
        (None, [0, 1, 2]), ("", []), ("1,0", [1, 0]), ("0,-1,1", [0]), ("0, 2", [0, 2]), ("7", []), ("-1", []),
        ("GPU-0ab", [0]), ("GPU-0ab-1cd,2", [0, 2]), ("0ab", []), ("1cd", []),
    ],
)  # fmt: skip
def test_cuda_visible_devices_is_read_as_cuda_reads_it(named: str | None, left: list[int]) -> None:
    assert visible(named, ["GPU-0ab-1cd", "GPU-11-1", "GPU-22-2"]) == left
