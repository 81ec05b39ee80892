"""Take a snapshot of this machine: files under /proc and /sys, a few system calls, and NVML where GPUs are.

Each part is read on its own and has a second or two; one that fails or hangs (a dead file system, a silent name server)
says so and stops nothing. Imports no torch.
"""

import importlib.util
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
from surefoot.system.deadline import Deadline, DeadlineExceeded
from surefoot.system.kernel_log import OF_PROGRAMS, KernelLog, gpu_errors
from surefoot.system.loopback import variables_of_user
from surefoot.system.machine import ELSEWHERE, HERE, LISTENS, Disk, Interface, Port, Snapshot
from surefoot.system.nccl_conflict import other_nccl
from surefoot.system.nvml import read_cards, read_peers, read_topology

PART_WITHIN_S, PATIENT_WITHIN_S = 1.5, 8.0
GPU_PARTS = ("cards", "peers", "topology")
"""What NVML says has longer: without a persistent driver it wakes the cards up first, which takes seconds."""
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
SET_BY_A_RUN = frozenset(("CUDA_MODULE_LOADING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"))
"""By torch, its launcher, and what records collectives."""
READ_BY = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "UCX_", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""How the variables begin that torch, NCCL, gloo, CUDA and OpenMP read."""
PCI_EXTENDED_AT, PCI_ACS = 0x100, 0x000D
NVIDIA, DISPLAY = "0x10de", "0x03"
"""Of a PCI device: its vendor, and how the class of a display or 3D controller begins."""
REDIRECTS = 0b1100
"""Requests and completions between devices below one bridge take the way through the processor."""
MOST_XIDS = 20
_IN_TORCH = re.compile(r"^cuda(?::[^=]*)? = '([^']+)'", re.MULTILINE)
GPUS, WINDOWS_GPU = "proc/driver/nvidia/gpus", "dev/dxg"
"""What NVIDIA's driver shows of itself, on Linux and in a Linux that Windows runs."""


def collect(
    output_dir: Path | None = None,
    rdzv_endpoint: str | None = None,
    root: Path = Path("/"),
    *,
    patient: bool = False,
    gpus: bool = True,
) -> Snapshot:
    """The snapshot.

    `root`: where proc and sys are, for the tests; `output_dir` is written to, and left as it was; `patient`: what is
    slow has longer, as a driver that must wake its cards up; `gpus`: whether NVML is asked.
    """
    parts: dict[str, Callable[[], Any]] = {
        "host": socket.gethostname,
        "kernel": platform.release,
        "architecture": platform.machine,
        "versions": lambda: _versions(root),
        "environment": _variables,
        "limits": _limits,
        "memory_bytes": _memory_bytes,
        "cpus": _cpus,
        "shared_memory": lambda: _disk(root / "dev/shm"),
        "host_addresses": _host_addresses,
        "interfaces": _interfaces,
        "ports": lambda: tuple(_ports(root)),
        "gpus": lambda: _num_gpus(root),
        "peer_memory": lambda: _peer_memory(root),
        "iommu": lambda: _iommu(root),
        "other_nccl": other_nccl,
        "acs": lambda: _redirecting(root),
    }
    if gpus and (any((root / GPUS).glob("*")) or (root / WINDOWS_GPU).exists()):
        parts |= {"cards": read_cards, "peers": read_peers, "topology": read_topology, "xids": _xids}
    if output_dir is not None:
        parts["output"] = lambda: _probed(_disk(existing_folder(output_dir)))
    if rdzv_endpoint is not None:
        parts["rendezvous"] = lambda: _place(rdzv_endpoint)
    begun = {name: Deadline(read) for name, read in parts.items()}
    began = time.monotonic()
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for name, part in begun.items():
        within_s = PATIENT_WITHIN_S if patient or name in GPU_PARTS else PART_WITHIN_S
        try:
            values[name] = part.result(max(0.0, began + within_s - time.monotonic()))
        except DeadlineExceeded:
            unknown[name] = f"no answer within {within_s} s"
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts are read
            unknown[name] = f"{type(error).__name__}: {error}"
    return Snapshot(**values, unknown=unknown)


def _num_gpus(root: Path) -> int:
    """Under Windows (WSL) only NVML tells."""
    found = len(list((root / GPUS).glob("*")))
    return found or (len(read_cards()) if (root / WINDOWS_GPU).exists() else 0)


def _versions(root: Path) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        cuda = _IN_TORCH.search(Path(torch.origin).with_name("version.py").read_text("utf-8"))
        if cuda is not None:
            found["cuda"] = cuda.group(1)
            with suppress(PackageNotFoundError):  # a torch that brings its own
                found["nccl"] = version(f"nvidia-nccl-cu{cuda.group(1).partition('.')[0]}")
    driver = root / "proc/driver/nvidia/version"
    if driver.is_file():
        number = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver.read_text())
        if number is not None:
            found["driver"] = number.group(1)
    return found


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables_of_user().items())
        if name.startswith(READ_BY) and name not in SET_BY_A_RUN
    }


def _limits() -> dict[str, int]:
    kinds = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    return {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}


def _memory_bytes() -> dict[str, int]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    found = {"total": memory.total, "available": memory.available, "swap_total": swap.total, "swap_used": swap.used}
    limit, used = cgroup.memory_limit_bytes(), cgroup.memory_used_bytes()
    if limit is not None:
        found |= {"limit": limit, "limit_left": limit - (used or 0)}
    return found


def _cpus() -> dict[str, float]:
    found: dict[str, float] = {"count": os.cpu_count() or 1, "usable": len(os.sched_getaffinity(0))}
    quota = cgroup.cpu_quota()
    return found | ({"quota": quota} if quota is not None else {})


def existing_folder(path: Path) -> Path:
    """The nearest folder above that is there."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def _disk(path: Path) -> Disk:
    seen = os.statvfs(path)
    within = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    kind = max(within, key=lambda one: len(one.mountpoint)).fstype if within else ""
    return Disk(str(path), kind, seen.f_bavail * seen.f_frsize, seen.f_favail if seen.f_files else -1)


def _probed(disk: Disk) -> Disk:
    """The same after a small file was written, synced, renamed and deleted there."""
    folder = Path(disk.path) / f".surefoot-probe-{os.getpid()}-{time.time_ns()}"
    began = time.perf_counter()
    error, took_s = "", None
    try:
        folder.mkdir()
        with open(folder / "new.tmp", "wb") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "new.tmp", folder / "new")
        took_s = time.perf_counter() - began
    except OSError as caught:
        error = caught.strerror or str(caught)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Disk(disk.path, disk.kind, disk.free_bytes, disk.free_inodes, took_s, error)


def _host_addresses() -> tuple[str, ...]:
    found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(one[4][0]) for one in found))


def _interfaces() -> dict[str, Interface]:
    states = psutil.net_if_stats()
    return {
        name: Interface(
            tuple(one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)),
            states[name].isup if name in states else False,
            states[name].mtu if name in states else 0,
            states[name].speed if name in states else 0,
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def _ports(root: Path) -> Iterator[Port]:
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        types, names = path / "gid_attrs/types", path / "gid_attrs/ndevs"
        gids = {int(one.name): one.read_text().strip() for one in sorted((path / "gids").glob("*"))}
        used = {index: gid for index, gid in sorted(gids.items()) if gid.replace(":", "").strip("0")}
        yield Port(
            device=path.parent.parent.name,
            port=int(path.name),
            state=_text(path / "state").partition(":")[2].strip(),
            link_layer=_text(path / "link_layer"),
            rate=_text(path / "rate"),
            gids=tuple(f"{index}:{_text(types / str(index))}:{gid}" for index, gid in used.items()),
            interface=next((_text(names / str(index)) for index in used if _text(names / str(index))), ""),
        )


def _text(path: Path) -> str:
    """Of a file of sysfs, which may be unreadable while nothing is plugged in."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _peer_memory(root: Path) -> bool | None:
    """Whether network cards reach GPU memory; None where nothing here would.

    Source: https://docs.nvidia.com/cuda/gpudirect-rdma/, kernel modules.
    """
    has_both = (root / "proc/driver/nvidia/version").is_file() and (root / "sys/class/infiniband").is_dir()
    if not has_both:
        return None
    loaded = {line.split()[0] for line in (root / "proc/modules").read_text().splitlines() if line}
    if "Open Kernel Module" in (root / "proc/driver/nvidia/version").read_text():
        return True  # it gives memory away by DMA-BUF, which needs no module more
    if all(path.name.startswith(("efa", "rdmap")) for path in (root / "sys/class/infiniband").iterdir()):
        return None  # AWS's cards have a driver of their own for it
    return bool(loaded & {"nvidia_peermem", "nv_peer_mem"}) or (root / "sys/kernel/mm/memory_peers/nv_mem").exists()


def _iommu(root: Path) -> str:
    words = (root / "proc/cmdline").read_text().split()
    said = " ".join(word for word in words if "iommu" in word)
    is_on = any((root / "sys/class/iommu").glob("*"))
    return f"{'on' if is_on else 'off'}{f' ({said})' if said else ''}"


def _redirecting(root: Path) -> tuple[str, ...] | None:
    """PCI bridges above GPUs whose access control sends what devices tell each other up through the processor.

    The capability lies beyond the 64 bytes that everyone may read: None for who may not.
    """
    devices = root / "sys/bus/pci/devices"
    gpus = [one for one in devices.glob("*") if _text(one / "vendor") == NVIDIA and _text(one / "class")[:4] == DISPLAY]
    above = sorted({part for gpu in gpus for part in gpu.resolve().parts[:-1] if (devices / part).exists()})
    found, could_read = [], not above
    for name in above:
        try:
            space = (devices / name / "config").read_bytes()
        except OSError:
            continue
        could_read = could_read or len(space) > PCI_EXTENDED_AT
        control = _access_control(space)
        if control is not None and control & REDIRECTS:
            found.append(name)
    return tuple(found) if could_read else None


def _access_control(space: bytes) -> int | None:
    """The control register of a device's ACS capability (PCI Express Base 5.0, 7.7.8), if it has one."""
    at = PCI_EXTENDED_AT
    for _ in range(len(space) // 4):  # a damaged list may lead in a circle
        if not PCI_EXTENDED_AT <= at <= len(space) - 8:
            return None
        header = int.from_bytes(space[at : at + 4], "little")
        if header & 0xFFFF == PCI_ACS:
            return int.from_bytes(space[at + 6 : at + 8], "little")
        at = header >> 20
    return None


def _xids() -> tuple[str, ...]:
    """Those that no program causes by itself."""
    log = KernelLog(from_the_start=True)
    lines = log.read()
    log.end()
    if log.why_not:
        raise OSError(log.why_not)
    errors = [one for one in gpu_errors(lines) if one.number not in OF_PROGRAMS]
    return tuple(f"{one.device}: {one.number}" for one in errors)[-MOST_XIDS:]


def _place(endpoint: str) -> str:
    """Whether the host of `host:port` is this machine, and whether its port is taken there.

    Nothing is opened on the port: a launcher may want it at this moment.
    """
    host, _, port = endpoint.rpartition(":")
    addresses = {str(one[4][0]) for one in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)}
    own = {address.partition("%")[0] for one in _interfaces().values() for address in one.addresses}
    if not addresses & own:
        return f"{ELSEWHERE} ({', '.join(sorted(addresses))})"
    listeners = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    taken = next((one for one in listeners if one.laddr and one.laddr.port == int(port)), None)
    if taken is None:
        return HERE
    return f"{HERE}, where {f'process {taken.pid}' if taken.pid else 'another program'} {LISTENS} its port"
