"""Mapping of the FSDP settings of transformers, accelerate and axolotl to Surefoot's sharding settings."""

from collections.abc import Mapping, Sequence
from typing import Any

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


def is_fsdp(name: str) -> bool:
    return name in ("fsdp", "fsdp_config", "use_fsdp")


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
