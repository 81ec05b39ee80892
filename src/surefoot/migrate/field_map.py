"""One setting of another program -> settings of ours that mean the same."""

import json
import re
from types import EllipsisType
from typing import Any, get_args

from surefoot.config.aliases import ALIASES, FLAG_ALIASES
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.methods import known_fields
from surefoot.migrate.parse_input import ParsedRun, found_at
from surefoot.migrate.peer_tables import DEFAULTS, OF_GRPO, OF_LENGTH, REWARDS, WITHOUT
from surefoot.migrate.sharding import is_fsdp, of_fsdp
from surefoot.migrate.sources import axolotl_source, mappings, odd_value, swift_source

TRACKERS = ("tensorboard", "wandb", "trackio")
SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
"""Names of transformers' schedules; any of ours may be warmed up to."""
SCHEDULED = get_args(known_fields()["lr_scheduler_type"].annotation)
LOSS_SCALES: dict[str, dict[str, Any]] = {
    "default": {}, "last_round": {"train_on": "last_assistant"}, "all": {"train_on": "all"},
}  # fmt: skip
"""What ms-swift calls which turns are trained."""
GROUPS = {"all-linear": "all", "all-router": "router"}
"""ms-swift's groups of modules; PEFT has the first."""
FASTER_LOSSES = ("LigerPlugin", "CutCrossEntropyPlugin")
"""Plugins of axolotl that change no number."""
PATTERN = re.compile(r"[\\\[\](|^$*+]")
"""What a regular expression has, and names of modules have not."""


Mapped = dict[str, Any] | None | EllipsisType
"""Settings of ours; None where there are none of that meaning; `...` where another topic is asked."""


def mapped(told: ParsedRun, name: str, value: Any) -> dict[str, Any] | None:
    """Settings of ours; None where there are none of that meaning."""
    for topic in (_of_axolotl, _of_data, _of_what_is_trained, _of_the_course, _of_rollouts, _of_the_start):
        found = topic(told, name, value)
        if found is not ...:
            return found
    if name in FLAG_ALIASES:
        return dict([FLAG_ALIASES[name]]) if value is True else {}
    ours = name if name in known_fields() else ALIASES.get(name)
    if ours is None or name in WITHOUT:
        return None
    return {ours: number_of(value)}


def _of_axolotl(told: ParsedRun, name: str, value: Any) -> Mapped:
    if told.program != "axolotl":
        return ...
    if name == "batch_size" and "gradient_accumulation_steps" not in told.settings:
        each, total = (number_of(one) for one in (told.settings.get("micro_batch_size", 1), value))
        if isinstance(each, int) and isinstance(total, int) and each > 0 and total % each == 0:
            return {"gradient_accumulation_steps": total // each}
    if name == "adapter":
        return {"tuning": "lora" if value == "qlora" else value or "full"}
    if name == "plugins" and isinstance(value, list):  # which loss is computed how, and it is the same loss
        return {} if all(any(known in str(one) for known in FASTER_LOSSES) for one in value) else None
    if name == "cosine_min_lr_ratio":
        return {"min_lr_ratio": value}
    if name in ("warmup_steps", "warmup_ratio") and value is not None and number_of(value) == 0:
        return {"warmup_ratio": 0.0}  # none at all; there is a default
    if name == "lora_target_linear":
        if not value:
            return {}
        named = _targets(told.settings.get("lora_target_modules"))
        return {"target_modules": ["all", *named] if named else "all"}
    if name == "lora_target_modules" and told.settings.get("lora_target_linear"):
        return {} if _targets(value) is not None else None  # with the other: both are trained
    if name == "datasets" or (name == "test_datasets" and value):
        entries = [axolotl_source(one) for one in mappings(told, name, value)]
        return {"dataset" if name == "datasets" else "eval_dataset": entries}
    return ...


def _of_data(told: ParsedRun, name: str, value: Any) -> Mapped:
    """Rows, and which of their tokens are trained."""
    if name == "dataset_shuffle" and told.program == "ms-swift":  # their loader shuffles, too
        return {"shuffle": False} if value is False and told.settings.get("train_dataloader_shuffle") is False else {}
    if name == "shuffle_dataset" and told.method == "sft":
        return {}  # once more, before the Trainer does
    if name in ("dataset_shuffle", "shuffle_dataset", "train_sampler_random"):
        return {} if value in (True, None) else {"shuffle": False}
    if name == "datasets" and told.program == "TRL":
        entries = [{"subset" if key == "name" else key: given for key, given in one.items()}
                 for one in mappings(told, name, value)]  # fmt: skip
        return {"dataset": entries}
    if name in ("dataset_config", "dataset_train_split", "dataset_test_split") and told.program == "TRL":
        return {}  # with the dataset
    if name in ("dataset", "val_dataset") and told.program == "ms-swift":
        sources = listed(value)
        if not all(isinstance(one, str) for one in sources):
            raise odd_value(told, name, value, "names of datasets")
        sampled = [swift_source(one) for one in sources]
        if name == "val_dataset":
            return {"eval_dataset": sampled[0] if len(sampled) == 1 else sampled}
        return {"dataset": sampled}
    if name == "columns" and told.program == "ms-swift":
        named = _mapping(told, name, value)
        return {"columns": {role: column for column, role in named.items()}} if named is not None else None
    if name in ("dataset_text_field", "dataset_prompt_column") and isinstance(value, str):
        role = "text" if name == "dataset_text_field" else "prompt"
        return {} if value == role else {"columns": {role: value}}
    if name == "dataset_dir" and str(value).upper().startswith(("ONLINE", "REMOTE:")):
        return {} if str(value).upper() == "ONLINE" else None
    if ALIASES.get(name, name) == "eval_fraction" and isinstance(share := number_of(value), int | float) and share >= 1:
        return None
    if name == "max_length" and told.program == "TRL" and is_null(value):
        return {"truncation": "error"}  # theirs cuts nothing then
    if name in ("packing", "sample_packing", "neat_packing") and not value:
        return {}
    if name == "assistant_only_loss":
        return {"train_on": "assistant"} if value else {}
    if name == "loss_scale" and isinstance(value, str) and value in LOSS_SCALES:
        return LOSS_SCALES[value]
    return ...


def _of_what_is_trained(told: ParsedRun, name: str, value: Any) -> Mapped:
    """The model, LoRA, the vision tower."""
    if name == "model_name" and told.program == "TRL":
        return {} if "model_name_or_path" in told.settings else {"model": value}
    if name == "adapters":
        return {"init_adapter": value[0] if isinstance(value, list) and value else value}
    if name == "use_peft":
        return {"tuning": "lora" if value else "full"}
    if name in ("freeze_llm", "freeze_language_model"):
        return {}  # with what is adapted
    if name in ("lora_target", "lora_target_modules", "target_modules"):
        names = _targets(value)
        if not names:
            return None if names is None else {}
        return {"target_modules": names[0] if len(names) == 1 else names}
    if name == "bf16" and value == "auto":
        return {}
    return ...


def _targets(value: Any) -> list[str] | None:
    """The names of modules to adapt, by ours where these are groups; None for a pattern."""
    names = [part.strip() for one in listed(value or []) for part in str(one).split(",") if part.strip()]
    return None if PATTERN.search("".join(names)) else [GROUPS.get(one, one) for one in names]


def _of_the_course(told: ParsedRun, name: str, value: Any) -> Mapped:
    """How long, at what learning rate, and what is saved and logged on the way."""
    if name in ("eval_strategy", "evaluation_strategy") and value in ("no", False):
        return {}  # with what is evaluated on
    if name == "save_strategy" and value in ("no", False):
        return {"save_steps": 0}
    if name == "save_total_limit" and isinstance(limit := number_of(value), int) and limit <= 0:
        return {"save_total_limit": None}  # all are kept
    if name in ("max_steps", "warmup_steps", "warmup_ratio") and number_of(value) in (-1, 0):
        return {}
    if name == "warmup_steps" and isinstance(share := number_of(value), float) and 0 < share < 1:
        return {"warmup_ratio": share}
    if ALIASES.get(name, name) == "lr_scheduler_type":
        schedule = SCHEDULES.get(str(value), value)
        return {"lr_scheduler_type": schedule} if schedule in SCHEDULED else None
    if name == "lr_scheduler_kwargs":
        kwargs = _mapping(told, name, value)
        if kwargs is not None and kwargs.keys() == {"min_lr"}:
            least, most = number_of(kwargs["min_lr"]), number_of(_learning_rate_of(told))
            is_known = isinstance(least, int | float) and isinstance(most, int | float) and most > 0
            return {"min_lr_ratio": float(f"{least / most:.6g}")} if is_known else None
        return (
            {"min_lr_ratio": kwargs["min_lr_rate"]} if kwargs is not None and kwargs.keys() == {"min_lr_rate"} else None
        )
    if name == "report_to":
        known = [one for one in listed(value) if one in TRACKERS]
        return {"report_to": known} if known else {}
    return ...


def _of_rollouts(told: ParsedRun, name: str, value: Any) -> Mapped:
    """GRPO: the loss, rewards, and the engine."""
    if name == "loss_type" and told.method != "grpo":
        return None
    if name == "loss_type" and value == "grpo" and _is_gspo(told):
        return {"loss_type": "gspo"}
    if name == "importance_sampling_level":
        return {"token": {}, "sequence": {"loss_type": "gspo"} if _is_gspo(told) else None}.get(str(value))
    if name == "vllm_importance_sampling_correction":
        return {} if value else {"importance_correction": "none"}
    is_uncorrected = number_of(told.settings.get("vllm_importance_sampling_correction")) is False
    if name.endswith("_importance_sampling_mode"):
        if is_uncorrected:
            return {}  # switched off, whatever its mode would be
        if is_null(value):
            return {"importance_correction": "none"}
    if name == "vllm_importance_sampling_clip_min" and (is_uncorrected or is_null(value)):
        return {}
    if name == "scale_rewards" and (value is None or isinstance(value, bool)):
        return {"scale_rewards": "group" if value else "none"}
    if name == "reward_weights":
        names = [str(one) for one in listed(told.settings.get("reward_funcs") or [])]
        weights = [number_of(one) for one in listed(value)]
        if not all(isinstance(one, int | float) for one in weights):
            raise odd_value(told, name, value, "numbers")
        if _is_any_left_out(told.program, names):
            is_with_functions = len(weights) == len(names) and any(
                one in REWARDS.get(told.program, {}) for one in names
            )
            return {} if is_with_functions else None
    if name == "soft_cache_length" and "soft_overlong" not in listed(told.settings.get("reward_funcs")):
        return {}  # it is read by that reward alone
    if name == "vllm_device":
        devices = [str(one).removeprefix("cuda:") for one in listed(value)]
        return {"vllm_devices": ",".join(devices)} if all(one.isdecimal() for one in devices) else None
    if name == "sleep_level":
        return {"vllm_sleep": True} if number_of(value) in (1, 2) else {}
    return ...


def _of_the_start(told: ParsedRun, name: str, value: Any) -> Mapped:
    """The method, sharding, and what saves memory."""
    if name in ("stage", "rlhf_type", "rl"):
        return {}
    if name == "task_type" and (told.method != "sft" or str(value).lower() == "causal_lm"):
        return {}  # it is the method
    if is_fsdp(name):
        config = told.settings.get("fsdp_config")
        settings = {**told.settings, "fsdp_config": _fsdp_config(told, config)} if config else told.settings
        if name == "fsdp_config" and isinstance(settings["fsdp_config"], str):
            return None  # a file that is not here
        sharded = of_fsdp(settings, needs_no_switch=told.program == "axolotl")
        return sharded or (None if value and name != "use_fsdp" else {})
    if name in DEEPSPEED_KEYS:
        return {"deepspeed": value} if value else {}
    if name == "gradient_checkpointing" and isinstance(value, str):
        return {"gradient_checkpointing": True}
    if name == "disable_gradient_checkpointing":
        return {"gradient_checkpointing": not value}
    return ...


def _fsdp_config(told: ParsedRun, value: Any) -> Any:
    """FSDP's settings, also where JSON or the name of a file says them. Raises: ConfigError for what is no JSON."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("{"):
        path = found_at(told.base, value)
        if not path.is_file():
            return value
        value = path.read_text("utf-8", errors="replace")
    return _mapping(told, "fsdp_config", value.strip()) or {}


def rewards_of(program: str, names: list[str], weights: list[Any]) -> tuple[list[Any], list[str]]:
    """The reward functions of a program that come with Surefoot, as items; the names of the others.

    `weights`: of all of them; the items have their own where others are left out.
    """
    known = REWARDS.get(program, {})
    others = [name for name in names if name not in known and name not in OF_LENGTH]
    are_numbers = all(isinstance(number_of(one), int | float) for one in weights)
    if len(weights) != len(names) or not are_numbers or not _is_any_left_out(program, names):
        return [known[name] for name in names if name in known], others
    pairs = zip(names, map(number_of, weights), strict=True)
    return [{**known[name], "weight": float(weight)} for name, weight in pairs if name in known], others


def _is_any_left_out(program: str, names: list[str]) -> bool:
    return any(name not in REWARDS.get(program, {}) for name in names)


def _learning_rate_of(told: ParsedRun) -> Any:
    usual = DEFAULTS[told.program].get("learning_rate", known_fields()["learning_rate"].default)
    return told.settings.get("learning_rate", usual)


def _is_gspo(told: ParsedRun) -> bool:
    """Whether ratios are those of whole sequences, in a loss that is not another one of its own."""
    is_of_sequences = told.settings.get("importance_sampling_level") == "sequence"
    usual = OF_GRPO.get(told.program, {}).get("loss_type", known_fields()["loss_type"].default)
    return is_of_sequences and told.settings.get("loss_type", usual) == "grpo"


def is_null(value: Any) -> bool:
    return value is None or str(value).lower() in ("none", "null")


def _mapping(told: ParsedRun, name: str, value: Any) -> dict[str, Any] | None:
    """A mapping, or one that is written as JSON; None for what is none. Raises: ConfigError for JSON that is none."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise odd_value(told, name, value, "a mapping in JSON") from error
    return value if isinstance(value, dict) else None


def number_of(value: Any) -> Any:
    if isinstance(value, list):
        return [number_of(one) for one in value]
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def may_be_null(name: str) -> bool:
    """Whether null is a value of its own, and not what holds where nothing is said."""
    field = known_fields().get(name)
    return field is not None and field.default is not None and "None" in str(field.annotation)
