"""Tables of peer settings: their defaults, and those that differ in meaning or have no counterpart in Surefoot.

Settings that differ in name only are in `config.aliases`. The defaults are those of ms-swift 3, LLaMA-Factory 0.9,
TRL 1 and axolotl 0.12, read 2026-11. They are carried because a run depends on them too.
"""

from typing import Any

Settings = dict[str, Any]

DEFAULTS: dict[str, Settings] = {
    "ms-swift": {
        "tuning": "lora", "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all", "num_train_epochs": 3,
        "per_device_train_batch_size": 1, "gradient_checkpointing": True, "weight_decay": 0.1, "adam_beta2": 0.95,
        "truncation": "drop", "save_steps": 500, "save_total_limit": None, "logging_steps": 5,
    },
    "LLaMA-Factory": {
        "tuning": "lora", "target_modules": "all", "dataset_dir": "data", "max_length": 2048, "learning_rate": 5e-5,
        "num_train_epochs": 3, "lr_scheduler_type": "linear", "per_device_train_batch_size": 8,
        "gradient_checkpointing": True, "truncation": "drop", "save_steps": 500, "save_total_limit": None,
    },
    "TRL": {
        "tuning": "full", "max_length": 1024, "truncation": "right", "learning_rate": 2e-5, "num_train_epochs": 3,
        "lr_scheduler_type": "linear", "per_device_train_batch_size": 8, "gradient_checkpointing": True,
        "save_steps": 500, "save_total_limit": None, "logging_steps": 10, "train_on": "all",
    },
    "axolotl": {
        "tuning": "full", "max_length": 512, "truncation": "drop", "per_device_train_batch_size": 1,
        "warmup_ratio": 0.03, "save_total_limit": 4,
    },
    "DeepSpeed": {},
}  # fmt: skip
"""Program -> its defaults as Surefoot settings, without those that equal Surefoot's own defaults."""

LORA_ALPHA_FACTOR = {"LLaMA-Factory": 2}
"""Program -> factor of lora_alpha to lora_rank if lora_alpha is not set."""
TRL_LORA = {
    "tuning": "lora",
    "lora_rank": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "v_proj"],
}

GRPO_DEFAULTS: dict[str, Settings] = {
    "TRL": {"truncation": "left", "learning_rate": 1e-6, "max_completion_length": 512},
    "ms-swift": {
        "max_completion_length": 512,
        "temperature": 0.9,
        "beta": 0.04,
        "loss_type": "grpo",
        "truncation": "left",
        "importance_correction": "none",
        "top_k": 50,
        "top_p": 0.9,
    },
}
"""Program -> its further defaults for GRPO."""
TRL_WITH_VLLM: Settings = {"importance_correction": "sequence_mask", "importance_cap": 3.0}
"""TRL's further defaults for GRPO with vLLM."""
SWIFT_BATCH = 16
"""Number of samples per step that ms-swift accumulates to by default."""

DEFAULT_NOTES: dict[str, dict[str, str]] = {
    "ms-swift": {
        "max_length": "theirs is the model's own maximum; here 2048 tokens, beyond which rows are left out and counted"
    },
    "LLaMA-Factory": {
        "nproc_per_node": "theirs starts a process for each GPU that it sees: say how many there are",
        "truncation": "theirs shortens the question before a short answer; here rows that are too long are left out "
        "and counted",
    },
    "axolotl": {
        "nproc_per_node": "theirs starts a process for each GPU that it sees: say how many there are",
        "save_steps": "theirs saves at the end of each epoch, here every 100 steps",
    },
    "TRL": {
        "nproc_per_node": "theirs is that of accelerate's configuration or launcher: say how many GPUs there are",
        "train_on": "theirs depends on the data: all tokens of conversations, and of prompts with completions the "
        "completions alone. For those write train_on: assistant",
    },
}
"""Program -> Surefoot setting -> what the user should know if it was not given."""

UNCUT_PROMPTS = (
    "theirs cuts no prompt; here one of more than 2048 tokens stops the run, which names it: give the length of your "
    "longest prompt"
)
"""Note for GRPO without a prompt length."""

IGNORED = frozenset(
    "do_train do_eval overwrite_cache plot_loss use_fast_tokenizer ddp_timeout remove_unused_columns "
    "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor per_device_eval_batch_size "
    "flash_attn attn_impl attn_implementation "
    "flash_attention use_liger_kernel enable_liger_kernel ddp_find_unused_parameters "
    "lazy_tokenize use_hf logging_dir logging_first_step include_num_input_tokens_seen include_tokens_per_second "
    "eval_on_start gradient_checkpointing_kwargs use_reentrant "
    "load_from_cache_file tokenizer_type model_type_hf val_batch_size strict_packing eval_sample_packing "
    "pad_to_sequence_len dataset_prepared_path xformers_attention "
    "ddp_backend log_level disable_tqdm "
    "low_cpu_mem_usage local_rank "
    "padding_free liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy tf32 "
    "attention "
    "attn strict pad_to_multiple_of "
    "log_completions strategy flash_attn_2 gradient_checkpointing_use_reentrant ".split()
)
"""Peer settings that change how a result is computed and not the result; Surefoot does it its own way, or always."""

IGNORED_IF: dict[str, tuple[frozenset[Any], str]] = {
    **dict.fromkeys(
        ("optim", "optimizer"),
        (frozenset("adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw AdamW".split()), "AdamW is used"),
    ),
    **dict.fromkeys(
        ("save_strategy", "evaluation_strategy", "eval_strategy", "logging_strategy"),
        (frozenset(("steps",)), "save_steps, eval_steps and logging_steps say when"),
    ),
    "loss_type": (
        frozenset(("nll", "causal_lm", "cross_entropy", None)),
        "the loss is cross-entropy over the trained tokens",
    ),
    "save_only_model": (frozenset((False, None)), "checkpoints hold the optimizer too: runs go on from them"),
    "push_to_hub": (frozenset((False, None)), "nothing is sent to the hub"),
}
"""Peer setting -> (values that match what Surefoot always does, what Surefoot does instead of other values)."""

UNSUPPORTED_VALUES: dict[str, str] = {
    **dict.fromkeys(
        ("val_size", "val_set_size", "split_dataset_ratio", "eval_fraction"),
        "a number of rows, and eval_fraction is a share of them: nothing is held out until you set it",
    ),
    "reward_weights": "they are of functions that are not carried: write weight beside each, {func: ..., weight: ...}",
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "that schedule is not available: the default holds"),
}
"""Peer setting -> why a value without a counterpart is left out."""

UNSUPPORTED: dict[str, str] = {
    "template": "the chat template of the model itself is used: check one sample with `surefoot data`",
    "chat_template": "the chat template of the model itself is used: check one sample with `surefoot data`",
    "max_samples": "write it as a split of the source: {path: ..., split: '[:1000]'}",
    "quantization_bit": "weights are not quantised here: the base lies in bfloat16, which takes four times the memory "
    "of 4 bits (`surefoot plan` says how much)",
    "load_in_4bit": "weights are not quantised here: the base lies in bfloat16",
    "load_in_8bit": "weights are not quantised here: the base lies in bfloat16",
    "quant_method": "weights are not quantised here: the base lies in bfloat16",
    "quant_bits": "weights are not quantised here: the base lies in bfloat16",
    "quantization_method": "weights are not quantised here: the base lies in bfloat16",
    "load_best_model_at_end": "no best checkpoint is chosen: save_total_limit keeps the newest",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "loraplus_lr_ratio": "A and B have one learning rate",
    "use_dora": "weight-decomposed LoRA is not available",
    "lora_bias": "biases are not trained beside LoRA",
    "modules_to_save": "only LoRA and, as `router`, routers are trained",
    "additional_target": "only LoRA and, as `router`, routers are trained",
    "freeze_aligner": "what joins tower and decoder is part of the tower: freeze_vision_tower is of both",
    "freeze_multi_modal_projector": "what joins tower and decoder is part of the tower: freeze_vision_tower is of both",
    "rope_scaling": "the rotary embedding is the one of the model's config.json",
    "system": "no system message is added: write it into the data",
    **dict.fromkeys(
        ("ray_scope", "ray_num_workers"), "there is no ray here: nproc_per_node says how many ranks there are"
    ),
    "pure_bf16": "trained weights and their moments are kept in float32",
    "activation_offloading": "activations stay on the GPU: gradient_checkpointing frees them",
    "model_revision": "name the folder of that revision as model",
    "max_turns": "a completion is one turn",
    **dict.fromkeys(("video_max_pixels", "video_min_pixels"), "videos are not read"),
    **dict.fromkeys(
        ("sequence_parallel_mode", "alst_sequence_backend"), "a sequence is not cut over GPUs: see its size"
    ),
    "vllm": "it is of `axolotl vllm-serve`: what a server that the run starts is to be told stands in vllm_args",
    "vllm_device": "say which GPUs are the server's: vllm_devices",
    "dataset_dir": "entries of a dataset_info.json that lies on the hub are not read: name their files as dataset",
    **dict.fromkeys(("fsdp", "use_fsdp"), "sharding is set by zero_stage"),
    "fsdp_config": "it does nothing there without fsdp, or is a file that is not here: sharding is set by zero_stage",
    "dataset_num_samples": "write it as a split of the source: {path: ..., split: '[:1000]'}",
    "resume_from_checkpoint": "checkpoints of other programs cannot be gone on from: start from the adapter with "
    "init_adapter",
    "model_name": "{{NAME}} in the data (swift/self-cognition) is not replaced: write it there",
    "model_author": "{{AUTHOR}} in the data (swift/self-cognition) is not replaced: write it there",
    "special_tokens": "the model's own tokenizer is used as it is",
    "tokenizer_name_or_path": "the model's own tokenizer is used as it is",
    "tokenizer_config": "the model's own tokenizer is used as it is",
    "model_type": "the architecture is that of the model's config.json",
    "completion_only_loss": "train_on says which turns are trained",
    "target_modules": "a pattern for whole names is not read: write names of modules, or groups",
    "lora_target_modules": "a pattern for whole names is not read: write names of modules, or groups",
    "lora_target": "a pattern for whole names is not read: write names of modules, or groups",
    "train_dataloader_shuffle": "rows are shuffled by shuffle",
    **dict.fromkeys(
        ("sequence_parallel_size", "context_parallel_size", "context_parallel_degree", "cp_size"),
        "a sequence is not cut over GPUs here, so each GPU takes samples of its own: divide "
        "gradient_accumulation_steps by it for the same batch",
    ),
    **dict.fromkeys(
        ("evals_per_epoch", "saves_per_epoch"),
        "eval_steps and save_steps count steps: of how many rows an epoch is, `surefoot data` says",
    ),
    **dict.fromkeys(("lora_modules_to_save",), "only LoRA and, as `router`, routers are trained"),
    "advantage_estimator": "advantages are those of GRPO: a reward less the mean of its group",
    "kl_in_reward": "the divergence from the reference is part of the loss (beta), not of the reward",
    "multi_turn_scheduler": "a completion is one turn",
    "system_prompt": "no system message is added: write it into the data",
    "eos_token": "a turn ends as the model's chat template says",
    "pad_token": "rows are not padded with it",
    "chat_template_path": "name the file as chat_template",
    "packing_strategy": "samples are packed whole, and none sees another",
    "agent_template": "tool calls are written as the model's chat template does",
    "mix_strategy": "sources are mixed by their weights",
    "interleave_probs": "sources are mixed by their weights: {path: ..., weight: ...}",
    "streaming": "rows are prepared beside training, and need not fit in memory",
    "init_weights": "A is drawn at random and B is 0",
    "init_lora_weights": "A is drawn at random and B is 0",
    "freeze_parameters_ratio": "no part of the layers is frozen: tuning is lora or full",
    "freeze_parameters": "no part of the layers is frozen: tuning is lora or full",
    "trainable_parameters": "what is trained follows from tuning and target_modules",
    "vit_gradient_checkpointing": "a frozen tower keeps no activations; gradient_checkpointing is of the decoder",
    "loss_scale": "the loss weighs all trained tokens alike: train_on says which are trained",
    "dataset_prompt_column": "name the column: columns: {prompt: NAME}",
    "trust_remote_code": "code that comes with a model is never run: the model must be one that transformers knows",
    "group_by_length": "rows come in an order drawn from the seed; packing leaves no room empty",
    **dict.fromkeys(
        ("wandb_project", "wandb_entity", "wandb_name", "wandb_run_id", "wandb_log_model"),
        "report_to: [wandb] takes it from wandb's own variables (WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME)",
    ),
    **dict.fromkeys(("hub_model_id", "hub_strategy"), "nothing is sent to the hub"),
    "plugins": "what a plugin of axolotl does is not done here",
    **dict.fromkeys(
        ("loss_watchdog_threshold", "loss_watchdog_patience"),
        "a loss that jumps or is no number is a finding (SF2..) by its own course, and no threshold is set",
    ),
    "do_predict": "nothing is predicted after training: `surefoot chat` tries what was trained",
    "metric_for_best_model": "no best checkpoint is chosen: save_total_limit keeps the newest",
}
"""Peer setting that may change the run -> why it is left out."""

VLLM_OPTIONS = {
    "vllm_gpu_memory_utilization": "gpu-memory-utilization",
    "vllm_max_model_len": "max-model-len",
    "vllm_max_model_length": "max-model-len",
    "vllm_tensor_parallel_size": "tensor-parallel-size",
    "vllm_max_num_seqs": "max-num-seqs",
    "vllm_limit_mm_per_prompt": "limit-mm-per-prompt",
}
"""Peer setting of the rollout engine -> option of `vllm serve`."""
VLLM_FLAGS = {"vllm_enforce_eager": "enforce-eager", "vllm_enable_prefix_caching": "enable-prefix-caching"}

UNSUPPORTED_GRPO = frozenset(
    "reward_model repetition_penalty external_plugins use_vllm num_infer_workers "
    "offload_model offload_optimizer gc_collect_after_offload move_model_batches async_generate "
    "tensor_parallel_size ref_model log_entropy".split()
)
"""Peer settings of reinforcement learning with rollouts that have no counterpart."""

REWARDS: dict[str, dict[str, Any]] = {
    "ms-swift": {
        "accuracy": {"func": "math_verify", "args": {"answer_column": "solution"}},
        "format": {"func": "regex", "args": {"pattern": r"\A<think>.*?</think>\s*<answer>.*?</answer>\Z"}},
    },
    "TRL": {
        "accuracy_reward": {"func": "math_verify", "args": {"answer_column": "solution"}},
        "think_format_reward": {"func": "regex", "args": {"pattern": r"\A<think>(?!.*<think>).*?</think>.*\Z"}},
    },
}
"""Program -> its reward function -> the same as an item of reward_funcs."""
LENGTH_REWARDS = ("soft_overlong",)
"""Rewards of ms-swift that are a setting in Surefoot: soft_overlong_length, set from soft_cache_length."""
