"""Memory and time of a run, by phase and rank, and whether it fits. Reads the model's config, and no weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._subclasses import FakeTensorMode

from surefoot.config import RolloutConfig, RunConfig, vllm_settings
from surefoot.config.vllm_args import SMALLER, memory_share, pipeline_parallel, tensor_parallel, value_of
from surefoot.distributed.parallel_dims import Layout
from surefoot.errors import ConfigError, ModelError, SurefootError
from surefoot.methods.base import PlannedLoss
from surefoot.methods.registry import method_of
from surefoot.models.build import build_without_storage
from surefoot.models.lora import LoraSettings, lora_settings
from surefoot.planner.devices import GB, GIB, Device
from surefoot.planner.expert_dispatch import share_out
from surefoot.planner.memory import (
    Cuts,
    Owners,
    Rollout,
    Server,
    cut,
    forecast_memory,
    gathered_experts,
    gradient_share,
)
from surefoot.planner.sizes import FP32_BYTES, HALF_BYTES, Elements, Sizes, check_fields, sizes_of
from surefoot.planner.trace import ATTENTION, NOTHING, Trace, shaped_batch, trace_step
from surefoot.planner.vision_tower import Pictures, pictures_of, show

FEW, MORE = 2, 4
"""Numbers of layers that are traced; a model with more equal layers is extrapolated linearly from both."""
RESERVE = 0.06
"""Share of a GPU's memory that tensors cannot use: CUDA's context, kernels, fragmentation of the allocator."""
HOST_LINK_BYTES_PER_S = 20 * GB
CPU_BYTES_PER_S = 10 * GB
"""Rates between a GPU and its host over PCIe 4, and of one rank's share of the host's memory; assumptions."""
UPDATE_PASSES = 7
"""Passes of AdamW over the trained weights: it reads weight, gradient and two moments and writes three of them."""
MOST_TOKENS = 1 << 18
"""Most tokens in one forward; more take minutes to trace, and fit on no device."""
GPU_PROCESS_BYTES = 3 * GIB
"""Host memory of a process with CUDA's libraries; not measured here."""


@dataclass(frozen=True)
class Forecast:
    """Forecast of one run on one kind of device."""

    run: RunConfig
    device: Device
    sizes: Sizes
    phases: dict[str, Owners]
    host_free_bytes: int
    """Free host memory of a machine; 0 if it is unknown."""
    step_s: float
    """Time to train on a batch that is already loaded."""
    sequences_per_step: int
    communication_bytes: int
    """Bytes that a rank sends in a step."""
    pictures: Pictures | None = None
    """Images of a micro-batch; None for a text-only model."""
    server: Server | None = None
    """vLLM server of the rollouts; None if the training process generates them."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the sequences of a step at full length; with GRPO of completions and their prompts."""
        return self.sequences_per_step * sequence_length(self.run)

    @property
    def seconds_per_token(self) -> float:
        return (self.step_s + self.rollout_s) / self.tokens_per_step

    @property
    def rollout_s(self) -> float:
        """Shortest time of the built-in engine for a step's completions: gathering the weights for each token."""
        run = self.run
        if not isinstance(run, RolloutConfig):
            return 0.0
        ranks = self.ranks_here * run.nnodes
        sequences_per_rank = -(-self.sequences_per_step // ranks)
        batches = -(-sequences_per_rank // min(run.rollout_batch_size or sequences_per_rank, sequences_per_rank))
        gathered_s = self.gathered_bytes_per_token / self.device.link_bytes_per_s
        return batches * run.max_completion_length * gathered_s / run.steps_per_batch

    @property
    def ranks_here(self) -> int:
        return self.run.nproc_per_node

    @property
    def device_peak(self) -> tuple[str, int]:
        """(phase, bytes) at the peak of one rank's device."""
        return max(
            ((name, owners.device_bytes) for name, owners in self.phases.items()),
            key=lambda phase_bytes: phase_bytes[1],
        )

    @property
    def host_peak(self) -> tuple[str, int]:
        """(phase, bytes) at the peak of all ranks of one machine."""
        peaks = ((name, owners.host_bytes * self.ranks_here) for name, owners in self.phases.items())
        return max(peaks, key=lambda phase_bytes: phase_bytes[1])

    @property
    def device_room_bytes(self) -> int:
        return int(self.device.memory_bytes * (1 - RESERVE)) if self.device.is_gpu else 0

    @property
    def fits(self) -> bool:
        """Whether each rank's device, each machine and the server have enough memory."""
        on_device = not self.device.is_gpu or self.device_peak[1] <= self.device_room_bytes
        return (
            on_device
            and (self.server is None or self.server.has_room)
            and (not self.host_free_bytes or self.host_peak[1] <= self.host_free_bytes)
        )

    def device_hours(self, steps: int) -> float:
        """Return the hours of these steps, summed over all devices."""
        return (self.step_s + self.rollout_s) * steps / 3600 * self.ranks_here * self.run.nnodes

    @property
    def gathered_bytes_per_token(self) -> int:
        """Bytes that a rank receives for each further token of a rollout: with ZeRO 3 all weights, at each forward."""
        is_local = isinstance(self.run, RolloutConfig) and self.run.rollout_engine == "local"
        if not is_local or self.run.zero_stage < 3 or self.ranks_here * self.run.nnodes == 1:
            return 0
        whole = self.sizes.whole
        return (whole.frozen + whole.expert_frozen) * self.sizes.frozen_bytes_each + whole.all_trained * FP32_BYTES

    def as_dict(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "device": {"name": self.device.name, "memory_bytes": self.device.memory_bytes, "how": self.device.how},
            "ranks": self.ranks_here * self.run.nnodes,
            "parameters": self.sizes.whole.total,
            "trained_parameters": self.sizes.whole.all_trained,
            "device_peak_bytes": self.device_peak[1],
            "device_peak_phase": self.device_peak[0],
            "host_peak_bytes": self.host_peak[1],
            "host_peak_phase": self.host_peak[0],
            "host_free_bytes": self.host_free_bytes,
            "phases": {
                name: {"device": dict(owners.device), "host": dict(owners.host)} for name, owners in self.phases.items()
            },
            "step_s": self.step_s,
            "rollout_s": self.rollout_s,
            "device_hours_per_1000_steps": self.device_hours(1000),
            "tokens_per_step": self.tokens_per_step,
            "communication_bytes_per_step": self.communication_bytes,
            "gathered_bytes_per_token": self.gathered_bytes_per_token,
        }


def forecast(
    run: RunConfig,
    base: Path,
    device: Device,
    *,
    host_free_bytes: int = 0,
    where: Callable[..., str] = lambda *_: "run.yaml",
    is_least: bool = False,
) -> Forecast:
    """Forecast a run whose model's config.json is in `base`.

    `is_least`: nothing is traced, and the memory of forward and backward is left out.
    Raises: ModelError for a config that no model can be built from; ConfigError for sizes that do not divide.
    """
    ranks = run.nproc_per_node * run.nnodes
    layout = Layout.of(run, ranks, where)
    dtype = torch.float32 if not device.is_gpu and run.dtype != "bfloat16" else torch.bfloat16
    dtype = torch.float32 if run.dtype == "float32" else dtype
    lora = lora_settings(run)
    sizes = _count_sizes(base, lora, dtype, freeze_vision=run.freeze_vision_tower)
    if layout.expert_parallel > 1 and (not sizes.num_experts or sizes.num_experts % layout.expert_parallel):
        raise ConfigError(
            f"expert_parallel_size={layout.expert_parallel} does not divide the {sizes.num_experts} experts of the "
            f"model ({where('expert_parallel_size')})."
        )
    all_sequences = run.global_batch_size or run.sequences_per_step * ranks
    sequences = -(-all_sequences // ranks)
    each = min(run.per_device_train_batch_size, sequences)
    steps = -(-sequences // each)
    length = sequence_length(run)
    if each * length > MOST_TOKENS:
        raise ConfigError(
            f"per_device_train_batch_size={each} sequences of {length} tokens are {each * length} tokens in one "
            f"forward; plans are made for up to {MOST_TOKENS} ({where('per_device_train_batch_size', 'max_length')})."
        )
    pictures = pictures_of(run, base, each, run.max_row_tokens)
    trace = NOTHING if is_least else _trace(
        base, lora, dtype, loss=method_of(run).planned_loss(run), is_checkpointed=run.gradient_checkpointing, rows=each,
        length=length, is_on_gpu=device.is_gpu, twice=steps > 1, share=gradient_share(layout, sizes),
        freeze_vision=run.freeze_vision_tower, pictures=pictures, expert_parallel=layout.expert_parallel,
    )  # fmt: skip
    process = GPU_PROCESS_BYTES if device.is_gpu else int(_measure_process_bytes())
    rollout = None
    if isinstance(run, RolloutConfig) and run.rollout_engine == "local":
        at_a_time = min(run.rollout_batch_size or sequences, sequences)
        prompts = -(-at_a_time // run.sequences_per_row)
        rollout = Rollout(at_a_time, length, dtype.itemsize, prompts * run.max_row_tokens / (each * length))
    server = _plan_server(run, device, sizes)
    phases = forecast_memory(
        sizes,
        layout,
        trace,
        process_bytes=process,
        saves=bool(run.save_steps),
        is_on_gpu=device.is_gpu,
        ranks_here=run.nproc_per_node,
        rollout=rollout,
        server=server,
        is_full=run.tuning == "full",
    )
    dispatched = trace.exchanged_bytes * (layout.expert_parallel - 1) // layout.expert_parallel
    sent = _count_sent_bytes(sizes, layout, steps) + steps * dispatched
    sharing = 1 if device.is_gpu else run.nproc_per_node
    moved = steps * trace.moved_bytes + UPDATE_PASSES * _count_trained_bytes(sizes, layout)
    compute_s = sharing * (steps * trace.flops / device.flops_per_s + moved / device.moved_bytes_per_s)
    return Forecast(
        run=run,
        device=device,
        sizes=sizes,
        phases=phases,
        host_free_bytes=host_free_bytes,
        step_s=compute_s + sent / device.link_bytes_per_s + _estimate_offload_s(sizes, layout, steps),
        sequences_per_step=all_sequences,
        communication_bytes=sent,
        pictures=pictures,
        server=server,
    )


def _plan_server(run: RunConfig, device: Device, sizes: Sizes) -> Server | None:
    """Return the vLLM server of a run, or None without one."""
    settings = vllm_settings(run)
    if settings is None:
        return None
    if settings.vllm_server is not None or not device.is_gpu:
        return Server(0, False)
    devices = (
        {number.strip() for number in settings.vllm_devices.split(",")} if settings.vllm_devices is not None else None
    )
    is_apart = devices is not None and not devices & {str(number) for number in range(run.nproc_per_node)}
    share = int(memory_share(settings.vllm_args) * device.memory_bytes)
    whole = sizes.whole
    model = HALF_BYTES * (whole.total - (whole.all_trained if run.tuning == "lora" else 0))
    return Server(
        bytes_here=0 if is_apart else share,
        sleeps=settings.vllm_sleep,
        share_bytes=0 if any(value_of(settings.vllm_args, name) is not None for name in SMALLER) else share,
        weights_bytes=model // (tensor_parallel(settings.vllm_args) * pipeline_parallel(settings.vllm_args)),
        asleep_bytes=model // run.nproc_per_node if settings.vllm_sleep else 0,
    )


def sequence_length(run: RunConfig) -> int:
    """Return the most tokens of a sequence that is trained on."""
    return run.max_row_tokens + run.max_added_tokens


@lru_cache(maxsize=1)
def _measure_process_bytes() -> int:
    """Return the resident memory of this process, which has loaded the same libraries as a rank."""
    return int(psutil.Process().memory_info().rss)


@contextmanager
def _raise_as_model_error(base: Path) -> Iterator[None]:
    """Raise errors of a model that cannot be built, counted or traced as a ModelError that names its config."""
    try:
        yield
    except SurefootError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{base / 'config.json'}: no forecast can be made of this model: {type(error).__name__}: {reason}"
        ) from error


@lru_cache(maxsize=8)
def _count_sizes(base: Path, lora: LoraSettings | None, dtype: torch.dtype, *, freeze_vision: bool) -> Sizes:
    with _raise_as_model_error(base), FakeTensorMode():
        check_fields(base)
        return sizes_of(
            build_without_storage(
                base,
                lora=lora,
                dtype=dtype,
                gradient_checkpointing=False,
                attention=ATTENTION,
                freeze_vision=freeze_vision,
            )
        )


@lru_cache(maxsize=64)
def _trace(
    base: Path, lora: LoraSettings | None, dtype: torch.dtype, *, loss: PlannedLoss, is_checkpointed: bool,
    rows: int, length: int, is_on_gpu: bool, twice: bool, share: float, freeze_vision: bool,
    pictures: Pictures | None, expert_parallel: int,
) -> Trace:  # fmt: skip
    """Trace `rows` sequences of full length whose tokens are all trained: the largest possible micro-batch.

    With GRPO the tokens of the longest completions are trained; each follows its own prompt, as on a GPU.
    """

    def trace_layers(layers: int | None) -> Trace:
        with _raise_as_model_error(base), FakeTensorMode():
            built = build_without_storage(
                base, lora=lora, dtype=dtype, gradient_checkpointing=is_checkpointed, attention=ATTENTION,
                layers=layers, freeze_vision=freeze_vision,
            )  # fmt: skip
            if expert_parallel > 1:
                share_out(built.model, expert_parallel)
            vision = show(built, pictures) if pictures is not None else None
            batch = shaped_batch([length] * rows, rows * loss.tokens_per_sequence, vision)
            return trace_step(built, batch, loss(built, batch), is_on_gpu=is_on_gpu, twice=twice, gradient_share=share)

    sizes = _count_sizes(base, lora, dtype, freeze_vision=freeze_vision)
    if not sizes.layers_are_equal or sizes.num_layers <= MORE:
        return trace_layers(None)
    return trace_layers(FEW).with_layers(trace_layers(MORE), FEW, MORE, sizes.num_layers)


def _estimate_offload_s(sizes: Sizes, layout: Layout, steps: int) -> float:
    """Estimate the time that offload adds to a step: weights to the device in each pass, gradients back, update."""
    if not layout.offload:
        return 0.0
    cuts = Cuts.of(layout, sizes)
    trained = _count_trained_bytes(sizes, layout)
    frozen = cut(Elements(trained=sizes.whole.frozen, expert_trained=sizes.whole.expert_frozen), cuts)
    weights = trained + (frozen * sizes.frozen_bytes_each if layout.zero_stage == 3 else 0)
    passes = 2 * steps if layout.zero_stage == 3 else steps
    return (passes * weights + steps * trained) / HOST_LINK_BYTES_PER_S + UPDATE_PASSES * trained / CPU_BYTES_PER_S


def _count_trained_bytes(sizes: Sizes, layout: Layout) -> int:
    """Return the bytes of this rank's shard of the trained weights."""
    return cut(sizes.whole, Cuts.of(layout, sizes)) * FP32_BYTES


def _count_sent_bytes(sizes: Sizes, layout: Layout, steps: int) -> int:
    """Count the bytes that a rank sends in a step to reduce gradients and gather weights, without rows to experts."""
    if layout.size == 1:
        return 0
    whole, element_bytes = sizes.whole, 4
    trained = element_bytes * (whole.trained + gathered_experts(whole, layout))
    reductions = steps if layout.zero_stage >= 2 else 1
    sent = 2 * trained if layout.zero_stage == 0 else trained * (1 + reductions)
    if layout.zero_stage == 3:
        frozen = sizes.frozen_bytes_each * (whole.frozen + whole.expert_frozen // layout.expert_parallel)
        sent = reductions * (2 * (trained + frozen) + trained)
    return sent
