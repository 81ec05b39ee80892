"""Reader of DeepSpeed configs: entries with a counterpart become settings, and the others are listed.

Source: https://www.deepspeed.ai/docs/config-json/. A value of `auto` has no effect, as in transformers.
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
"""Names of the settings that point to a DeepSpeed config."""

PRESETS = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    **{
        f"zero{stage}_offload": {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
        for stage in (2, 3)
    },
}
"""Presets that ms-swift names."""

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
"""DeepSpeed's name -> name of the setting, where the value is the same."""

DEEPSPEED_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
WARMUP_STEPS = 1000
"""Default number of warm-up steps in DeepSpeed's schedules."""
NOT_NOTHING = ("optimizer.params.adam_w_mode", "optimizer.params.bias_correction")
"""Entries that are on unless they are switched off."""
OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")

PARTS = ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization")
"""Keys of a config that hold nested settings."""
CHANGES_TRAINING = re.compile(r"(optimizer|scheduler|fp16|bf16|amp|zero_optimization\.offload_\w+\.device)\b")
"""Entries without counterpart that change the numbers of a run or whether it fits in memory, not only its speed."""


def read_deepspeed(value: Any, base: Path, place: str) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Return ([(setting, value, place)], [entry without counterpart]) of a DeepSpeed config.

    `value` is the path of its JSON file (relative to `base`), one of `PRESETS`, or the config itself.
    Raises: ConfigError for anything else.
    """
    if isinstance(value, str) and value in PRESETS:
        config: Any = PRESETS[value]
        source = place
    elif isinstance(value, str):
        source = Path(value).name
        config = _read_config_file(resolve_path(value, base, "deepspeed", place), place)
    else:
        config, source = value, place
    if not isinstance(config, Mapping) or not all(isinstance(config.get(part, {}), Mapping) for part in PARTS):
        raise ConfigError(f"deepspeed: expected a DeepSpeed config, found {shorten(config)} ({source}).")
    entries = dict(_flatten_entries(config))
    _check_batch_sizes(entries, source)
    settings: dict[str, tuple[Any, str]] = {}
    leftover = []
    for name, value_read in entries.items():
        if value_read in ("auto", None, ["auto", "auto"]) or _is_switched_off(name, value_read):
            continue
        if name == "scheduler.params.warmup_type":  # see below
            continue
        mapped = _map_entry(name, value_read, entries)
        if mapped is None:
            leftover.append(f"{name}: {shorten(json.dumps(value_read, default=str), quote=False)}")
        for setting, new in (mapped or {}).items():
            earlier = settings.get(setting)
            if earlier is not None and earlier[0] != new:
                raise ConfigError(
                    f"{setting} is set to {shorten(earlier[0])} and to {shorten(new)}, by {earlier[1]} and {name} "
                    f"of {source}. Keep one."
                )
            settings[setting] = (new, name)
    if _text_or_empty(entries.get("scheduler.type")) in DEEPSPEED_SCHEDULES:
        if "scheduler.params.warmup_num_steps" not in entries:
            settings["warmup_steps"] = (WARMUP_STEPS, "scheduler.type")
        if entries.get("scheduler.params.warmup_type", "log") == "log":
            leftover.append('scheduler.params.warmup_type: "log", its default (warm-up is linear here)')
    if all(config.get(part, {}).get("enabled") is False for part in ("bf16", "fp16")):
        settings["dtype"] = ("float32", "bf16.enabled and fp16.enabled")
    return [(setting, value_read, f"{source}: {name}") for setting, (value_read, name) in settings.items()], leftover


def _read_config_file(path: Path, place: str) -> Any:
    if not path.exists():
        raise ConfigError(
            f"deepspeed={path}: no such file. Give a DeepSpeed JSON, one of {', '.join(PRESETS)}, or set zero_stage "
            f"({place})."
        )
    return parse_json(read_text(path, f"deepspeed={path} ({place})"), str(path), place)


def _flatten_entries(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (`zero_optimization.stage`, 2) and so on, without sections that are switched off."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            if value.get("enabled", True) in (False, "auto"):
                continue
            yield from _flatten_entries(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _text_or_empty(value: Any) -> str:
    """Return the value if it is a text, else an empty text."""
    return value if isinstance(value, str) else ""


def _check_batch_sizes(entries: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if no number of ranks makes DeepSpeed's three sizes agree."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    global_batch, micro, accumulation = (entries.get(name) for name in names)
    if not all(isinstance(size, int) and size > 0 for size in (global_batch, micro, accumulation)):
        return
    assert isinstance(global_batch, int)
    assert isinstance(micro, int)
    assert isinstance(accumulation, int)
    if global_batch % (micro * accumulation):
        raise ConfigError(
            f"train_batch_size={global_batch} is not a multiple of train_micro_batch_size_per_gpu={micro} x "
            f"gradient_accumulation_steps={accumulation} = {micro * accumulation}, so no number of ranks makes them "
            f"agree. Keep train_batch_size and set gradient_accumulation_steps: auto ({source})."
        )


def _is_switched_off(name: str, value: Any) -> bool:
    """Return whether an entry has no effect because it switches something off."""
    is_off = value is False and name not in NOT_NOTHING
    return is_off or value == {} or (name in OFFLOADS and value == "none")


def _map_entry(name: str, value: Any, entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings for one entry: empty if it matches the default, None if it has no counterpart."""
    if name == "gradient_accumulation_steps" and isinstance(entries.get("train_batch_size"), int):
        return {}  # it follows from the other two, see `_check_batch_sizes`
    if name in SAME:
        return {SAME[name]: value}
    if name in OFFLOADS and value == "cpu":
        return {"offload": "cpu"}
    if name == "bf16.enabled":
        return {"dtype": "bfloat16"}
    if name == "optimizer.type" and _text_or_empty(value) in ("Adam", "AdamW"):
        return {}
    if name == "optimizer.params.betas" and isinstance(value, list) and len(value) == 2:
        return {"adam_beta1": value[0], "adam_beta2": value[1]}
    if name == "scheduler.type" and _text_or_empty(value) in DEEPSPEED_SCHEDULES:
        return {"lr_scheduler_type": DEEPSPEED_SCHEDULES[value]}
    return None
