"""A forecast as text and as findings."""

from typing import Any

from surefoot.config import LoadedConfig, rollout_settings
from surefoot.findings import Finding
from surefoot.planner.devices import GIB
from surefoot.planner.forecast import Forecast, count_parameters
from surefoot.planner.sizes import FP32_BYTES, HALF_BYTES
from surefoot.planner.suggest import SettingChanges, format_settings

LEAST_SHOWN_BYTES = 1 << 20


def format_forecast(
    forecast: Forecast, findings: list[Finding], changes: list[tuple[SettingChanges, Forecast]], price: float
) -> str:
    """Return a forecast as text for a person. `price`: of an hour of one device, in any currency; 0 if not given."""
    run, whole = forecast.run, forecast.sizes.whole
    ranks = run.nproc_per_node * run.nnodes
    lines = [
        f"{run.model}: {_format_count(whole.total)} parameters, {_format_count(whole.all_trained)} trained",
        f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {forecast.device.name} ({forecast.device.how})",
        "",
        *_format_table(forecast),
        "",
        *_format_verdict(forecast),
        "",
        f"a step: {forecast.tokens_per_step} tokens{'' if run.packing else ' if all rows have the full length'}, "
        f"about {_format_duration(forecast.step_s)}"
        + (f" and {_format_duration(forecast.rollout_s)} for its rollout" if forecast.rollout_s else "")
        + f", {1 / forecast.seconds_per_token:.0f} tokens/s{_format_cost(forecast, price)}",
    ]
    if run.quantization is not None:
        lines.insert(2, _describe_format(forecast))
        lines[-1] += f"; without reading weights back from {run.quantization}" if forecast.device.is_gpu else ""
    if forecast.images is not None:
        lines[-1] += f"; each forward is taken to have {forecast.images}, the most that fit, also if rows have none"
    if rollout_settings(run) is not None:
        lines[-1] += f"; without {'sampling' if forecast.rollout_s else 'rollouts'} and rewards"
        if forecast.server is not None:
            lines.append(_describe_sync(forecast))
            if not forecast.server.bytes_here:
                lines.append("the vLLM server has separate devices, which the table leaves out")
    lines += [
        f"the {model.role} {model.source} is not on this machine, so the table leaves it out"
        for model in run.models_beside
        if count_parameters(model.source) is None
    ]
    if forecast.gathered_bytes_per_token:
        seconds = forecast.gathered_bytes_per_token / forecast.device.link_bytes_per_s
        lines.append(
            f"each further token of a rollout gathers {forecast.gathered_bytes_per_token / GIB:.1f} GiB of weights, "
            f"about {_format_duration(seconds)}, for all completions of a rank together"
        )
    if whole.expert_trained and ranks > forecast.sizes.num_experts:
        lines.append(
            f"experts are sharded over {forecast.sizes.num_experts} of the {ranks} ranks, one expert per rank: "
            "more ranks do not reduce their memory"
        )
    if forecast.communication_bytes:
        lines.append(f"each rank sends about {forecast.communication_bytes / GIB:.2f} GiB in a step")
    lines += ["", *(finding.as_text() for finding in findings)] if findings else []
    if changes:
        lines += _format_changes(forecast, changes)
    elif findings:
        lines += [
            "",
            "No similar settings fit: use fewer parameters, a shorter max_length, or other devices.",
        ]
    return "\n".join(lines)


def _describe_format(forecast: Forecast) -> str:
    """Return a sentence on what the format of the frozen weights saves."""
    whole = forecast.sizes.whole
    held, plain = whole.frozen_bytes + whole.expert_frozen_bytes, (whole.total - whole.all_trained) * HALF_BYTES
    return (
        f"frozen weights: {forecast.run.quantization} in linear layers and experts, {_as_gib(held)} instead of "
        f"{_as_gib(plain)} in bfloat16"
    )


def _format_changes(forecast: Forecast, changes: list[tuple[SettingChanges, Forecast]]) -> list[str]:
    """Return the changes that fit, each with its peak memory and its speed."""
    lines = ["", "What to change (any one of these; the fastest first):"]
    for number, (changed, changed_forecast) in enumerate(changes, 1):
        peak = _as_gib(changed_forecast.host_peak[1])
        if changed_forecast.device_peak[1]:
            peak = f"{_as_gib(changed_forecast.device_peak[1])} at the peak, {peak} of host memory"
        speed = 1 / changed_forecast.seconds_per_token
        lines += [f"\n# {number}: {peak}, {speed:.0f} tokens/s", format_settings(changed)]
    if not forecast.host_free_bytes and any(changed.get("offload") for changed, _ in changes):
        lines.append("\nThe host memory of the machine is unknown: pass host_gib=N to include it in the plan.")
    return lines


def list_findings(forecast: Forecast, loaded: LoadedConfig) -> list[Finding]:
    """Return a finding for each memory that is too small."""
    findings: list[Finding] = []

    def add_finding(code: str, cause: str, evidence: dict[str, Any], fix: str = "") -> None:
        findings.append(Finding(code, cause, evidence, fix, 0.9))

    where = loaded.where("model")
    phase, needed = forecast.device_peak
    room, free = forecast.device_room_bytes, forecast.host_free_bytes
    if forecast.device.is_gpu and needed > room:
        add_finding(
            "SF719",
            f"each rank needs {_as_gib(needed)} on its {forecast.device.name} in {phase}, and {_as_gib(room)} are "
            "available for tensors",
            {"needed_bytes": needed, "room_bytes": room, "phase": phase, "where": where},
        )
    server = forecast.server
    if server is not None and not server.has_room:
        add_finding(
            "SF719",
            f"the vLLM server must hold {_as_gib(server.weights_bytes)} of weights on each of its GPUs, and may take "
            f"{_as_gib(server.share_bytes)}",
            {"weights_bytes": server.weights_bytes, "share_bytes": server.share_bytes,
             "where": loaded.where("vllm_args", "rollout_engine")},
            "Shard its model over more GPUs (--tensor-parallel-size in vllm_args).",
        )  # fmt: skip
    phase, needed = forecast.host_peak
    if free and needed > free:
        add_finding(
            "SF716",
            f"{forecast.ranks_here} ranks on one machine need {_as_gib(needed)} of its memory in {phase}, and "
            f"{_as_gib(free)} are free",
            {"needed_bytes": needed, "free_bytes": free, "phase": phase, "where": where},
        )
    return findings


def _describe_sync(forecast: Forecast) -> str:
    """Return a sentence on the weights that a server receives of each policy."""
    whole = forecast.sizes.whole
    if forecast.run.tuning == "full":
        is_float32 = forecast.run.dtype == "float32" or (forecast.run.dtype == "auto" and not forecast.device.is_gpu)
        size = whole.total * (FP32_BYTES if is_float32 else HALF_BYTES)
        return f"a sync writes the whole model to output_dir, {size / GIB:.2f} GiB, and the server reads it"
    sent = whole.all_trained * FP32_BYTES
    merged = whole.frozen_bytes + whole.expert_frozen_bytes
    return f"a sync sends the adapter alone, {sent / GIB:.2f} GiB: {sent / merged:.2%} of a merged model"


def _format_table(forecast: Forecast) -> list[str]:
    """Return a table of owners by phases, in GiB of one rank."""
    names = list(forecast.phases)
    lines = []
    for place in ("device", "host"):
        owners = {name: getattr(phase, place) for name, phase in forecast.phases.items()}
        rows = list(dict.fromkeys(owner for phase in owners.values() for owner in phase))
        shown = [row for row in rows if max(phase.get(row, 0) for phase in owners.values()) >= LEAST_SHOWN_BYTES]
        if not shown:
            continue
        title = f"{place} memory of a rank, GiB"
        width = max(len(row) for row in (*shown, title))
        lines += [f"{title:{width}}" + "".join(f"{name:>10}" for name in names)]
        for row in shown:
            sizes = (owners[name].get(row, 0) for name in names)
            lines.append(f"{row:{width}}" + "".join(f"{size / GIB:10.2f}" if size else f"{'-':>10}" for size in sizes))
        totals = (sum(owners[name].values()) for name in names)
        lines += [f"{'together':{width}}" + "".join(f"{total / GIB:10.2f}" for total in totals), ""]
    return lines[:-1]


def _format_verdict(forecast: Forecast) -> list[str]:
    lines = []
    if forecast.device.is_gpu:
        phase, needed = forecast.device_peak
        sign = "fits" if needed <= forecast.device_room_bytes else "DOES NOT FIT"
        lines.append(
            f"{sign}: {_as_gib(needed)} of {_as_gib(forecast.device_room_bytes)} on each {forecast.device.name}, "
            f"in {phase}"
        )
        if fitting := forecast.fitting_devices:
            lines.append(f"the smallest with enough memory: {fitting[0]}")
    phase, needed = forecast.host_peak
    if not forecast.host_free_bytes:
        lines.append(f"each machine needs {_as_gib(needed)} of host memory, in {phase}")
    else:
        sign = "fits" if needed <= forecast.host_free_bytes else "DOES NOT FIT"
        lines.append(f"{sign}: {_as_gib(needed)} of {_as_gib(forecast.host_free_bytes)} of host memory, in {phase}")
    return lines


def _format_cost(forecast: Forecast, price: float) -> str:
    steps = forecast.run.max_steps or 1000
    hours = forecast.device_hours(steps)
    took_s = (forecast.step_s + forecast.rollout_s) * steps
    length = f"{steps} step{'s' * (steps != 1)}"
    if forecast.run.max_steps is None:
        length += " (an example: max_steps is not set)"
    text = f"; {length}: {_format_duration(took_s)}, {hours:.2f} device hours"
    return text + (f", {hours * price:.2f} at {price:g} an hour" if price else "")


def _format_count(number: int) -> str:
    return f"{number / 1e9:.2f} G" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _as_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
