"""DeepSpeed configs read as settings of ours: what means the same is mapped, what has no counterpart is listed.

Source: https://www.deepspeed.ai/docs/config-json/. A value of `auto` asks for nothing, as in transformers.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.config.documents import parse_json, read_text, shorten
from surefoot.config.paths import resolve_path
from surefoot.errors import ConfigError

KEYS = ("deepspeed", "deepspeed_config", "deepspeed_config_file")
"""Names under which configs point to one."""

PRESETS = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    **{
        f"zero{stage}_offload": {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
        for stage in (2, 3)
    },
}
"""ms-swift's names."""

SAME = {
    "zero_optimization.stage": "zero_stage",
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.cos_min_ratio": "min_lr_ratio",
}
"""DeepSpeed's name -> ours, where the value is the same."""

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
WARMUP_STEPS = 1000
"""DeepSpeed's default of its schedules."""
NOT_NOTHING = ("optimizer.params.adam_w_mode", "optimizer.params.bias_correction")
"""On unless they are switched off."""
OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")

PARTS = ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization")
"""Of a config, that hold settings of their own."""
CHANGES_TRAINING = re.compile(r"(optimizer|scheduler|fp16|bf16|amp|zero_optimization\.offload_\w+\.device)\b")
"""Entries without counterpart that would change the numbers of a run, or whether it fits; not just how fast it is."""


def read_deepspeed(value: Any, base: Path, place: str) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """([(our setting, value, place)], what has no counterpart) of a DeepSpeed config.

    `value` is the path of its JSON file (relative to `base`), one of `PRESETS`, or the config itself.
    Raises: ConfigError for what is none of these.
    """
    if isinstance(value, str) and value in PRESETS:
        config: Any = PRESETS[value]
        source = place
    elif isinstance(value, str):
        source = Path(value).name
        config = _read(resolve_path(value, base, "deepspeed", place), place)
    else:
        config, source = value, place
    if not isinstance(config, Mapping) or not all(isinstance(config.get(part, {}), Mapping) for part in PARTS):
        raise ConfigError(f"deepspeed: expected a DeepSpeed config, found {shorten(config)} ({source}).")
    entries = dict(_flat(config))
    _check_batch_sizes(entries, source)
    settings: dict[str, tuple[Any, str]] = {}
    leftover = []
    for name, given in entries.items():
        if given in ("auto", None, ["auto", "auto"]) or _asks_for_nothing(name, given):
            continue
        if name == "scheduler.params.warmup_type":  # see below
            continue
        mapped = _mapped(name, given, entries)
        if mapped is None:
            leftover.append(f"{name}: {shorten(json.dumps(given, default=str), quote=False)}")
        for ours, value_here in (mapped or {}).items():
            earlier = settings.get(ours)
            if earlier is not None and earlier[0] != value_here:
                raise ConfigError(
                    f"{ours} is set to {shorten(earlier[0])} and to {shorten(value_here)}, by {earlier[1]} and {name} "
                    f"of {source}. Keep one."
                )
            settings[ours] = (value_here, name)
    if _text(entries.get("scheduler.type")) in SCHEDULES:
        if "scheduler.params.warmup_num_steps" not in entries:
            settings["warmup_steps"] = (WARMUP_STEPS, "scheduler.type")
        if entries.get("scheduler.params.warmup_type", "log") == "log":
            leftover.append('scheduler.params.warmup_type: "log", its default (warm-up is linear here)')
    if all(config.get(part, {}).get("enabled") is False for part in ("bf16", "fp16")):
        settings["dtype"] = ("float32", "bf16.enabled and fp16.enabled")
    return [(ours, given, f"{source}: {name}") for ours, (given, name) in settings.items()], leftover


def _read(path: Path, place: str) -> Any:
    if not path.exists():
        raise ConfigError(
            f"deepspeed={path}: no such file. Give a DeepSpeed JSON, one of {', '.join(PRESETS)}, or set zero_stage "
            f"({place})."
        )
    return parse_json(read_text(path, f"deepspeed={path} ({place})"), str(path), place)


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """`zero_optimization.stage` -> 2, and so on, without parts that are switched off."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            if value.get("enabled", True) in (False, "auto"):
                continue
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _text(value: Any) -> str:
    """A name, or nothing where it is something else."""
    return value if isinstance(value, str) else ""


def _check_batch_sizes(entries: Mapping[str, Any], source: str) -> None:
    """Raises: ConfigError where no number of ranks makes DeepSpeed's three sizes agree."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, accumulation = (entries.get(name) for name in names)
    if not all(isinstance(size, int) and size > 0 for size in (whole, micro, accumulation)):
        return
    assert isinstance(whole, int)
    assert isinstance(micro, int)
    assert isinstance(accumulation, int)
    if whole % (micro * accumulation):
        raise ConfigError(
            f"train_batch_size={whole} is no multiple of train_micro_batch_size_per_gpu={micro} x "
            f"gradient_accumulation_steps={accumulation} = {micro * accumulation}, so no number of ranks makes them "
            f"agree. Keep train_batch_size and set gradient_accumulation_steps: auto ({source})."
        )


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Whether an entry says that something is off."""
    is_off = value is False and name not in NOT_NOTHING
    return is_off or value == {} or (name in OFFLOADS and value == "none")


def _mapped(name: str, value: Any, entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """Settings of ours for one entry, none where it says what is so here anyway; None where it has no counterpart."""
    if name == "gradient_accumulation_steps" and isinstance(entries.get("train_batch_size"), int):
        return {}  # it follows, see `_check_batch_sizes`
    if name in SAME:
        return {SAME[name]: value}
    if name in OFFLOADS and value == "cpu":
        return {"offload": "cpu"}
    if name == "bf16.enabled":
        return {"dtype": "bfloat16"}
    if name == "optimizer.type" and _text(value) in ("Adam", "AdamW"):
        return {}
    if name == "optimizer.params.betas" and isinstance(value, list) and len(value) == 2:
        return {"adam_beta1": value[0], "adam_beta2": value[1]}
    if name == "scheduler.type" and _text(value) in SCHEDULES:
        return {"lr_scheduler_type": SCHEDULES[value]}
    return None
