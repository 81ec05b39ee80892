"""Values of the settings that are `auto` because they depend on memory: recomputation, and sequences at a time."""

from collections.abc import Callable
from pathlib import Path

from surefoot.config import RunConfig
from surefoot.config.schema import AUTO
from surefoot.errors import SurefootError
from surefoot.planner.devices import GIB, Device, detect_gpu
from surefoot.planner.forecast import Forecast, forecast, sequence_length
from surefoot.system.memory import room_bytes

MOST_TOKENS = 16_384
"""Tokens of a forward beyond which more sequences at a time hardly make a step faster; a choice, not a measurement."""
ForecastRun = Callable[[RunConfig], Forecast]


def choose_for_memory(run: RunConfig, forecast_run: ForecastRun, *, is_on_gpu: bool) -> tuple[RunConfig, str | None]:
    """Return the config without `auto` in settings that depend on memory, and a line on what was chosen, if planned.

    The fastest settings that fit are chosen, by the forecast; if none fit, those that need the least memory. On the CPU
    nothing is recomputed unless the config says so. Raises: SurefootError if no settings can be forecast.
    """
    chooses_recompute = run.gradient_checkpointing == AUTO
    chooses_rows = run.per_device_train_batch_size == AUTO
    recomputes = [False, True] if chooses_recompute and is_on_gpu else [run.gradient_checkpointing is True]
    rows = _list_row_counts(run) if chooses_rows else [run.rows_at_a_time]
    if len(recomputes) == len(rows) == 1:
        return _with(run, recomputes[0], rows[0]), None
    fitting, too_large, refusals = [], [], []
    for recompute in recomputes:
        for count in rows:
            try:
                candidate = forecast_run(_with(run, recompute, count))
            except SurefootError as error:  # a model whose layers cannot be recomputed, or traced
                refusals.append(error)
                break
            if candidate.fits:
                fitting.append(candidate)
                break
            too_large.append(candidate)
    if not fitting and not too_large:
        raise refusals[0]
    best = min(fitting, key=lambda candidate: candidate.seconds_per_token) if fitting else too_large[-1]
    chosen = []
    if chooses_recompute and is_on_gpu:
        chosen.append(f"gradient_checkpointing: {str(best.run.gradient_checkpointing).lower()}")
    if chooses_rows:
        chosen.append(f"per_device_train_batch_size: {best.run.per_device_train_batch_size}")
    largest = max(too_large, key=_needed_bytes, default=None)
    misfit = "" if fitting else ", which is too little"
    if largest is not None and largest is not best:
        misfit += f"; faster settings need up to {_format_gib(_needed_bytes(largest))}"
    needed, room = _format_gib(_needed_bytes(best)), _format_gib(_room_bytes(best))
    return best.run, f"auto: {', '.join(chosen)} ({needed} of {room} by the forecast{misfit})"


def choose_on_this_machine(run: RunConfig, base: Path) -> tuple[RunConfig, str | None]:
    """Choose as `choose_for_memory` does, for a run whose device and type are set, on the GPU or CPU of this process.

    `base`: folder of the model. Raises: SurefootError.
    """
    is_on_gpu = run.device == "cuda"
    gpu = detect_gpu() if is_on_gpu else None
    device = gpu or Device("cpu", room_bytes(), flops_per_s=1.0, link_bytes_per_s=1.0, is_gpu=False)

    def forecast_run(candidate: RunConfig) -> Forecast:
        return forecast(candidate, base, device, host_free_bytes=room_bytes())

    return choose_for_memory(run, forecast_run, is_on_gpu=is_on_gpu)


def _with(run: RunConfig, recompute: bool, rows: int) -> RunConfig:
    return run.model_copy(update={"gradient_checkpointing": recompute, "per_device_train_batch_size": rows})


def _list_row_counts(run: RunConfig) -> list[int]:
    """Return the numbers of sequences to try for a forward: powers of two, the largest first."""
    ranks = run.nproc_per_node * run.nnodes
    most = min(-(-run.sequences_per_step // ranks), max(1, MOST_TOKENS // sequence_length(run)))
    return [1 << power for power in reversed(range(most.bit_length()))]


def _needed_bytes(candidate: Forecast) -> int:
    return candidate.device_peak[1] if candidate.device.is_gpu else candidate.host_peak[1]


def _room_bytes(candidate: Forecast) -> int:
    return candidate.device_room_bytes if candidate.device.is_gpu else candidate.host_free_bytes


def _format_gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
