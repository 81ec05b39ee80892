"""Tables of peer settings: their defaults, and those that differ in meaning or have no counterpart in Surefoot.

Settings that differ in name only are in `config.aliases`. The defaults are those of ms-swift 4, LLaMA-Factory 0.9,
TRL 1 and axolotl 0.12, read 2026-11. They are carried because a run depends on them too.
"""

from typing import Any

Settings = dict[str, Any]

DEFAULTS: dict[str, Settings] = {
    "ms-swift": {
        "tuning": "lora", "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all", "num_train_epochs": 3,
        "per_device_train_batch_size": 1, "gradient_checkpointing": True, "weight_decay": 0.1, "adam_beta2": 0.95,
        "learning_rate": 1e-4, "truncation": "drop", "save_steps": 500, "save_total_limit": None, "logging_steps": 5,
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
        "warmup_ratio": 0.03, "saves_per_epoch": 1, "save_total_limit": 4,
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
    },
}
"""Program -> its further defaults for GRPO."""
TRL_WITH_VLLM: Settings = {"importance_correction": "sequence_mask", "importance_cap": 3.0}
"""TRL's further defaults for GRPO with vLLM."""
SWIFT_3_SAMPLING: Settings = {"top_k": 50, "top_p": 0.9}
"""Further defaults for GRPO of ms-swift before 4.1."""
PREFERENCE_DEFAULTS: dict[str, Settings] = {"TRL": {"learning_rate": 1e-6}}
"""Program -> its further defaults for DPO, KTO and ORPO."""
OWN_TRAINERS_OF_TRL = frozenset(("TRL", "axolotl"))
"""Programs that train preferences with TRL's trainers as they are."""
TRL_ORPO: Settings = {"train_on": "all"}
"""TRL's default for ORPO: the likelihood that it adds is that of the question, too."""
TRL_REWARD: Settings = {"learning_rate": 1e-4, "truncation": "drop"}
"""TRL's defaults for reward models."""
TRL_KTO: Settings = {"shuffle": False}
"""TRL's default for KTO, whose mismatched answers are those of neighbouring rows."""
SWIFT_SCALES = {"rloo": "none", "reinforce_plus_plus": "batch"}
"""ms-swift's default of scale_rewards by its advantage_estimator, where it is not that of GRPO."""
AXOLOTL_MOST_WARMUP = 100
"""Most steps of axolotl's default warm-up."""
SWIFT_BATCH = 16
"""Number of samples per step that ms-swift accumulates to by default."""

DEFAULT_NOTES: dict[str, dict[str, str]] = {
    "ms-swift": {
        "max_length": "the default of ms-swift is the model's own maximum. Here it is 2048 tokens, and longer rows are "
        "skipped and counted"
    },
    "LLaMA-Factory": {
        "nproc_per_node": "LLaMA-Factory starts a process for each visible GPU: set the number of processes",
        "truncation": "LLaMA-Factory shortens the question before a short answer. Here rows that are too long are "
        "skipped and counted",
    },
    "axolotl": {
        "nproc_per_node": "axolotl starts a process for each visible GPU: set the number of processes",
        "warmup_ratio": "axolotl's default is 3 % of the run, but at most 100 steps: for more than 3,333 steps set "
        "warmup_steps: 100",
    },
    "TRL": {
        "nproc_per_node": "TRL takes it from accelerate's configuration or launcher: set the number of processes",
        "train_on": "the default of TRL depends on the data: all tokens of conversations, but only the completions of "
        "prompt-completion rows. For the latter set train_on: assistant",
    },
}
"""Program -> Surefoot setting -> what the user should know if the run does not set it."""

SWIFT_3_NOTE = "ms-swift before 4.1 samples with top_p 0.9 and top_k 50 by default: set both for a run of that version"
UNCUT_PROMPTS = (
    "{program} does not truncate prompts. Here a prompt of more than 2048 tokens stops the run, with an error that "
    "names it: set the length of your longest prompt"
)
"""Note for GRPO without a prompt length."""


IGNORED = frozenset(
    "do_train do_eval overwrite_cache plot_loss use_fast_tokenizer ddp_timeout remove_unused_columns "
    "dataloader_pin_memory dataloader_prefetch_factor per_device_eval_batch_size flash_attn "
    "attn_impl attn_implementation flash_attention use_liger_kernel enable_liger_kernel ddp_find_unused_parameters "
    "lazy_tokenize use_hf logging_dir logging_first_step include_num_input_tokens_seen include_tokens_per_second "
    "eval_on_start gradient_checkpointing_kwargs use_reentrant load_from_cache_file tokenizer_type model_type_hf "
    "val_batch_size strict_packing eval_sample_packing pad_to_sequence_len dataset_prepared_path xformers_attention "
    "ddp_backend log_level disable_tqdm low_cpu_mem_usage local_rank padding_free liger_rope liger_rms_norm "
    "liger_glu_activation liger_fused_linear_cross_entropy tf32 attention attn strict pad_to_multiple_of "
    "log_completions strategy flash_attn_2 gradient_checkpointing_use_reentrant use_unsloth experts_impl "
    "experts_implementation use_kernels use_scattermoe lora_mlp_kernel lora_qkv_kernel lora_o_kernel".split()
)
"""Peer settings that change how a result is computed and not the result; Surefoot does it its own way, or always."""


def _index_by_name(reasons: dict[str, str]) -> dict[str, str]:
    """Return name -> reason, from reason -> names with spaces between."""
    return {name: why for why, names in reasons.items() for name in names.split()}


CROSS_ENTROPY = frozenset(("nll", "chunked_nll", "causal_lm", "cross_entropy", None))
"""Names of the loss of SFT."""
IGNORED_IF: dict[str, tuple[frozenset[Any], str]] = {
    **dict.fromkeys(
        ("save_strategy", "evaluation_strategy", "eval_strategy", "logging_strategy"),
        (
            frozenset(("steps",)),
            "intervals are steps or parts of an epoch: set save_steps or saves_per_epoch, "
            "eval_steps or evals_per_epoch, logging_steps",
        ),
    ),
    "loss_type": (CROSS_ENTROPY, "the loss is cross-entropy over the trained tokens"),
    "save_only_model": (frozenset((False, None)), "checkpoints include the optimizer state, which resuming needs"),
    "push_to_hub": (frozenset((False, None)), "push_to_hub: user/name uploads what a run wrote"),
}
"""Peer setting -> (values that match what Surefoot always does, what Surefoot does instead of other values)."""

UNSUPPORTED_VALUES = _index_by_name({
    "a number of rows, but eval_fraction is a share of them: no rows are held out until you set it":
        "val_size val_set_size split_dataset_ratio eval_fraction",
    "they belong to functions that are not carried: write each weight with its function, {func: ..., weight: ...}":
        "reward_weights",
    "this schedule is not available: the default of its program stands instead": "lr_scheduler_type lr_scheduler",
    "this optimizer is not available: AdamW stands instead": "optim optimizer",
    "not all of these parameters have a counterpart, with this schedule: docs/runs.md lists those that have one":
        "lr_scheduler_kwargs",
})  # fmt: skip
"""Peer setting -> why a value without a counterpart is left out."""

UNSUPPORTED = _index_by_name({
    "the chat template of the model itself is used: check one sample with `surefoot data`": "template chat_template",
    "write it as a split of the source: {path: ..., split: '[:1000]'}": "max_samples dataset_num_samples",
    "the best checkpoint is not selected: save_total_limit keeps the newest":
        "load_best_model_at_end metric_for_best_model",
    "biases are not trained with LoRA": "lora_bias",
    "the projector between tower and decoder is part of the tower: freeze_vision_tower applies to both":
        "freeze_aligner freeze_multi_modal_projector",
    "the rotary embedding is that of the model's config.json": "rope_scaling",
    "ray is not used: nproc_per_node sets the number of ranks": "ray_scope ray_num_workers",
    "trained weights and their moments are float32": "pure_bf16",
    "activations stay on the GPU: gradient_checkpointing frees them": "activation_offloading",
    "name the folder of that revision as model": "model_revision",
    "zero_stage: 3 cuts the teacher over the ranks; otherwise each holds it whole":
        "teacher_deepspeed offload_teacher_model",
    "a completion is one turn": "max_turns multi_turn_scheduler",
    "videos are not read": "video_max_pixels video_min_pixels",
    "sequences are not split over GPUs: see sequence_parallel_size":
        "sequence_parallel_mode alst_sequence_backend",
    "it configures `axolotl vllm-serve`: vllm_args configures the server that the run starts": "vllm",
    "name the GPUs of the server in vllm_devices": "vllm_device",
    "a dataset_info.json on the hub is not read: name its files as dataset": "dataset_dir",
    "sharding is set by zero_stage": "fsdp use_fsdp",
    "it has no effect without fsdp, or is a file that does not exist here: sharding is set by zero_stage":
        "fsdp_config",
    "checkpoints of other programs cannot be resumed: start from the adapter with init_adapter":
        "resume_from_checkpoint",
    "{{NAME}} in the data (swift/self-cognition) is not replaced: write the name there": "model_name",
    "{{AUTHOR}} in the data (swift/self-cognition) is not replaced: write the author there": "model_author",
    "the model's own tokenizer is used unchanged": "special_tokens tokenizer_name_or_path tokenizer_config",
    "the architecture is that of the model's config.json": "model_type",
    "PEFT takes one regular expression, and in a list of several finds no module of such a name":
        "target_modules lora_target_modules lora_target",
    "the setting `shuffle` shuffles rows": "train_dataloader_shuffle",
    "sequences are not split over GPUs here, so each GPU takes its own samples: divide gradient_accumulation_steps by "
    "it for the same batch": "sequence_parallel_size context_parallel_size context_parallel_degree cp_size",
    "the model's chat template ends a turn": "eos_token",
    "rows are not padded": "pad_token",
    "name the file as chat_template": "chat_template_path",
    "samples are packed without splitting, and do not attend to each other": "packing_strategy",
    "the model's chat template formats tool calls": "agent_template",
    "sources are mixed by their weights": "mix_strategy",
    "sources are mixed by their weights: {path: ..., weight: ...}": "interleave_probs",
    "rows are prepared while training runs, and need not fit in memory": "streaming",
    "A is initialised at random and B is 0": "init_weights init_lora_weights",
    "with LoRA the weights of the model are frozen anyway": "freeze_parameters_ratio freeze_parameters",
    "target_modules and modules_to_save set what is trained": "trainable_parameters",
    "a frozen tower keeps no activations, and gradient_checkpointing applies to the decoder":
        "vit_gradient_checkpointing",
    "the loss weighs all trained tokens equally: train_on sets which are trained": "loss_scale",
    "name the column: columns: {prompt: NAME}": "dataset_prompt_column",
    "code that comes with a model is never run: transformers itself must support the model": "trust_remote_code",
    "the seed sets the order of rows, and packing leaves no padding": "group_by_length",
    "report_to: [wandb] reads it from wandb's own variables (WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME)":
        "wandb_project wandb_entity wandb_name wandb_run_id wandb_log_model",
    "report_to: [swanlab] reads it from SwanLab's own variables (SWANLAB_PROJECT, SWANLAB_WORKSPACE, SWANLAB_MODE)":
        "swanlab_project swanlab_workspace swanlab_mode swanlab_logdir",
    "push_to_hub: user/name uploads what a run wrote": "hub_model_id hub_strategy",
    "plugins of axolotl are not run": "plugins",
    "a loss that jumps or is not finite is reported as a finding (SF4..), without a threshold":
        "loss_watchdog_threshold loss_watchdog_patience",
    "name its functions in reward_funcs as file.py:FUNCTION; docs/grpo.md shows what they receive": "external_plugins",
    "no predictions are made after training: try the model with `surefoot chat`": "do_predict",
})  # fmt: skip
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

REWARD_MODELS = ("reward_model_name_or_path", "reward_model")
"""Settings of TRL and ms-swift for reward models beside reward functions."""
UNSUPPORTED_GRPO = frozenset(
    "repetition_penalty use_vllm num_infer_workers "
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
