"""Settings near those of a run that fit, the fastest first."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from surefoot.config import RolloutConfig, vllm_settings
from surefoot.config.schema import RunConfig
from surefoot.config.validate import contradictions
from surefoot.config.vllm_args import MEMORY_SHARE, TENSOR_PARALLEL, memory_share, tensor_parallel, without
from surefoot.errors import SurefootError
from surefoot.planner.forecast import Forecast

MOST = 3
LESS = "0.4"
"""Of a GPU that a server shares with training."""
SEARCH_S = 40.0
"""After which no more settings are tried."""
Changed = dict[str, Any]


def suggest(told: Forecast, ask: Callable[..., Forecast]) -> list[tuple[Changed, Forecast]]:
    """At most `MOST` changes with their forecasts; none where the run fits as it is.

    Settings that keep the result of the run come first: what is tried with more GPUs only where none of those fits, or
    all of them lean on host memory of which nobody knows whether it is there. `ask` makes the forecast of a config;
    with `is_least=True` at once, of the least that it takes.
    """
    if told.fits:
        return []
    give_up_s = time.monotonic() + SEARCH_S
    fitting: list[tuple[Changed, Forecast]] = []
    for candidates in (_smaller_waves(told), _same_ranks(told), _more_ranks(told)):
        on_host = list(fitting)
        for changed in candidates:
            if time.monotonic() > give_up_s:
                break
            try:
                run = told.run.model_copy(update=changed)
                if _is_refused(run) and not _is_refused(told.run):
                    continue
                if not ask(run, is_least=True).fits:
                    continue
                other = ask(run)
            except SurefootError:  # settings that exclude each other for this model
                continue
            if other.fits and not any(_is_less(known, changed) for known, _ in fitting):
                fitting.append((changed, other))
        fitting.sort(key=lambda one: (one[1].seconds_per_token, len(one[0])))
        if on_host and len(fitting) > len(on_host):  # the fastest of both kinds
            more = next(one for one in fitting if one not in on_host)
            return sorted([*on_host[: MOST - 1], more], key=lambda one: one[1].seconds_per_token)
        leans_on_host = not told.host_free_bytes and all(changed.get("offload") for changed, _ in fitting)
        if fitting and not leans_on_host:
            break
    return fitting[:MOST]


def _is_refused(run: RunConfig) -> bool:
    """Whether its settings exclude each other."""
    fields = type(run).model_fields
    given = {name for name in run.model_fields_set if getattr(run, name) != fields[name].get_default()}
    return any(True for _ in contradictions(run, given))


def _is_less(known: Changed, changed: Changed) -> bool:
    """Whether a change that fits already is a part of this one."""
    return known.items() <= changed.items()


def _smaller_waves(told: Forecast) -> Iterator[Changed]:
    """Fewer completions at a time, where it is the rollout that does not fit: the run learns the same."""
    run = told.run
    if told.device_peak[0] != "rollout" or not isinstance(run, RolloutConfig) or run.rollout_engine != "local":
        return
    at_a_time = -(-told.sequences_per_step // (run.nproc_per_node * run.nnodes))
    at_a_time = min(run.rollout_batch_size or at_a_time, at_a_time)
    while at_a_time > 1:
        at_a_time //= 2
        yield {"rollout_batch_size": at_a_time}


def _same_ranks(told: Forecast) -> Iterator[Changed]:
    run = told.run
    sequences = told.sequences_per_step
    rows = [n for n in (run.per_device_train_batch_size, 8, 4, 2, 1) if n <= run.per_device_train_batch_size]
    options: dict[str, list[Any]] = {
        "offload": [None, "cpu"] if told.device.is_gpu and run.offload is None else [run.offload],
        "zero_stage": [stage for stage in (2, 3) if stage >= run.zero_stage] or [run.zero_stage],
        "expert_parallel_size": _expert_sizes(told),
        "gradient_checkpointing": [run.gradient_checkpointing] if run.gradient_checkpointing else [False, True],
        "per_device_train_batch_size": list(dict.fromkeys(rows)),
    }
    rollouts = vllm_settings(run)
    if rollouts is not None and told.server is not None and told.server.share_bytes:
        options["vllm_args"] = list(map(list, dict.fromkeys(map(tuple, _server_arguments(told, rollouts)))))
        options["vllm_sleep"] = [rollouts.vllm_sleep, True] if told.server.bytes_here else [rollouts.vllm_sleep]
    for values in product(*options.values()):
        changed = {name: value for name, value in zip(options, values, strict=True) if getattr(run, name) != value}
        if changed.keys() <= {"vllm_args", "vllm_sleep"} and changed:
            yield changed  # a step is as it was
        elif changed:
            # As many sequences in a step as before: the run learns the same.
            is_fixed = run.global_batch_size is not None and run.gradient_accumulation_steps is None
            yield changed if is_fixed else {**changed, "global_batch_size": sequences, **_NO_ACCUMULATION}


def _server_arguments(told: Forecast, run: RolloutConfig) -> Iterator[list[str]]:
    """As they are; cut over all of its GPUs; and with a smaller share of them where it shares them."""
    assert told.server is not None
    yield run.vllm_args
    is_low = memory_share(run.vllm_args) <= float(LESS)
    gpus = len(run.vllm_devices.split(",")) if run.vllm_devices is not None else run.nproc_per_node
    cut = [*without(run.vllm_args, TENSOR_PARALLEL), TENSOR_PARALLEL, str(gpus)]
    can_be_cut = tensor_parallel(run.vllm_args) != gpus and told.sizes.num_heads % gpus == 0
    if can_be_cut:
        yield cut
    if told.server.bytes_here and not is_low:
        yield [*without(run.vllm_args, MEMORY_SHARE), MEMORY_SHARE, LESS]
        if can_be_cut:
            yield [*without(cut, MEMORY_SHARE), MEMORY_SHARE, LESS]


_NO_ACCUMULATION: Changed = {"gradient_accumulation_steps": None}


def _expert_sizes(told: Forecast) -> list[int]:
    ranks, asked = told.run.nproc_per_node * told.run.nnodes, told.run.expert_parallel_size
    first = asked if isinstance(asked, int) else 1
    more = [n for n in (2, 4, 8) if told.sizes.num_experts and ranks % n == 0 and told.sizes.num_experts % n == 0]
    return list(dict.fromkeys([first, *more]))


def _more_ranks(told: Forecast) -> Iterator[Changed]:
    """Up to eight ranks on a machine, then more machines; with the settings that save most."""
    run = told.run
    sizes = [(n, run.nnodes) for n in (2, 4, 8) if n > run.nproc_per_node]
    sizes += [(max(8, run.nproc_per_node), n) for n in (2, 4, 8) if n > run.nnodes]
    for nproc, nodes in ((n, m) for n, m in sizes if n * m <= told.sequences_per_step):
        for rows in dict.fromkeys((run.per_device_train_batch_size, 1)):
            yield {
                "nproc_per_node": nproc, "nnodes": nodes, "zero_stage": 3, "gradient_checkpointing": True,
                "per_device_train_batch_size": rows, "global_batch_size": told.sequences_per_step, **_NO_ACCUMULATION,
                **({"rdzv_endpoint": run.rdzv_endpoint or "node0:29500"} if nodes > 1 else {}),
            }  # fmt: skip


def ready_to_paste(changed: Changed) -> str:
    """Lines of run.yaml."""
    return "\n".join(f"{name}: {_yaml(value)}" for name, value in changed.items())


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
