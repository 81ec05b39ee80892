"""Kind of an imported run's model: by its config.json where its folder is here, else by its name."""

import re
from typing import Any

from surefoot.migrate.parsed_run import ParsedRun, resolve_path
from surefoot.system.json_files import read_object

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which config.json has the number of experts."""
MOE_NAME = re.compile(r"(?i)moe|mixtral|\dB-A\d|deepseek-v[23]|gpt-oss")
"""Part of the name of a Mixture-of-Experts, as in Qwen1.5-MoE-A2.7B and Qwen3-30B-A3B."""
VISION_NAME = re.compile(
    r"(?i)(?<![a-z])vl(?![a-z])|vision|llava|internvl|pixtral|smolvlm|idefics|paligemma|gemma-3-(4|12|27)b|glm-4\.\dv"
)
"""Part of the name of a model that reads images."""


def is_moe(run: ParsedRun, model: str) -> bool:
    """Return whether a model is a Mixture-of-Experts."""
    config = _read_config(run, model)
    if config is None:
        return MOE_NAME.search(model) is not None
    return any(part.get(name) for part in (config, config.get("text_config") or {}) for name in EXPERT_COUNTS)


def has_vision_tower(run: ParsedRun, model: str) -> bool:
    """Return whether a model reads images."""
    config = _read_config(run, model)
    return VISION_NAME.search(model) is not None if config is None else "vision_config" in config


def _read_config(run: ParsedRun, model: str) -> dict[str, Any] | None:
    """Return the config.json of a folder; None for a model that is not here or whose file is unreadable."""
    try:
        return read_object(resolve_path(run.base, model) / "config.json")
    except (OSError, ValueError):  # a damaged one, or a name that can be no path
        return None
