"""What NVML says of this machine's GPUs, sampled from outside by a thread: a driver in trouble may hang whoever asks.

    events/gpus-MACHINE.jsonl     {"time_s", "gpus": [[index, utilisation, power_w, power_limit_w, clock_mhz,
                                   memory_bytes, temperature_c, reasons, lost_data, links_up, pcie_lanes], ...]},
                                  a line every `WRITE_EVERY_S`

A value that a card does not give is null. Imports no torch.
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
    """One GPU at one moment."""

    index: int
    utilisation: float | None
    """Share of the last moments in which any kernel ran, 0 to 1; one that only waits counts as well."""
    power_w: float | None
    power_limit_w: float | None
    clock_mhz: int | None
    memory_bytes: int | None
    temperature_c: int | None
    reasons: tuple[str, ...] = ()
    """Why its clocks are low, of `SLOWING`."""
    lost_data: int | None = None
    """Errors of its memory that ECC could not correct, since the driver was loaded."""
    links_up: int | None = None
    """NVLinks that work."""
    pcie_lanes: int | None = None
    """That it uses."""


Look = tuple[float, tuple[GpuSample, ...]]
"""When, and what was seen of each GPU."""


def gpus_path(run_folder: Path) -> Path:
    return run_folder / "events" / f"gpus-{this_machine().hex()[:8]}.jsonl"


def read_looks(run_folder: Path) -> list[Look]:
    """Of all machines of a run, oldest first; lines that a kill has cut are left out."""
    looks: list[Look] = []
    for path in sorted((run_folder / "events").glob("gpus-*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(line)
                looks.append((said["time_s"], tuple(_read(one) for one in said["gpus"])))
    return sorted(looks, key=lambda look: look[0])


def _read(values: Sequence[Any]) -> GpuSample:
    index, utilisation, power_w, limit_w, clock_mhz, memory_bytes, temperature_c, reasons, *more = values
    return GpuSample(
        index, utilisation, power_w, limit_w, clock_mhz, memory_bytes, temperature_c, tuple(reasons), *more
    )


class Accelerators:
    """Samples the first `count` of the GPUs that this process may see, from when it is made until `end`."""

    def __init__(self, run_folder: Path, count: int) -> None:
        self._path, self._count = gpus_path(run_folder), count
        self._is_over = threading.Event()
        self._looks: deque[Look] = deque()
        self.first: Look | None = None
        """How the cards were when they were first looked at."""
        self.why_not = ""
        """Why there are no samples, if there are none."""
        self._addresses: list[str] = []
        self._written_s = 0.0
        self._thread = threading.Thread(target=self._watch, name="accelerators", daemon=True)
        self._thread.start()

    def looks(self) -> list[Look]:
        """Of the last `KEPT_S`."""
        return list(self._looks)

    def may_be(self, device: str) -> bool:
        """Whether the run may use a device that the kernel names (`0000:1b:00`); so it is where NVML tells nothing."""
        return not self._addresses or any(is_at(address, device) for address in self._addresses)

    def end(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            all_of_them = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            seen = _visible(all_of_them)
            self._addresses = [address_of(pynvml, handle) for handle in seen.values()]
            handles = dict(list(seen.items())[: self._count])  # a rank takes that of its number
        except Exception as error:  # noqa: BLE001 - no driver, no permission, no package: then there are no samples
            self.why_not = f"{type(error).__name__}: {error}"
            return
        while handles and not self._is_over.wait(EVERY_S):
            now_s = time.time()
            look = (now_s, tuple(_sample(index, handle) for index, handle in handles.items()))
            self.first = self.first or look
            self._looks.append(look)
            while now_s - self._looks[0][0] > KEPT_S:
                self._looks.popleft()
            if now_s - self._written_s >= WRITE_EVERY_S:
                self._written_s = now_s
                with suppress(OSError):  # a full disk, or no folder yet: the samples are still looked at
                    _write(self._path, look)


def _visible(handles: Sequence[Any]) -> dict[int, Any]:
    """Those that CUDA_VISIBLE_DEVICES leaves, by their numbers."""
    import pynvml

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles] if named is not None else [""] * len(handles)
    return {number: handles[number] for number in visible(named, names)}


def _sample(index: int, handle: Any) -> GpuSample:
    import pynvml

    def ask(question: Callable[..., Any], *more: Any) -> Any:
        try:
            return question(handle, *more)
        except pynvml.NVMLError:  # not supported by this card or driver
            return None

    use, power, limit = (
        ask(one)
        for one in (
            pynvml.nvmlDeviceGetUtilizationRates,
            pynvml.nvmlDeviceGetPowerUsage,
            pynvml.nvmlDeviceGetEnforcedPowerLimit,
        )
    )
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    links = [ask(pynvml.nvmlDeviceGetNvLinkState, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    return GpuSample(
        index=index,
        utilisation=use.gpu / 100 if use is not None else None,
        power_w=power / 1000 if power is not None else None,
        power_limit_w=limit / 1000 if limit is not None else None,
        clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        memory_bytes=int(memory.used) if memory is not None else None,
        temperature_c=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        reasons=tuple(words for bit, words in SLOWING.items() if reasons & bit),
        lost_data=ask(
            pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        links_up=sum(map(bool, links)) if any(state is not None for state in links) else None,
        pcie_lanes=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
    )


def _write(path: Path, look: Look) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time_s": look[0], "gpus": [list(astuple(gpu)) for gpu in look[1]]}) + "\n")
