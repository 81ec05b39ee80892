"""Rules for GPUs that are busy without working, that are slowed down, or that lost capability. Pure.

NVML's utilisation is the share of time in which any kernel ran: a kernel that only spins while it waits for another
rank reads 100 %. Power distinguishes the two.
"""

from collections.abc import Collection, Iterator, Sequence
from statistics import median

from surefoot.diagnostics.monitor.gpus import GpuSample, GpuSnapshot
from surefoot.findings import Finding
from surefoot.system.kernel_log import OF_PROGRAMS, GpuError

WINDOW_S = 30.0
LEAST_LOOKS = 10
BUSY = 0.9
IDLE_POWER = 0.25
"""Share of its power limit: a card that computes draws more, a card whose kernels only wait does not. An H100 of 700 W
then draws about 70 W."""
ALONE_POWER = 0.15
"""The same for a single card, which waits for no other: small kernels that only read memory also draw little."""
HALF_BUSY, ONE_CORE, MOST_COMPUTING = 0.6, 0.9, 0.7
"""Signs of a program that cannot launch kernels fast enough: a GPU less busy than this, a process that uses about one
core or more, and steps that are mostly computing."""
MOST_CORES = 2.0
"""Most cores that such a program uses; a program that uses more computes on the CPU itself."""
XIDS = {
    13: "an exception of a kernel",
    31: "a memory page fault of a kernel",
    43: "the GPU stopped a program",
    45: "a program was removed from the GPU",
    48: "two bits of its memory are wrong (ECC)",
    61: "its microcontroller stopped",
    62: "its microcontroller stopped",
    63: "a memory row is to be replaced at the next reset",
    64: "a memory row could not be replaced",
    74: "NVLink failed",
    79: "it has fallen off the bus",
    92: "many single bits of its memory are wrong (ECC)",
    94: "memory is wrong (ECC); only this program is hit",
    95: "memory is wrong (ECC); every program is hit",
    119: "its system processor does not answer",
    120: "its system processor failed",
}
"""Xid errors from NVIDIA's list (docs.nvidia.com/deploy/xid-errors), read 2026-11."""
REMOVED = 45
"""Xid that follows from the end of a program."""
SLOWED_SHARE = 0.5
"""Share of the samples in which a GPU must be slowed down."""


def find_in_gpus(looks: Sequence[GpuSnapshot]) -> list[Finding]:
    """Return the findings in the newest `WINDOW_S` of samples; none if the samples are too few."""
    gpus = _group_by_gpu(_select_newest(looks))
    return [*_find_spinning(gpus), *_find_slowed(gpus)]


def find_worse_gpus(first: GpuSnapshot | None, looks: Sequence[GpuSnapshot]) -> list[Finding]:
    """Return findings on cards that lost data, NVLinks or PCIe lanes since the run's first sample.

    Fewer links or lanes count only if no sample of the newest `WINDOW_S` has as many as the first.
    """
    began = {gpu.index: gpu for gpu in first[1]} if first is not None else {}
    findings = []
    for index, samples in _group_by_gpu(_select_newest(looks)).items():
        before = began.get(index)
        if before is None:
            continue
        findings += _find_lost_data(before, samples)
        for code, field, name in (("SF724", "links_up", "NVLinks"), ("SF725", "pcie_lanes", "PCIe lanes")):
            at_first, counts = getattr(before, field), [getattr(sample, field) for sample in samples]
            most = max((count for count in counts if count is not None), default=None)
            if at_first and most is not None and most < at_first:
                cause = f"GPU {index} uses {most} {name}; it used {at_first} when the run began"
                findings.append(Finding(code, cause, {"device": index}))
    return findings


def _find_lost_data(before: GpuSample, samples: Sequence[GpuSample]) -> list[Finding]:
    lost = [sample.lost_data for sample in samples if sample.lost_data is not None]
    if before.lost_data is None or not lost or lost[-1] <= before.lost_data:
        return []
    cause = f"GPU {before.index}'s memory lost data {lost[-1] - before.lost_data} times since the run began"
    return [Finding("SF722", cause, {"device": before.index})]


def find_last_errors(
    errors: Sequence[GpuError], processes: Collection[int], first: GpuSnapshot | None, last: GpuSnapshot | None
) -> list[Finding]:
    """Return what the GPUs report when a rank has died: the driver's errors, and data that their memory lost.

    `errors`, `processes`: see `find_gpu_errors`. `first`, `last`: samples at the run's start and after the death.
    """
    now = {gpu.index: gpu for gpu in last.gpus} if last is not None else {}
    lost = [
        finding
        for gpu in (first.gpus if first is not None else ())
        if gpu.index in now
        for finding in _find_lost_data(gpu, [now[gpu.index]])
    ]
    causes = [error for error in errors if error.number != REMOVED]
    return [*find_gpu_errors(causes, processes), *lost]


def find_launch_bound(looks: Sequence[GpuSnapshot], cores: float | None, computing: float | None) -> Finding | None:
    """Return a finding if GPUs wait for the program, which is busy with launching kernels.

    `cores`: number of cores that a rank's own process uses. `computing`: share of its steps in forward, backward and
    optimizer.
    """
    if cores is None or computing is None or not ONE_CORE <= cores <= MOST_CORES or computing < MOST_COMPUTING:
        return None
    use = [gpu.utilisation for _, gpus in _select_newest(looks) for gpu in gpus if gpu.utilisation is not None]
    if not use or median(use) > HALF_BUSY:
        return None
    return Finding(
        "SF310",
        f"the GPUs run kernels in {median(use):.0%} of the time, while {computing:.0%} of a step is forward, backward "
        f"and optimizer, and the program uses {cores:.1f} cores: it cannot launch kernels fast enough",
        {"gpu_utilisation": f"{median(use):.0%}", "computing": f"{computing:.0%}", "cores": round(cores, 2)},
        confidence=0.7,
    )


def find_gpu_errors(errors: Sequence[GpuError], processes: Collection[int]) -> list[Finding]:
    """Return findings on the driver's errors in the kernel log, each number once for each device.

    `processes`: the ranks' processes. An error that a program caused counts only if one of them caused it.
    """
    firsts: dict[tuple[str, int], GpuError] = {}
    for error in errors:
        if error.number not in OF_PROGRAMS or error.process in processes:
            firsts.setdefault((error.device, error.number), error)
    return [
        Finding(
            "SF112",
            f"the GPU at {device} reports an error: Xid {error.number}"
            f"{f', {XIDS[error.number]}' if error.number in XIDS else ''}",
            {"device": device, "xid": error.number, "kernel_says": error.message},
            "Restart the program, which caused this error itself." if error.number in OF_PROGRAMS else "",
            confidence=0.9,
        )
        for (device, _), error in firsts.items()
    ]


def _select_newest(looks: Sequence[GpuSnapshot]) -> list[GpuSnapshot]:
    """Return the samples of the newest `WINDOW_S`; none if they are too few for a conclusion."""
    newest = [look for look in looks if looks[-1][0] - look[0] <= WINDOW_S]
    is_enough = len(newest) >= LEAST_LOOKS and newest[-1][0] - newest[0][0] >= WINDOW_S / 2
    return newest if is_enough else []


def _group_by_gpu(looks: Sequence[GpuSnapshot]) -> dict[int, list[GpuSample]]:
    gpus: dict[int, list[GpuSample]] = {}
    for _, samples in looks:
        for sample in samples:
            gpus.setdefault(sample.index, []).append(sample)
    return gpus


def in_words(look: GpuSnapshot) -> str:
    """Return one sample of all GPUs as text, for evidence."""
    return "; ".join(
        f"{gpu.index}: {_format_share(gpu.utilisation)} busy, "
        f"{_format_watts(gpu.power_w)} of {_format_watts(gpu.power_limit_w)}"
        + (f", {gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes is not None else "")
        for gpu in look[1]
    )


def _format_share(value: float | None) -> str:
    return f"{value:.0%}" if value is not None else "?"


def _format_watts(value: float | None) -> str:
    return f"{value:.0f} W" if value is not None else "? W"


def _find_spinning(gpus: dict[int, list[GpuSample]]) -> Iterator[Finding]:
    spinning = []
    for index, samples in gpus.items():
        readings = [
            (sample.utilisation, sample.power_w / sample.power_limit_w)
            for sample in samples
            if sample.utilisation is not None and sample.power_w is not None and sample.power_limit_w
        ]
        if not readings:
            continue
        busy, power = median(value for value, _ in readings), median(value for _, value in readings)
        if busy >= BUSY and power <= (IDLE_POWER if len(gpus) > 1 else ALONE_POWER):
            spinning.append(f"GPU {index} {busy:.0%} busy at {power:.0%} of its power")
    if not spinning:
        return
    description = ", ".join(spinning)
    yield Finding(
        "SF307",
        f"{description}: its kernels only wait",
        {"gpus": description, "of": len(gpus)},
        confidence=0.8,
    )


def _find_slowed(gpus: dict[int, list[GpuSample]]) -> Iterator[Finding]:
    for index, samples in gpus.items():
        slowed = [sample for sample in samples if sample.reasons]
        if len(slowed) < SLOWED_SHARE * len(samples):
            continue
        reasons = ", ".join(dict.fromkeys(reason for sample in slowed for reason in sample.reasons))
        last = slowed[-1]
        yield Finding(
            "SF308",
            f"GPU {index} is slowed down: {reasons}",
            {
                "gpu": index,
                "share_of_looks": f"{len(slowed) / len(samples):.0%}",
                "clock_mhz": last.clock_mhz,
                "temperature_c": last.temperature_c,
                "power_w": last.power_w,
            },
        )
        return
