"""Facts about a machine as plain values, taken once on this machine or read from a file of another machine.

`unknown` holds the reason for each value that cannot be read; nothing is guessed. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from surefoot.system.json_files import read_object

HERE, ELSEWHERE = "on this machine", "on another machine"
LISTENS = "listens on"
"""Words of `Snapshot.rendezvous`."""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    addresses: tuple[str, ...]
    is_up: bool
    mtu: int
    speed_mbit: int = 0
    """Speed that the interface reports; 0 if it reports none."""
    networks: tuple[str, ...] = ()
    """IPv4 networks of its addresses, such as 10.0.0.0/24."""


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE device."""

    device: str
    port: int
    state: str
    """ACTIVE, DOWN, ..."""
    link_layer: str
    """InfiniBand or Ethernet."""
    rate: str
    gids: tuple[str, ...]
    """`index:type:address` of each GID that is set."""
    interface: str
    """Network interface of the port; empty without one."""


@dataclass(frozen=True)
class Disk:
    """The file system that a run writes to."""

    path: str
    kind: str
    """ext4, nfs4, lustre, overlay, ..."""
    free_bytes: int
    free_inodes: int
    """-1 if the file system does not count inodes."""
    write_s: float | None = None
    """Time to write, sync and rename a small file there; None if that failed."""
    error: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML reports it. None: this GPU or driver does not report the value."""

    index: int
    name: str
    uuid: str = ""
    pci: str = ""
    """PCI address."""
    capability: str = ""
    """Compute capability, such as 9.0; empty if it is not reported."""
    slowed_by: tuple[str, ...] = ()
    """Reasons for low clocks at this moment, if they mean trouble."""
    power_limit_w: float | None = None
    power_default_w: float | None = None
    """Default limit of the GPU."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """Temperature from which the GPU lowers its clocks."""
    uncorrected_errors: int | None = None
    """Number of uncorrected memory errors since the driver was loaded."""
    remap: str = ""
    """Trouble with the remapping of bad memory rows: pending, failed."""
    links: tuple[bool, ...] = ()
    """Whether each NVLink is up."""
    fabric: str = ""
    """Registration with the NVSwitches: completed, in progress, not started; empty without NVSwitches."""
    pcie_width: int | None = None
    """Number of lanes now; unlike the generation, it does not change while a GPU is idle."""
    pcie_most_width: int | None = None
    """Most lanes that GPU and slot support."""
    pcie_generation: int | None = None
    """Generation now; an idle GPU lowers it."""
    pcie_most_generation: int | None = None
    """Highest generation that GPU and slot support."""
    pcie_own_generation: int | None = None
    """Highest generation that the GPU supports."""
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    processes: tuple[int, ...] = ()
    """Process IDs of the processes that use the GPU; NVML reports a container's processes by their IDs on the host."""


@dataclass(frozen=True)
class Snapshot:
    """Facts about one machine, as one process on it sees them."""

    host: str = ""
    kernel: str = ""
    architecture: str = ""
    """Architecture of the processors: x86_64, aarch64."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package, `python`, `cuda` (of torch), `nccl` (of torch), `driver` -> version."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that torch, NCCL, gloo, CUDA and OpenMP read."""
    limits: dict[str, int] = field(default_factory=dict)
    """nofile, memlock (bytes), nproc: the soft limits of this process; -1 is no limit."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """total, available, swap_total, swap_used; limit and limit_left if the cgroup has a limit."""
    cpus: dict[str, int | float] = field(default_factory=dict)
    """count; usable by the affinity of this process; quota if the cgroup has one."""
    multiplies_bfloat16: bool | None = None
    """Whether the processors have instructions with which torch multiplies matrices of bfloat16; None if not known."""
    shared_memory: Disk | None = None
    output: Disk | None = None
    host_addresses: tuple[str, ...] = ()
    """Addresses that the host's own name resolves to."""
    interfaces: dict[str, Interface] = field(default_factory=dict)
    ports: tuple[Port, ...] = ()
    gpus: int = 0
    """Number of devices under /proc/driver/nvidia."""
    cards: tuple[Gpu, ...] = ()
    """The same GPUs, as NVML reports them."""
    gpu_query_s: float | None = None
    """Seconds that NVML took for them."""
    peers: dict[str, str] = field(default_factory=dict)
    """"0-1" -> ok, or the reason why these two GPUs cannot read each other's memory."""
    topology: dict[str, str] = field(default_factory=dict)
    """"0-1" -> the connection of these two GPUs besides NVLink."""
    xids: tuple[str, ...] = ()
    """GPU errors in the kernel's log, the newest last."""
    acs: tuple[str, ...] | None = None
    """PCI bridges that send traffic between devices through the processor; None if that cannot be read."""
    other_nccl: tuple[str, ...] = ()
    """Files of LD_LIBRARY_PATH that would be loaded instead of torch's NCCL."""
    peer_memory: bool | None = None
    """Whether a module that lets network cards read GPU memory is loaded; None without a GPU or such a network card."""
    iommu: str = ""
    """State of the IOMMU: on or off, with its arguments on the kernel's command line."""
    rendezvous: str = ""
    """Machine of rdzv_endpoint, this one or another, and the process that already listens on its port."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Field -> the reason why it could not be read."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_snapshot(path: Path, host: str = "") -> Snapshot:
    """Read a snapshot from environment.json of a run, or from the output of `surefoot doctor --json`.

    Returns the snapshot of `host` for a run on several machines, or that of rank 0 if `host` took no part in the run.
    Raises: ValueError for a file that is no snapshot.
    """
    try:
        content = read_object(path)
        machines = [content["machine"], *content.get("other_machines", [])]
        return snapshot_of(next((machine for machine in machines if machine.get("host") == host), machines[0]))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no snapshot of a machine: {' '.join(str(error).split())[:200]}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no snapshot of a machine: an entry is missing or has the wrong type") from error


def snapshot_of(payload: Mapping[str, Any]) -> Snapshot:
    """Return a snapshot from its JSON; keys that only another version has are left out. Raises: ValueError."""
    return TypeAdapter(Snapshot).validate_python(payload)
