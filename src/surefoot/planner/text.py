"""A forecast as text, and as findings."""

from surefoot.config import LoadedConfig, RolloutConfig
from surefoot.findings import CATALOGUE, Finding
from surefoot.planner.devices import GIB
from surefoot.planner.forecast import Forecast
from surefoot.planner.sizes import FP32_BYTES, HALF_BYTES
from surefoot.planner.suggest import Changed, ready_to_paste

LEAST_SHOWN_BYTES = 1 << 20


def as_text(told: Forecast, findings: list[Finding], changes: list[tuple[Changed, Forecast]], price: float) -> str:
    """For a person. `price`: of an hour of one device, in whatever currency; 0 where none was given."""
    run, whole = told.run, told.sizes.whole
    ranks = run.nproc_per_node * run.nnodes
    lines = [
        f"{run.model}: {_count(whole.total)} parameters, {_count(whole.all_trained)} trained",
        f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {told.device.name} ({told.device.how})",
        "",
        *_table(told),
        "",
        *_verdict(told),
        "",
        f"a step: {told.tokens_per_step} tokens, about {_duration(told.step_s)}"
        + (f" and {_duration(told.rollout_s)} for its rollout" if told.rollout_s else "")
        + f", {1 / told.seconds_per_token:.0f} tokens/s{_cost(told, price)}",
    ]
    if told.pictures is not None:
        lines[-1] += f"; each forward sees {told.pictures}, the most that it has room for"
    if isinstance(run, RolloutConfig):
        left_out = "rewards, and what drawing tokens takes," if told.rollout_s else "rollouts and rewards"
        lines[-1] += f"; {left_out} are not in it"
        if told.server is not None:
            lines.append(_sync(told))
            if not told.server.bytes_here:
                lines.append("the vLLM server has devices of its own, which are not in the table")
    if told.gathered_bytes_per_token:
        seconds = told.gathered_bytes_per_token / told.device.link_bytes_per_s
        lines.append(
            f"each further token of a rollout gathers {told.gathered_bytes_per_token / GIB:.1f} GiB of weights, about "
            f"{_duration(seconds)}, for all completions of a rank together"
        )
    if whole.expert_trained and ranks > told.sizes.num_experts:
        lines.append(
            f"experts are cut over {told.sizes.num_experts} of the {ranks} ranks, as many as there are of them: "
            "more ranks save no more of their memory"
        )
    if told.communication_bytes:
        lines.append(f"each rank sends about {told.communication_bytes / GIB:.2f} GiB in a step")
    lines += ["", *(finding.as_text() for finding in findings)] if findings else []
    if changes:
        lines += ["", "What to change (any one of these; the fastest first):"]
        for number, (changed, other) in enumerate(changes, 1):
            host = _gib(other.host_peak[1])
            fits = f"{_gib(other.device_peak[1])} at the peak, {host} of host memory" if other.device_peak[1] else host
            lines += [
                f"\n# {number}: {fits}, {1 / other.seconds_per_token:.0f} tokens/s",
                ready_to_paste(changed),
            ]
        if not told.host_free_bytes and any(changed.get("offload") for changed, _ in changes):
            lines.append("\nWhether a machine has that much memory is not known: host_gib=N tells the plan.")
    elif findings:
        lines += ["", "No setting near these fits: fewer parameters, a shorter max_length, or other devices would."]
    return "\n".join(lines)


def findings_of(told: Forecast, loaded: LoadedConfig) -> list[Finding]:
    """What does not fit."""
    found = []
    where = loaded.where("model")
    phase, needed = told.device_peak
    if told.device.is_gpu and needed > told.device_room_bytes:
        found.append(
            Finding(
                "SF719",
                f"each rank needs {_gib(needed)} on its {told.device.name} in {phase}, and "
                f"{_gib(told.device_room_bytes)} are there for tensors",
                {"needed_bytes": needed, "room_bytes": told.device_room_bytes, "phase": phase, "where": where},
                CATALOGUE["SF719"].fix,
                0.9,
            )
        )
    server = told.server
    if server is not None and not server.has_room:
        found.append(
            Finding(
                "SF719",
                f"the vLLM server must hold {_gib(server.weights_bytes)} of weights on each of its GPUs, and may take "
                f"{_gib(server.share_bytes)}",
                {"weights_bytes": server.weights_bytes, "share_bytes": server.share_bytes,
                 "where": loaded.where("vllm_args", "rollout_engine")},
                "Let it cut the model over more GPUs (--tensor-parallel-size in vllm_args).",
                0.9,
            )
        )  # fmt: skip
    phase, needed = told.host_peak
    if told.host_free_bytes and needed > told.host_free_bytes:
        found.append(
            Finding(
                "SF716",
                f"{told.ranks_here} ranks on one machine need {_gib(needed)} of its memory in {phase}, and "
                f"{_gib(told.host_free_bytes)} are free",
                {"needed_bytes": needed, "free_bytes": told.host_free_bytes, "phase": phase, "where": where},
                CATALOGUE["SF716"].fix,
                0.9,
            )
        )
    return found


def _sync(told: Forecast) -> str:
    """What a server is sent of each policy."""
    whole = told.sizes.whole
    if told.run.tuning == "full":
        is_float32 = told.run.dtype == "float32" or (told.run.dtype == "auto" and not told.device.is_gpu)
        size = whole.total * (FP32_BYTES if is_float32 else HALF_BYTES)
        return f"a sync writes the whole model to output_dir, {size / GIB:.2f} GiB, and the server reads it"
    sent = whole.all_trained * FP32_BYTES
    merged = (whole.total - whole.all_trained) * told.sizes.frozen_bytes_each
    return f"a sync sends the adapter alone, {sent / GIB:.2f} GiB: {sent / merged:.2%} of a merged model"


def _table(told: Forecast) -> list[str]:
    """Owners against phases, in GiB of one rank."""
    names = list(told.phases)
    lines = []
    for place in ("device", "host"):
        owners = {name: getattr(phase, place) for name, phase in told.phases.items()}
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


def _verdict(told: Forecast) -> list[str]:
    lines = []
    if told.device.is_gpu:
        phase, needed = told.device_peak
        sign = "fits" if needed <= told.device_room_bytes else "DOES NOT FIT"
        lines.append(f"{sign}: {_gib(needed)} of {_gib(told.device_room_bytes)} on each {told.device.name}, in {phase}")
    phase, needed = told.host_peak
    if not told.host_free_bytes:
        lines.append(f"each machine needs {_gib(needed)} of host memory, in {phase}")
    else:
        sign = "fits" if needed <= told.host_free_bytes else "DOES NOT FIT"
        lines.append(f"{sign}: {_gib(needed)} of {_gib(told.host_free_bytes)} of host memory, in {phase}")
    return lines


def _cost(told: Forecast, price: float) -> str:
    steps = told.run.max_steps or 1000
    hours = told.device_hours(steps)
    took_s = (told.step_s + told.rollout_s) * steps
    said = f"; {steps} steps: {_duration(took_s)}, {hours:.2f} device hours"
    return said + (f", {hours * price:.2f} at {price:g} an hour" if price else "")


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} G" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
