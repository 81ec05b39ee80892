"""Mapping of one peer setting to the Surefoot settings with the same meaning."""

import json
from pathlib import Path
from types import EllipsisType
from typing import Any, get_args

from surefoot.config.aliases import ALIASES, FLAG_ALIASES, VALUE_ALIASES
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.methods import known_fields
from surefoot.config.schema import REGULAR_EXPRESSION
from surefoot.methods.grpo.settings import OF_MODEL
from surefoot.migrate.axolotl_sources import map_axolotl_source
from surefoot.migrate.distillation import map_distillation
from surefoot.migrate.megatron import map_megatron
from surefoot.migrate.parsed_run import ParsedRun, resolve_path
from surefoot.migrate.peer_tables import (
    CROSS_ENTROPY,
    GRPO_DEFAULTS,
    LENGTH_REWARDS,
    REWARD_MODELS,
    REWARDS,
    UNSUPPORTED,
)
from surefoot.migrate.preferences import map_preferences
from surefoot.migrate.quantization import map_quantization
from surefoot.migrate.schedules import find_peer_schedule, map_schedule, map_schedule_kwargs
from surefoot.migrate.sharding import FSDP_SETTINGS, map_fsdp_settings
from surefoot.migrate.swift_sources import parse_swift_source
from surefoot.migrate.values import as_list, is_null, parse_number

TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")
OPTIMIZERS = get_args(known_fields()["optim"].annotation)
LOSS_SCALES: dict[str, dict[str, Any]] = {
    "default": {}, "last_round": {"train_on": "last_assistant"}, "all": {"train_on": "all"},
}  # fmt: skip
"""ms-swift's loss_scale -> the turns that are trained."""
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "assistant_only_loss": ({"train_on": "assistant"}, {}),
    "use_swanlab": ({"report_to": ["swanlab"]}, {}),
    "use_peft": ({"tuning": "lora"}, {"tuning": "full"}),
    "vllm_importance_sampling_correction": ({}, {"importance_correction": "none"}),
    "disable_gradient_checkpointing": ({"gradient_checkpointing": False}, {"gradient_checkpointing": True}),
}
"""Peer setting -> Surefoot settings (if it is on, if it is off)."""
CARRIED_ELSEWHERE = frozenset({"stage", "rlhf_type", "rl", "freeze_llm", "freeze_language_model"})
"""Peer settings that are carried as the method or with the target modules."""
CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora-ga", "lora_ga")
"""Beginnings of the names of starts of LoRA that take the pair away from the weights of the base."""
TARGET_MODULES = ("lora_target", "lora_target_modules", "target_modules")
TARGET_PARAMETERS = ("lora_target_parameters", "target_parameters")
"""Peer settings that name what LoRA adapts: linear layers, and stacks of experts."""
MODULE_GROUPS = {"all-linear": "all", "all-router": "router"}
"""ms-swift's groups of modules -> Surefoot's. PEFT has the first."""
FASTER_LOSSES = ("LigerPlugin", "CutCrossEntropyPlugin")
"""Plugins of axolotl that compute the same loss faster."""

MappedSettings = dict[str, Any] | None | EllipsisType
"""Surefoot settings; None if no setting has that meaning; `...` if another mapping function is responsible."""


def map_setting(run: ParsedRun, name: str, value: Any) -> dict[str, Any] | None:
    """Return the Surefoot settings for one peer setting, or None if no setting has that meaning."""
    if name in SWITCHES:
        settings_if_on, settings_if_off = SWITCHES[name]
        return settings_if_on if value else settings_if_off
    if name in CARRIED_ELSEWHERE:
        return {}
    for map_part in (
        map_megatron,
        map_quantization,
        map_preferences,
        map_distillation,
        _map_axolotl,
        _map_data,
        _map_trained_modules,
        _map_duration,
        _map_rollouts,
        _map_method_and_sharding,
    ):
        settings = map_part(run, name, value)
        if settings is not ...:
            return settings
    if name in FLAG_ALIASES:
        return dict([FLAG_ALIASES[name]]) if value is True else {}
    surefoot_name = name if name in known_fields() else ALIASES.get(name)
    if surefoot_name is None or name in UNSUPPORTED:
        return None
    return {surefoot_name: parse_number(value)}


def _map_axolotl(run: ParsedRun, name: str, value: Any) -> MappedSettings:
    if run.program != "axolotl":
        return ...
    if name == "batch_size" and "gradient_accumulation_steps" not in run.settings:
        micro_batch, batch_size = (parse_number(item) for item in (run.settings.get("micro_batch_size", 1), value))
        if (
            isinstance(micro_batch, int)
            and isinstance(batch_size, int)
            and micro_batch > 0
            and batch_size % micro_batch == 0
        ):
            return {"gradient_accumulation_steps": batch_size // micro_batch}
    if name == "adapter":
        return {"tuning": "lora", "quantization": "nf4"} if value == "qlora" else {"tuning": value or "full"}
    if name == "plugins" and isinstance(value, list):  # these plugins change how the loss is computed, not its value
        return {} if all(any(loss in str(item) for loss in FASTER_LOSSES) for item in value) else None
    if name == "cosine_min_lr_ratio":
        return {"min_lr_ratio": value}
    if name in ("warmup_steps", "warmup_ratio") and value is not None and parse_number(value) == 0:
        return {"warmup_ratio": 0.0}  # explicit, because axolotl's default is not 0
    if name == "lora_target_linear":
        if not value:
            return {}
        also = ("lora_target_modules", "lora_target_parameters")
        names = [each for key in also for each in _parse_target_modules(run.settings.get(key)) or []]
        return {"target_modules": ["all", *dict.fromkeys(names)] if names else "all"}
    if name in ("lora_target_modules", "lora_target_parameters") and run.settings.get("lora_target_linear"):
        return {} if _parse_target_modules(value) is not None else None  # merged into the mapping of lora_target_linear
    if name == "datasets" or (name == "test_datasets" and value):
        entries = [map_axolotl_source(item) for item in run.check_entries(name, value)]
        return {"dataset" if name == "datasets" else "eval_dataset": entries}
    return ...


def system_file(run: ParsedRun, value: Any) -> Path | None:
    """Return the path of the file from which a run reads its system message: ms-swift does for a name in .txt."""
    is_name = run.program == "ms-swift" and isinstance(value, str) and value.endswith(".txt")
    return resolve_path(run.base, value) if is_name else None


def _map_data(run: ParsedRun, name: str, value: Any) -> MappedSettings:
    """Map settings of the rows and of which tokens are trained."""
    if name == "system" and (path := system_file(run, value)) is not None:
        return {"system": path.read_text("utf-8", errors="replace")} if path.is_file() else {}
    if name == "dataset_shuffle" and run.program == "ms-swift":  # ms-swift's data loader shuffles too
        return {"shuffle": False} if value is False and run.settings.get("train_dataloader_shuffle") is False else {}
    if name == "shuffle_dataset" and run.method == "sft":
        return {}  # an extra shuffle before the Trainer's own
    if name in ("dataset_shuffle", "shuffle_dataset", "train_sampler_random"):
        return {} if value in (True, None) else {"shuffle": False}
    if name == "datasets" and run.program == "TRL":
        entries = [{"subset" if key == "name" else key: option for key, option in source.items()}
                 for source in run.check_entries(name, value)]  # fmt: skip
        return {"dataset": entries}
    if name in ("dataset_config", "dataset_train_split", "dataset_test_split") and run.program == "TRL":
        return {}  # carried with the dataset
    if name in ("dataset", "val_dataset") and run.program == "ms-swift":
        sources = as_list(value)
        if not all(isinstance(source, str) for source in sources):
            raise run.make_value_error(name, value, "names of datasets")
        entries = [parse_swift_source(source) for source in sources]
        if name == "val_dataset":
            return {"eval_dataset": entries[0] if len(entries) == 1 else entries}
        return {"dataset": entries}
    if name == "columns" and run.program == "ms-swift":
        roles = _parse_mapping(run, name, value)
        return {"columns": {role: column for column, role in roles.items()}} if roles is not None else None
    if name in ("dataset_text_field", "dataset_prompt_column") and isinstance(value, str):
        role = "text" if name == "dataset_text_field" else "prompt"
        return {} if value == role else {"columns": {role: value}}
    if name == "dataset_dir" and not str(value).upper().startswith(("ONLINE", "REMOTE:")):
        return {"dataset_dir": str(value)}
    if name == "max_samples" and run.program == "LLaMA-Factory" and isinstance(parse_number(value), int):
        return {}  # carried as the split of each source
    if name == "dataset_dir":
        return {} if str(value).upper() == "ONLINE" else None
    if (
        ALIASES.get(name, name) == "eval_fraction"
        and isinstance(share := parse_number(value), int | float)
        and share >= 1
    ):
        return None
    if name == "max_length" and run.program == "TRL" and is_null(value):
        return {"truncation": "error"}  # TRL then truncates nothing
    if name in ("packing", "sample_packing", "neat_packing") and not value:
        return {}
    if name == "completion_only_loss" and run.method == "sft":
        return {"train_on": "assistant" if value else "all"} if isinstance(value, bool) else {}
    if name == "loss_scale" and isinstance(value, str) and value in LOSS_SCALES:
        return LOSS_SCALES[value]
    return ...


def _map_trained_modules(run: ParsedRun, name: str, value: Any) -> MappedSettings:
    """Map settings of the model, LoRA and the vision tower."""
    if name == "model_name" and run.program == "TRL":
        return {} if "model_name_or_path" in run.settings else {"model": value}
    if name == "adapters":
        return {"init_adapter": value[0] if isinstance(value, list) and value else value}
    if name == "target_regex" or (name in TARGET_MODULES and run.settings.get("target_regex")):
        return {"target_modules": value} if name == "target_regex" and value else {}
    if name in (*TARGET_MODULES, *TARGET_PARAMETERS):
        # PEFT names linear layers and stacks of experts in two settings. The last one in the run carries both.
        given_keys = [key for key in (*TARGET_MODULES, *TARGET_PARAMETERS) if run.settings.get(key)]
        parsed = [_parse_target_modules(run.settings[key]) for key in given_keys] if name in given_keys else []
        if any(names is None for names in parsed):
            return None
        combined = list(dict.fromkeys(target for names in parsed for target in names or []))
        if not combined or name != given_keys[-1]:
            return {}
        return {"target_modules": combined[0] if len(combined) == 1 else combined}
    if ALIASES.get(name, name) == "tuning" and value == "freeze":
        raise run.make_value_error(
            name, value, "lora or full: here tuning: full trains what freeze_layers and freeze_modules do not name"
        )
    if name in ("init_weights", "init_lora_weights") and str(value).lower().startswith(CHANGE_THE_BASE):
        raise run.make_value_error(name, value, "true: a start that changes the base is not carried")
    if ALIASES.get(name, name) == "modules_to_save":
        modules = [part.strip() for item in as_list(value or []) for part in str(item).split(",") if part.strip()]
        if group := next((module for module in modules if module.startswith("all-")), None):
            raise run.make_value_error(name, group, "the names of modules, such as embed_tokens and norm")
        return {"modules_to_save": modules} if modules else {}
    if name == "bf16" and value == "auto":
        return {}
    return ...


def _parse_target_modules(value: Any) -> list[str] | None:
    """Return the modules to adapt, with groups under their Surefoot names, or one regular expression.

    Return None for several, which PEFT does not take.
    """
    if len(as_list(value or [])) == 1 and REGULAR_EXPRESSION.search(str(as_list(value)[0])):
        return [str(as_list(value)[0])]
    names = [part.strip() for name in as_list(value or []) for part in str(name).split(",") if part.strip()]
    return None if REGULAR_EXPRESSION.search("".join(names)) else [MODULE_GROUPS.get(name, name) for name in names]


def _map_duration(run: ParsedRun, name: str, value: Any) -> MappedSettings:
    """Map settings of duration, learning rate, checkpoints and logging."""
    if name in ("eval_strategy", "evaluation_strategy") and value in ("no", False):
        return {}  # carried with the evaluation data
    if name == "save_strategy" and value in ("no", False):
        return {"save_steps": 0}
    if name == "save_strategy" and value == "epoch":
        return {"saves_per_epoch": 1}
    if name in ("eval_strategy", "evaluation_strategy") and value == "epoch":
        return {"evals_per_epoch": 1}
    if name == "save_total_limit" and isinstance(limit := parse_number(value), int) and limit <= 0:
        return {"save_total_limit": None}  # unlimited
    if name in ("warmup_steps", "warmup_ratio") and find_peer_schedule(run) == "constant":
        return {}  # which has no warm-up in transformers
    if name in ("max_steps", "warmup_steps", "warmup_ratio") and parse_number(value) in (-1, 0):
        return {}
    if name == "warmup_steps" and isinstance(ratio := parse_number(value), float) and 0 < ratio < 1:
        return {"warmup_ratio": ratio}
    if name in ("optim", "optimizer"):
        return _map_optimizer(run, name, value)
    if name == "use_muon":
        return {"optim": "muon"} if value is True else {}
    if ALIASES.get(name, name) == "lr_scheduler_type":
        return map_schedule(run, value)
    if name == "lr_scheduler_kwargs":
        return map_schedule_kwargs(run, _parse_mapping(run, name, value))
    if name == "report_to":
        trackers = [tracker for tracker in as_list(value) if tracker in TRACKERS]
        return {"report_to": trackers} if trackers else {}
    return ...


def _map_optimizer(run: ParsedRun, name: str, value: Any) -> dict[str, Any] | None:
    """Map the optimizer. In ms-swift `optimizer` names a plug-in, which replaces `optim`."""
    if run.program == "ms-swift" and name == "optimizer" and value == "lorap":
        return {}  # carried by its ratio
    if run.program == "ms-swift" and name == "optim" and run.settings.get("optimizer") == "muon":
        return {}
    optimizer = VALUE_ALIASES["optim"].get(str(value), value)
    return {"optim": optimizer} if optimizer in OPTIMIZERS else {} if is_null(value) else None


OF_TRL_RLOO = ("normalize_advantages", "reward_clip_range")
"""Settings of TRL's RLOO trainer alone."""


def map_trl_rloo(run: ParsedRun) -> dict[str, Any]:
    """Return the settings of GRPO that TRL's RLOO trainer stands for. Raises: ConfigError for what has none."""
    if parse_number(run.settings.get("normalize_advantages", False)):
        raise run.make_value_error("normalize_advantages", True, "false: advantages are not scaled over the batch")
    if not is_null(run.settings.get("reward_clip_range")):
        raise run.make_value_error(
            "reward_clip_range", run.settings["reward_clip_range"], "none: clip in your function"
        )
    defaults = {"beta": 0.05, "num_generations": 2}
    settings: dict[str, Any] = {name: value for name, value in defaults.items() if name not in run.settings}
    settings |= dict.fromkeys(("loss_type", "advantage_estimator"), "rloo")
    settings |= dict.fromkeys(("scale_rewards", "importance_correction"), "none")
    return settings | ({"kl_in_reward": True} if parse_number(run.settings.get("beta", defaults["beta"])) else {})


def _map_rollouts(run: ParsedRun, name: str, value: Any) -> MappedSettings:
    """Map settings of GRPO: loss, rewards and rollout engine.

    Raises: ConfigError for another loss: the run would learn something else.
    """
    is_cross_entropy = isinstance(value, str | None) and value in CROSS_ENTROPY
    if name == "loss_type" and run.method == "sft" and name not in run.unset and not is_cross_entropy:
        expected = "nll (cross-entropy), the only loss of sft: remove the setting to train with that"
        raise run.make_value_error(name, value, expected)
    if name == "loss_type" and run.method != "grpo":
        return None
    if name == "loss_type" and value == "grpo" and _is_gspo(run):
        return {"loss_type": "gspo"}
    if name in OF_TRL_RLOO and run.method == "grpo":
        return {}  # read by `map_trl_rloo`
    if name in ("advantage_estimator", "kl_in_reward") and run.method == "grpo":
        own = {"advantage_estimator": value} if name == "advantage_estimator" else {}
        in_reward = parse_number(run.settings.get("kl_in_reward", run.settings.get("advantage_estimator") != "grpo"))
        beta = parse_number(run.settings.get("beta", GRPO_DEFAULTS.get(run.program, {}).get("beta", 0)))
        return own | ({"kl_in_reward": True} if in_reward and beta else {})
    if name == "importance_sampling_level":
        return {"token": {}, "sequence": {"loss_type": "gspo"} if _is_gspo(run) else None}.get(str(value))
    is_uncorrected = parse_number(run.settings.get("vllm_importance_sampling_correction")) is False
    if name.endswith("_importance_sampling_mode"):
        if is_uncorrected:
            return {}  # the correction is off, so its mode has no effect
        if is_null(value):
            return {"importance_correction": "none"}
    if name == "vllm_importance_sampling_clip_min" and (is_uncorrected or is_null(value)):
        return {}
    if name == "scale_rewards" and (value is None or isinstance(value, bool)):
        return {"scale_rewards": "group" if value else "none"}
    if name == "reward_weights":
        names = [str(item) for item in as_list(run.settings.get("reward_funcs") or [])]
        weights = [parse_number(item) for item in as_list(value)]
        if not all(isinstance(item, int | float) for item in weights):
            raise run.make_value_error(name, value, "numbers")
        if _has_unmapped_reward(run.program, names):
            has_weights_per_function = len(weights) == len(names) and any(
                item in REWARDS.get(run.program, {}) for item in names
            )
            return {} if has_weights_per_function else None
    if name == "soft_cache_length" and "soft_overlong" not in as_list(run.settings.get("reward_funcs")):
        return {}  # only soft_overlong reads it
    if name == "vllm_device":
        devices = [str(item).removeprefix("cuda:") for item in as_list(value)]
        return {"vllm_devices": ",".join(devices)} if all(item.isdecimal() for item in devices) else None
    if name == "sleep_level":
        return {"vllm_sleep": True} if parse_number(value) in (1, 2) else {}
    return ...


def _map_method_and_sharding(run: ParsedRun, name: str, value: Any) -> MappedSettings:
    """Map settings of the method, sharding and memory saving."""
    if name == "task_type" and (run.method != "sft" or str(value).lower() == "causal_lm"):
        return {}  # carried as the method
    if name in FSDP_SETTINGS:
        config = run.settings.get("fsdp_config")
        settings = {**run.settings, "fsdp_config": _read_fsdp_config(run, config)} if config else run.settings
        if name == "fsdp_config" and isinstance(settings["fsdp_config"], str):
            return None  # the file is missing
        sharding = map_fsdp_settings(settings, is_config_enough=run.program == "axolotl")
        return sharding or (None if value and name != "use_fsdp" else {})
    if name in DEEPSPEED_KEYS:
        return {"deepspeed": value} if value else {}
    if name == "gradient_checkpointing" and isinstance(value, str):
        return {"gradient_checkpointing": True}
    return ...


def _read_fsdp_config(run: ParsedRun, value: Any) -> Any:
    """Return the FSDP settings, given as a mapping, as JSON or as a file name; the name itself if the file is missing.

    Raises: ConfigError for invalid JSON.
    """
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("{"):
        path = resolve_path(run.base, value)
        if not path.is_file():
            return value
        value = path.read_text("utf-8", errors="replace")
    return _parse_mapping(run, "fsdp_config", value.strip()) or {}


def join_reward_models(run: ParsedRun) -> None:
    """Put reward models that have a setting of their own among the reward functions, in the program's order."""
    for name in REWARD_MODELS:
        value = run.settings.pop(name, None)
        if is_null(value):
            continue
        models = [f"{OF_MODEL}{model}" for model in as_list(value)]
        functions = as_list(run.settings.get("reward_funcs") or [])
        run.settings["reward_funcs"] = [*models, *functions] if run.program == "TRL" else [*functions, *models]


def map_rewards(program: str, names: list[str], weights: list[Any], file: str) -> tuple[list[Any], list[str]]:
    """Return items of reward_funcs, and the names of the rewards that Surefoot does not have.

    Beside others, such a reward becomes the function of its name in `file`, so the run does not start until it is
    there. `weights`: one per name. Each item carries its own weight if any reward is not known.
    """
    models = {name: f"{OF_MODEL}{name.removeprefix(OF_MODEL)}" for name in names if _is_model(program, name)}
    rewards = REWARDS.get(program, {}) | models
    unmapped = [name for name in names if name not in rewards and name not in LENGTH_REWARDS]
    own = {name: {"func": f"{file}:{name.rpartition('.')[2]}"} for name in unmapped if len(unmapped) < len(names)}
    rewards |= own
    are_numbers = all(isinstance(parse_number(weight), int | float) for weight in weights)
    if len(weights) != len(names) or not are_numbers or not _has_unmapped_reward(program, names):
        return [rewards[name] for name in names if name in rewards], unmapped
    pairs = zip(names, map(parse_number, weights), strict=True)
    items = [(rewards[name], float(weight)) for name, weight in pairs if name in rewards]
    return [
        {**({"func": item} if isinstance(item, str) else item), "weight": weight} for item, weight in items
    ], unmapped


def _has_unmapped_reward(program: str, names: list[str]) -> bool:
    return any(name not in REWARDS.get(program, {}) and not _is_model(program, name) for name in names)


def _is_model(program: str, name: str) -> bool:
    """Return whether a reward is a model: TRL's trainers take its name in the place of a function."""
    return name.startswith(OF_MODEL) or (program == "TRL" and "/" in name and ".py" not in name)


def _is_gspo(run: ParsedRun) -> bool:
    """Return whether importance ratios are per sequence and the loss is `grpo` (so no loss that defines its own)."""
    is_sequence_level = run.settings.get("importance_sampling_level") == "sequence"
    default = GRPO_DEFAULTS.get(run.program, {}).get("loss_type", known_fields()["loss_type"].default)
    return is_sequence_level and run.settings.get("loss_type", default) == "grpo"


def _parse_mapping(run: ParsedRun, name: str, value: Any) -> dict[str, Any] | None:
    """Return a mapping, parsed from JSON if it is a string; None for any other value.

    Raises: ConfigError for invalid JSON.
    """
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise run.make_value_error(name, value, "a mapping in JSON") from error
    return value if isinstance(value, dict) else None


def can_be_null(name: str) -> bool:
    """Return whether null is a value of its own for this setting, distinct from its default."""
    field = known_fields().get(name)
    return field is not None and field.default is not None and "None" in str(field.annotation)
