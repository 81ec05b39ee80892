"""Memory and rates of accelerators by their data sheets, and of this machine by a short measurement."""

import difflib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch

from surefoot.errors import ConfigError

GB = 10**9
GIB = 1 << 30
USED_SHARE = 0.4
"""Share of a data sheet's rate that training usually reaches; an assumption, not a measurement."""
USED_SHARE_CPU = 0.8
"""Share of the two measured rates that training reaches: its products are smaller, and ops have overhead between them;
an estimate from the runs of docs/plan-accuracy.md."""
ROWS, RING, RING_ELEMENTS = 1024, 16, 1 << 21
"""Sizes of the product and of the ring of sigmoids that measure this machine, in float32. A ring of 128 MiB exceeds the
caches, as the activations of a step do."""
SLICES, SLICE_S = 5, 0.1
"""Number and length of the time slices that measure each rate of this machine; the best slice counts, as it was least
disturbed."""


@dataclass(frozen=True)
class Device:
    """An accelerator, or this machine's CPU."""

    name: str
    memory_bytes: int
    flops_per_s: float
    """Dense bfloat16 rate (float32 on a CPU) that training can expect."""
    link_bytes_per_s: float
    """Rate of one device to the others of its machine."""
    is_gpu: bool = True
    moved_bytes_per_s: float = math.inf
    """Rate at which ops other than matrix products read and write; infinite if `flops_per_s` includes their time."""
    how: str = ""
    """Source of the numbers."""


def _from_data_sheet(name: str, memory_gib: float, tflops: float, link_gb_per_s: float) -> Device:
    return Device(
        name, int(memory_gib * GIB), USED_SHARE * tflops * 1e12, link_gb_per_s * GB,
        how=f"{memory_gib:g} GiB as its driver reports; data sheet: {tflops:g} TFLOP/s bfloat16 dense, of which "
        f"{USED_SHARE:.0%} are assumed",
    )  # fmt: skip


DEVICES = {
    device.name: device
    for device in (
        _from_data_sheet("b200", 178.3, 2250, 700), _from_data_sheet("h200", 139.7, 989, 360),
        _from_data_sheet("h100", 79.1, 989, 360), _from_data_sheet("h800", 79.1, 989, 160),
        _from_data_sheet("h20", 95.0, 148, 360), _from_data_sheet("a100", 79.1, 312, 228),
        _from_data_sheet("a100-40", 39.4, 312, 228), _from_data_sheet("a800", 79.1, 312, 150),
        _from_data_sheet("a6000", 47.4, 155, 20), _from_data_sheet("l40s", 44.4, 362, 20),
        _from_data_sheet("l20", 44.4, 119, 20), _from_data_sheet("a10", 22.0, 125, 20),
        _from_data_sheet("rtx4090", 23.6, 165, 20), _from_data_sheet("rtx5090", 31.3, 210, 20),
        _from_data_sheet("rtx3090", 23.6, 71, 12),
    )
}  # fmt: skip
"""Accelerators by name. Memory: as CUDA reports it, which is less than in the name of a GPU; torch's out-of-memory
messages in public reports show it ("total capacity of 79.10 GiB"). Rates: data sheets of NVIDIA, read 2026-11. Links:
all-reduce bandwidth, from public measurements (Azure's node health checks: 363 to 367 GB/s by rings on H100, 228 on
A100; 12 to 24 over PCIe 4), else a share of the data sheet's."""


def get_device(name: str) -> Device:
    """Return the accelerator of this name. Raises: ConfigError for an unknown name."""
    if name in DEVICES:
        return DEVICES[name]
    near = difflib.get_close_matches(name.lower().replace(" ", ""), DEVICES, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(
        f"device={name}: unknown device{hint} Choose one of {', '.join(DEVICES)}, or cpu, cuda or auto for this "
        "machine."
    )


def measure_cpu(free_bytes: int) -> Device:
    """Measure the CPU of this machine, all cores together, in matrix products and in elementwise ops."""
    matrix, ring = (
        torch.ones(ROWS, ROWS),
        torch.ones(RING, RING_ELEMENTS),
    )  # one block, which malloc returns when it is freed
    positions = cycle(range(RING))

    def activate() -> None:
        position = next(positions)
        torch.sigmoid(ring[position - 1], out=ring[position])

    flops_per_s = 2 * ROWS**3 * _measure_calls_per_s(lambda: torch.mm(matrix, matrix))
    bytes_per_s = 2 * ring[0].nbytes * _measure_calls_per_s(activate)
    return Device(
        "cpu", free_bytes, USED_SHARE_CPU * flops_per_s, 1 * GB, is_gpu=False,
        moved_bytes_per_s=USED_SHARE_CPU * bytes_per_s,
        how=f"measured on {os.cpu_count()} cores: {flops_per_s / 1e9:.0f} GFLOP/s in products, "
        f"{bytes_per_s / GB:.0f} GB/s in sigmoids, of which {USED_SHARE_CPU:.0%} are assumed",
    )  # fmt: skip


def _measure_calls_per_s(call: Callable[[], object]) -> float:
    call()
    rates = []
    for _ in range(SLICES):
        calls, start_s = 0, time.perf_counter()
        while (took_s := time.perf_counter() - start_s) < SLICE_S:
            call()
            calls += 1
        rates.append(calls / took_s)
    return max(rates)


def detect_gpu() -> Device | None:
    """Return the first GPU of this machine, by its data sheet if its name is in `DEVICES`; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    candidates = [device for name, device in DEVICES.items() if name in properties.name.lower().replace(" ", "")]
    sheet = max(candidates, key=lambda device: len(device.name), default=None)
    rate = sheet.flops_per_s if sheet is not None else 50e12
    link = sheet.link_bytes_per_s if sheet is not None else 12 * GB
    how = sheet.how if sheet is not None else "without a data sheet; 50 TFLOP/s are assumed"
    return Device(properties.name, int(properties.total_memory), rate, link, how=how)
