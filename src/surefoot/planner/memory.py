"""Memory of one rank, by owner, at the peak of each phase. Pure.

at rest     weights between steps, optimizer state and models beside; gradients take no memory
load        at rest without optimizer state, and one copy, in the file's dtype, of the tensor that is being read
step        forward and backward, at the peak of activations and gradients together; optimizer state exists from the
            second step on
save        at rest, and the copy in host memory that is written while training continues
rollout     with GRPO and the built-in engine: at rest, the KV cache of all tokens, and the logits of the next tokens;
            with a server on the same GPUs: at rest, and the server's share
sync        weights that are sent to a server: a whole adapter, or all weights tensor by tensor
export      the same, written to a file at the end of the run
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from surefoot.config.optimizers import STATE_BYTES
from surefoot.planner.sharded_model import ShardedModel
from surefoot.planner.sizes import FP32_BYTES, HALF_BYTES
from surefoot.planner.trace import Trace

HEAP_FRAGMENTATION = 0.75
"""Fragmentation of glibc's heap on a CPU, as a share of activations; measured, see docs/plan-accuracy.md."""
MAX_WEIGHT_SHARE = 0.9
"""Most of a server's share that weights can fill: the KV cache and activations need the rest; an assumption."""
SAMPLING_BYTES = 36
"""Bytes per token of the vocabulary: logits, and their copies in float32 and float64 in the local engine."""
PINNED_ROUNDING = "rounding of pinned memory"


@dataclass(frozen=True)
class Rollout:
    """Completions that one rank generates at a time."""

    completions: int
    tokens: int
    """Most tokens of a prompt and its completion."""
    element_bytes: int
    """Bytes of an element of keys and values."""
    prompts_share: float = 0.0
    """Ratio of the prompt tokens in one prefill forward to the tokens of a training forward."""


@dataclass(frozen=True)
class Server:
    """A vLLM server."""

    bytes_here: int
    """Bytes of each training device; 0 if the server has devices of its own."""
    sleeps: bool
    """Whether it frees them outside rollouts (vLLM's sleep mode)."""
    share_bytes: int = 0
    """Bytes that it may take of each of its devices; 0 if that is unknown."""
    weights_bytes: int = 0
    """Bytes of the model's weights on each of its devices. The rest of its share holds the KV cache and activations."""
    asleep_bytes: int = 0
    """Bytes of host memory per rank that hold its weights while it sleeps."""

    @property
    def has_room(self) -> bool:
        """Whether its share can hold the model and a minimum of KV cache."""
        return not self.share_bytes or self.weights_bytes < MAX_WEIGHT_SHARE * self.share_bytes


@dataclass(frozen=True)
class Owners:
    """Bytes of one phase by owner, on the device that computes and in host memory; on a CPU all is host memory."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class RankSetup:
    """Memory of a rank besides its sharded model and the tensors of a step."""

    process_bytes: int
    """Bytes of a process that has loaded Python and torch."""
    saves_checkpoints: bool
    is_on_gpu: bool
    is_full: bool
    """Whether all weights are trained, and not LoRA."""
    ranks_here: int = 1
    """Number of ranks of a machine; host memory that only some of them hold is divided among all of them."""
    rollout: Rollout | None = None
    state_bytes: float = STATE_BYTES["adamw"]
    """Bytes of the optimizer's state for each trained weight."""
    server: Server | None = None
    models_beside: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the models that the rank holds beside the trained one, by role."""
    sharded_beside: frozenset[str] = frozenset()
    """Roles of those that are cut over the ranks."""


def forecast_memory(model: ShardedModel, trace: Trace, setup: RankSetup) -> dict[str, Owners]:
    """Return the memory of each phase."""
    layout = model.layout
    weights = {
        "frozen weights": model.frozen_bytes,
        "trained weights" if setup.is_full else "LoRA weights": model.trained_bytes,
    }
    at_rest = {
        **weights,
        "optimizer": int(setup.state_bytes * model.trained_elements),
        **setup.models_beside,
    }
    gathered = {"gathered weights": model.gathered_bytes}
    process = {"process": setup.process_bytes}
    host = {**process, **(_count_checkpoint_copy(model, setup) if setup.saves_checkpoints else {})}
    host |= {PINNED_ROUNDING: model.pinned_rounding_bytes} if layout.offload else {}
    loading = dict(process)
    if layout.offload and layout.zero_stage < 3:  # weights are read to the host, and moved once all are read
        loading["frozen weights on their way"] = model.frozen_bytes
    phases = {
        "load": Owners({**weights, "tensor that is read": model.sizes.largest_tensor_bytes}, loading),
        "step": Owners({**at_rest, **gathered, **_count_step(model, trace, is_on_gpu=setup.is_on_gpu)}, host),
        "update": Owners({**at_rest, "gradients": model.trained_bytes}, host),
        "save": Owners(at_rest, host),
        "evaluate": Owners({**at_rest, **gathered, "temporary": trace.evaluation_peak}, host),
    }
    if setup.rollout is not None:
        generation = _count_generation(setup.rollout, model, trace.evaluation_peak)
        phases["rollout"] = Owners({**at_rest, **gathered, **generation}, host)
    written = _count_written_weights(model, is_full=setup.is_full)
    if setup.server is not None:
        phases["rollout"] = Owners(at_rest, host)
        phases["sync"] = Owners({**at_rest, **written.device}, {**host, **written.host})
    phases["export"] = Owners({**at_rest, **written.device}, {**process, **written.host})
    if setup.server is not None:
        _add_server(phases, setup.server)
    return {name: _place_owners(owners, model, setup) for name, owners in phases.items()}


def _count_step(model: ShardedModel, trace: Trace, *, is_on_gpu: bool) -> dict[str, int]:
    """Return what forward and backward hold besides weights and optimizer state."""
    gradients = {"gradients": round(model.gradient_share * trace.gradients_at_peak)}
    if model.layout.offload:  # `_place_owners` moves this rank's shard to the host
        gradients = {"gradients that are not summed": gradients["gradients"], "gradients": model.trained_bytes}
    activations = {f"activations: {kind}": size for kind, size in trace.saved_by_kind.items()}
    computed = trace.peak - trace.logits_at_peak
    activations = activations if sum(activations.values()) <= computed else {}
    return {
        **gradients,
        "communication buffers": model.count_reduction_bytes(is_on_gpu=is_on_gpu),
        **activations,
        "logits": trace.logits_at_peak,
        "temporary": computed - sum(activations.values()),
        **({} if is_on_gpu else {"holes in the heap": round(HEAP_FRAGMENTATION * trace.peak)}),
    }


def _count_generation(rollout: Rollout, model: ShardedModel, prefill_peak_bytes: int) -> dict[str, int]:
    """Return what the built-in engine holds besides the weights: keys and values, and the larger of its two stages."""
    sizes = model.sizes
    generation = {
        "keys and values": rollout.completions * rollout.tokens * sizes.cache_elements * rollout.element_bytes
    }
    prefill_bytes = round(rollout.prompts_share * prefill_peak_bytes)  # prompts are read before tokens are sampled
    if rollout.element_bytes < FP32_BYTES and model.layout.zero_stage < 3:
        generation["copies for autocast"] = HALF_BYTES * sizes.whole.trained
    sampling_bytes = rollout.completions * sizes.vocabulary * SAMPLING_BYTES
    is_prefill = prefill_bytes > sampling_bytes
    generation["reading prompts" if is_prefill else "drawing tokens"] = max(prefill_bytes, sampling_bytes)
    return generation


def _add_server(phases: dict[str, Owners], server: Server) -> None:
    """Add the memory of a vLLM server on the same devices to the phases in which it has it."""
    if server.bytes_here:
        weights = min(server.weights_bytes, server.bytes_here)
        shared = {"vLLM's weights": weights, "vLLM's keys and values": server.bytes_here - weights}
        for name in ("rollout", "sync") if server.sleeps else tuple(phases):
            phases[name] = Owners({**phases[name].device, **shared}, phases[name].host)
    if server.asleep_bytes:
        for name in phases.keys() - {"rollout", "sync"}:
            phases[name] = Owners(phases[name].device, {**phases[name].host, "sleeping server": server.asleep_bytes})


def _count_checkpoint_copy(model: ShardedModel, setup: RankSetup) -> dict[str, int]:
    """Count the host memory of a checkpoint's copy, pinned if it comes from a GPU. One rank copies each shard."""
    shard, ranks = model.trained_elements, setup.ranks_here
    copied = min(shard * ranks, model.sizes.whole.all_trained)  # by all ranks of the machine
    size = int((FP32_BYTES + setup.state_bytes) * copied) // ranks
    if not setup.is_on_gpu or model.layout.offload or not shard:
        return {"copy to save": size}
    copies = 1 + setup.state_bytes / FP32_BYTES
    pinned = int(copies * model.count_pinned_bytes(is_trained=True)) * copied // (shard * ranks)
    return {"copy to save": size, PINNED_ROUNDING: pinned - size}


def _count_written_weights(model: ShardedModel, *, is_full: bool) -> Owners:
    """Count what rank 0 holds to send or write the trained weights; tensors are gathered one at a time."""
    largest = model.sizes.largest_tensor_bytes
    gathered = largest if is_full and model.layout.is_sharded else 0
    held = largest if is_full else FP32_BYTES * model.sizes.whole.all_trained
    return Owners({"tensor that is gathered": gathered}, {"weights that are written": held})


def _place_owners(owners: Owners, model: ShardedModel, setup: RankSetup) -> Owners:
    """Return the owners with their memory on its device: on a CPU all is host memory, and offloaded state is too."""
    device, host = dict(owners.device), dict(owners.host)
    if not setup.is_on_gpu:
        device, host = {}, {**host, **device}
    elif model.layout.offload:
        offloaded = {"trained weights", "LoRA weights", "optimizer", "gradients"}
        offloaded |= {"frozen weights", *setup.sharded_beside} if model.layout.zero_stage == 3 else set()
        host |= {name: size for name, size in device.items() if name in offloaded}
        device = {name: size for name, size in device.items() if name not in offloaded}
    return Owners(*({name: size for name, size in place.items() if size} for place in (device, host)))
