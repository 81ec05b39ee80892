"""Taking a snapshot of this machine: files under /proc and /sys, a few system calls, and NVML if it has GPUs.

Each part is read on its own within a second or two. A part that fails or hangs (a dead file system, a silent name
server) is reported as unknown and does not stop the others. Imports no torch.
"""

import importlib.util
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from surefoot.system import cgroup
from surefoot.system.added_variables import variables_of_user
from surefoot.system.deadline import Deadline, DeadlineExceeded
from surefoot.system.kernel_log import OF_PROGRAMS, KernelLog, gpu_errors
from surefoot.system.machine import ELSEWHERE, HERE, LISTENS, Disk, Interface, Port, Snapshot
from surefoot.system.nccl_conflict import other_nccl
from surefoot.system.nvml import read_cards, read_peers, read_topology

PART_WITHIN_S, PATIENT_WITHIN_S = 1.5, 8.0
GPU_PARTS = ("cards", "peers", "topology")
"""Parts that NVML reports. They may take longer: without a persistent driver NVML wakes the GPUs first (seconds)."""
PROBE_BYTES = 1 << 20
PACKAGES = (
    "surefoot",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "trl",
    "vllm",
    "triton",
    "torchvision",
)
SET_BY_A_RUN = frozenset(
    ("CUDA_MODULE_LOADING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_TIMING")
)
"""Variables that torch, its launcher and the recorder of collectives set."""
READ_BY = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "UCX_", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Prefixes of the variables that torch, NCCL, gloo, CUDA and OpenMP read."""
PCI_EXTENDED_AT, PCI_ACS = 0x100, 0x000D
NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI vendor of NVIDIA, and the prefix of the PCI class of a display or 3D controller."""
REDIRECTS = 0b1100
"""Bits of the ACS control register that send requests and completions between devices through the processor."""
MOST_XIDS = 20
_IN_TORCH = re.compile(r"^cuda(?::[^=]*)? = '([^']+)'", re.MULTILINE)
GPUS, WINDOWS_GPU = "proc/driver/nvidia/gpus", "dev/dxg"
"""Paths that NVIDIA's driver creates, on Linux and on Linux under Windows (WSL)."""
BFLOAT16_FLAGS = frozenset(("avx512bw", "avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16"))
"""Flags of /proc/cpuinfo; one suffices. With avx512bw alone oneDNN computes in float32 and converts."""


def collect(
    output_dir: Path | None = None,
    rdzv_endpoint: str | None = None,
    root: Path = Path("/"),
    *,
    patient: bool = False,
    gpus: bool = True,
) -> Snapshot:
    """Return a snapshot of this machine.

    `root`: folder of proc and sys, for the tests. `output_dir`: a small file is written there and deleted again.
    `patient`: slow parts may take longer, such as a driver that must wake its GPUs. `gpus`: whether NVML is queried.
    """
    parts: dict[str, Callable[[], Any]] = {
        "host": socket.gethostname,
        "kernel": platform.release,
        "architecture": platform.machine,
        "versions": lambda: _read_versions(root),
        "environment": _read_variables,
        "limits": _read_limits,
        "memory_bytes": _read_memory_bytes,
        "cpus": _count_cpus,
        "multiplies_bfloat16": lambda: _multiplies_bfloat16(root),
        "shared_memory": lambda: _read_disk(root / "dev/shm"),
        "host_addresses": _resolve_host_name,
        "interfaces": _read_interfaces,
        "ports": lambda: tuple(_read_ports(root)),
        "gpus": lambda: _count_gpus(root),
        "peer_memory": lambda: _has_peer_memory(root),
        "iommu": lambda: _read_iommu(root),
        "other_nccl": other_nccl,
        "acs": lambda: _find_redirecting_bridges(root),
    }
    if gpus and (any((root / GPUS).glob("*")) or (root / WINDOWS_GPU).exists()):
        parts |= {"cards": read_cards, "peers": read_peers, "topology": read_topology, "xids": _read_xids}
    if output_dir is not None:
        parts["output"] = lambda: _probe_disk(_read_disk(existing_folder(output_dir)))
    if rdzv_endpoint is not None:
        parts["rendezvous"] = lambda: _locate_endpoint(rdzv_endpoint)
    pending = {name: Deadline(read) for name, read in parts.items()}
    start_s = time.monotonic()
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for name, part in pending.items():
        within_s = PATIENT_WITHIN_S if patient or name in GPU_PARTS else PART_WITHIN_S
        try:
            values[name] = part.result(max(0.0, start_s + within_s - time.monotonic()))
        except DeadlineExceeded:
            unknown[name] = f"no answer within {within_s} s"
        except Exception as error:  # noqa: BLE001 - the other parts are read after any error
            unknown[name] = f"{type(error).__name__}: {error}"
    if "cards" in values:
        values["gpu_query_s"] = pending["cards"].took_s
    return Snapshot(**values, unknown=unknown)


def _count_gpus(root: Path) -> int:
    """Count the GPUs under /proc; under Windows (WSL) only NVML lists them."""
    count = len(list((root / GPUS).glob("*")))
    return count or (len(read_cards()) if (root / WINDOWS_GPU).exists() else 0)


def _read_versions(root: Path) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        cuda = _IN_TORCH.search(Path(torch.origin).with_name("version.py").read_text("utf-8"))
        if cuda is not None:
            versions["cuda"] = cuda.group(1)
            with suppress(PackageNotFoundError):  # torch bundles its own NCCL
                versions["nccl"] = version(f"nvidia-nccl-cu{cuda.group(1).partition('.')[0]}")
    driver = root / "proc/driver/nvidia/version"
    if driver.is_file():
        number = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver.read_text())
        if number is not None:
            versions["driver"] = number.group(1)
    return versions


def _read_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables_of_user().items())
        if name.startswith(READ_BY) and name not in SET_BY_A_RUN
    }


def _read_limits() -> dict[str, int]:
    kinds = {
        "nofile": resource.RLIMIT_NOFILE,
        "memlock": resource.RLIMIT_MEMLOCK,
        "nproc": resource.RLIMIT_NPROC,
        "as": resource.RLIMIT_AS,
    }
    return {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}


def _read_memory_bytes() -> dict[str, int]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    sizes = {"total": memory.total, "available": memory.available, "swap_total": swap.total, "swap_used": swap.used}
    limit, used = cgroup.memory_limit_bytes(), cgroup.memory_used_bytes()
    if limit is not None:
        sizes |= {"limit": limit, "limit_left": limit - (used or 0)}
    return sizes


def _count_cpus() -> dict[str, float]:
    counts: dict[str, float] = {"count": os.cpu_count() or 1, "usable": len(os.sched_getaffinity(0))}
    quota = cgroup.cpu_quota()
    return counts | ({"quota": quota} if quota is not None else {})


def _multiplies_bfloat16(root: Path) -> bool | None:
    """Return whether the processors have what oneDNN, torch's library, needs for products of bfloat16 matrices."""
    for line in (root / "proc/cpuinfo").read_text("utf-8").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # of x86 and of ARM
            return not BFLOAT16_FLAGS.isdisjoint(flags.split())
    return None


def existing_folder(path: Path) -> Path:
    """Return the path itself, or its nearest parent, that is a folder."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _read_disk(path: Path) -> Disk:
    usage = os.statvfs(path)
    partitions = [
        partition for partition in psutil.disk_partitions(all=True) if path.is_relative_to(partition.mountpoint)
    ]
    kind = max(partitions, key=lambda partition: len(partition.mountpoint)).fstype if partitions else ""
    return Disk(str(path), kind, usage.f_bavail * usage.f_frsize, usage.f_favail if usage.f_files else -1)


def _probe_disk(disk: Disk) -> Disk:
    """Return the disk with the time to write, sync and rename a small file there; the file is deleted."""
    folder = Path(disk.path) / f".surefoot-probe-{os.getpid()}-{time.time_ns()}"
    start_s = time.perf_counter()
    error, took_s = "", None
    try:
        folder.mkdir()
        with open(folder / "new.tmp", "wb") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "new.tmp", folder / "new")
        took_s = time.perf_counter() - start_s
    except OSError as failure:
        error = failure.strerror or str(failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Disk(disk.path, disk.kind, disk.free_bytes, disk.free_inodes, took_s, error)


def _resolve_host_name() -> tuple[str, ...]:
    infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(info[4][0]) for info in infos))


def _read_interfaces() -> dict[str, Interface]:
    states = psutil.net_if_stats()
    return {
        name: Interface(
            tuple(address.address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)),
            states[name].isup if name in states else False,
            states[name].mtu if name in states else 0,
            states[name].speed if name in states else 0,
            tuple(dict.fromkeys(_network_of(address) for address in addresses if _has_network(address))),
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def _has_network(address: Any) -> bool:
    """Return whether an address has IPv4 neighbours: a netmask that is not that of a single address."""
    return address.family == socket.AF_INET and address.netmask not in (None, "255.255.255.255")


def _network_of(address: Any) -> str:
    return str(ipaddress.ip_interface(f"{address.address}/{address.netmask}").network)


def _read_ports(root: Path) -> Iterator[Port]:
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        types, names = path / "gid_attrs/types", path / "gid_attrs/ndevs"
        gids = {int(file.name): file.read_text().strip() for file in sorted((path / "gids").glob("*"))}
        used = {index: gid for index, gid in sorted(gids.items()) if gid.replace(":", "").strip("0")}
        yield Port(
            device=path.parent.parent.name,
            port=int(path.name),
            state=_read_text(path / "state").partition(":")[2].strip(),
            link_layer=_read_text(path / "link_layer"),
            rate=_read_text(path / "rate"),
            gids=tuple(f"{index}:{_read_text(types / str(index))}:{gid}" for index, gid in used.items()),
            interface=next((_read_text(names / str(index)) for index in used if _read_text(names / str(index))), ""),
        )


def _read_text(path: Path) -> str:
    """Read a file of sysfs; empty if it is unreadable, as for an unplugged port."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _has_peer_memory(root: Path) -> bool | None:
    """Return whether network cards can read GPU memory; None without both a GPU and such a card.

    Source: https://docs.nvidia.com/cuda/gpudirect-rdma/, kernel modules.
    """
    has_both = (root / "proc/driver/nvidia/version").is_file() and (root / "sys/class/infiniband").is_dir()
    if not has_both:
        return None
    loaded = {line.split()[0] for line in (root / "proc/modules").read_text().splitlines() if line}
    if "Open Kernel Module" in (root / "proc/driver/nvidia/version").read_text():
        return True  # it exports memory by DMA-BUF, which needs no other module
    if all(path.name.startswith(("efa", "rdmap")) for path in (root / "sys/class/infiniband").iterdir()):
        return None  # AWS's network cards use their own driver for it
    return bool(loaded & {"nvidia_peermem", "nv_peer_mem"}) or (root / "sys/kernel/mm/memory_peers/nv_mem").exists()


def _read_iommu(root: Path) -> str:
    words = (root / "proc/cmdline").read_text().split()
    arguments = " ".join(word for word in words if "iommu" in word)
    is_on = any((root / "sys/class/iommu").glob("*"))
    return f"{'on' if is_on else 'off'}{f' ({arguments})' if arguments else ''}"


def _find_redirecting_bridges(root: Path) -> tuple[str, ...] | None:
    """Find the PCI bridges above GPUs whose access control sends traffic between devices through the processor.

    Only a privileged user can read the capability, which is beyond the first 64 bytes; returns None for other users.
    """
    devices = root / "sys/bus/pci/devices"
    gpus = [
        device
        for device in devices.glob("*")
        if _read_text(device / "vendor") == NVIDIA and _read_text(device / "class")[:4] == DISPLAY
    ]
    bridges = sorted({address for gpu in gpus for address in gpu.resolve().parts[:-1] if (devices / address).exists()})
    redirecting, could_read = [], not bridges
    for name in bridges:
        try:
            config_space = (devices / name / "config").read_bytes()
        except OSError:
            continue
        could_read = could_read or len(config_space) > PCI_EXTENDED_AT
        control = _read_access_control(config_space)
        if control is not None and control & REDIRECTS:
            redirecting.append(name)
    return tuple(redirecting) if could_read else None


def _read_access_control(config_space: bytes) -> int | None:
    """Return the control register of a device's ACS capability (PCI Express Base 5.0, 7.7.8), or None without one."""
    offset = PCI_EXTENDED_AT
    for _ in range(len(config_space) // 4):  # a damaged list may be circular
        if not PCI_EXTENDED_AT <= offset <= len(config_space) - 8:
            return None
        header = int.from_bytes(config_space[offset : offset + 4], "little")
        if header & 0xFFFF == PCI_ACS:
            return int.from_bytes(config_space[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return None


def _read_xids() -> tuple[str, ...]:
    """Return the newest Xids that programs do not cause."""
    log = KernelLog(from_the_start=True)
    lines = log.read()
    log.end()
    if log.why_not:
        raise OSError(log.why_not)
    errors = [error for error in gpu_errors(lines) if error.number not in OF_PROGRAMS]
    return tuple(f"{error.device}: {error.number}" for error in errors)[-MOST_XIDS:]


def _locate_endpoint(endpoint: str) -> str:
    """Return whether the host of `host:port` is this machine, and which process listens on its port here.

    The port itself is not opened, because a launcher may be about to bind it.
    """
    host, _, port = endpoint.rpartition(":")
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)}
    own = {address.partition("%")[0] for interface in _read_interfaces().values() for address in interface.addresses}
    if not addresses & own:
        return f"{ELSEWHERE} ({', '.join(sorted(addresses))})"
    listeners = [entry for entry in psutil.net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
    listener = next((entry for entry in listeners if entry.laddr and entry.laddr.port == int(port)), None)
    if listener is None:
        return HERE
    return f"{HERE}, where {f'process {listener.pid}' if listener.pid else 'another program'} {LISTENS} its port"
