"""Values of the settings that are `auto` because they depend on memory: recomputation, and sequences at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path

from surefoot.config import RunConfig
from surefoot.config.schema import AUTO, Checkpointing
from surefoot.errors import SurefootError, one_line
from surefoot.models.build import meta_model
from surefoot.models.experts import can_keep_outputs
from surefoot.planner.devices import GIB, Device, detect_gpu
from surefoot.planner.forecast import Forecast, forecast, sequence_length
from surefoot.planner.live_tensors import limit_trace_time
from surefoot.system.memory import room_bytes

MOST_TOKENS = 16_384
"""Tokens of a forward beyond which more sequences at a time hardly make a step faster; a choice, not a measurement."""
LIMIT_S = 30.0
"""Seconds after which a run that starts no longer waits for a forecast: recurrent layers are traced token by token."""
ForecastRun = Callable[[RunConfig], Forecast]


def choose_for_memory(
    run: RunConfig,
    forecast_run: ForecastRun,
    *,
    is_on_gpu: bool,
    choices: Sequence[Checkpointing] = (False, True),
) -> tuple[RunConfig, str | None]:
    """Return the config without `auto` in settings that depend on memory, and a line on what was chosen, if planned.

    The fastest settings that fit are chosen, by the forecast; if none fit, or nothing can be forecast, those that need
    the least memory. On the CPU nothing is recomputed unless the config says so. `choices`: what the model's layers can
    recompute; what cannot be forecast in time is that which comes last.
    """
    chooses_recompute = run.gradient_checkpointing == AUTO
    chooses_rows = run.per_device_train_batch_size == AUTO
    recomputes = choices if chooses_recompute and is_on_gpu else [run.checkpointing]
    rows = _list_row_counts(run) if chooses_rows else [run.rows_at_a_time]
    least = _with(run, True if True in recomputes else recomputes[-1], rows[0])
    if len(recomputes) == len(rows) == 1:
        return least, None
    fitting, too_large, refusal = [], [], None
    for recompute in recomputes:
        for count in rows:
            try:
                candidate = forecast_run(_with(run, recompute, count))
            except SurefootError as error:  # a model that cannot be traced, or not in time
                refusal = error
                break
            if not candidate.fits:
                too_large.append(candidate)
                break
            fitting.append(candidate)
    best = max(
        fitting, key=lambda candidate: (1 / candidate.seconds_per_token, candidate.run.rows_at_a_time), default=None
    )
    chosen = best.run if best is not None else least
    values = []
    if chooses_recompute and is_on_gpu:
        values.append(f"gradient_checkpointing: {str(chosen.gradient_checkpointing).lower()}")
    if chooses_rows:
        values.append(f"per_device_train_batch_size: {chosen.rows_at_a_time}")
    return chosen, f"auto: {', '.join(values)} ({_explain(best, too_large, refusal)})"


def _explain(best: Forecast | None, too_large: list[Forecast], refusal: SurefootError | None) -> str:
    """Return why settings were chosen: what they need, and what others need; or why nothing is known."""
    misfits = [_format_gib(_needed_bytes(candidate)) for candidate in too_large]
    others = f"; what is faster needs {' or '.join(misfits)}" if misfits else ""
    if best is not None:
        return f"{_format_gib(_needed_bytes(best))} of {_format_gib(_room_bytes(best))} by the forecast{others}"
    if too_large:
        least = min(too_large, key=_needed_bytes)
        return (
            f"the least, but {_format_gib(_needed_bytes(least))} of {_format_gib(_room_bytes(least))} by the forecast"
        )
    return f"what needs the least memory, because nothing could be forecast: {one_line(refusal) if refusal else ''}"


def choose_on_this_machine(run: RunConfig, base: Path) -> tuple[RunConfig, str | None]:
    """Choose as `choose_for_memory` does, for a run whose device and type are set, on the GPU or CPU of this process.

    `run`: with the number of ranks that there are; `base`: folder of the model. Raises: SurefootError.
    """
    is_on_gpu = run.device == "cuda"
    gpu = detect_gpu() if is_on_gpu else None
    device = gpu or Device("cpu", room_bytes(), flops_per_s=1.0, link_bytes_per_s=1.0, is_gpu=False)

    def forecast_run(candidate: RunConfig) -> Forecast:
        return forecast(candidate, base, device, host_free_bytes=room_bytes())

    with limit_trace_time(LIMIT_S):
        choices = list_choices(base) if is_on_gpu else ()
        return choose_for_memory(run, forecast_run, is_on_gpu=is_on_gpu, choices=choices)


def list_choices(base: Path) -> list[Checkpointing]:
    """Return what the layers of a model can recompute. `base`: its folder; no weights are read."""
    try:
        model = meta_model(base)
    except SurefootError:  # which the forecast raises, too, with its place
        return [False, True]
    if not model.supports_gradient_checkpointing:
        return [False]
    return [False, True, "selective"] if can_keep_outputs(model) else [False, True]


def _with(run: RunConfig, recompute: Checkpointing, rows: int) -> RunConfig:
    return run.model_copy(update={"gradient_checkpointing": recompute, "per_device_train_batch_size": rows})


def _list_row_counts(run: RunConfig) -> list[int]:
    """Return the numbers of sequences to try for a forward: powers of two, the smallest first."""
    ranks = run.nproc_per_node * run.nnodes
    most_samples = MOST_TOKENS // (sequence_length(run) * run.sequences_per_sample)
    most = min(-(-run.sequences_per_step // ranks), max(1, most_samples))
    return [1 << power for power in range(most.bit_length())]


def _needed_bytes(candidate: Forecast) -> int:
    return candidate.device_peak[1] if candidate.device.is_gpu else candidate.host_peak[1]


def _room_bytes(candidate: Forecast) -> int:
    return candidate.device_room_bytes if candidate.device.is_gpu else candidate.host_free_bytes


def _format_gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
