"""What the checks look at, as plain values: taken once here, or read from a file that another machine wrote.

What cannot be read says why, in `unknown`; nothing is guessed. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from surefoot.system.json_files import read_object

HERE, ELSEWHERE = "on this machine", "on another machine"
LISTENS = "listens on"
"""How `Snapshot.rendezvous` is worded."""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    addresses: tuple[str, ...]
    is_up: bool
    mtu: int
    speed_mbit: int = 0
    """What it says it can; 0 where it does not."""


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
    """index:type:address of those that are set."""
    interface: str
    """The network interface it belongs to; empty where there is none."""


@dataclass(frozen=True)
class Disk:
    """The file system that a run writes to."""

    path: str
    kind: str
    """ext4, nfs4, lustre, overlay, ..."""
    free_bytes: int
    free_inodes: int
    """-1 where the file system counts none."""
    write_s: float | None = None
    """To write, sync and rename a small file there; None where that failed."""
    error: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML sees it. None: this card or driver does not tell."""

    index: int
    name: str
    uuid: str = ""
    pci: str = ""
    """Its PCI address."""
    capability: str = ""
    """Its compute capability, such as 9.0; empty where it is not told."""
    slowed_by: tuple[str, ...] = ()
    """Why its clocks are low right now, where that means trouble."""
    power_limit_w: float | None = None
    power_default_w: float | None = None
    """The limit it came with."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """From which temperature on it slows itself down."""
    uncorrected_errors: int | None = None
    """Of its memory, since the driver was loaded."""
    remap: str = ""
    """What is wrong with the replacement of bad rows of its memory: pending, failed."""
    links: tuple[bool, ...] = ()
    """Of each of its NVLinks whether it is up."""
    fabric: str = ""
    """Its registration with NVSwitches: completed, in progress, not started; empty where there are none."""
    pcie_width: int | None = None
    """Lanes now; the number does not change while a card is idle, as the generation does."""
    pcie_most_width: int | None = None
    """That card and slot can."""
    pcie_generation: int | None = None
    """Now: an idle card lowers it."""
    pcie_most_generation: int | None = None
    """That card and slot can."""
    pcie_own_generation: int | None = None
    """That the card alone could."""
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    processes: tuple[int, ...] = ()
    """That use it, by number; those of a container are told by the numbers that the host gives them."""


@dataclass(frozen=True)
class Snapshot:
    """One machine, as one process on it sees it."""

    host: str = ""
    kernel: str = ""
    architecture: str = ""
    """Of its processors: x86_64, aarch64."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package, `python`, `cuda` (of torch), `nccl` (of torch), `driver` -> version."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that torch, NCCL, gloo, CUDA and OpenMP read."""
    limits: dict[str, int] = field(default_factory=dict)
    """nofile, memlock (bytes), nproc: the soft limits of this process; -1 is none."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """total, available, swap_total, swap_used; limit where the cgroup has one."""
    cpus: dict[str, float] = field(default_factory=dict)
    """count; quota where the cgroup has one; usable by the affinity of this process."""
    shared_memory: Disk | None = None
    output: Disk | None = None
    host_addresses: tuple[str, ...] = ()
    """What the host's own name resolves to."""
    interfaces: dict[str, Interface] = field(default_factory=dict)
    ports: tuple[Port, ...] = ()
    gpus: int = 0
    """Devices under /proc/driver/nvidia."""
    cards: tuple[Gpu, ...] = ()
    """The same GPUs, as NVML tells of them."""
    peers: dict[str, str] = field(default_factory=dict)
    """"0-1" -> ok, or why these two GPUs cannot read each other's memory."""
    topology: dict[str, str] = field(default_factory=dict)
    """"0-1" -> what lies between these two GPUs besides NVLink."""
    xids: tuple[str, ...] = ()
    """Errors of GPUs in the kernel's log, the newest last."""
    acs: tuple[str, ...] | None = None
    """PCI bridges that send traffic between devices through the processor; None where that cannot be read."""
    other_nccl: tuple[str, ...] = ()
    """Files of LD_LIBRARY_PATH that would be loaded in place of torch's NCCL."""
    peer_memory: bool | None = None
    """Whether a module that lets network cards read GPU memory is loaded; None without a GPU or such a card."""
    iommu: str = ""
    """What the kernel's command line says of it."""
    rendezvous: str = ""
    """Where rdzv_endpoint is: on this machine, or on another one; and who has its port already."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Field -> why it could not be read."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_snapshot(path: Path, host: str = "") -> Snapshot:
    """A snapshot in environment.json of a run, or one that `surefoot doctor --json` printed.

    Of a run on several machines the one of `host`; where that took no part, the one of rank 0.
    Raises: ValueError for a file that is none.
    """
    try:
        told = read_object(path)
        machines = [told["machine"], *told.get("other_machines", [])]
        return snapshot_of(next((one for one in machines if one.get("host") == host), machines[0]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no snapshot of a machine: {error!r}") from error


def snapshot_of(told: Mapping[str, Any]) -> Snapshot:
    """A snapshot from its JSON, which another version may have written."""
    known = {one.name for one in fields(Snapshot)}
    values = {name: value for name, value in told.items() if name in known}
    for name in ("shared_memory", "output"):
        values[name] = Disk(**values[name]) if values.get(name) else None
    values["interfaces"] = {
        name: Interface(tuple(one["addresses"]), one["is_up"], one["mtu"], one.get("speed_mbit", 0))
        for name, one in values.get("interfaces", {}).items()
    }
    values["ports"] = tuple(Port(**{**one, "gids": tuple(one["gids"])}) for one in values.get("ports", ()))
    values["cards"] = tuple(
        Gpu(**{**one, **{name: tuple(one[name]) for name in ("slowed_by", "links", "processes")}})
        for one in values.get("cards", ())
    )
    for name in ("host_addresses", "xids", "other_nccl"):
        values[name] = tuple(values.get(name, ()))
    values["acs"] = tuple(values["acs"]) if values.get("acs") is not None else None
    return Snapshot(**values)
