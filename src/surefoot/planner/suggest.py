"""Settings near those of a run that fit into memory, the fastest first."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

from surefoot.config import RolloutConfig, rollout_settings, vllm_settings
from surefoot.config.schema import Checkpointing, RunConfig
from surefoot.config.validate import contradictions
from surefoot.config.vllm_args import MEMORY_SHARE, TENSOR_PARALLEL, memory_share, tensor_parallel, without
from surefoot.errors import SurefootError
from surefoot.planner.forecast import Forecast

MAX_SUGGESTIONS = 3
REDUCED_SHARE = "0.4"
"""Share of a GPU for a server that shares it with training."""
SEARCH_S = 40.0
"""Time after which no more settings are tried."""
SettingChanges = dict[str, Any]


def suggest(current: Forecast, forecast_run: Callable[..., Forecast]) -> list[tuple[SettingChanges, Forecast]]:
    """Return at most `MAX_SUGGESTIONS` changes with their forecasts; empty if the run fits as it is.

    Settings that keep the result of the run are tried first. Four bits and more GPUs are tried only if none of those
    fits, or if all of them depend on host memory whose size is unknown; then the fastest of each kind is returned.
    `forecast_run` forecasts a config; with `is_least=True` quickly, and only the least that it needs.
    """
    if current.fits:
        return []
    deadline_s = time.monotonic() + SEARCH_S
    kinds: list[list[tuple[SettingChanges, Forecast]]] = []
    for candidates, keeps_result in (
        (_propose_smaller_rollout_batches(current), True),
        (_propose_same_ranks(current), True),
        (_propose_four_bits(current), False),
        (_propose_more_ranks(current), True),
    ):
        fitting: list[tuple[SettingChanges, Forecast]] = []
        kinds.append(fitting)
        for changed in candidates:
            if time.monotonic() > deadline_s:
                break
            try:
                run = current.run.model_copy(update=changed)
                if _has_conflict(run) and not _has_conflict(current.run):
                    continue
                if not forecast_run(run, is_least=True).fits:
                    continue
                changed_forecast = forecast_run(run)
            except SurefootError:  # settings that conflict for this model
                continue
            is_more = any(accepted.items() <= changed.items() for accepted, _ in chain(*kinds))
            if changed_forecast.fits and not is_more:
                fitting.append((changed, changed_forecast))
        fitting.sort(key=_rank_change)
        needs_unknown_host_memory = not current.host_free_bytes and all(
            changed.get("offload") for changed, _ in fitting
        )
        if fitting and keeps_result and not needs_unknown_host_memory:
            break
    fastest = [fitting[0] for fitting in kinds if fitting]
    others = [change for fitting in kinds for change in fitting[1:]]
    return sorted((fastest + others)[:MAX_SUGGESTIONS], key=_rank_change)


def _rank_change(change: tuple[SettingChanges, Forecast]) -> tuple[float, int]:
    """Return the order of a change: the faster first, then the smaller."""
    return change[1].seconds_per_token, len(change[0])


def _has_conflict(run: RunConfig) -> bool:
    """Return whether settings of a run conflict."""
    fields = type(run).model_fields
    explicit = {name for name in run.model_fields_set if getattr(run, name) != fields[name].get_default()}
    return any(True for _ in contradictions(run, explicit))


def _propose_smaller_rollout_batches(current: Forecast) -> Iterator[SettingChanges]:
    """Propose smaller rollout batches if the peak is the rollout. The training result stays the same."""
    run = rollout_settings(current.run)
    if current.device_peak[0] != "rollout" or run is None or run.rollout_engine != "local":
        return
    at_a_time = -(-current.sequences_per_step // (run.nproc_per_node * run.nnodes))
    at_a_time = min(run.rollout_batch_size or at_a_time, at_a_time)
    while at_a_time > 1:
        at_a_time //= 2
        yield {"rollout_batch_size": at_a_time}


def _propose_same_ranks(current: Forecast) -> Iterator[SettingChanges]:
    run = current.run
    sequences = current.sequences_per_step
    rows = [n for n in (run.rows_at_a_time, 8, 4, 2, 1) if n <= run.rows_at_a_time]
    options: dict[str, list[Any]] = {
        "offload": [None, "cpu"] if current.device.is_gpu and run.offload is None else [run.offload],
        "zero_stage": [stage for stage in (2, 3) if stage >= run.zero_stage] or [run.zero_stage],
        "expert_parallel_size": _list_expert_sizes(current),
        "gradient_checkpointing": _list_checkpointing(current),
        "per_device_train_batch_size": list(dict.fromkeys(rows)),
    }
    rollouts = vllm_settings(run)
    if rollouts is not None and current.server is not None and current.server.share_bytes:
        options["vllm_args"] = list(map(list, dict.fromkeys(map(tuple, _propose_server_arguments(current, rollouts)))))
        options["vllm_sleep"] = [rollouts.vllm_sleep, True] if current.server.bytes_here else [rollouts.vllm_sleep]
    for values in product(*options.values()):
        changed = {name: value for name, value in zip(options, values, strict=True) if getattr(run, name) != value}
        if changed.keys() <= {"vllm_args", "vllm_sleep"} and changed:
            yield changed  # the training step is unchanged
        elif changed:
            # The same number of sequences in a step keeps the training result.
            is_fixed = run.global_batch_size is not None and run.gradient_accumulation_steps is None
            yield changed if is_fixed else {**changed, "global_batch_size": sequences, **_NO_ACCUMULATION}


def _propose_server_arguments(current: Forecast, run: RolloutConfig) -> Iterator[list[str]]:
    """Propose server arguments: unchanged, tensor-parallel over all GPUs, with a smaller share of shared GPUs."""
    assert current.server is not None
    yield run.vllm_args
    is_low = memory_share(run.vllm_args) <= float(REDUCED_SHARE)
    gpus = len(run.vllm_devices.split(",")) if run.vllm_devices is not None else run.nproc_per_node
    cut = [*without(run.vllm_args, TENSOR_PARALLEL), TENSOR_PARALLEL, str(gpus)]
    can_be_cut = tensor_parallel(run.vllm_args) != gpus and current.sizes.num_heads % gpus == 0
    if can_be_cut:
        yield cut
    if current.server.bytes_here and not is_low:
        yield [*without(run.vllm_args, MEMORY_SHARE), MEMORY_SHARE, REDUCED_SHARE]
        if can_be_cut:
            yield [*without(cut, MEMORY_SHARE), MEMORY_SHARE, REDUCED_SHARE]


def _propose_four_bits(current: Forecast) -> Iterator[SettingChanges]:
    """Propose frozen weights in NF4, alone and with other settings for the same ranks."""
    if current.run.tuning != "lora" or current.run.quantization is not None:
        return
    for changed in ({}, *_propose_same_ranks(current)):
        yield {"quantization": "nf4", **changed}


_NO_ACCUMULATION: SettingChanges = {"gradient_accumulation_steps": None}


def _list_checkpointing(current: Forecast) -> list[Checkpointing]:
    """Return what the run recomputes, and all that needs less memory."""
    every: list[Checkpointing] = [False, "selective", True] if current.sizes.num_experts else [False, True]
    return every[every.index(current.run.checkpointing) :]


def _list_expert_sizes(current: Forecast) -> list[int]:
    ranks, requested = current.run.nproc_per_node * current.run.nnodes, current.run.expert_parallel_size
    first = requested if isinstance(requested, int) else 1
    more = [n for n in (2, 4, 8) if current.sizes.num_experts and ranks % n == 0 and current.sizes.num_experts % n == 0]
    return list(dict.fromkeys([first, *more]))


def _propose_more_ranks(current: Forecast) -> Iterator[SettingChanges]:
    """Propose up to 8 ranks on a machine, then more machines, with the settings that save the most memory."""
    run = current.run
    sizes = [(n, run.nnodes) for n in (2, 4, 8) if n > run.nproc_per_node]
    sizes += [(max(8, run.nproc_per_node), n) for n in (2, 4, 8) if n > run.nnodes]
    for nproc, nodes in ((n, m) for n, m in sizes if n * m <= current.sequences_per_step):
        for rows in dict.fromkeys((run.rows_at_a_time, 1)):
            yield {
                "nproc_per_node": nproc, "nnodes": nodes, "zero_stage": 3, "gradient_checkpointing": True,
                "per_device_train_batch_size": rows, "global_batch_size": current.sequences_per_step,
                **_NO_ACCUMULATION,
                **({"rdzv_endpoint": run.rdzv_endpoint or "node0:29500"} if nodes > 1 else {}),
            }  # fmt: skip


def format_settings(changed: SettingChanges) -> str:
    """Return a change as lines of run.yaml."""
    return "\n".join(f"{name}: {_format_yaml(value)}" for name, value in changed.items())


def _format_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
