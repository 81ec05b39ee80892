"""Memory and time of a run, by phase and rank, and whether it fits. Reads the model's config, and no weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from surefoot.config import RunConfig, rollout_settings, vllm_settings
from surefoot.config.optimizers import OUTSIDE_LAYERS_BYTES, STATE_BYTES
from surefoot.config.vllm_args import SMALLER, memory_share, pipeline_parallel, tensor_parallel, value_of
from surefoot.distributed.parallel_dims import Layout
from surefoot.errors import ConfigError
from surefoot.methods.registry import method_of
from surefoot.models import frozen_model
from surefoot.models.frozen_parts import frozen_parts
from surefoot.models.lora import lora_settings
from surefoot.planner.devices import DEVICES, GB, GIB, Device
from surefoot.planner.memory import Owners, RankSetup, Rollout, Server, forecast_memory
from surefoot.planner.sharded_model import ShardedModel
from surefoot.planner.sizes import FP32_BYTES, HALF_BYTES, Sizes
from surefoot.planner.trace import EMPTY_TRACE
from surefoot.planner.traced_model import ModelSpec, StepSpec, sizes_of, trace_of
from surefoot.planner.vision_tower import ImageBatch, fit_images

RESERVED_SHARE = 0.06
"""Share of a GPU's memory that tensors cannot use: CUDA's context, kernels, fragmentation of the allocator."""
HOST_LINK_BYTES_PER_S = 20 * GB
CPU_BYTES_PER_S = 10 * GB
"""Rates between a GPU and its host over PCIe 4, and of one rank's share of the host's memory; assumptions."""
UPDATE_PASSES = 7
"""Passes of AdamW over the trained weights: it reads weight, gradient and two moments and writes three of them."""
MAX_FORWARD_TOKENS = 1 << 18
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
    images: ImageBatch | None = None
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
        run = rollout_settings(self.run)
        if run is None:
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
        return _count_room_bytes(self.device) if self.device.is_gpu else 0

    @property
    def fitting_devices(self) -> list[str]:
        """Names of the accelerators with enough memory for these settings, the smallest first."""
        if not self.device.is_gpu:
            return []
        devices = sorted(DEVICES.values(), key=lambda device: device.memory_bytes)
        return [device.name for device in devices if self.device_peak[1] <= _count_room_bytes(device)]

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
        run = rollout_settings(self.run)
        is_local = run is not None and run.rollout_engine == "local"
        if not is_local or self.run.zero_stage < 3 or self.ranks_here * self.run.nnodes == 1:
            return 0
        whole = self.sizes.whole
        return whole.frozen_bytes + whole.expert_frozen_bytes + whole.all_trained * FP32_BYTES

    def as_dict(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "device": {"name": self.device.name, "memory_bytes": self.device.memory_bytes, "how": self.device.how},
            "ranks": self.ranks_here * self.run.nnodes,
            "parameters": self.sizes.whole.total,
            "trained_parameters": self.sizes.whole.all_trained,
            "device_peak_bytes": self.device_peak[1],
            "fitting_devices": self.fitting_devices,
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
    is_float32 = run.dtype == "float32" or (not device.is_gpu and run.dtype != "bfloat16")
    dtype = torch.float32 if is_float32 else torch.bfloat16
    spec = ModelSpec(base, lora_settings(run), dtype, frozen_parts(run), run.has_score)
    sizes = sizes_of(spec)
    if layout.expert_parallel > 1 and (not sizes.num_experts or sizes.num_experts % layout.expert_parallel):
        raise ConfigError(
            f"expert_parallel_size={layout.expert_parallel} does not divide the {sizes.num_experts} experts of the "
            f"model ({where('expert_parallel_size')})."
        )
    model = ShardedModel(sizes, layout)
    all_samples = run.global_batch_size or run.sequences_per_step * ranks
    sequences = -(-all_samples // ranks) * run.sequences_per_sample
    step = _plan_step(run, base, sequences, where)
    micro_batches = -(-sequences // step.rows)
    trace = EMPTY_TRACE
    if not is_least:
        trace = trace_of(spec, step, model.gradient_share, layout.expert_parallel, is_on_gpu=device.is_gpu)
    server = _plan_server(run, device, sizes)
    setup = RankSetup(
        process_bytes=GPU_PROCESS_BYTES if device.is_gpu else _measure_process_bytes(),
        saves_checkpoints=run.planned_checkpoints != 0,
        is_on_gpu=device.is_gpu,
        is_full=run.tuning == "full",
        ranks_here=run.nproc_per_node,
        rollout=_plan_rollout(run, sequences, step, dtype),
        state_bytes=_count_state_bytes(run, sizes),
        server=server,
        models_beside=_count_models_beside(run, layout, dtype),
        sharded_beside=frozenset(model.role for model in run.models_beside if model.is_sharded),
    )
    dispatched = trace.exchanged_bytes * (layout.expert_parallel - 1) // layout.expert_parallel
    sent = model.count_sent_bytes(micro_batches) + micro_batches * dispatched
    sharing = 1 if device.is_gpu else run.nproc_per_node
    moved = micro_batches * trace.moved_bytes + UPDATE_PASSES * model.trained_bytes
    compute_s = sharing * (micro_batches * trace.flops / device.flops_per_s + moved / device.moved_bytes_per_s)
    return Forecast(
        run=run,
        device=device,
        sizes=sizes,
        phases=forecast_memory(model, trace, setup),
        host_free_bytes=host_free_bytes,
        step_s=compute_s + sent / device.link_bytes_per_s + _estimate_offload_s(model, micro_batches),
        sequences_per_step=all_samples * run.sequences_per_sample,
        communication_bytes=sent,
        images=step.images,
        server=server,
    )


def _count_room_bytes(device: Device) -> int:
    return int(device.memory_bytes * (1 - RESERVED_SHARE))


count_parameters = lru_cache(maxsize=16)(frozen_model.count_parameters)


def _count_state_bytes(run: RunConfig, sizes: Sizes) -> float:
    """Return the bytes of the optimizer's state for a trained weight, on average."""
    inside, trained = STATE_BYTES[run.optim], max(1, sizes.whole.all_trained)
    outside = OUTSIDE_LAYERS_BYTES.get(run.optim, inside)
    return inside + (outside - inside) * sizes.outside.all_trained / trained


def _count_models_beside(run: RunConfig, layout: Layout, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes that a rank holds of the models beside the trained one, by role. Raises: ModelError."""
    held: dict[str, int] = {}
    for model in run.models_beside:
        size = dtype.itemsize * (count_parameters(model.source) or 0) // (layout.fsdp if model.is_sharded else 1)
        held[model.role] = held.get(model.role, 0) + size
    return held


def _plan_step(run: RunConfig, base: Path, sequences: int, where: Callable[..., str]) -> StepSpec:
    """Return the micro-batches of one rank's `sequences`.

    Raises: ConfigError for more tokens in one forward than plans are made for.
    """
    rows = min(run.rows_at_a_time * run.sequences_per_sample, sequences)
    length = sequence_length(run)
    if rows * length > MAX_FORWARD_TOKENS:
        raise ConfigError(
            f"per_device_train_batch_size={run.rows_at_a_time}: {rows} sequences of {length} tokens are "
            f"{rows * length} tokens in one forward, and the plan can trace at most {MAX_FORWARD_TOKENS} "
            f"({where('per_device_train_batch_size', 'max_length')})."
        )
    return StepSpec(
        loss=method_of(run).planned_loss(run),
        rows=rows,
        length=length,
        images=fit_images(run, base, rows, run.max_row_tokens),
        checkpointing=run.checkpointing,
        is_accumulated=sequences > rows,
    )


def _plan_rollout(config: RunConfig, sequences: int, step: StepSpec, dtype: torch.dtype) -> Rollout | None:
    """Return the completions that the built-in engine generates at a time, or None without it."""
    run = rollout_settings(config)
    if run is None or run.rollout_engine != "local":
        return None
    completions = min(run.rollout_batch_size or sequences, sequences)
    prompts = -(-completions // run.sequences_per_row)
    prompts_share = prompts * run.max_row_tokens / (step.rows * step.length)
    return Rollout(completions, step.length, dtype.itemsize, prompts_share)


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


def _estimate_offload_s(model: ShardedModel, micro_batches: int) -> float:
    """Estimate the time that offload adds to a step: weights to the device in each pass, gradients back, update."""
    if not model.layout.offload:
        return 0.0
    sizes, trained = model.sizes, model.trained_bytes
    weights, passes = trained, micro_batches
    if model.layout.zero_stage == 3:
        weights += model.count_shard(sizes.whole.frozen_bytes, sizes.whole.expert_frozen_bytes)
        passes = 2 * micro_batches
    moved = passes * weights + micro_batches * trained
    return moved / HOST_LINK_BYTES_PER_S + UPDATE_PASSES * trained / CPU_BYTES_PER_S
