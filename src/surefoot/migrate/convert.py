"""Conversion of another program's run to a run.yaml, with the settings that were left out and the findings."""

import re
from math import ceil
from pathlib import Path
from typing import Any

from surefoot.config.aliases import NOT_HERE
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.methods import known_fields, method_names
from surefoot.errors import ConfigError
from surefoot.migrate import megatron
from surefoot.migrate.axolotl_sources import are_texts, list_axolotl_left_out
from surefoot.migrate.distillation import PEER_METHODS
from surefoot.migrate.drop_invalid import drop_invalid_settings
from surefoot.migrate.field_map import (
    TRACKERS,
    can_be_null,
    join_reward_models,
    map_rewards,
    map_setting,
    map_trl_rloo,
    system_file,
)
from surefoot.migrate.imported_run import PATHS, ImportedRun
from surefoot.migrate.lint import lint
from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.peer_defaults import collect_defaults, note_peer_defaults
from surefoot.migrate.peer_tables import (
    IGNORED,
    IGNORED_IF,
    UNSUPPORTED,
    UNSUPPORTED_GRPO,
    UNSUPPORTED_VALUES,
    VLLM_FLAGS,
    VLLM_OPTIONS,
)
from surefoot.migrate.preferences import LIMITS, METHODS, map_cpo
from surefoot.migrate.quantization import note_quantization
from surefoot.migrate.rollout_engine import choose_rollout_engine
from surefoot.migrate.schedules import note_schedule
from surefoot.migrate.sharding import check_deepspeed_config, read_deepspeed_settings
from surefoot.migrate.swift_sources import list_swift_left_out, note_hub_of_model
from surefoot.migrate.trained_modules import choose_linear_targets, choose_trained_modules, leave_out_expert_dropout
from surefoot.migrate.values import as_list, is_null, parse_number

VARIABLES = {
    "NPROC_PER_NODE": "nproc_per_node",
    "NNODES": "nnodes",
    "MAX_PIXELS": "max_pixels",
    "MIN_PIXELS": "min_pixels",
}
USE_HF = "USE_HF"
"""Variable of ms-swift: ids are those of huggingface.co."""
SECRET_VARIABLE = re.compile("(?i)(key|token|secret|password)$")
SECRET_OPTION = re.compile("(?i)((api|access|auth|hub|hf|wandb|swanlab|trackio|mlflow).*(key|token)|secret|password)$")
LIBRARY_VARIABLES = re.compile(
    "ACCELERATE_|CUDA_|GLOO_|HF_|MASTER_|MKL_|MLFLOW_|NCCL_|NUMEXPR_|OMP_|OPENBLAS_|PYTORCH_|RDZV_|SWANLAB_|TOKENIZERS_|"
    "TORCH|TRANSFORMERS_|TRITON_|UCX_|VLLM_|WANDB_|LD_LIBRARY_PATH|PATH$|PYTHONPATH"
)
"""Environment variables read by libraries that Surefoot uses too."""
LAUNCHER_VARIABLES = frozenset({"NODE_RANK", "FORCE_TORCHRUN", "GPUS_PER_NODE", "RANK"})
"""Variables that scripts set for a launcher. Surefoot needs none: each machine detects its own rank."""
USUALLY_TRUE = frozenset({"freeze_aligner", "freeze_multi_modal_projector"})

OVERRIDES = (
    ("max_steps", "num_train_epochs"),
    ("warmup_steps", "warmup_ratio"),
    ("saves_per_epoch", "save_steps"),
    ("evals_per_epoch", "eval_steps"),
)
"""(setting, the one that peer programs ignore beside it)."""
SPLIT_TEXTS = {"train_on": "all", "truncation": "split"}
"""Settings of plain texts, each of which becomes as many samples as it needs."""
PACKED_TEXTS = {**SPLIT_TEXTS, "packing": True}
ENGINE_SETTINGS = ("vllm_server_host", "vllm_server_port", "vllm_mode")
"""Peer settings that `rollout_engine` reads."""
UNKNOWN_VALUE = "the script does not set this value"


def convert(run: ParsedRun) -> ImportedRun:
    """Convert a parsed run to Surefoot's settings.

    Raises: ConfigError if the settings make no valid run: an invalid value, settings that exclude each other.
    """
    imported = ImportedRun(run)
    _start_import(imported)
    for name, value in run.settings.items():
        _carry_setting(imported, name, value)
    _carry_variables(imported)
    choose_rollout_engine(imported)
    _drop_overridden_settings(imported)
    _choose_eval_dataset(imported)
    for name, value in collect_defaults(imported).items():
        imported.settings.setdefault(name, (value, f"default of {run.program}"))
    note_peer_defaults(imported)
    _resolve_shares_of_run(imported)
    _carry_max_samples(imported)
    choose_trained_modules(imported)
    choose_linear_targets(imported)
    leave_out_expert_dropout(imported)
    _leave_out_redundant_evaluation(imported)
    check_deepspeed_config(imported)
    _set_rendezvous_endpoint(imported)
    imported.settings.setdefault("output_dir", ("run", "not set by the run"))
    zero_stage = read_deepspeed_settings(imported).get("zero_stage", imported.get_value("zero_stage"))
    is_fp16 = any(": fp16.enabled" in name for name in imported.left_out)
    imported.findings = list(lint(run, is_zero3=zero_stage == 3 and not run.uses_megatron, is_fp16=is_fp16))
    try:
        if run.method in method_names():  # what is valid for another method is not known
            drop_invalid_settings(imported)
    except ConfigError as error:  # a run that is refused needs its findings most
        raise ConfigError("\n\n".join([str(error), *(finding.as_text() for finding in imported.findings)])) from error
    _note_missing_settings(imported)
    _sort_settings(imported)
    _list_variables(imported)
    return imported


def _start_import(imported: ImportedRun) -> None:
    """Record the method, and leave out the launcher's options and the other commands of the script."""
    run, left_out = imported.source, imported.left_out
    for name, value in run.launcher.items():
        left_out[f"{name} = {'(not shown)' if SECRET_OPTION.search(name) else value}"] = "an option of the launcher"
    left_out |= dict.fromkeys(run.other_commands, "another command of the script: import it separately")
    left_out |= run.notes
    if run.method == "pt":  # pretraining on plain text trains every token
        run.method = "sft"
        imported.settings["train_on"] = ("all", f"stage pt of {run.program}")
        if run.program == "LLaMA-Factory" and run.settings.get("packing", True):
            imported.settings |= {name: (value, f"stage pt of {run.program}") for name, value in PACKED_TEXTS.items()}
        elif run.program == "LLaMA-Factory":
            imported.settings["truncation"] = ("right", f"packing of {run.get_location('packing')}")
    if run.program == "axolotl" and are_texts(run.settings.get("datasets")):
        imported.settings |= {name: (value, "type: completion") for name, value in SPLIT_TEXTS.items()}
    if run.method == "rm":
        run.method = "reward"
    if run.method in PEER_METHODS:
        run.peer_method, run.method = run.method, "distill"
    if run.method in ("grpo", "rloo"):
        join_reward_models(run)
    if run.method == "dpo" and run.program == "LLaMA-Factory" and run.settings.get("pref_loss") == "orpo":
        run.method = "orpo"
        left_out["the average of ORPO's likelihood"] = (
            "LLaMA-Factory averages the tokens of each answer first, Surefoot those of the whole step"
        )
    if run.method == "rloo" and run.program == "TRL":
        run.method = "grpo"
        imported.settings |= {name: (value, "the RLOO trainer of TRL") for name, value in map_trl_rloo(run).items()}
    if run.method in ("cpo", "simpo"):
        imported.settings |= {name: (value, "the CPO trainer of TRL") for name, value in map_cpo(run).items()}
    if run.method == "ipo" and run.program == "axolotl":  # there a method of its own
        run.method = "dpo"
        imported.settings["loss_type"] = ("ipo", f"rl of {run.get_location('rl')}")
    if run.method in method_names():
        imported.settings |= {"method": (run.method, run.program)} if run.method != "sft" else {}
    else:
        available = ", ".join(method_names())
        left_out[f"method = {run.method}"] = (
            f"only {available} are available; `method: {run.method}` keeps this from being trained as one of them"
        )
        imported.settings["method"] = (run.method, "not available yet")


def _carry_setting(imported: ImportedRun, name: str, value: Any) -> None:
    """Map one peer setting to Surefoot's, or record it as left out (with the reason) or as unknown."""
    run, left_out = imported.source, imported.left_out
    if value is None and run.program == "axolotl" and name != "datasets":  # axolotl ignores keys without a value
        return
    peer_setting = f"{name} = {value}" if name else str(value)
    peer_setting = f"{name} = (not shown)" if SECRET_OPTION.search(name) else peer_setting
    origin = f"{name} of {run.get_location(name)}"
    if name == "reward_funcs":
        names = [str(reward) for reward in as_list(value)]
        file = str(as_list(run.settings.get("external_plugins") or "file.py")[0])
        rewards, unmapped = map_rewards(run.program, names, as_list(run.settings.get("reward_weights") or []), file)
        imported.settings |= {name: (rewards, origin)} if rewards else {}
        left_out |= {f"{name} = {reward}": f"your own function: name it as {file}:FUNCTION" for reward in unmapped}
        return
    left_out |= _list_left_out_parts(run, name, value, peer_setting)
    settings = map_setting(run, name, value)
    if name in run.unset:
        left_out[peer_setting] = UNKNOWN_VALUE
        settings = {key: item for key, item in (settings or {}).items() if key in (*PATHS, "output_dir")}
    if settings is None:
        _record_unmapped_setting(imported, name, value, peer_setting)
        return
    for field_name, field_value in settings.items():
        if field_value is None and not can_be_null(field_name) and known_fields()[field_name].default is not None:
            left_out[peer_setting] = f"{field_name} needs a value here"
        else:
            earlier_value, earlier_origin = imported.settings.get(field_name, (field_value, ""))
            if earlier_value != field_value:
                earlier = earlier_origin.partition(" of ")[0]
                left_out[f"{earlier} = {run.settings.get(earlier, earlier_value)}"] = f"{peer_setting} overrides it"
            imported.settings[field_name] = (field_value, origin)


def _list_left_out_parts(run: ParsedRun, name: str, value: Any, peer_setting: str) -> dict[str, str]:
    """Return the parts of a peer setting that are lost although the rest is carried, each with its reason."""
    why = (
        megatron.note_left_out(run, name, value)
        or note_quantization(run, name, value)
        or note_schedule(run, name, value)
    )
    if why is not None:
        return {peer_setting: why}
    if name == "datasets" and run.program == "axolotl":
        return list_axolotl_left_out(run, value)
    if name in ("dataset", "val_dataset") and run.program == "ms-swift":
        return list_swift_left_out(name, value, default_hub="HF" if _uses_huggingface(run) else "MS")
    if name == "max_length" and run.program == "TRL" and is_null(value):
        why = "a limit always applies here, 2048 tokens by default: a longer row stops the run, and no row is truncated"
        return {peer_setting: why}
    if name in ("model", "model_id_or_path") and run.program == "ms-swift" and not _uses_huggingface(run):
        note = note_hub_of_model(run, str(value))
        return {f"the hub of {peer_setting}": note} if note is not None else {}
    if name == "system" and (path := system_file(run, value)) is not None and not path.is_file():
        return {peer_setting: "there is no such file here; give the text that it holds as system"}
    if name == "pref_ftx" and parse_number(value):
        why = "LLaMA-Factory averages the tokens of each answer first, sft_weight those of the whole step"
        return {f"the average of {peer_setting}": why}
    if name == "report_to":
        unsupported = [tracker for tracker in as_list(value) if tracker not in (*TRACKERS, "none", None)]
        return {f"{name} = {tracker}": f"only {', '.join(TRACKERS)} are available" for tracker in unsupported}
    return {}


def _record_unmapped_setting(imported: ImportedRun, name: str, value: Any, peer_setting: str) -> None:
    """Record a peer setting without a counterpart: as left out, as ignored, or as unknown."""
    left_out = imported.left_out
    if _list_left_out_parts(imported.source, name, value, peer_setting):
        return  # listed with its reason
    if imported.source.method in METHODS and name in LIMITS:
        left_out[peer_setting] = "max_length limits the question with one answer"
    elif name in UNSUPPORTED_GRPO:
        left_out[peer_setting] = "rollouts have no such setting"
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
    elif name in IGNORED:
        imported.not_needed.append(name)
    else:
        imported.unknown.append(peer_setting)


def _uses_huggingface(run: ParsedRun) -> bool:
    """Return whether a run of ms-swift was told to take ids from huggingface.co; they are ModelScope's otherwise."""
    return str(run.environment.get(USE_HF, run.settings.get("use_hf"))).lower() in ("1", "true")


def _carry_variables(imported: ImportedRun) -> None:
    """Carry the settings that peers read from environment variables.

    Raises: ConfigError for a value that is not a whole number.
    """
    for variable, name in VARIABLES.items():
        if variable not in imported.source.environment:
            continue
        count = imported.source.environment[variable]
        if variable in imported.source.unset:
            imported.left_out[f"{variable} = {count}"] = UNKNOWN_VALUE
        elif not count.isdecimal():
            raise ConfigError(f"{variable}={count} is not a whole number.")
        else:
            imported.settings.setdefault(name, (int(count), variable))


def _drop_overridden_settings(imported: ImportedRun) -> None:
    """Leave out the setting that the peer programs ignore when two settings control the same thing."""
    for winner, other in OVERRIDES:
        if {winner, other} <= imported.settings.keys():
            value, origin = imported.settings.pop(other)
            imported.left_out[f"{origin.partition(' of ')[0]} = {value}"] = (
                f"{winner} overrides it, as in {imported.program}"
            )


def _choose_eval_dataset(imported: ImportedRun) -> None:
    """Choose the evaluation data: none if the strategy is `no`; else, for TRL, the `test` split of its dataset."""
    run, options = imported.source, imported.source.settings
    strategies = [options[name] for name in ("eval_strategy", "evaluation_strategy") if name in options]
    if run.program == "ms-swift" and not strategies:  # its default is the strategy of checkpoints
        strategies = [options[name] for name in ("save_strategy",) if name in options]
    if strategies and strategies[-1] in ("no", False):
        for name in ("eval_dataset", "eval_fraction", "eval_steps", "evals_per_epoch"):
            imported.leave_out(name, "eval_strategy: no")
        return
    if run.program != "TRL" or not isinstance(imported.get_value("dataset"), str):
        return
    name, origin = imported.settings["dataset"]
    train, subset = (options.get(f"dataset_{part}") for part in ("train_split", "config"))
    test = options.get("dataset_test_split", "test")

    def make_source(split: Any) -> dict[str, Any]:
        return {"path": name, **({"subset": subset} if subset else {}), **({"split": split} if split else {})}

    if train or subset:
        imported.settings["dataset"] = ([make_source(train)], origin)
    if strategies and not imported.has_evaluation and test is not None:
        imported.settings["eval_dataset"] = (make_source(test), f"dataset_test_split of {run.program}")


def _resolve_shares_of_run(imported: ImportedRun) -> None:
    """Carry intervals below 1, which are shares of the whole run in transformers' trainer."""
    max_steps, epochs = (imported.get_value(name) for name in ("max_steps", "num_train_epochs"))
    for steps, per_epoch in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        share, origin = imported.settings.get(steps, (None, ""))
        if not isinstance(share, float) or not 0 < share < 1:
            continue
        if isinstance(max_steps, int) and max_steps > 0:
            imported.settings[steps] = (ceil(max_steps * share), f"{origin}: {share:g} of {max_steps} steps")
        elif isinstance(epochs, int | float) and epochs > 0:
            parts = 1 / (share * epochs)
            del imported.settings[steps]
            imported.settings[per_epoch] = (max(round(parts), 1), f"{origin}: {share:g} of {epochs:g} epochs")
            if abs(parts - round(parts)) > 1e-6 or parts < 1:
                imported.left_out[f"{steps} = {share:g}"] = (
                    f"every {share * epochs:g} epochs is no whole number of times in an epoch; the nearest is carried"
                )


def _carry_max_samples(imported: ImportedRun) -> None:
    """Carry LLaMA-Factory's max_samples, the number of first rows that are read of each source, as their split."""
    count = parse_number(imported.source.settings.get("max_samples"))
    if imported.source.program != "LLaMA-Factory" or not isinstance(count, int):
        return
    folder = imported.settings.pop("dataset_dir", (None, ""))[0]
    for setting in ("dataset", "eval_dataset"):
        if setting not in imported.settings:
            continue
        value, origin = imported.settings[setting]
        names = [name.strip() for part in as_list(value) for name in str(part).split(",")]
        file = str(Path(folder, "dataset_info.json")) if folder is not None else None
        items = [{"path": file, "name": name} if file is not None else {"path": name} for name in names]
        imported.settings[setting] = ([{**item, "split": f"[:{count}]"} for item in items], f"{origin}, max_samples")


def _leave_out_redundant_evaluation(imported: ImportedRun) -> None:
    """Leave out evaluation settings that are redundant or have no data, and data settings GRPO does not have."""
    settings, program = imported.settings, imported.source.program
    if "eval_dataset" in settings:
        imported.leave_out("eval_fraction", "eval_dataset is set")
    if imported.has_evaluation and program == "ms-swift" and "evals_per_epoch" not in settings:
        if "saves_per_epoch" in settings and imported.source.settings.get("eval_strategy", "epoch") == "epoch":
            imported.leave_out("eval_steps", "evals_per_epoch overrides it, as in ms-swift")
            settings["evals_per_epoch"] = (imported.get_value("saves_per_epoch"), f"default of {program}")
        elif "save_steps" in settings:
            settings.setdefault("eval_steps", (imported.get_value("save_steps"), f"default of {program}"))
    if not imported.has_evaluation:
        for name in ("eval_steps", "evals_per_epoch"):
            imported.leave_out(name, "no evaluation data is set")
    method = imported.source.method
    for name in {"grpo": ("packing", "train_on"), "dpo": ("train_on",), "kto": ("train_on",)}.get(method, ()):
        imported.leave_out(name, f"not available with method: {method}")
    if method in (*METHODS, "distill"):
        imported.leave_out("lora_dropout", f"method {method} turns dropout off, as the trainers of peers do by default")


def _set_rendezvous_endpoint(imported: ImportedRun) -> None:
    run = imported.source
    if imported.get_value("nnodes", 1) not in (1, None) and "rdzv_endpoint" not in imported.settings:
        host = run.rendezvous.get("host") or run.environment.get("MASTER_ADDR") or "HOST_OF_THE_FIRST_MACHINE"
        port = run.rendezvous.get("port") or run.environment.get("MASTER_PORT") or 29500
        imported.settings["rdzv_endpoint"] = (
            run.rendezvous.get("endpoint") or f"{host}:{port}",
            "address of the first machine",
        )


def _note_missing_settings(imported: ImportedRun) -> None:
    required = {"grpo": ("reward_funcs",), "distill": ("teacher_model",)}.get(imported.source.method, ())
    for name in ("model", "dataset", *required):
        if name == "teacher_model" and "teacher_server" in imported.settings:
            continue
        if name not in imported.settings:
            imported.note_missing(name, "required: add it to this file")


def _sort_settings(imported: ImportedRun) -> None:
    """Put the settings in the order of the documentation; DeepSpeed's config comes last."""
    settings = imported.settings
    order = [*known_fields(), *(name for name in settings if name in DEEPSPEED_KEYS)]
    imported.settings = {name: settings[name] for name in order if
                         name in settings and (settings[name][0] is not None or can_be_null(name))}  # fmt: skip


def _list_variables(imported: ImportedRun) -> None:
    """List the environment variables that libraries read themselves, and those that are unknown."""
    for name, value in imported.source.environment.items():
        if name in LAUNCHER_VARIABLES or name in VARIABLES or name == USE_HF:
            continue
        if LIBRARY_VARIABLES.match(name):
            imported.variables[name] = "(not shown)" if SECRET_VARIABLE.search(name) else value
        else:
            imported.unknown.append(f"the variable {name}")
