"""One query of NVML about the GPUs of this machine. Imports no torch; raises without a driver.

A broken driver may hang its caller, so callers that must go on call these functions in a thread.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import byref
from functools import partial
from itertools import combinations
from typing import Any

from surefoot.system.deadline import Deadline
from surefoot.system.machine import Gpu

HIDES_ALL = ("", "-1", "NoDevFiles", "none", "void")
"""Values of CUDA_VISIBLE_DEVICES with which a process is to use no GPU."""
QUERY_S = 3.0
"""Seconds that the driver may take to answer."""

SLOWING = {
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's reasons for low clocks that mean trouble; a power cap under full load does not."""
FABRIC = {1: "not started", 2: "in progress", 3: "completed"}
PEERS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "these GPUs do not support it",
    3: "there is an I/O hub between them that does not support it",
    4: "it is disabled by a setting of the driver",
    5: "not supported",
}

BETWEEN = {
    0: "on one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one host bridge",
    40: "one processor",
    50: "several processors",
}
"""Connection between two GPUs besides NVLink, by NVML's topology level; the nearest first."""


@contextmanager
def _open_nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_cards() -> tuple[Gpu, ...]:
    """Return all GPUs of the machine. Raises: NVMLError without a driver."""
    with _open_nvml() as nvml:
        return tuple(read_gpu(nvml, index, handle) for index, handle in enumerate(_list_handles(nvml)))


def read_visible(number: int) -> Gpu | None:
    """Return the GPU with this CUDA device number in this process; None if NVML does not list it.

    Raises: NVMLError without a driver.
    """
    with _open_nvml() as nvml:
        gpus = list(list_visible(nvml).items())
        return read_gpu(nvml, *gpus[number]) if number < len(gpus) else None


def list_names() -> list[str]:
    """Return the names of this machine's GPUs; none if CUDA_VISIBLE_DEVICES hides all, or no driver answers."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDES_ALL:
        return []
    try:
        return [card.name for card in Deadline(read_cards).result(QUERY_S)]
    except Exception:  # noqa: BLE001 - no driver, one that hangs, no package: nothing is known then
        return []


def list_visible(nvml: Any) -> dict[int, Any]:
    """Return index -> handle of the GPUs that this process may use, in the order of their CUDA device numbers.

    CUDA numbers GPUs as NVML does with CUDA_DEVICE_ORDER=PCI_BUS_ID, which the command line sets. A slice of a GPU
    (MIG) has a handle of its own, with the index 0: CUDA shows a process one of them at most.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if is_slice(named):
        assert named is not None
        return {0: nvml.nvmlDeviceGetHandleByUUID(named.split(",")[0].strip().encode())}
    handles = _list_handles(nvml)
    identities = [_decode(query_or_none(nvml, nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
    return {index: handles[index] for index in visible(named, identities)}


def _list_handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def read_peers() -> dict[str, str]:
    """Return for each pair of GPUs whether one can read the other's memory. Raises: NVMLError without a driver."""
    with _open_nvml() as nvml:
        return _query_pairs(
            nvml,
            lambda reader, peer: query_or_none(nvml, nvml.nvmlDeviceGetP2PStatus, reader, peer, 0),  # 0: reading
            PEERS,
        )


def read_topology() -> dict[str, str]:
    """Return the connection of each pair of GPUs besides NVLink. Raises: NVMLError without a driver."""
    with _open_nvml() as nvml:
        return _query_pairs(nvml, partial(query_or_none, nvml, nvml.nvmlDeviceGetTopologyCommonAncestor), BETWEEN)


def _query_pairs(nvml: Any, query: Callable[[Any, Any], Any], words: Mapping[int, str]) -> dict[str, str]:
    """Return pair, such as "0-1", -> answer in words, for each pair with an answer."""
    handles = _list_handles(nvml)
    answers = {f"{i}-{j}": query(first, second) for (i, first), (j, second) in combinations(enumerate(handles), 2)}
    return {pair: words.get(int(answer), "not known") for pair, answer in answers.items() if answer is not None}


def address_of(nvml: Any, handle: Any) -> str:
    """Return the PCI address of a GPU, such as `00000000:1B:00.0`; empty if it reports none."""
    return _decode(getattr(query_or_none(nvml, nvml.nvmlDeviceGetPciInfo, handle), "busId", ""))


def is_at(address: str, device: str) -> bool:
    """Return whether a GPU's PCI address is that of a kernel message's device, `0000:1b:00`; True if it has none."""
    bus = ":".join(device.split(":")[1:3])
    return not address or address.lower().partition(":")[2].startswith(bus.lower())


def query_or_none(nvml: Any, getter: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of NVML returns; None if this GPU or driver does not support it."""
    try:
        return getter(*arguments)
    except nvml.NVMLError:
        return None


def read_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    """Return one GPU. Values that it does not report, as after it was lost, are None or empty."""

    def query(getter: Callable[..., Any], *arguments: Any) -> Any:
        return query_or_none(nvml, getter, handle, *arguments)

    reasons = query(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    limit = query(nvml.nvmlDeviceGetEnforcedPowerLimit)
    default = query(nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    rows = query(nvml.nvmlDeviceGetRemappedRows)
    memory = query(nvml.nvmlDeviceGetMemoryInfo)
    links = (query(nvml.nvmlDeviceGetNvLinkState, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    remap = [word for word, is_so in zip(("pending", "failed"), rows[2:] if rows else (), strict=False) if is_so]
    return Gpu(
        index=index,
        name=_decode(query(nvml.nvmlDeviceGetName)),
        uuid=_decode(query(nvml.nvmlDeviceGetUUID)),
        pci=address_of(nvml, handle),
        capability=".".join(map(str, query(nvml.nvmlDeviceGetCudaComputeCapability) or ())),
        slowed_by=tuple(words for bit, words in SLOWING.items() if reasons & bit),
        power_limit_w=limit / 1000 if limit is not None else None,
        power_default_w=default / 1000 if default is not None else None,
        temperature_c=query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        slowdown_c=query(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        uncorrected_errors=query(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap=", ".join(remap),
        links=tuple(bool(state) for state in links if state is not None),
        fabric=_describe_fabric(nvml, handle),
        pcie_width=query(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_most_width=query(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        pcie_generation=query(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_most_generation=query(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_own_generation=query(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration),
        memory_used_bytes=int(memory.used) if memory is not None else None,
        memory_bytes=int(memory.total) if memory is not None else None,
        processes=tuple(int(process.pid) for process in query(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
    )


def _decode(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def _describe_fabric(nvml: Any, handle: Any) -> str:
    """Describe the registration with the NVSwitches; a completed registration may have failed with an error."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if query_or_none(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info)) is None:
        return ""
    state = FABRIC.get(int(info.state), "")
    return f"{state} with error {info.status}" if state == "completed" and info.status else state


def is_slice(named: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES names a slice of a GPU (MIG)."""
    return (named or "").strip().startswith("MIG-")


def visible(named: str | None, identities: Sequence[str]) -> list[int]:
    """Return the indices of the GPUs in CUDA_VISIBLE_DEVICES, in its order and read as CUDA does; all if it is not set.

    `named`: value of the variable. It names GPUs by index or by the beginning of a UUID; the first entry that matches
    no GPU ends the list. `identities`: UUID of each GPU.
    """
    if named is None:
        return list(range(len(identities)))
    indices: list[int] = []
    for entry in (part.strip() for part in named.split(",")):
        matches = [index for index, uuid in enumerate(identities) if entry == str(index)]
        matches = matches or [
            index for index, uuid in enumerate(identities) if entry[:1].isalpha() and uuid.startswith(entry)
        ]
        if not matches:
            break
        indices.append(matches[0])
    return indices
