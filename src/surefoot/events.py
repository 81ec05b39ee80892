"""Events of a run, as frozen records. Standard library only.

The trainer emits events; observers receive them, return nothing, hold no trainer and change no number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from surefoot.findings import Finding


@dataclass(frozen=True)
class Heartbeat:
    """Progress of preparing data (here or in another process), waiting for a server, or evaluating.

    `text` holds the progress, with rate and time left.
    """

    text: str = ""
    """Progress for the user; empty if another process reports it."""


@dataclass(frozen=True)
class DataCounted:
    """Row counts of the training data: all rows, or those prepared so far."""

    rows: Mapping[str, int]
    """Row counts by name: read, trained, truncated, skipped."""
    is_complete: bool
    held_out: int | None = None
    """Number of rows that `eval_fraction` keeps for evaluation; None if it keeps none, or not all rows are prepared."""


@dataclass(frozen=True)
class RunStarted:
    """Start of a run, just before its first step."""

    run_folder: Path
    config: Mapping[str, Any]
    total_steps: int | None
    """Number of steps; None while the data that determine it are being prepared."""
    first_step: int
    """Number of the first step: 1, or the step after the resumed checkpoint."""
    trainable_parameters: int
    all_parameters: int
    evaluates_again: bool = False
    """Whether the evaluation before `first_step` is repeated, because it was interrupted or not saved."""


@dataclass(frozen=True)
class StepEnded:
    """End of an optimizer step."""

    step: int
    total_steps: int
    """Number of steps of the whole run; an estimate if the data are still being prepared, or are many."""
    is_last: bool
    epoch: float
    loss: float
    """Mean negative log-likelihood over the step's trained tokens, without the load-balancing loss."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    tokens: int
    """Number of tokens processed so far, prompts included."""
    trained_tokens: int
    """Number of tokens in the loss so far."""
    tokens_per_second: float
    step_time_s: float
    peak_memory_bytes: int
    """Peak of the allocator since the start on CUDA, else the process's peak resident set."""
    aux_loss: float | None = None
    """Load-balancing loss before its coefficient."""
    expert_load: tuple[float, ...] | None = None
    """Rows of the busiest expert over the mean, per MoE layer (1 is even)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the method by name; GRPO: reward, entropy, clip_ratio, policy_version, ..."""

    def is_logged(self, every: int) -> bool:
        """Return whether the step is shown and logged: each of the interval, and the last."""
        return self.step % every == 0 or self.is_last


@dataclass(frozen=True)
class Evaluated:
    """End of an evaluation."""

    step: int
    metrics: Mapping[str, float]
    """Metrics by name: eval_loss and eval_trained_tokens; with GRPO eval_reward and other metrics of completions."""


@dataclass(frozen=True)
class CheckpointSaved:
    """Checkpoint that is complete on disk."""

    step: int
    path: Path
    save_time_s: float


@dataclass(frozen=True)
class CompletionsMade:
    """Completions that a step of GRPO is about to train on."""

    step: int
    """First step that trains on them."""
    policy_version: int
    """Number of steps that the generating weights had been trained for."""
    samples: tuple[Mapping[str, Any], ...]
    """Samples: place, prompt, completion, tokens, finish, reward, rewards, advantage, and failures if any."""
    is_evaluation: bool = False
    """Whether they are for evaluation only; `step` is then the step after which they were generated."""


@dataclass(frozen=True)
class SamplesTrained:
    """Samples that the first step of SFT trains on, as the model sees them."""

    step: int
    samples: tuple[Mapping[str, Any], ...]
    """Samples: place, tokens, and parts: the text as [part, is trained] pairs."""


@dataclass(frozen=True)
class Notice:
    """Event worth a line on the screen: a resume, a skipped row, an alias."""

    text: str


@dataclass(frozen=True)
class FindingMade:
    """Finding that names a cause."""

    finding: Finding


@dataclass(frozen=True)
class RunEnded:
    """End of a run; `summary` is the content of summary.json."""

    summary: Mapping[str, Any] = field(default_factory=dict)


Phase = Literal[
    "load",
    "tokenize",
    "data_wait",
    "forward",
    "backward",
    "collectives",
    "optimizer",
    "save",
    "evaluate",
    "export",
    "forward_backward",
    "rollout",
    "reward",
    "sync",
    "rollout_wait",
    "launch",
]
"""Phases of a rank, as its program sees them. On CUDA the device may still run the work of an earlier phase; the end of
`backward` waits for it. `forward_backward` is for trainers that do not separate the two; `launch` lasts until
all ranks have joined."""
FORMER_PHASES: dict[str, Phase] = {
    "tokenise": "tokenize",
    "wait for data": "data_wait",
    "communicate": "collectives",
    "forward and backward": "forward_backward",
    "wait for completions": "rollout_wait",
}
"""Former names of phases, in files of older runs, with the present ones."""


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """Start of a phase that may take long. On a rank, phases follow one another; only `evaluate` contains others."""

    rank: int
    step: int
    """Current step; 0 before the first."""
    phase: Phase


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """End of a phase on a rank, also if an error ended it."""

    rank: int
    step: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class LayerEntered:
    """Entry of a rank into a decoder layer, in a trained forward or in its backward.

    There are many each second: observers that do not need the event must return at once.
    """

    rank: int
    layer: int
    """Index of the layer from 0, as in the names of parameters."""


@dataclass(frozen=True, slots=True)
class BatchDescribed:
    """A rank's part of a step's global batch."""

    rank: int
    step: int
    tokens: int
    trained: int
    """Number of tokens in the loss."""
    sequences: int
    fillers: int
    """Number of dummy micro-batches, computed but not counted, so that all ranks take part in each collective."""
    padding: int = 0
    """Number of padding tokens among the tokens. Other trainers only: Surefoot lays rows end to end."""
    images: int = 0
    patches: int = 0
    """Number of patches that the vision tower reads."""
    micro_batches: int = 0
    """Number of forward passes, fillers included. Surefoot only."""


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """Memory of a rank's device between two steps, in bytes; activations are freed by then."""

    rank: int
    step: int
    frozen: int
    """Size of buffers and of parameters that are not trained."""
    trained: int
    """Size of trained parameters: LoRA's, or the model's."""
    gradients: int
    """Size of a step's gradients; freed at its end."""
    optimizer: int
    total: int | None
    """Size of all tensors on CUDA; None elsewhere, or the process's memory that belongs to no file."""


@dataclass(frozen=True, slots=True)
class DeviceMemorySampled:
    """Counters of CUDA's caching allocator at the end of a step, in bytes; activations are freed by then."""

    rank: int
    step: int
    allocated: int
    """Size of tensors."""
    reserved: int
    """Size of memory taken from the driver."""
    inactive: int
    """Size of the unused pieces between tensors of one block; a part of `reserved`."""
    retries: int
    """Number of times since the start that it freed all it could and asked the driver again."""
    free: int
    """Free memory of the device, for any process."""


@dataclass(frozen=True, slots=True)
class ExpertsUsed:
    """Distribution of the tokens of many steps over the experts, over the global batches."""

    rank: int
    step: int
    """Last of these steps."""
    layer: int
    """Index of the MoE layer whose routing is most uneven."""
    share: float
    """Share of its rows on the K busiest experts, K being experts per token: 1 if all tokens choose the same ones."""
    even_share: float
    """The same share if all experts were used evenly: experts per token over experts of the layer."""
    silent: int
    """Number of experts of all layers with no token now, and half of an even share or more before."""
    rows: float
    """Mean number of rows per expert."""


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """Host memory that a model took on a rank of another trainer, in bytes."""

    rank: int
    whole: int
    """Size of all of its parameters, in their stored type."""
    kept: int
    """Size of the parameters in host memory on this rank now."""
    peak: int
    """Peak of the process's own memory until now, Python and libraries included."""


@dataclass(frozen=True, slots=True)
class ExpertRanksUsed:
    """Balance of rows between expert-parallel ranks, over many steps and all layers."""

    rank: int
    step: int
    """Last of these steps."""
    load: float
    """Rows of the busiest rank over those of the mean rank, layer by layer: 1 if all are equal."""
    ranks: int
    """Number of ranks that share the experts of a layer."""


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
    | SamplesTrained
    | Notice
    | FindingMade
    | RunEnded
)


Emit = Callable[[Event], None]
"""Function that gives an event to all observers."""


class Observer(Protocol):
    """Receiver of every event of a run, in order."""

    def observe(self, event: Event) -> None: ...
