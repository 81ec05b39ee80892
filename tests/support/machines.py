"""Snapshots of machines for the doctor's checks."""

from surefoot.diagnostics.preflight.check import Check
from surefoot.system.machine import Disk, Gpu, Interface, Port, Snapshot

GIB = 1 << 30
PORT = Port(
    "mlx5_0", 1, "ACTIVE", "Ethernet", "400 Gb/sec", ("0:IB/RoCE v1:fe80::1", "3:RoCE v2:::ffff:10.0.0.5"), "ib0"
)
LAPTOP = Snapshot(
    host="laptop",
    kernel="6.8.0",
    versions={"torch": "2.13.0+cpu"},
    limits={"nofile": 1024, "memlock": 8 << 20, "nproc": -1},
    memory_bytes={"total": 16 * GIB, "available": 8 * GIB},
    cpus={"count": 8, "usable": 8},
    shared_memory=Disk("/dev/shm", "tmpfs", 64 << 20, -1),
    output=Disk("/home", "ext4", 100 * GIB, -1, 0.01),
    host_addresses=("127.0.1.1",),
    interfaces={"lo": Interface(("127.0.0.1",), True, 65536)},
    iommu="on",
)
"""One without a GPU, as it comes."""
NODE = Snapshot(
    host="node1",
    kernel="6.8.0-generic",
    versions={"torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.3", "driver": "580.95.05", "transformers": "5.23.0"},
    limits={"nofile": 65536, "memlock": -1, "nproc": -1},
    memory_bytes={"total": 2000 * GIB, "available": 1900 * GIB},
    cpus={"count": 96, "usable": 96},
    shared_memory=Disk("/dev/shm", "tmpfs", 900 * GIB, -1),
    output=Disk("/data", "nfs4", 5000 * GIB, 10**9, 0.01),
    host_addresses=("10.0.0.5",),
    interfaces={
        "lo": Interface(("127.0.0.1",), True, 65536),
        "eth0": Interface(("10.0.0.5",), True, 1500),
        "ib0": Interface(("10.1.0.5",), True, 9000),
        "down0": Interface((), False, 1500),
    },
    ports=(PORT,),
    gpus=8,
    peer_memory=True,
    iommu="off",
    rendezvous="on this machine",
)
"""A sound machine of a cluster."""


def bad(checks: list[Check]) -> dict[str, str]:
    """Code -> status, of what is wrong."""
    return {check.finding.code: check.status for check in checks if check.finding is not None}


SOUND = Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    uuid="GPU-0",
    power_limit_w=700.0,
    power_default_w=700.0,
    temperature_c=34,
    slowdown_c=87,
    uncorrected_errors=0,
    links=(True,) * 18,
    fabric="completed",
    pcie_width=16,
    pcie_most_width=16,
    pcie_most_generation=5,
    pcie_own_generation=5,
    memory_used_bytes=1 << 29,
    memory_bytes=80 * GIB,
)
