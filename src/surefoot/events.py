"""What happens in a run, as frozen records. Standard library only.

The trainer emits events; observers receive them, return nothing, hold no trainer and change no number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from surefoot.findings import Finding


@dataclass(frozen=True)
class Heartbeat:
    """Data is being prepared, by this process or one it waits for, a server is waited for, or an evaluation goes on.

    `text` says how far, with rate and time left.
    """

    text: str = ""
    """Empty where another process tells its user."""


@dataclass(frozen=True)
class DataCounted:
    """The rows of the training data were counted: all of them, or those prepared so far."""

    rows: Mapping[str, int]
    """read, trained, truncated, skipped."""
    is_complete: bool


@dataclass(frozen=True)
class RunStarted:
    """The run is assembled and about to take its first step."""

    run_folder: Path
    config: Mapping[str, Any]
    total_steps: int | None
    """None while the data, which say how many, are being prepared."""
    first_step: int
    """1, or the step after the checkpoint that was resumed."""
    trainable_parameters: int
    all_parameters: int
    evaluates_again: bool = False
    """An evaluation after the step before `first_step` was interrupted, or not yet saved as made: it is made again."""


@dataclass(frozen=True)
class StepEnded:
    """One optimizer step is done."""

    step: int
    total_steps: int
    """Of the whole run; an estimate where the data are still being prepared, or are many."""
    is_last: bool
    epoch: float
    loss: float
    """Mean negative log-likelihood over the step's trained tokens, without the load-balancing loss."""
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    tokens: int
    """Tokens processed so far, prompts included."""
    trained_tokens: int
    """Tokens in the loss so far."""
    tokens_per_second: float
    step_time_s: float
    peak_memory_bytes: int
    """On CUDA the allocator's peak since the start, else the process's peak resident set."""
    aux_loss: float | None = None
    """Load-balancing loss before its coefficient."""
    expert_load: tuple[float, ...] | None = None
    """Per MoE layer, the busiest expert's rows over the mean (1 is even)."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What else the method has to say of it, by name; GRPO: reward, entropy, clip_ratio, policy_version, ..."""


@dataclass(frozen=True)
class Evaluated:
    """The evaluation data were gone through."""

    step: int
    measured: Mapping[str, float]
    """By name: eval_loss and eval_trained_tokens; with GRPO eval_reward and what else is said of completions."""


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is complete on disk."""

    step: int
    path: Path
    save_time_s: float


@dataclass(frozen=True)
class CompletionsMade:
    """What a step of GRPO is about to learn from."""

    step: int
    """The first that trains on them."""
    policy_version: int
    """Steps that the weights had seen when they were generated."""
    samples: tuple[Mapping[str, Any], ...]
    """place, prompt, completion, tokens, finish, reward, rewards, advantage, and failures where there are any."""
    is_evaluation: bool = False
    """Nothing learns from them; `step` is then the one after which they were made."""


@dataclass(frozen=True)
class Notice:
    """Something worth a line on the screen: a resume, a skipped row, an alias."""

    text: str


@dataclass(frozen=True)
class FindingMade:
    """A named cause was found."""

    finding: Finding


@dataclass(frozen=True)
class RunEnded:
    """The run is over; `summary` is what summary.json says."""

    summary: Mapping[str, Any] = field(default_factory=dict)


Phase = Literal[
    "load",
    "tokenise",
    "wait for data",
    "forward",
    "backward",
    "communicate",
    "optimizer",
    "save",
    "evaluate",
    "export",
    "forward and backward",
    "rollout",
    "reward",
    "sync",
    "wait for completions",
    "launch",
]
"""What a rank is doing, as its program sees it. On CUDA the device may still work on what an earlier phase asked for;
the end of `backward` waits for it. `forward and backward` is of trainers that do not tell them apart; `launch` lasts
until the ranks have joined each other."""


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """A rank began something that may take long. Phases do not overlap on a rank, but `evaluate` contains others."""

    rank: int
    step: int
    """The step that is being taken; 0 before the first."""
    phase: Phase


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """A rank is through with a phase, or left it by an error."""

    rank: int
    step: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class LayerEntered:
    """A rank has come to a layer of the decoder, in a forward that is trained or in its backward.

    There are many a second: observers that do not need it must be through with it at once.
    """

    rank: int
    layer: int
    """From 0, as in the names of parameters."""


@dataclass(frozen=True, slots=True)
class BatchDescribed:
    """A rank's part of a step's global batch."""

    rank: int
    step: int
    tokens: int
    trained: int
    """Tokens in the loss."""
    sequences: int
    fillers: int
    """Micro-batches that are computed and counted nowhere, so that all ranks take part in each collective."""
    padding: int = 0
    """Of the tokens, those that only fill up rows: of other trainers, ours lays rows end to end."""
    images: int = 0
    patches: int = 0
    """That the vision tower reads of them."""


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """What lies in the memory of a rank's device between two steps, in bytes; activations are given back by then."""

    rank: int
    step: int
    frozen: int
    """Parameters that are not trained, and buffers."""
    trained: int
    """Parameters that are: LoRA's, or the model's."""
    gradients: int
    """Of a step; given back at its end."""
    optimizer: int
    total: int | None
    """All that tensors use on CUDA; None elsewhere, where it is what of the process's memory belongs to no file."""


@dataclass(frozen=True, slots=True)
class DeviceMemorySampled:
    """What CUDA's caching allocator counts at the end of a step, in bytes; activations are given back by then."""

    rank: int
    step: int
    allocated: int
    """Of tensors."""
    reserved: int
    """Taken from the driver."""
    inactive: int
    """Of these, pieces between tensors of one block."""
    retries: int
    """How often it gave back all it could and asked the driver again, since the start."""
    free: int
    """Of the device, for whoever asks."""


@dataclass(frozen=True, slots=True)
class ExpertsUsed:
    """How the routers spread the tokens of many steps over the experts, over the global batches."""

    rank: int
    step: int
    """The last of them."""
    layer: int
    """The MoE layer whose routing is most uneven."""
    share: float
    """Of its rows, those of the busiest experts, as many as a token chooses: 1 where all tokens choose the same."""
    even_share: float
    """What that would be if all experts were used evenly: experts a token chooses, over the experts of the layer."""
    silent: int
    """Experts of all layers that got no token now, and half of an even part or more before."""
    rows: float
    """Rows an expert got on average."""


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """What a model took of host memory on a rank of another trainer, in bytes."""

    rank: int
    whole: int
    """All of its parameters, as they are kept."""
    kept: int
    """Of them, those in host memory on this rank now."""
    peak: int
    """The most memory that the process had of its own until now, Python and libraries included."""


@dataclass(frozen=True, slots=True)
class ExpertRanksUsed:
    """How evenly ranks that share experts out got rows, over many steps and all layers."""

    rank: int
    step: int
    """The last of them."""
    load: float
    """Rows of the busiest rank, layer by layer, over those of the mean one: 1 where all have as many."""
    ranks: int
    """Over which the experts of a layer are shared out."""


Event = (
    Heartbeat
    | DataCounted
    | RunStarted
    | PhaseBegan
    | PhaseEnded
    | LayerEntered
    | BatchDescribed
    | MemorySampled
    | DeviceMemorySampled
    | ExpertsUsed
    | ExpertRanksUsed
    | ModelLoaded
    | StepEnded
    | Evaluated
    | CheckpointSaved
    | CompletionsMade
    | Notice
    | FindingMade
    | RunEnded
)


class Observer(Protocol):
    """Receives every event of a run, in order."""

    def observe(self, event: Event) -> None: ...
