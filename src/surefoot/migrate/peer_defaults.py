"""Defaults of the other program for an imported run, as Surefoot settings."""

from math import prod
from typing import Any

from surefoot.migrate import megatron
from surefoot.migrate.distillation import defaults_of, generates, needs_prompt_limit
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.peer_tables import (
    AXOLOTL_MOST_WARMUP,
    DEFAULT_NOTES,
    DEFAULTS,
    GRPO_DEFAULTS,
    LORA_ALPHA_FACTOR,
    OWN_TRAINERS_OF_TRL,
    PREFERENCE_DEFAULTS,
    SWIFT_3_NOTE,
    SWIFT_3_SAMPLING,
    SWIFT_BATCH,
    SWIFT_SCALES,
    TRL_KTO,
    TRL_LORA,
    TRL_ORPO,
    TRL_REWARD,
    TRL_WITH_VLLM,
    UNCUT_PROMPTS,
)
from surefoot.migrate.preferences import METHODS
from surefoot.migrate.schedules import find_peer_schedule
from surefoot.migrate.sharding import read_deepspeed_settings
from surefoot.migrate.values import is_null


def collect_defaults(imported: ImportedRun) -> dict[str, Any]:
    """Return the peer program's defaults for this run, without those that its settings override."""
    run, settings = imported.source, imported.settings
    is_trl, is_swift, is_grpo = run.program == "TRL", run.program == "ms-swift", run.method == "grpo"
    defaults = dict(DEFAULTS[run.program]) if not run.uses_megatron else megatron.defaults_of(run)
    if is_trl and imported.get_value("tuning") == "lora":
        defaults |= TRL_LORA
    if is_trl and imported.get_value("quantization") == "nf4" and imported.get_value("tuning") == "lora":
        defaults["double_quantization"] = False
    if is_grpo and _is_swift_3(run):
        defaults |= SWIFT_3_SAMPLING
    if is_grpo:
        defaults = _replace_grpo_defaults(imported, defaults)
    elif run.method in METHODS:
        defaults = {name: value for name, value in defaults.items() if name != "train_on"}
        defaults |= PREFERENCE_DEFAULTS.get(run.program, {})
        if run.program in OWN_TRAINERS_OF_TRL:
            defaults |= {"orpo": TRL_ORPO, "kto": TRL_KTO, "reward": TRL_REWARD}.get(run.method, {})
    elif run.method == "distill":
        if run.peer_method == "distillation":  # prompts have no limit, and completions alone are trained
            defaults = {name: value for name, value in defaults.items() if name not in ("max_length", "train_on")}
        defaults |= defaults_of(run)
    factor, rank = LORA_ALPHA_FACTOR.get(run.program), imported.get_value("lora_rank")
    if factor and isinstance(rank, int):
        defaults["lora_alpha"] = factor * rank
    is_swift = is_swift and not run.uses_megatron
    if is_swift and imported.get_value("tuning", defaults.get("tuning")) == "full":
        defaults["learning_rate"] = 1e-5
    if is_swift and not is_grpo:
        counts = [imported.get_value(name, 1) for name in ("per_device_train_batch_size", "nproc_per_node", "nnodes")]
        if all(isinstance(count, int) and count > 0 for count in counts):
            defaults["gradient_accumulation_steps"] = -(-SWIFT_BATCH // prod(counts))
    max_steps = imported.get_value("max_steps")
    if run.program == "axolotl" and isinstance(max_steps, int) and max_steps > 0:  # otherwise it is not known here
        defaults["warmup_steps"] = min(int(defaults.pop("warmup_ratio") * max_steps), AXOLOTL_MOST_WARMUP)
    if run.program == "LLaMA-Factory" and "vl" in str(run.settings.get("template", "")):
        defaults |= {"max_pixels": 768 * 768, "min_pixels": 32 * 32}
    visible = run.environment.get("CUDA_VISIBLE_DEVICES")
    if run.program in ("LLaMA-Factory", "axolotl") and visible:  # these two start one process per visible GPU
        defaults["nproc_per_node"] = len(visible.split(","))
    is_overridden = {
        "num_train_epochs": "max_steps" in settings,
        "max_length": is_trl and is_null(run.settings.get("max_length", 0)),
        "dataset_dir": str(run.settings.get("dataset_dir")).upper().startswith(("ONLINE", "REMOTE:")),
        "warmup_ratio": "warmup_steps" in settings or find_peer_schedule(run) == "constant",
        "warmup_steps": "warmup_ratio" in settings or find_peer_schedule(run) == "constant",
        "gradient_accumulation_steps": "global_batch_size" in settings,
        "save_steps": run.settings.get("save_strategy", "steps") != "steps",
        "saves_per_epoch": "save_steps" in settings or run.settings.get("save_strategy", "epoch") != "epoch",
        # Surefoot's GRPO and DPO refuse LoRA dropout; trainers of DPO and distillation turn it off by default.
        "lora_dropout": run.method in ("grpo", "distill", *METHODS),
        **dict.fromkeys(read_deepspeed_settings(imported), True),
    }
    return {name: value for name, value in defaults.items() if not is_overridden.get(name)}


def _replace_grpo_defaults(imported: ImportedRun, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of a GRPO run, from the program's defaults of every method."""
    program = imported.program
    sft_settings = ("max_length", "train_on") if program == "TRL" else ()
    defaults = {name: value for name, value in defaults.items() if name not in sft_settings}
    defaults |= GRPO_DEFAULTS.get(program, {})
    if not _has_prompt_limit(imported):
        defaults["truncation"] = "error"
    if program == "TRL" and imported.get_value("rollout_engine") == "vllm":
        defaults |= TRL_WITH_VLLM
    estimator = str(imported.get_value("advantage_estimator"))
    if program == "ms-swift" and estimator in SWIFT_SCALES:
        defaults["scale_rewards"] = SWIFT_SCALES[estimator]
    if imported.get_value("importance_correction") == "none":
        defaults.pop("importance_cap", None)
    return defaults


def note_peer_defaults(imported: ImportedRun) -> None:
    """Record the settings that the run does not set and whose default differs in the peer program."""
    run = imported.source
    explicit = {name for name, (_, origin) in imported.settings.items() if not origin.startswith("default of")}
    explicit |= {"nproc_per_node"} & imported.settings.keys()
    explicit |= {"warmup_ratio"} if "warmup_ratio" not in imported.settings else set()
    notes = DEFAULT_NOTES.get(run.program, {})
    if run.method in METHODS:
        notes = {name: why for name, why in notes.items() if name != "train_on"}
    elif run.method != "sft":
        notes = {name: why for name, why in notes.items() if name == "nproc_per_node"}
        if run.program == "ms-swift" and not _is_swift_3(run) and (run.method != "distill" or generates(run)):
            notes["top_p"] = SWIFT_3_NOTE
        if not _has_prompt_limit(imported) and (run.method != "distill" or needs_prompt_limit(run)):
            notes["max_prompt_length"] = UNCUT_PROMPTS.format(program=run.program)
    for name, why in notes.items():
        if name in explicit:
            continue
        imported.note_missing(name, why)
        if name in imported.settings:
            value, origin = imported.settings[name]
            imported.settings[name] = (value, f"{origin}, as near as it can be: see below")


def _is_swift_3(run: ParsedRun) -> bool:
    """Return whether a run of ms-swift names its tuning as version 3 did, and as version 4 no longer can."""
    return run.program == "ms-swift" and not {"train_type", "sft_type"}.isdisjoint(run.settings)


def _has_prompt_limit(imported: ImportedRun) -> bool:
    """Return whether a GRPO run sets the length at which prompts are truncated."""
    limits = ("max_prompt_length",) if imported.program == "TRL" else ("max_prompt_length", "max_length")
    return imported.program not in GRPO_DEFAULTS or any(name in imported.settings for name in limits)
