"""Conversion of another program's run to a run.yaml, with the settings that were left out and the findings."""

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from surefoot.config.aliases import NOT_HERE
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.deepspeed import PRESETS, read_deepspeed
from surefoot.config.methods import known_fields
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.migrate.drop_invalid import drop_invalid_settings
from surefoot.migrate.field_map import TRACKERS, as_list, can_be_null, is_null, map_rewards, map_setting, parse_number
from surefoot.migrate.lint import MOE_NAME, lint
from surefoot.migrate.output import PATHS, Imported
from surefoot.migrate.parse_input import ParsedRun, resolve_path
from surefoot.migrate.peer_tables import (
    DEFAULT_NOTES,
    DEFAULTS,
    GRPO_DEFAULTS,
    IGNORED,
    IGNORED_IF,
    LORA_ALPHA_FACTOR,
    SWIFT_BATCH,
    TRL_LORA,
    TRL_WITH_VLLM,
    UNCUT_PROMPTS,
    UNSUPPORTED,
    UNSUPPORTED_GRPO,
    UNSUPPORTED_VALUES,
    VLLM_FLAGS,
    VLLM_OPTIONS,
)
from surefoot.migrate.sources import MODELSCOPE_NOTE, is_modelscope_id, list_axolotl_left_out, list_swift_left_out

VARIABLES = {
    "NPROC_PER_NODE": "nproc_per_node",
    "NNODES": "nnodes",
    "MAX_PIXELS": "max_pixels",
    "MIN_PIXELS": "min_pixels",
}
SECRET_VARIABLE = re.compile("(?i)(key|token|secret|password)$")
SECRET_OPTION = re.compile("(?i)((api|access|auth|hub|hf|wandb|swanlab|trackio|mlflow).*(key|token)|secret|password)$")
LIBRARY_VARIABLES = re.compile(
    "ACCELERATE_|CUDA_|GLOO_|HF_|MASTER_|MKL_|MLFLOW_|NCCL_|NUMEXPR_|OMP_|OPENBLAS_|PYTORCH_|RDZV_|SWANLAB_|TOKENIZERS_|"
    "TORCH|TRANSFORMERS_|TRITON_|UCX_|VLLM_|WANDB_|LD_LIBRARY_PATH|PATH$|PYTHONPATH"
)
"""Environment variables read by libraries that Surefoot uses too."""
LAUNCHER_VARIABLES = frozenset({"NODE_RANK", "FORCE_TORCHRUN", "GPUS_PER_NODE", "RANK"})
"""Variables that scripts set for a launcher. Surefoot needs none: each machine detects its own rank."""
USUALLY_TRUE = frozenset({"freeze_aligner", "freeze_multi_modal_projector", "completion_only_loss"})

STAGE_NAME = re.compile(r"(?i)(?:zero|(?<![a-z])z|stage)[-_]?([0-3])(?!\d)")
"""ZeRO stage in the name of a DeepSpeed config: zero3, ds_z3_config.json, stage3.json."""
NO_OFFLOAD = re.compile(r"(?i)(?:no|without|non)[-_]?offload")
LORA_SETTINGS = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
EVALUATION_SETTINGS = ("eval_dataset", "eval_fraction")
ENGINE_SETTINGS = ("vllm_server_host", "vllm_server_port", "vllm_mode")
"""Peer settings that `_choose_rollout_engine` reads."""
UNKNOWN_VALUE = "the script does not say what stands there"


@dataclass
class _Draft:
    """A conversion in progress: the parsed run and the settings derived from it."""

    run: ParsedRun
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Surefoot setting -> (value, its origin)."""
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def get_value(self, name: str, default: Any = None) -> Any:
        return self.settings.get(name, (default, ""))[0]

    def leave_out(self, name: str, why: str) -> None:
        """Remove a Surefoot setting if it is present, and record the reason."""
        if name in self.settings:
            self.left_out[f"{name} = {self.settings.pop(name)[0]}"] = why

    @property
    def has_evaluation(self) -> bool:
        return not self.settings.keys().isdisjoint(EVALUATION_SETTINGS)


def convert(run: ParsedRun) -> Imported:
    """Convert a parsed run to Surefoot's settings.

    Raises: ConfigError if the settings make no valid run: an invalid value, settings that exclude each other.
    """
    draft = _Draft(run)
    _start_draft(draft)
    for name, value in run.settings.items():
        _carry_setting(draft, name, value)
    _carry_variables(draft)
    _choose_rollout_engine(draft)
    _drop_overridden_settings(draft)
    _choose_eval_dataset(draft)
    for name, value in _collect_defaults(run, draft.settings).items():
        draft.settings.setdefault(name, (value, f"default of {run.program}"))
    _note_peer_defaults(draft)
    _choose_trained_modules(draft)
    _leave_out_expert_dropout(draft)
    _note_routers(draft)
    _leave_out_redundant_evaluation(draft)
    _check_deepspeed_config(draft)
    _set_rendezvous_endpoint(draft)
    draft.settings.setdefault("output_dir", ("run", "nothing was said"))
    is_fp16 = any(": fp16.enabled" in name for name in draft.left_out)
    findings = list(lint(run, is_zero3=_is_zero3(draft), is_fp16=is_fp16))
    try:
        draft.left_out |= drop_invalid_settings(run, draft.settings)
    except ConfigError as error:  # a run that is refused needs its findings most
        raise ConfigError("\n\n".join([str(error), *(finding.as_text() for finding in findings)])) from error
    _note_missing_settings(draft)
    return _build_imported_run(draft, findings)


def _start_draft(draft: _Draft) -> None:
    """Record the method, and leave out the launcher's options and the other commands of the script."""
    run = draft.run
    draft.left_out |= {f"{name} = {'(not shown)' if SECRET_OPTION.search(name) else value}": "an option of the launcher"
                       for name, value in run.launcher.items()}  # fmt: skip
    draft.left_out |= dict.fromkeys(run.other_commands, "another command of the script: import it by itself")
    draft.left_out |= run.notes
    if run.method == "pt":  # pretraining on plain text trains every token
        run.method = "sft"
        draft.settings["train_on"] = ("all", f"stage pt of {run.program}")
        if run.program == "LLaMA-Factory" and "packing" not in run.settings:
            draft.settings["packing"] = (True, f"stage pt of {run.program}")
    if run.method == "grpo":
        draft.settings["method"] = ("grpo", run.program)
    elif run.method != "sft":
        draft.left_out[f"method = {run.method}"] = (
            f"only sft and grpo are available; `method: {run.method}` keeps this from being trained as one of them"
        )
        draft.settings["method"] = (run.method, "not available yet")


def _carry_setting(draft: _Draft, name: str, value: Any) -> None:
    """Map one peer setting to Surefoot's, or record it as left out (with the reason) or as unknown."""
    run, left_out = draft.run, draft.left_out
    if value is None and run.program == "axolotl" and name != "datasets":  # axolotl ignores keys without a value
        return
    peer_setting = f"{name} = {value}" if name else str(value)
    peer_setting = f"{name} = (not shown)" if SECRET_OPTION.search(name) else peer_setting
    origin = f"{name} of {run.locations.get(name, run.program)}"
    if name == "reward_funcs":
        names = [str(reward) for reward in as_list(value)]
        rewards, unmapped = map_rewards(run.program, names, as_list(run.settings.get("reward_weights") or []))
        draft.settings |= {name: (rewards, origin)} if rewards else {}
        left_out |= {f"{name} = {reward}": "a function of yours: name it as file.py:function" for reward in unmapped}
        return
    left_out |= _list_left_out_parts(run, name, value, peer_setting)
    settings = map_setting(run, name, value)
    if name in run.unset:
        left_out[peer_setting] = UNKNOWN_VALUE
        settings = {key: item for key, item in (settings or {}).items() if key in (*PATHS, "output_dir")}
    if settings is None:
        _record_unmapped_setting(draft, name, value, peer_setting)
        return
    for field_name, field_value in settings.items():
        if field_value is None and not can_be_null(field_name) and known_fields()[field_name].default is not None:
            left_out[peer_setting] = f"{field_name} must be said here"
        else:
            _note_overruled_setting(draft, field_name, field_value, peer_setting)
            draft.settings[field_name] = (field_value, origin)


def _note_overruled_setting(draft: _Draft, field_name: str, field_value: Any, peer_setting: str) -> None:
    """Record the earlier peer setting that `peer_setting` overrides, if it set another value for the same field."""
    value, origin = draft.settings.get(field_name, (field_value, ""))
    if value != field_value:
        earlier = origin.partition(" of ")[0]
        draft.left_out[f"{earlier} = {draft.run.settings.get(earlier, value)}"] = (
            f"{peer_setting} is taken in its place"
        )


def _list_left_out_parts(run: ParsedRun, name: str, value: Any, peer_setting: str) -> dict[str, str]:
    """Return the parts of a peer setting that are lost although the rest is carried, each with its reason."""
    if name == "datasets" and run.program == "axolotl":
        return list_axolotl_left_out(run, value)
    if name in ("dataset", "val_dataset") and run.program == "ms-swift":
        return list_swift_left_out(name, value)
    if name == "max_length" and run.program == "TRL" and is_null(value):
        why = "there always is a limit here, 2048 tokens unless you set it; longer rows are named, and none cut"
        return {peer_setting: why}
    if name in ("model", "model_id_or_path") and is_modelscope_id(str(value)):
        return {peer_setting: MODELSCOPE_NOTE}
    if name == "report_to":
        unsupported = [tracker for tracker in as_list(value) if tracker not in (*TRACKERS, "none", None)]
        return {f"{name} = {tracker}": f"there are {', '.join(TRACKERS)}" for tracker in unsupported}
    return {peer_setting: UNSUPPORTED["load_in_4bit"]} if name == "adapter" and value == "qlora" else {}


def _record_unmapped_setting(draft: _Draft, name: str, value: Any, peer_setting: str) -> None:
    """Record a peer setting without a counterpart: as left out, as ignored, or as unknown."""
    left_out = draft.left_out
    if name in UNSUPPORTED_GRPO:
        left_out[peer_setting] = "of rollouts"
    elif name in NOT_HERE:
        if value is True or value not in (False, None, 1, "1"):
            left_out[peer_setting] = NOT_HERE[name]
    elif name in UNSUPPORTED_VALUES:
        left_out[peer_setting] = UNSUPPORTED_VALUES[name]
    elif name in UNSUPPORTED:
        default_values = (True, None) if name in USUALLY_TRUE else (False, None)
        left_out |= {} if value in default_values else {peer_setting: UNSUPPORTED[name]}
    elif name in VLLM_OPTIONS or name in VLLM_FLAGS or name in ENGINE_SETTINGS:
        pass
    elif name in IGNORED_IF:
        ignored_values, why = IGNORED_IF[name]
        left_out |= {} if isinstance(value, str | bool | None) and value in ignored_values else {peer_setting: why}
    elif name not in IGNORED:
        draft.unknown.append(peer_setting)


def _carry_variables(draft: _Draft) -> None:
    """Carry the settings that peers read from environment variables.

    Raises: ConfigError for a value that is no whole number.
    """
    for variable, name in VARIABLES.items():
        if variable not in draft.run.environment:
            continue
        count = draft.run.environment[variable]
        if variable in draft.run.unset:
            draft.left_out[f"{variable} = {count}"] = UNKNOWN_VALUE
        elif not count.isdecimal():
            raise ConfigError(f"{variable}={count} is no whole number.")
        else:
            draft.settings.setdefault(name, (int(count), variable))


def _choose_rollout_engine(draft: _Draft) -> None:
    """Set `vllm_server` for a server started elsewhere, or `vllm_args` for the server that this run starts."""
    run, options = draft.run, draft.run.settings
    if draft.get_value("rollout_engine") == "vllm" and "vllm_server" not in draft.settings:
        address_setting = next(
            (name for name in ("vllm_server_host", "vllm_server_port") if options.get(name)), "vllm_mode"
        )
        if options.get("vllm_mode") == "server" or (
            address_setting != "vllm_mode" and options.get("vllm_mode") != "colocate"
        ):
            host, port = (
                options.get("vllm_server_host") or "127.0.0.1",
                options.get("vllm_server_port") or 8000,
            )
            address = f"http://{as_list(host)[0]}:{as_list(port)[0]}"
            draft.settings["vllm_server"] = (address, f"{address_setting} of {run.program}")
            draft.left_out |= {f"{name} = {extra}": "one server makes all completions"
                               for name in ("vllm_server_host", "vllm_server_port")
                               for extra in as_list(options.get(name))[1:]}  # fmt: skip
        else:
            if run.program == "TRL":
                options = {"vllm_gpu_memory_utilization": 0.3, **options}  # TRL's default
            options = {
                name: value for name, value in options.items() if not _leave_out_short_context(draft, name, value)
            }
            words = [
                f"--{option}={options[name]}" for name, option in VLLM_OPTIONS.items() if options.get(name) is not None
            ]
            words += [f"--{option}" for name, option in VLLM_FLAGS.items() if options.get(name) is True]
            draft.settings |= {"vllm_args": (words, f"vllm_... of {run.program}")} if words else {}
    if "vllm_server" in draft.settings:
        draft.left_out[f"the server at {draft.get_value('vllm_server')}"] = (
            "it is to be `vllm serve`, started as docs/grpo.md says: `swift rollout` and `trl vllm-serve` speak "
            "otherwise"
        )
    if "vllm_args" not in draft.settings:
        server_settings = [name for name in run.settings if name in VLLM_OPTIONS or name in VLLM_FLAGS]
        why = "of a server that the run starts itself"
        draft.left_out |= {f"{name} = {run.settings[name]}": why for name in server_settings}


def _leave_out_short_context(draft: _Draft, name: str, value: Any) -> bool:
    """Leave out a server context shorter than prompt plus completion (tokens). Return whether it was left out."""
    fields, defaults = known_fields(), _collect_defaults(draft.run, draft.settings)
    default_lengths = {
        field: defaults.get(field, fields[field].default) for field in ("max_length", "max_completion_length")
    }
    prompt = draft.get_value("max_prompt_length", defaults.get("max_prompt_length")) or draft.get_value(
        "max_length", default_lengths["max_length"]
    )
    completion = draft.get_value("max_completion_length", default_lengths["max_completion_length"])
    lengths = (parse_number(value), prompt, completion)
    if VLLM_OPTIONS.get(name) != "max-model-len" or not all(isinstance(length, int) for length in lengths):
        return False
    if lengths[0] >= prompt + completion:
        return False
    draft.left_out[f"{name} = {value}"] = f"prompts of {prompt} and completions of {completion} tokens need more"
    return True


def _drop_overridden_settings(draft: _Draft) -> None:
    """Leave out the setting that the peer programs ignore when two settings control the same thing."""
    for winner, other in (("max_steps", "num_train_epochs"), ("warmup_steps", "warmup_ratio")):
        if {winner, other} <= draft.settings.keys():
            value, origin = draft.settings.pop(other)
            draft.left_out[f"{origin.partition(' of ')[0]} = {value}"] = f"{winner} overrides it, there as here"


def _choose_eval_dataset(draft: _Draft) -> None:
    """Choose the evaluation data: none if the strategy is `no`; else, for TRL, the `test` split of its dataset."""
    run, options = draft.run, draft.run.settings
    strategies = [options[name] for name in ("eval_strategy", "evaluation_strategy") if name in options]
    if strategies and strategies[-1] in ("no", False):
        for name in (*EVALUATION_SETTINGS, "eval_steps"):
            draft.leave_out(name, "eval_strategy: no")
        return
    if run.program != "TRL" or not isinstance(draft.get_value("dataset"), str):
        return
    name, origin = draft.settings["dataset"]
    train, test, subset = (options.get(f"dataset_{part}") for part in ("train_split", "test_split", "config"))

    def make_source(split: Any) -> dict[str, Any]:
        return {"path": name, **({"subset": subset} if subset else {}), **({"split": split} if split else {})}

    if train or subset:
        draft.settings["dataset"] = ([make_source(train)], origin)
    if strategies and not draft.has_evaluation:
        draft.settings["eval_dataset"] = (make_source(test or "test"), f"dataset_test_split of {run.program}")


def _note_peer_defaults(draft: _Draft) -> None:
    """Record the peer defaults that no Surefoot setting expresses."""
    explicit = {name for name, (_, origin) in draft.settings.items() if not origin.startswith("default of")}
    explicit |= {"nproc_per_node"} & draft.settings.keys()
    notes = DEFAULT_NOTES.get(draft.run.program, {})
    if draft.run.method != "sft":
        notes = {name: why for name, why in notes.items() if name == "nproc_per_node"}
        if not _has_prompt_limit(draft.run, draft.settings):
            notes["max_prompt_length"] = UNCUT_PROMPTS
    if notes:
        explicit |= {"save_steps"} if "saves_per_epoch" in draft.run.settings else set()
        draft.left_out |= {f"{name}, which was not given": why for name, why in notes.items() if name not in explicit}


def _choose_trained_modules(draft: _Draft) -> None:
    """Decide whether the vision tower is trained, and leave out LoRA settings in full training."""
    is_full = draft.get_value("tuning") == "full"
    freeze_tower = draft.settings.pop("freeze_vision_tower", None)
    for name in ("freeze_llm", "freeze_language_model"):
        if parse_number(draft.run.settings.get(name)) is True:
            _train_vision_tower_only(
                draft, name, is_full=is_full, trains_tower=freeze_tower is not None and not freeze_tower[0]
            )
            return
    if freeze_tower is not None and is_full:
        draft.settings["freeze_vision_tower"] = freeze_tower
    elif freeze_tower is not None and not freeze_tower[0]:  # with LoRA, peers adapt an unfrozen tower
        draft.settings["target_modules"] = (
            [*as_list(draft.get_value("target_modules", "all")), "vision"],
            freeze_tower[1],
        )
    for name in LORA_SETTINGS if is_full else ():
        value, origin = draft.settings.pop(name, (None, "default of nobody"))
        if not origin.startswith("default of"):
            draft.left_out[f"{name} = {value}"] = "nothing is adapted in full training"


def _train_vision_tower_only(draft: _Draft, name: str, *, is_full: bool, trains_tower: bool) -> None:
    """Set LoRA to adapt the vision tower only.

    Raises: ConfigError for full training, or if what the run trains is not the tower.
    """
    where = draft.run.locations.get(name, draft.run.program)
    if is_full or not trains_tower:
        raise ConfigError(
            f"{name}=True ({where}): nothing but the vision tower or what joins it to the language model is trained "
            "there. Here full training always trains the language model. LoRA can adapt the tower alone: tuning: lora, "
            "target_modules: [vision]."
        )
    draft.settings["target_modules"] = (["vision"], f"{name} of {where}")


def _note_routers(draft: _Draft) -> None:
    """Record that `all` linear layers of a Mixture-of-Experts include the routers in some peers."""
    name = str(draft.get_value("model", ""))
    targets = as_list(draft.get_value("target_modules", ""))
    if draft.get_value("tuning") == "lora" and MOE_NAME.search(name) and "all" in targets and "router" not in targets:
        draft.left_out["routers, among all linear layers"] = (
            "with transformers 4, where they are linear layers, theirs adapts them, too; for that write "
            "target_modules: [all, router]"
        )


def _leave_out_expert_dropout(draft: _Draft) -> None:
    """Leave out LoRA dropout if experts are adapted: as in PEFT, LoRA on stacked experts has no dropout."""
    targets = as_list(draft.get_value("target_modules", "all"))
    is_moe = MOE_NAME.search(str(draft.get_value("model", "")))
    if is_moe and draft.get_value("lora_dropout") and {"all", "experts"} & {str(target) for target in targets}:
        draft.leave_out("lora_dropout", "not available where experts are adapted: they are one grouped product")


def _leave_out_redundant_evaluation(draft: _Draft) -> None:
    """Leave out evaluation settings that are redundant or have no data, and data settings GRPO does not have."""
    settings, program = draft.settings, draft.run.program
    if "eval_dataset" in settings:
        draft.leave_out("eval_fraction", "the evaluation data are named")
    if draft.has_evaluation and program == "ms-swift" and "save_steps" in settings:
        settings.setdefault("eval_steps", (draft.get_value("save_steps"), f"default of {program}"))
    if not draft.has_evaluation:
        draft.leave_out("eval_steps", "there is nothing to evaluate on")
    if draft.run.method == "grpo":
        for name in ("packing", "train_on"):
            draft.leave_out(name, "not available with method: grpo")


def _check_deepspeed_config(draft: _Draft) -> None:
    """Record the entries of the DeepSpeed config that are not carried, or the config itself if its file is missing.

    Raises: ConfigError for a file that is no DeepSpeed config.
    """
    run = draft.run
    for name in DEEPSPEED_KEYS & draft.settings.keys():
        value, origin = draft.settings[name]
        if _is_config_readable(run, value):
            for entry in read_deepspeed(_resolve_config_path(run, value), run.base, origin)[1]:
                draft.left_out[f"{name}: {entry}"] = "DeepSpeed's own, without a counterpart"
            continue
        del draft.settings[name]  # a run whose config file is missing would not start
        why = f"the file is not at {run.base}: what it says could not be looked at"
        stage = STAGE_NAME.search(Path(str(value)).name)
        if stage is not None:
            draft.settings.setdefault("zero_stage", (int(stage[1]), f"the name of {Path(str(value)).name}"))
            why += f", and zero_stage is {stage[1]} by its name"
        if "offload" in str(value).lower() and not NO_OFFLOAD.search(str(value)):
            draft.settings.setdefault("offload", ("cpu", f"the name of {Path(str(value)).name}"))
        draft.left_out[f"{name} = {value}"] = why


def _set_rendezvous_endpoint(draft: _Draft) -> None:
    run = draft.run
    if draft.get_value("nnodes", 1) not in (1, None) and "rdzv_endpoint" not in draft.settings:
        host = run.rendezvous.get("host") or run.environment.get("MASTER_ADDR") or "HOST_OF_THE_FIRST_MACHINE"
        port = run.rendezvous.get("port") or run.environment.get("MASTER_PORT") or 29500
        draft.settings["rdzv_endpoint"] = (run.rendezvous.get("endpoint") or f"{host}:{port}", "where machines meet")


def _note_missing_settings(draft: _Draft) -> None:
    rewards = ("reward_funcs",) if draft.run.method == "grpo" else ()
    for name in ("model", "dataset", *rewards):
        if name not in draft.settings:
            draft.left_out[f"{name}, which was not given"] = "write it into the file: nothing starts without it"


def _build_imported_run(draft: _Draft, findings: list[Finding]) -> Imported:
    """Return the settings in the order of the documentation, and the variables that libraries read themselves."""
    run, settings = draft.run, draft.settings
    order = [name for name in known_fields() if name in settings] + [
        name for name in settings if name in DEEPSPEED_KEYS
    ]
    ordered = {name: settings[name] for name in order if settings[name][0] is not None or can_be_null(name)}
    handled = LAUNCHER_VARIABLES | VARIABLES.keys()
    variables = {name: value for name, value in run.environment.items() if name not in handled}
    shown = {name: "(not shown)" if SECRET_VARIABLE.search(name) else value
             for name, value in variables.items() if LIBRARY_VARIABLES.match(name)}  # fmt: skip
    unknown = [*draft.unknown, *(f"the variable {name}" for name in variables if name not in shown)]
    return Imported(run.program, ordered, draft.left_out, unknown, findings, shown)


def _is_zero3(draft: _Draft) -> bool:
    """Return whether the run uses ZeRO stage 3: by its DeepSpeed config, or by the file's name if that is missing."""
    deepspeed = _read_deepspeed_settings(draft.run, draft.settings)
    return bool(deepspeed.get("zero_stage", draft.get_value("zero_stage")) == 3)


def _is_config_readable(run: ParsedRun, config: Any) -> bool:
    """Return whether the DeepSpeed config is given inline, as a preset or as a file that exists."""
    return not isinstance(config, str) or config in PRESETS or resolve_path(run.base, config).is_file()


def _resolve_config_path(run: ParsedRun, config: Any) -> Any:
    """Return the path of a DeepSpeed config file with its folder; presets and inline configs unchanged."""
    return str(resolve_path(run.base, config)) if isinstance(config, str) and config not in PRESETS else config


def _has_prompt_limit(run: ParsedRun, settings: dict[str, tuple[Any, str]]) -> bool:
    """Return whether a GRPO run sets the length at which prompts are truncated."""
    limits = ("max_prompt_length",) if run.program == "TRL" else ("max_prompt_length", "max_length")
    return run.program not in GRPO_DEFAULTS or any(name in settings for name in limits)


def _collect_defaults(run: ParsedRun, settings: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return the peer program's defaults for this run, as Surefoot settings."""
    defaults = dict(DEFAULTS[run.program])
    if run.program == "TRL" and settings.get("tuning", ("full", ""))[0] == "lora":
        defaults |= TRL_LORA
    if run.method == "grpo":
        sft_settings = ("max_length", "train_on") if run.program == "TRL" else ()
        defaults = {name: value for name, value in defaults.items() if name not in sft_settings}
        defaults |= GRPO_DEFAULTS.get(run.program, {})
        if not _has_prompt_limit(run, settings):
            defaults["truncation"] = "error"
        if run.program == "TRL" and settings.get("rollout_engine", ("", ""))[0] == "vllm":
            defaults |= TRL_WITH_VLLM
        if settings.get("importance_correction", ("", ""))[0] == "none":
            defaults.pop("importance_cap", None)
    factor = LORA_ALPHA_FACTOR.get(run.program)
    rank = settings.get("lora_rank", (None, ""))[0]
    if factor and isinstance(rank, int):
        defaults["lora_alpha"] = factor * rank
    tuning = settings.get("tuning", (defaults.get("tuning"), ""))[0]
    if tuning == "full" and run.program == "ms-swift":
        defaults["learning_rate"] = 1e-5
    if run.program == "ms-swift" and run.method == "sft":
        names = ("per_device_train_batch_size", "nproc_per_node", "nnodes")
        counts = [settings.get(name, (1, ""))[0] for name in names]
        if all(isinstance(count, int) and count > 0 for count in counts):
            defaults["gradient_accumulation_steps"] = -(-SWIFT_BATCH // prod(counts))
    if "max_steps" in settings:
        defaults.pop("num_train_epochs", None)
    if run.program == "TRL" and is_null(run.settings.get("max_length", 0)):
        defaults.pop("max_length", None)
    if str(run.settings.get("dataset_dir")).upper().startswith(("ONLINE", "REMOTE:")):
        defaults.pop("dataset_dir", None)
    if {"warmup_steps", "warmup_ratio"} & settings.keys():
        defaults.pop("warmup_ratio", None)
    if "global_batch_size" in settings:
        defaults.pop("gradient_accumulation_steps", None)
    if run.program == "LLaMA-Factory" and "vl" in str(run.settings.get("template", "")):
        defaults |= {"max_pixels": 768 * 768, "min_pixels": 32 * 32}
    visible = run.environment.get("CUDA_VISIBLE_DEVICES")
    if run.program in ("LLaMA-Factory", "axolotl") and visible:  # these two start one process per visible GPU
        defaults["nproc_per_node"] = len(visible.split(","))
    if run.method == "grpo":
        defaults.pop("lora_dropout", None)  # Surefoot's GRPO refuses LoRA dropout
    for name in _read_deepspeed_settings(run, settings):
        defaults.pop(name, None)
    return defaults


def _read_deepspeed_settings(run: ParsedRun, settings: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return the settings that the DeepSpeed config sets; nothing for a file that is missing."""
    deepspeed: dict[str, Any] = {}
    for key in DEEPSPEED_KEYS & settings.keys():
        value, origin = settings[key]
        if _is_config_readable(run, value):
            deepspeed |= {
                name: setting
                for name, setting, _ in read_deepspeed(_resolve_config_path(run, value), run.base, origin)[0]
            }
    return deepspeed
