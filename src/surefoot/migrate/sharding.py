"""FSDP as transformers, accelerate and axolotl are told of it -> settings of ours that shard alike."""

from collections.abc import Mapping, Sequence
from typing import Any

STAGES = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "_hybrid_shard_zero2": 2,
          "no_shard": 0, "fsdp2": 3}  # fmt: skip
"""FSDP's strategy -> the stage of ZeRO that keeps the same parts; what it gathers for a forward it keeps in stage 2."""
BY_NUMBER = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
"""accelerate's numbers for them."""
STRATEGY = ("sharding_strategy", "reshard_after_forward")
"""Of accelerate's FSDP 1 both are names of strategies; of FSDP 2 the second is a switch."""


def is_fsdp(name: str) -> bool:
    return name in ("fsdp", "fsdp_config", "use_fsdp")


def of_fsdp(settings: Mapping[str, Any], *, needs_no_switch: bool) -> dict[str, Any]:
    """`settings`: of a run, of which `fsdp`, `fsdp_config` and `use_fsdp` are looked at, and its number of machines.

    `needs_no_switch`: whether `fsdp_config` alone shards.
    """
    words = [str(word).lower() for word in _words(settings.get("fsdp"))]
    config = settings.get("fsdp_config")
    said = {str(key).lower().removeprefix("fsdp_"): value for key, value in config.items()} if isinstance(
        config, Mapping) else {}  # fmt: skip
    switch = settings.get("use_fsdp")
    if switch is not None and not _is_true(switch):
        return {}
    # Of transformers, a config beside no `fsdp` does nothing; axolotl's and accelerate's is the whole of it.
    begins = bool(words) or _is_true(switch) or (bool(said) and needs_no_switch)
    if not begins:
        return {}
    strategy = next((word for word in words if word in STAGES), "")
    for name in STRATEGY:
        strategy = strategy or _strategy_of(said.get(name))
    found: dict[str, Any] = {"zero_stage": STAGES[strategy or "full_shard"]}
    machines = str(settings.get("nnodes", 1))
    if "hybrid" in strategy and machines.isdecimal() and int(machines) > 1:
        found["dp_replicate_size"] = int(machines)
    if "offload" in words or _is_true(said.get("offload_params")):
        found["offload"] = "cpu"
    if _is_true(said.get("activation_checkpointing")):
        found["gradient_checkpointing"] = True
    return found


def _strategy_of(value: Any) -> str:
    text = str(value).lower()
    text = BY_NUMBER.get(text, text)
    return {"true": "full_shard", "false": "shard_grad_op"}.get(text, text if text in STAGES else "")


def _words(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return value if isinstance(value, list) else ["full_shard"] if value is True else []


def _is_true(value: Any) -> bool:
    return value is True or str(value).lower() == "true"
