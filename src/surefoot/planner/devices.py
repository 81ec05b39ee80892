"""What is known of accelerators by their data sheets, and of this machine by a short measurement."""

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
"""Of a data sheet's rate that training reaches, as a rule; an assumption, not a measurement."""
USED_SHARE_CPU = 0.8
"""Of the two measured rates: products are smaller too, and something lies between ops; a judgement by the runs of
docs/plan-accuracy.md."""
ROWS, RING, RING_ELEMENTS = 1024, 16, 1 << 21
"""Of the product and the sigmoids that this machine is measured with, in float32. A ring of 128 MiB is in no cache, as
what the layers of a step leave is not."""
SLICES, SLICE_S = 5, 0.1
"""Of time for each of the two rates of this machine; the best one counts, which nothing else has disturbed."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or this machine's CPU."""

    name: str
    memory_bytes: int
    flops_per_s: float
    """Dense, bfloat16 (float32 on a CPU), that training may count on."""
    link_bytes_per_s: float
    """Of one device to the others of its machine."""
    is_gpu: bool = True
    moved_bytes_per_s: float = math.inf
    """What ops that are no products of matrices read and write; infinite where `flops_per_s` allows for them."""
    how: str = ""
    """Where the numbers come from."""


def _sheet(name: str, memory_gib: float, tflops: float, link_gb_per_s: float) -> Device:
    return Device(
        name, int(memory_gib * GIB), USED_SHARE * tflops * 1e12, link_gb_per_s * GB,
        how=f"{memory_gib:g} GiB as its driver tells; data sheet: {tflops:g} TFLOP/s bfloat16 dense, of which "
        f"{USED_SHARE:.0%} are assumed",
    )  # fmt: skip


DEVICES = {
    device.name: device
    for device in (
        _sheet("b200", 178.3, 2250, 700), _sheet("h200", 139.7, 989, 360), _sheet("h100", 79.1, 989, 360),
        _sheet("h800", 79.1, 989, 160), _sheet("h20", 95.0, 148, 360), _sheet("a100", 79.1, 312, 228),
        _sheet("a100-40", 39.4, 312, 228), _sheet("a800", 79.1, 312, 150), _sheet("a6000", 47.4, 155, 20),
        _sheet("l40s", 44.4, 362, 20), _sheet("l20", 44.4, 119, 20), _sheet("a10", 22.0, 125, 20),
        _sheet("rtx4090", 23.6, 165, 20), _sheet("rtx5090", 31.3, 210, 20), _sheet("rtx3090", 23.6, 71, 12),
    )
}  # fmt: skip
"""Memory: what CUDA says is there, which is less than the name of a card says; torch's out-of-memory messages in public
reports show it ("total capacity of 79.10 GiB"). Rates: data sheets of NVIDIA, read 2026-11. Links: what an all-reduce
carries, measured by others where that is public (Azure's node health checks: 363 to 367 GB/s by rings on H100, 228 on
A100; 12 to 24 over PCIe 4), else the data sheet's share of it."""


def named(name: str) -> Device:
    """Raises: ConfigError for a name that is not known."""
    if name in DEVICES:
        return DEVICES[name]
    raise ConfigError(
        f"device={name}: not known. There are: {', '.join(DEVICES)}; or cpu, cuda and auto for this machine."
    )


def this_cpu(free_bytes: int) -> Device:
    """The CPU of this machine, all cores together: how fast it is now, in products and in what is done elementwise."""
    rows, ring = torch.ones(ROWS, ROWS), torch.ones(RING, RING_ELEMENTS)  # one block, which goes back when it is free
    turns = cycle(range(RING))

    def activate() -> None:
        at = next(turns)
        torch.sigmoid(ring[at - 1], out=ring[at])

    flops_per_s = 2 * ROWS**3 * _times_per_s(lambda: torch.mm(rows, rows))
    bytes_per_s = 2 * ring[0].nbytes * _times_per_s(activate)
    return Device(
        "cpu", free_bytes, USED_SHARE_CPU * flops_per_s, 1 * GB, is_gpu=False,
        moved_bytes_per_s=USED_SHARE_CPU * bytes_per_s,
        how=f"measured on {os.cpu_count()} cores: {flops_per_s / 1e9:.0f} GFLOP/s in products, "
        f"{bytes_per_s / GB:.0f} GB/s in sigmoids, of which {USED_SHARE_CPU:.0%} are assumed",
    )  # fmt: skip


def _times_per_s(work: Callable[[], object]) -> float:
    work()
    rates = []
    for _ in range(SLICES):
        done, began = 0, time.perf_counter()
        while (took_s := time.perf_counter() - began) < SLICE_S:
            work()
            done += 1
        rates.append(done / took_s)
    return max(rates)


def this_gpu() -> Device | None:
    """The first GPU of this machine, by its data sheet where its name is known; None where there is none."""
    if not torch.cuda.is_available():
        return None
    about = torch.cuda.get_device_properties(0)
    known = [device for name, device in DEVICES.items() if name in about.name.lower().replace(" ", "")]
    sheet = max(known, key=lambda device: len(device.name), default=None)
    rate = sheet.flops_per_s if sheet is not None else 50e12
    link = sheet.link_bytes_per_s if sheet is not None else 12 * GB
    how = sheet.how if sheet is not None else "no data sheet is known; 50 TFLOP/s are assumed"
    return Device(about.name, int(about.total_memory), rate, link, how=how)
