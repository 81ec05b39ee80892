"""What NVML says of the GPUs of this machine, once. Imports no torch; without a driver it raises, and nothing is known.

A driver in trouble may hang whoever asks: `collect` does so in a thread.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import byref
from functools import partial
from itertools import combinations
from typing import Any

from surefoot.system.machine import Gpu

SLOWING = {
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's reasons for low clocks that mean trouble; a power cap under full load is none."""
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
"""What the way from one GPU to another goes over, where it is not NVLink; the nearest first."""


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_cards() -> tuple[Gpu, ...]:
    """All GPUs of the machine. Raises: NVMLError without a driver."""
    with _nvml() as nvml:
        return tuple(_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def read_visible(number: int) -> Gpu | None:
    """The GPU that CUDA calls so in this process; None where NVML knows none such.

    Raises: NVMLError without a driver.
    """
    with _nvml() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        identities = [_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
        chosen = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), identities)
        return _card(nvml, chosen[number]) if number < len(chosen) else None


def read_peers() -> dict[str, str]:
    """Of each pair of GPUs whether one can read the other's memory. Raises: NVMLError without a driver."""
    with _nvml() as nvml:
        return _pairs(nvml, lambda one, other: _ask(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, 0), PEERS)  # reading


def read_topology() -> dict[str, str]:
    """Of each pair of GPUs what lies between them. Raises: NVMLError without a driver."""
    with _nvml() as nvml:
        return _pairs(nvml, partial(_ask, nvml, nvml.nvmlDeviceGetTopologyCommonAncestor), BETWEEN)


def _pairs(nvml: Any, ask: Callable[[Any, Any], Any], words: Mapping[int, str]) -> dict[str, str]:
    """An answer in words for each pair, "0-1", for which there is one."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    answers = {f"{i}-{j}": ask(one, other) for (i, one), (j, other) in combinations(enumerate(handles), 2)}
    return {pair: words.get(int(said), "not known") for pair, said in answers.items() if said is not None}


def address_of(nvml: Any, handle: Any) -> str:
    """Of a card on the PCI bus, `00000000:1B:00.0`; empty where it tells none."""
    return _text(getattr(_ask(nvml, nvml.nvmlDeviceGetPciInfo, handle), "busId", ""))


def is_at(address: str, device: str) -> bool:
    """Whether a card is the device of which the kernel says something: `0000:1b:00`. Yes where it tells no address."""
    bus = ":".join(device.split(":")[1:3])
    return not address or address.lower().partition(":")[2].startswith(bus.lower())


def _ask(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    try:
        return question(*about)
    except nvml.NVMLError:  # not supported by this card or driver
        return None


def _card(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[..., Any], *more: Any) -> Any:
        return _ask(nvml, question, handle, *more)

    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    limit = ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
    default = ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    rows = ask(nvml.nvmlDeviceGetRemappedRows)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    links = (ask(nvml.nvmlDeviceGetNvLinkState, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    remap = [word for word, is_so in zip(("pending", "failed"), rows[2:] if rows else (), strict=False) if is_so]
    return Gpu(
        index=index,
        name=_text(ask(nvml.nvmlDeviceGetName)),
        uuid=_text(ask(nvml.nvmlDeviceGetUUID)),
        pci=address_of(nvml, handle),
        capability=".".join(map(str, ask(nvml.nvmlDeviceGetCudaComputeCapability) or ())),
        slowed_by=tuple(words for bit, words in SLOWING.items() if reasons & bit),
        power_limit_w=limit / 1000 if limit is not None else None,
        power_default_w=default / 1000 if default is not None else None,
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        slowdown_c=ask(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        uncorrected_errors=ask(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap=", ".join(remap),
        links=tuple(bool(state) for state in links if state is not None),
        fabric=_fabric(nvml, handle),
        pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_most_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        pcie_generation=ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_most_generation=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_own_generation=ask(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration),
        memory_used_bytes=int(memory.used) if memory is not None else None,
        memory_bytes=int(memory.total) if memory is not None else None,
        processes=tuple(int(one.pid) for one in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
    )


def _text(said: Any) -> str:
    return said.decode() if isinstance(said, bytes) else said or ""


def _fabric(nvml: Any, handle: Any) -> str:
    """Registration with the NVSwitches; one that is completed may have ended with an error."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if _ask(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info)) is None:
        return ""
    said = FABRIC.get(int(info.state), "")
    return f"{said} with error {info.status}" if said == "completed" and info.status else said


def visible(named: str | None, identities: Sequence[str]) -> list[int]:
    """Numbers of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, as CUDA reads it; all where it is not set.

    `identities`: the UUID of each. It names them by number or by the beginning of an identity; the first that is none
    ends the list.
    """
    if named is None:
        return list(range(len(identities)))
    chosen: list[int] = []
    for one in (part.strip() for part in named.split(",")):
        meant = [number for number, name in enumerate(identities) if one == str(number)]
        meant = meant or [
            number for number, name in enumerate(identities) if one[:1].isalpha() and name.startswith(one)
        ]
        if not meant:
            break
        chosen.append(meant[0])
    return chosen
