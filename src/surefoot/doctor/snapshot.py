"""What the checks look at, as plain values: taken once here, or read from a file that another machine wrote.

What cannot be read says why, in `unknown`; nothing is guessed. Imports no torch.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    addresses: tuple[str, ...]
    is_up: bool
    mtu: int


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
class Snapshot:
    """One machine, as one process on it sees it."""

    host: str = ""
    kernel: str = ""
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
    peer_memory: bool | None = None
    """Whether a module that lets network cards read GPU memory is loaded; None without a GPU or such a card."""
    iommu: str = ""
    """What the kernel's command line says of it."""
    rendezvous: str = ""
    """Where rdzv_endpoint is: on this machine, or on another one."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Field -> why it could not be read."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_snapshot(path: Path) -> Snapshot:
    """A snapshot in environment.json of a run, or one that `surefoot doctor --json` printed.

    Raises: ValueError for a file that is none.
    """
    try:
        values = json.loads(path.read_text("utf-8"))["machine"]
        known = {one.name for one in fields(Snapshot)}
        values = {name: value for name, value in values.items() if name in known}
        for name in ("shared_memory", "output"):
            values[name] = Disk(**values[name]) if values.get(name) else None
        values["interfaces"] = {
            name: Interface(tuple(one["addresses"]), one["is_up"], one["mtu"])
            for name, one in values.get("interfaces", {}).items()
        }
        values["ports"] = tuple(Port(**{**one, "gids": tuple(one["gids"])}) for one in values.get("ports", ()))
        values["host_addresses"] = tuple(values.get("host_addresses", ()))
        return Snapshot(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no snapshot of a machine: {error!r}") from error
