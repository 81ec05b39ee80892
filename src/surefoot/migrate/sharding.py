"""Mapping of peer settings of FSDP and DeepSpeed to Surefoot's sharding settings."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.deepspeed import PRESETS, read_deepspeed
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.parsed_run import ParsedRun, resolve_path

FSDP_SETTINGS = ("fsdp", "fsdp_config", "use_fsdp")
STAGES = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "_hybrid_shard_zero2": 2,
          "no_shard": 0, "fsdp2": 3}  # fmt: skip
"""FSDP strategy -> ZeRO stage that shards the same tensors. Stage 2 keeps parameters gathered after the forward."""
STRATEGY_NUMBERS = {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
}
"""Accelerate's number for a strategy -> the strategy."""
STRATEGY_KEYS = ("sharding_strategy", "reshard_after_forward")
"""Keys that hold the strategy. In accelerate's FSDP 1 both hold its name; in FSDP 2 the second is a boolean."""


STAGE_NAME = re.compile(r"(?i)(?:zero|(?<![a-z])z|stage)[-_]?([0-3])(?!\d)")
"""ZeRO stage in the name of a DeepSpeed config: zero3, ds_z3_config.json, stage3.json."""
NO_OFFLOAD = re.compile(r"(?i)(?:no|without|non)[-_]?offload")


def map_fsdp_settings(settings: Mapping[str, Any], *, is_config_enough: bool) -> dict[str, Any]:
    """Return the Surefoot settings that shard like a peer's `fsdp`, `fsdp_config` and `use_fsdp`.

    `settings`: all settings of the peer run; `nnodes` among them sets the number of replicas of hybrid sharding.
    `is_config_enough`: whether `fsdp_config` alone turns sharding on.
    """
    words = [str(word).lower() for word in _split_words(settings.get("fsdp"))]
    config = settings.get("fsdp_config")
    options = {str(key).lower().removeprefix("fsdp_"): value for key, value in config.items()} if isinstance(
        config, Mapping) else {}  # fmt: skip
    switch = settings.get("use_fsdp")
    if switch is not None and not _is_true(switch):
        return {}
    # In transformers fsdp_config has no effect without `fsdp`; in axolotl and accelerate it is all there is.
    is_enabled = bool(words) or _is_true(switch) or (bool(options) and is_config_enough)
    if not is_enabled:
        return {}
    strategy = next((word for word in words if word in STAGES), "")
    for name in STRATEGY_KEYS:
        strategy = strategy or _parse_strategy(options.get(name))
    sharding: dict[str, Any] = {"zero_stage": STAGES[strategy or "full_shard"]}
    machines = str(settings.get("nnodes", 1))
    if "hybrid" in strategy and machines.isdecimal() and int(machines) > 1:
        sharding["dp_replicate_size"] = int(machines)
    if "offload" in words or _is_true(options.get("offload_params")):
        sharding["offload"] = "cpu"
    if _is_true(options.get("activation_checkpointing")):
        sharding["gradient_checkpointing"] = True
    return sharding


def _parse_strategy(value: Any) -> str:
    text = str(value).lower()
    text = STRATEGY_NUMBERS.get(text, text)
    return {"true": "full_shard", "false": "shard_grad_op"}.get(text, text if text in STAGES else "")


def _split_words(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return value if isinstance(value, list) else ["full_shard"] if value is True else []


def _is_true(value: Any) -> bool:
    return value is True or str(value).lower() == "true"


def locate_deepspeed_config(run: ParsedRun, config: Any) -> Any:
    """Return a DeepSpeed config for `read_deepspeed`: a preset or inline as it is, a file with its folder.

    Returns None if there is no such file.
    """
    if not isinstance(config, str) or config in PRESETS:
        return config
    path = resolve_path(run.base, config)
    return str(path) if path.is_file() else None


def read_deepspeed_settings(imported: ImportedRun) -> dict[str, Any]:
    """Return the settings that the DeepSpeed config sets; nothing for a file that is missing."""
    settings: dict[str, Any] = {}
    for key in DEEPSPEED_KEYS & imported.settings.keys():
        value, origin = imported.settings[key]
        config = locate_deepspeed_config(imported.source, value)
        if config is not None:
            settings |= {name: value for name, value, _ in read_deepspeed(config, imported.source.base, origin)[0]}
    return settings


def check_deepspeed_config(imported: ImportedRun) -> None:
    """Record the entries of the DeepSpeed config that are not carried, or the config itself if its file is missing.

    Raises: ConfigError for a file that is no DeepSpeed config.
    """
    run = imported.source
    for key in DEEPSPEED_KEYS & imported.settings.keys():
        value, origin = imported.settings[key]
        config = locate_deepspeed_config(run, value)
        if config is not None:
            for entry in read_deepspeed(config, run.base, origin)[1]:
                imported.left_out[f"{key}: {entry}"] = "an entry of DeepSpeed without a counterpart"
            continue
        del imported.settings[key]  # a run whose config file is missing would not start
        file_name = Path(value).name
        why = f"there is no such file in {run.base}, so its entries are unknown"
        stage = STAGE_NAME.search(file_name)
        if stage is not None:
            imported.settings.setdefault("zero_stage", (int(stage[1]), f"the name of {file_name}"))
            why = f"there is no such file in {run.base}: zero_stage is {stage[1]} by its name, the rest is unknown"
        if "offload" in value.lower() and not NO_OFFLOAD.search(value):
            imported.settings.setdefault("offload", ("cpu", f"the name of {file_name}"))
        imported.left_out[f"{key} = {value}"] = why
