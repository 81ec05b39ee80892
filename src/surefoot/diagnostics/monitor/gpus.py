"""Samples of this machine's GPUs from NVML, taken by a thread: a driver in trouble may hang its caller.

    events/gpus-MACHINE.jsonl     {"time_s", "gpus": [[index, utilisation, power_w, power_limit_w, clock_mhz,
                                   memory_bytes, temperature_c, reasons, lost_data, links_up, pcie_lanes], ...]},
                                  a line every `WRITE_EVERY_S`

A value that a card does not report is null. Imports no torch.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.ring_buffer import this_machine
from surefoot.system.nvml import SLOWING, address_of, is_at, visible

EVERY_S = 2.0
WRITE_EVERY_S = 10.0
KEPT_S = 60.0


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


Look = tuple[float, tuple[GpuSample, ...]]
"""(time, the sample of each GPU)."""


def gpus_path(run_folder: Path) -> Path:
    return run_folder / "events" / f"gpus-{this_machine().hex()[:8]}.jsonl"


def read_looks(run_folder: Path) -> list[Look]:
    """Return the samples of all machines of a run, oldest first, without lines that a kill cut short."""
    looks: list[Look] = []
    for path in sorted((run_folder / "events").glob("gpus-*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                payload = json.loads(line)
                looks.append((payload["time_s"], tuple(_decode_sample(values) for values in payload["gpus"])))
    return sorted(looks, key=lambda look: look[0])


def _decode_sample(values: Sequence[Any]) -> GpuSample:
    index, utilisation, power_w, limit_w, clock_mhz, memory_bytes, temperature_c, reasons, *more = values
    return GpuSample(
        index, utilisation, power_w, limit_w, clock_mhz, memory_bytes, temperature_c, tuple(reasons), *more
    )


class Accelerators:
    """A sampler of the first `count` visible GPUs, from its creation until `end`."""

    def __init__(self, run_folder: Path, count: int) -> None:
        self._path, self._count = gpus_path(run_folder), count
        self._stop = threading.Event()
        self._looks: deque[Look] = deque()
        self.first: Look | None = None
        """The first sample of the cards."""
        self.why_not = ""
        """Reason why there are no samples; empty if there are some."""
        self._addresses: list[str] = []
        self._written_s = 0.0
        self._thread = threading.Thread(target=self._watch, name="accelerators", daemon=True)
        self._thread.start()

    def looks(self) -> list[Look]:
        """Return the samples of the last `KEPT_S`."""
        return list(self._looks)

    def may_be(self, device: str) -> bool:
        """Return whether the run may use a device of the kernel log (`0000:1b:00`); True if NVML reports nothing."""
        return not self._addresses or any(is_at(address, device) for address in self._addresses)

    def end(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            all_handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            visible_gpus = _select_visible_handles(all_handles)
            self._addresses = [address_of(pynvml, handle) for handle in visible_gpus.values()]
            handles = dict(list(visible_gpus.items())[: self._count])  # each rank takes the GPU of its number
        except Exception as error:  # noqa: BLE001 - no driver, no permission, no package: then there are no samples
            self.why_not = f"{type(error).__name__}: {error}"
            return
        while handles and not self._stop.wait(EVERY_S):
            now_s = time.time()
            look = (now_s, tuple(_sample(index, handle) for index, handle in handles.items()))
            self.first = self.first or look
            self._looks.append(look)
            while now_s - self._looks[0][0] > KEPT_S:
                self._looks.popleft()
            if now_s - self._written_s >= WRITE_EVERY_S:
                self._written_s = now_s
                with suppress(OSError):  # a full disk, or no folder yet: the samples in memory are still used
                    _write(self._path, look)


def _select_visible_handles(handles: Sequence[Any]) -> dict[int, Any]:
    """Return index -> handle of the GPUs that CUDA_VISIBLE_DEVICES allows."""
    import pynvml

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles] if named is not None else [""] * len(handles)
    return {number: handles[number] for number in visible(named, names)}


def _sample(index: int, handle: Any) -> GpuSample:
    import pynvml

    def query(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except pynvml.NVMLError:  # not supported by this card or driver
            return None

    use, power, limit = (
        query(function)
        for function in (
            pynvml.nvmlDeviceGetUtilizationRates,
            pynvml.nvmlDeviceGetPowerUsage,
            pynvml.nvmlDeviceGetEnforcedPowerLimit,
        )
    )
    memory = query(pynvml.nvmlDeviceGetMemoryInfo)
    reasons = query(pynvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    links = [query(pynvml.nvmlDeviceGetNvLinkState, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    return GpuSample(
        index=index,
        utilisation=use.gpu / 100 if use is not None else None,
        power_w=power / 1000 if power is not None else None,
        power_limit_w=limit / 1000 if limit is not None else None,
        clock_mhz=query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        memory_bytes=int(memory.used) if memory is not None else None,
        temperature_c=query(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        reasons=tuple(words for bit, words in SLOWING.items() if reasons & bit),
        lost_data=query(
            pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        links_up=sum(map(bool, links)) if any(state is not None for state in links) else None,
        pcie_lanes=query(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
    )


def _write(path: Path, look: Look) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time_s": look[0], "gpus": [list(astuple(gpu)) for gpu in look[1]]}) + "\n")
