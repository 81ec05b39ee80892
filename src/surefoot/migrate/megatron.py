"""Commands `megatron sft | pt | rlhf` of ms-swift, whose trainer has Megatron's names and its own defaults.

Source: docs/source_en/Megatron-SWIFT/Command-line-parameters.md of ms-swift, read 2026-12.
"""

from types import EllipsisType
from typing import Any

from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.schedules import map_schedule
from surefoot.migrate.values import as_list, is_null, parse_number

RENAMED = {
    "micro_batch_size": "per_device_train_batch_size",
    "lr": "learning_rate",
    "lr_warmup_iters": "warmup_steps",
    "lr_warmup_fraction": "warmup_ratio",
    "clip_grad": "max_grad_norm",
    "train_iters": "max_steps",
    "max_epochs": "num_train_epochs",
    "save": "output_dir",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "log_interval": "logging_steps",
    "expert_model_parallel_size": "expert_parallel_size",
    "adapter_load": "init_adapter",
    "wandb_exp_name": "run_name",
    "moe_aux_loss_coeff": "router_aux_loss_coef",
}
RECOMPUTED = {"full": {"gradient_checkpointing": True}, "none": {"gradient_checkpointing": False}, "selective": {}}
"""Granularity of the recomputation -> settings. Megatron's `selective` recomputes attention alone."""
SIZES = {
    "tensor_model_parallel_size": "zero_stage: 3 cuts every weight over the ranks instead",
    "pipeline_model_parallel_size": "zero_stage: 3 cuts every weight over the ranks instead",
    "expert_tensor_parallel_size": "each expert is whole on one rank; expert_parallel_size spreads them",
    "context_parallel_size": "a sequence is on one GPU, and each GPU takes its own sequences",
    "virtual_pipeline_model_parallel_size": "there is no pipeline",
}
"""Size of a way to split a model that does not exist here -> what is done instead."""
CUTS_WEIGHTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
OF_MEGATRON = "the model is read in the format of transformers: give its folder or id as model"
LEFT_OUT = {
    "load": OF_MEGATRON,
    "ref_load": OF_MEGATRON,
    "mcore_model": OF_MEGATRON,
    "mcore_adapter": OF_MEGATRON,
    "moe_z_loss_coeff": "there is no z-loss of routers",
    "moe_expert_capacity_factor": "experts take all tokens that are sent to them: none is dropped",
    "fp8_format": "training in FP8 is not available",
    "fp8_recipe": "training in FP8 is not available",
    "lr_decay_iters": "the schedule ends with the run",
    "lr_wsd_decay_iters": "set decay_ratio to the share of the run in which the learning rate falls",
}
"""Option without a counterpart -> what to know or do."""
NO_EFFECT = frozenset(
    "load_safetensors save_safetensors finetune no_save_optim no_save_rng no_load_optim no_load_rng ckpt_format "
    "no_initialization auto_detect_ckpt_format exit_on_missing_checkpoint async_save use_persistent_ckpt_worker "
    "recompute_method recompute_num_layers recompute_modules sequence_parallel use_distributed_optimizer "
    "overlap_grad_reduce overlap_param_gather tp_comm_overlap distributed_backend distributed_timeout_minutes "
    "moe_grouped_gemm moe_permute_fusion moe_shared_expert_overlap moe_token_dispatcher_type moe_router_dtype "
    "moe_enable_deepep moe_router_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl attention_backend "
    "calculate_per_token_loss manual_gc manual_gc_interval seq_length eval_iters add_version num_workers "
    "dataloader_type deterministic_mode log_throughput log_params_norm tensorboard_dir tensorboard_log_interval "
    "optimizer_offload_fraction use_precision_aware_optimizer no_masked_softmax_fusion no_bias_dropout_fusion "
    "no_bias_swiglu_fusion no_rope_fusion no_gradient_accumulation_fusion transformer_impl use_cpu_initialization "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers mlp_padding_free "
    "vit_gradient_checkpointing use_hf check_model".split()
)
"""Options of how a result is computed, read or written, and not of the result."""
DEFAULTS: dict[str, Any] = {
    "tuning": "full", "global_batch_size": 16, "weight_decay": 0.1, "adam_beta2": 0.95, "truncation": "drop",
    "per_device_train_batch_size": 1, "save_steps": 500, "save_total_limit": None, "logging_steps": 5,
}  # fmt: skip
LORA_DEFAULTS: dict[str, Any] = {"lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all"}
LEARNING_RATES = {"full": 1e-5, "lora": 1e-4}

Mapped = dict[str, Any] | None | EllipsisType


def map_megatron(run: ParsedRun, name: str, value: Any) -> Mapped:
    """Return the settings for one option, None if there is none, or `...` if it is an option of `swift`, too.

    Raises: ConfigError for modules under Megatron's names.
    """
    if not run.uses_megatron:
        return ...
    number = parse_number(value)
    if name in RENAMED:
        return {} if name in ("lr_warmup_iters", "lr_warmup_fraction") and not number else {RENAMED[name]: number}
    if name == "lr_decay_style":
        return map_schedule(run, value)
    if name == "lr_wsd_decay_iters":
        steps = parse_number(run.settings.get("train_iters"))
        are_counts = isinstance(number, int) and isinstance(steps, int) and 0 < number <= steps
        return {"decay_ratio": number / steps} if are_counts else None
    if name == "recompute_granularity" and (granularity := "none" if is_null(value) else value) in RECOMPUTED:
        return RECOMPUTED[granularity]
    if name == "target_modules" and any(str(target).startswith("linear_") for target in as_list(value)):
        raise run.make_value_error(name, value, "names of transformers: attention, mlp, experts, or all of them")
    if name == "min_lr":
        rate = parse_number(run.settings.get("lr", LEARNING_RATES[_tuning_of(run)]))
        are_numbers = isinstance(number, int | float) and isinstance(rate, int | float) and rate > 0
        return {"min_lr_ratio": number / rate} if are_numbers and number else {}
    if name == "optimizer_cpu_offload":
        return {"offload": "cpu"} if value is True else {}
    if name in SIZES:
        return {"zero_stage": 3} if name in CUTS_WEIGHTS and _is_split(number) else {}
    if name == "optimizer" and value == "adam":
        return {}
    return None if name in LEFT_OUT else {} if name in NO_EFFECT else ...


def note_left_out(run: ParsedRun, name: str, value: Any) -> str | None:
    """Return why an option, or a part of what it means, is not carried; None if all of it is."""
    if not run.uses_megatron:
        return None
    if name in SIZES:
        return SIZES[name] if _is_split(parse_number(value)) else None
    if name == "lr_wsd_decay_iters" and map_megatron(run, name, value) is not None:
        return None
    return LEFT_OUT.get(name) if not is_null(value) else None


def defaults_of(run: ParsedRun) -> dict[str, Any]:
    """Return the defaults of the run as Surefoot settings."""
    tuning = _tuning_of(run)
    return {**DEFAULTS, **(LORA_DEFAULTS if tuning == "lora" else {}), "learning_rate": LEARNING_RATES[tuning]}


def _tuning_of(run: ParsedRun) -> str:
    names = {str(run.settings.get(name)) for name in ("tuner_type", "train_type")}
    return "lora" if "lora" in names else "full"


def _is_split(size: Any) -> bool:
    return isinstance(size, int) and size > 1
