"""GPUs that are busy and do no work, and GPUs that are slowed down. Pure.

NVML's utilisation is the share of time in which any kernel ran: one that only spins while it waits for another rank
reads 100 %. Power tells the two apart.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from surefoot.findings import CATALOGUE, Finding
from surefoot.health.accelerators import GpuSample, Look

WINDOW_S = 30.0
LEAST_LOOKS = 10
BUSY = 0.9
IDLE_POWER = 0.25
"""Of its limit: a card that computes draws more, one whose kernels only wait does not. An H100 of 700 W draws about
70 W then."""
SLOWED_SHARE = 0.5
"""Of the looks."""


def find_in_gpus(looks: Sequence[Look]) -> list[Finding]:
    """What the newest `WINDOW_S` show; nothing where there are too few looks."""
    if not looks:
        return []
    newest = [look for look in looks if looks[-1][0] - look[0] <= WINDOW_S]
    if len(newest) < LEAST_LOOKS or newest[-1][0] - newest[0][0] < WINDOW_S / 2:
        return []
    gpus: dict[int, list[GpuSample]] = {}
    for _, samples in newest:
        for sample in samples:
            gpus.setdefault(sample.index, []).append(sample)
    return [*_spinning(gpus), *_slowed(gpus)]


def in_words(look: Look) -> str:
    """One look at all GPUs, for evidence."""
    return "; ".join(
        f"{gpu.index}: {_share(gpu.utilisation)} busy, {_watts(gpu.power_w)} of {_watts(gpu.power_limit_w)}"
        for gpu in look[1]
    )


def _share(value: float | None) -> str:
    return f"{value:.0%}" if value is not None else "?"


def _watts(value: float | None) -> str:
    return f"{value:.0f} W" if value is not None else "? W"


def _spinning(gpus: dict[int, list[GpuSample]]) -> Iterator[Finding]:
    spinning = {}
    for index, samples in gpus.items():
        known = [(s.utilisation, s.power_w / s.power_limit_w) for s in samples
                 if s.utilisation is not None and s.power_w is not None and s.power_limit_w]  # fmt: skip
        if not known:
            continue
        busy, power = median(one for one, _ in known), median(one for _, one in known)
        if busy >= BUSY and power <= IDLE_POWER:
            spinning[index] = (busy, power)
    if not spinning:
        return
    said = ", ".join(f"GPU {index} {busy:.0%} busy at {power:.0%} of its power" for index, (busy, power) in
                     spinning.items())  # fmt: skip
    yield Finding(
        "SF307",
        f"{said}: kernels run that only wait",
        {"gpus": said, "of": len(gpus)},
        CATALOGUE["SF307"].fix,
        confidence=0.8,
    )


def _slowed(gpus: dict[int, list[GpuSample]]) -> Iterator[Finding]:
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
            CATALOGUE["SF308"].fix,
        )
        return
