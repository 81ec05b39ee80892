"""Aliases of settings: the names that other trainers use, and their settings that have no counterpart."""

ALIASES: dict[str, str] = {
    **dict.fromkeys(
        ["model_name_or_path", "model_id_or_path", "base_model", "model_name", "pretrained_model"], "model"
    ),
    **dict.fromkeys(
        ["datasets", "train_dataset", "train_file", "dataset_path", "data_path", "dataset_name"], "dataset"
    ),
    **dict.fromkeys(["val_dataset", "eval_file", "validation_file"], "eval_dataset"),
    **dict.fromkeys(["default_system", "default_system_message", "system_prompt"], "system"),
    **dict.fromkeys(["val_size", "val_set_size", "split_dataset_ratio"], "eval_fraction"),
    **dict.fromkeys(["preprocessing_num_workers", "dataset_processes", "dataset_num_workers"], "dataset_num_proc"),
    "truncation_strategy": "truncation",
    **dict.fromkeys(["column", "column_mapping", "column_map"], "columns"),
    **dict.fromkeys(["finetuning_type", "train_type", "tuner_type", "peft_type", "sft_type"], "tuning"),
    **dict.fromkeys(["lora_r", "r", "peft_lora_r"], "lora_rank"),
    "peft_lora_alpha": "lora_alpha",
    **dict.fromkeys(["lora_target", "lora_target_modules", "peft_lora_target_modules"], "target_modules"),
    **dict.fromkeys(["adapter_name_or_path", "lora_model_dir", "resume_from_adapter"], "init_adapter"),
    **dict.fromkeys(["peft_lora_dropout"], "lora_dropout"),
    **dict.fromkeys(["rslora", "peft_use_rslora"], "use_rslora"),
    "peft_use_dora": "use_dora",
    **dict.fromkeys(["peft_layers_to_transform", "lora_layers_to_transform"], "layers_to_transform"),
    **dict.fromkeys(["lora_modules_to_save", "additional_target"], "modules_to_save"),
    **dict.fromkeys(["cutoff_len", "sequence_len", "max_seq_length", "max_seq_len"], "max_length"),
    **dict.fromkeys(["sample_packing", "neat_packing"], "packing"),
    **dict.fromkeys(["micro_batch_size", "train_batch_size", "per_device_batch_size"], "per_device_train_batch_size"),
    "grad_accum_steps": "gradient_accumulation_steps",
    **dict.fromkeys(["ep_size", "expert_model_parallel_size"], "expert_parallel_size"),
    **dict.fromkeys(["nproc", "num_processes", "num_gpus"], "nproc_per_node"),
    **dict.fromkeys(["num_machines", "num_nodes"], "nnodes"),
    "deepspeed_stage": "zero_stage",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    **dict.fromkeys(["hsdp_replicate_size", "data_parallel_replicate_degree"], "dp_replicate_size"),
    **dict.fromkeys(["lr", "max_lr"], "learning_rate"),
    **dict.fromkeys(["lr_scheduler", "scheduler"], "lr_scheduler_type"),
    "optimizer": "optim",
    "lorap_lr_ratio": "loraplus_lr_ratio",
    **dict.fromkeys(["num_epochs", "epochs", "max_epochs"], "num_train_epochs"),
    **dict.fromkeys(["gradient_clipping", "max_gradient_norm"], "max_grad_norm"),
    **dict.fromkeys(["torch_dtype", "precision"], "dtype"),
    **dict.fromkeys(["torch_compile"], "compile"),
    **dict.fromkeys(["quant_bits", "quantization_bit"], "quantization"),
    **dict.fromkeys(["bnb_4bit_use_double_quant", "use_bnb_nested_quant"], "double_quantization"),
    "freeze_vit": "freeze_vision_tower",
    **dict.fromkeys(["image_max_pixels"], "max_pixels"),
    **dict.fromkeys(["image_min_pixels"], "min_pixels"),
    "media_dir": "image_dir",
    **dict.fromkeys(["moe_aux_loss_coeff", "moe_aux_loss_coef", "aux_loss_coef"], "router_aux_loss_coef"),
    "moe_router_bias_update_rate": "router_bias_update_rate",
    **dict.fromkeys(["logging_interval"], "logging_steps"),
    **dict.fromkeys(["save_interval"], "save_steps"),
    "swanlab_run_name": "run_name",
    "swanlab_exp_name": "run_name",
    **dict.fromkeys(["overwrite_output"], "overwrite_output_dir"),
    **dict.fromkeys(["rl", "rlhf_type"], "method"),
    **dict.fromkeys(["num_return_sequences", "n_samples_per_prompt", "rollout_n"], "num_generations"),
    **dict.fromkeys(["max_new_tokens", "max_response_length"], "max_completion_length"),
    **dict.fromkeys(["kl_coef", "kl_loss_coef"], "beta"),
    **dict.fromkeys(["epsilon_low", "clip_ratio_low"], "epsilon"),
    "clip_ratio_high": "epsilon_high",
    **dict.fromkeys(["stop_words", "stop_strings"], "stop"),
    **dict.fromkeys(["reward_functions", "rewards"], "reward_funcs"),
    "teacher_model_name_or_path": "teacher_model",
    "sft_alpha": "sft_weight",
    **dict.fromkeys(["teacher_model_server", "teacher_model_server_url"], "teacher_server"),
    **dict.fromkeys(["vllm_server_base_url", "vllm_base_url"], "vllm_server"),
    **dict.fromkeys(["overlong_filter"], "mask_truncated_completions"),
    "vllm_enable_sleep_mode": "vllm_sleep",
    "soft_cache_length": "soft_overlong_length",
    "max_resample_times": "dynamic_sampling_tries",
    "dynamic_sample": "dynamic_sampling",
    **dict.fromkeys(["vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"], "importance_cap"),
    "rollout_importance_sampling_threshold": "importance_cap",
    "vllm_importance_sampling_clip_min": "importance_floor",
    **dict.fromkeys(["rollout_importance_sampling_mode", "vllm_importance_sampling_mode"], "importance_correction"),
}
"""Names of TRL, ms-swift, LLaMA-Factory, Unsloth and axolotl for the same settings."""

FLAG_ALIASES: dict[str, tuple[str, str]] = {
    "use_vllm": ("rollout_engine", "vllm"),
    "load_in_4bit": ("quantization", "nf4"),
    "load_in_8bit": ("quantization", "int8"),
    "bf16": ("dtype", "bfloat16"),
    "fp32": ("dtype", "float32"),
    "train_on_prompt": ("train_on", "all"),
    "train_on_inputs": ("train_on", "all"),
    "mask_history": ("train_on", "last_assistant"),
}
"""Flags of other trainers that are a value of a setting. A flag that is false has no effect."""

VALUE_ALIASES: dict[str, dict[str, str]] = {
    "truncation": {"delete": "drop", "raise": "error"},
    "dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "quantization": {"4": "nf4", "8": "int8"},
    "optim": {
        **dict.fromkeys(
            "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla adamw_torch_npu_fused adamw_bnb "
            "paged_adamw paged_adamw_32bit AdamW adam".split(),
            "adamw",
        ),
        **dict.fromkeys(["adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"], "adamw_8bit"),
        **dict.fromkeys(
            ["lion_pytorch", "lion_32bit", "lion_8bit", "paged_lion", "paged_lion_32bit", "paged_lion_8bit"], "lion"
        ),
    },
    "target_modules": {"all-linear": "all"},
    "importance_correction": {"token_truncate": "truncate", "token_mask": "mask"},
}
"""Names of other trainers for the same values."""

_NO_TENSOR_PARALLEL = (
    "tensor parallelism of the trained model is not available. zero_stage: 3 cuts every weight over the ranks, and "
    "expert_parallel_size the experts; both keep each matrix product on one GPU"
)
INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        ["quant_method", "quantization_method", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype"],
        "quantization: nf4 stores NF4 by bitsandbytes, and dtype is the type of the arithmetic; drop it",
    ),
    **dict.fromkeys(
        ["attn_implementation", "attn_impl", "flash_attn", "flash_attention", "use_liger_kernel"],
        "attention and loss are chosen for the device and for packing; drop it",
    ),
    **dict.fromkeys(
        ["wandb_project", "swanlab_project", "swanlab_workspace", "mlflow_experiment_name", "trackio_project"],
        "a tracker takes its project from its own variable: export WANDB_PROJECT, SWANLAB_PROJECT, "
        "MLFLOW_EXPERIMENT_NAME or TRACKIO_PROJECT; run_name names the run",
    ),
    "template": "the model's own chat template is used; chat_template names another file",
    "max_samples": "write it as a split of the source: dataset: {path: ..., split: '[:1000]'}",
    "dataset_text_field": "name the column: columns: {text: NAME}",
    "use_peft": "tuning: lora, which is the default; tuning: full trains all weights",
    "assistant_only_loss": "train_on: assistant, which is the default",
    "save_strategy": "save_steps counts steps, saves_per_epoch: 1 saves after each pass over the data, and "
    "save_steps: 0 saves none",
    "logging_strategy": "logging_steps says when",
    **dict.fromkeys(
        ["eval_strategy", "evaluation_strategy"],
        "eval_dataset turns evaluation on, eval_steps or evals_per_epoch sets when",
    ),
    "logging_dir": "output_dir holds all files of the run",
    "early_stopping_patience": "there is no early stopping here: watch eval_loss, and stop with Ctrl-C, which saves",
    "ddp_timeout": "waits have deadlines of their own, and a stall is named in seconds; drop it",
}
"""Settings of other trainers that do not exist -> what to do instead."""
NOT_HERE: dict[str, str] = {
    **dict.fromkeys(
        ["tensor_parallel_size", "tensor_model_parallel_size", "tp_size", "tensor_parallel_degree"], _NO_TENSOR_PARALLEL
    ),
    **dict.fromkeys(
        ["steps_per_generation", "generation_batch_size"],
        "each step here trains on the completions of its own prompts. Set global_batch_size (completions a step), and "
        "num_iterations to use them several times",
    ),
    "importance_sampling_level": "set loss_type: gspo for ratios of whole sequences; the others take one a token",
    "fp16": "float16 is not available: it needs a loss scale, and bfloat16 does not. Set bf16: true",
}
"""Settings of other trainers that have no counterpart -> what to use instead. False has no effect."""
