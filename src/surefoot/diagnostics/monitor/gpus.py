"""Samples of this machine's GPUs from NVML, taken by a thread: a driver in trouble may hang its caller.

    events/gpus-MACHINE.jsonl     {"time_s", "gpus": [[index, utilisation, power_w, power_limit_w, clock_mhz,
                                   memory_bytes, temperature_c, reasons, lost_data, links_up, pcie_lanes], ...]},
                                  a line every `WRITE_EVERY_S`

A value that a card does not report is null. Imports no torch.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.diagnostics.monitor.ring_buffer import this_machine
from surefoot.system.deadline import Deadline
from surefoot.system.json_files import read_objects
from surefoot.system.nvml import QUERY_S, address_of, is_at, list_visible, query_or_none, read_gpu

EVERY_S = 2.0
WRITE_EVERY_S = 10.0
KEPT_S = 60.0
REASONS_AT = 7
"""Position of `reasons` among the values of a GPU."""


@dataclass(frozen=True)
class GpuSample:
    """The state of one GPU at one moment."""

    index: int
    utilisation: float | None
    """Share of the last moments in which any kernel ran, 0 to 1; a kernel that only waits counts too."""
    power_w: float | None
    power_limit_w: float | None
    clock_mhz: int | None
    memory_bytes: int | None
    temperature_c: int | None
    reasons: tuple[str, ...] = ()
    """Reasons for low clocks, from `SLOWING`."""
    lost_data: int | None = None
    """Number of memory errors that ECC could not correct since the driver was loaded."""
    links_up: int | None = None
    """Number of NVLinks that work."""
    pcie_lanes: int | None = None
    """Number of PCIe lanes in use."""


class GpuSnapshot(NamedTuple):
    """All GPUs of this machine at one moment."""

    time_s: float
    gpus: tuple[GpuSample, ...]


def gpus_path(run_folder: Path) -> Path:
    return run_folder / "events" / f"gpus-{this_machine().hex()[:8]}.jsonl"


def read_snapshots(run_folder: Path) -> list[GpuSnapshot]:
    """Return the samples of all machines of a run, oldest first, without lines that a kill cut short."""
    snapshots: list[GpuSnapshot] = []
    for path in sorted((run_folder / "events").glob("gpus-*.jsonl")):
        for _, line in read_objects(path):
            with suppress(ValueError, LookupError, TypeError):
                if line is not None:
                    gpus = tuple(_decode_sample(values) for values in line["gpus"])
                    snapshots.append(GpuSnapshot(line["time_s"], gpus))
    return sorted(snapshots, key=lambda snapshot: snapshot.time_s)


def _decode_sample(values: Sequence[Any]) -> GpuSample:
    return replace(GpuSample(*values), reasons=tuple(values[REASONS_AT]))


class GpuSampler:
    """A sampler of the first `count` visible GPUs, from its creation until `end`."""

    def __init__(self, run_folder: Path, count: int) -> None:
        self._path, self._count = gpus_path(run_folder), count
        self._stop = threading.Event()
        self._snapshots: deque[GpuSnapshot] = deque()
        self.first: GpuSnapshot | None = None
        self.problem = ""
        """Reason why there are no samples; empty if there are some."""
        self._addresses: list[str] = []
        self._written_s = 0.0
        self._thread = threading.Thread(target=self._watch, name="gpu-sampler", daemon=True)
        self._thread.start()

    def snapshots(self) -> list[GpuSnapshot]:
        """Return the samples of the last `KEPT_S`."""
        return list(self._snapshots)

    def may_use(self, device: str) -> bool:
        """Return whether the run may use a device of the kernel log (`0000:1b:00`); True if NVML reports nothing."""
        return not self._addresses or any(is_at(address, device) for address in self._addresses)

    def end(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            visible = list_visible(pynvml)
            self._addresses = [address_of(pynvml, handle) for handle in visible.values()]
            handles = dict(list(visible.items())[: self._count])  # each rank takes the GPU of its number
        except Exception as error:  # noqa: BLE001 - no driver, no permission, no package: then there are no samples
            self.problem = f"{type(error).__name__}: {error}"
            return
        while handles and not self._stop.wait(EVERY_S):
            now_s = time.time()
            snapshot = GpuSnapshot(now_s, tuple(_sample(pynvml, index, handle) for index, handle in handles.items()))
            self.first = self.first or snapshot
            self._snapshots.append(snapshot)
            while now_s - self._snapshots[0].time_s > KEPT_S:
                self._snapshots.popleft()
            if now_s - self._written_s >= WRITE_EVERY_S:
                self._written_s = now_s
                with suppress(OSError):  # a full disk, or no folder yet: the samples in memory are still used
                    _write(self._path, snapshot)


def take_snapshot() -> GpuSnapshot | None:
    """Return the state of the visible GPUs now; None if NVML does not report it within `QUERY_S`."""

    def read() -> GpuSnapshot:
        import pynvml

        pynvml.nvmlInit()
        return GpuSnapshot(
            time.time(), tuple(_sample(pynvml, index, handle) for index, handle in list_visible(pynvml).items())
        )

    try:
        return Deadline(read).result(QUERY_S)
    except Exception:  # noqa: BLE001 - no driver, one that hangs, no package: nothing is known then
        return None


def _sample(nvml: Any, index: int, handle: Any) -> GpuSample:
    gpu = read_gpu(nvml, index, handle)
    use = query_or_none(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    power = query_or_none(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return GpuSample(
        index=index,
        utilisation=use.gpu / 100 if use is not None else None,
        power_w=power / 1000 if power is not None else None,
        power_limit_w=gpu.power_limit_w,
        clock_mhz=query_or_none(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_bytes=gpu.memory_used_bytes,
        temperature_c=gpu.temperature_c,
        reasons=gpu.slowed_by,
        lost_data=gpu.uncorrected_errors,
        links_up=sum(gpu.links) if gpu.links else None,
        pcie_lanes=gpu.pcie_width,
    )


def _write(path: Path, snapshot: GpuSnapshot) -> None:
    with open(path, "a", encoding="utf-8") as file:
        line = {"time_s": snapshot.time_s, "gpus": [list(astuple(gpu)) for gpu in snapshot.gpus]}
        file.write(json.dumps(line) + "\n")
