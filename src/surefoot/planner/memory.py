"""Memory of one rank, by owner, at the peak of each phase. Pure.

at rest     weights between steps and optimizer state; gradients take no memory
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
from dataclasses import dataclass

from surefoot.distributed.parallel_dims import Layout
from surefoot.planner.sizes import FP32_BYTES, HALF_BYTES, Elements, Sizes
from surefoot.planner.trace import Trace

MOMENTS = 2
"""Number of AdamW's moments, in float32."""
HOLES = 0.75
"""Fragmentation of glibc's heap on a CPU, as a share of activations; measured, see docs/plan-accuracy.md."""
IN_FLIGHT, IN_FLIGHT_GLOO = 2, 3
"""Copies of a group's gradients: as computed and as sent; gloo adds the received ones."""
GATHERED_LAYERS = 2
"""Layers that FSDP has gathered at once: it gathers the next layer while one computes."""
ROUNDED = "rounding of pinned memory"
FILLED = 0.9
"""Most of a server's share that weights can fill: the KV cache and activations need the rest; an assumption."""
DRAWING_BYTES = 36
"""Bytes per token of the vocabulary: logits, and their copies in float32 and float64 in the local engine."""


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
        return not self.share_bytes or self.weights_bytes < FILLED * self.share_bytes


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
class Cuts:
    """Number of shards of the training state: of dense weights, and of experts."""

    dense: int
    experts: int
    expert_parallel: int

    @staticmethod
    def of(layout: Layout, sizes: Sizes) -> "Cuts":
        shards = layout.expert_shards(sizes.num_experts) if sizes.num_experts else layout.fsdp
        is_alike = layout.expert_parallel == 1 and shards == layout.fsdp
        experts = layout.fsdp if is_alike else shards
        return Cuts(layout.fsdp, experts * layout.expert_parallel, layout.expert_parallel)


def gradient_share(layout: Layout, sizes: Sizes) -> float:
    """Return the share of the computed gradients that stays on a rank's device during the backward, by elements.

    A rank computes the gradients of its own experts and of all dense weights. With offload they leave the device once
    they are summed.
    """
    dense, experts = sizes.whole.trained, sizes.whole.expert_trained
    is_summed_by_layer = layout.is_sharded and layout.zero_stage >= 2 and _is_grouped_by_layer(layout, sizes)
    if is_summed_by_layer and layout.offload:
        return 0.0
    cuts = Cuts.of(layout, sizes) if is_summed_by_layer else Cuts(1, layout.expert_parallel, layout.expert_parallel)
    return (dense / cuts.dense + experts / cuts.experts) / max(1, dense + experts / layout.expert_parallel)


def forecast_memory(
    sizes: Sizes,
    layout: Layout,
    trace: Trace,
    *,
    process_bytes: int,
    saves: bool,
    is_on_gpu: bool,
    ranks_here: int = 1,
    rollout: Rollout | None = None,
    server: Server | None = None,
    is_full: bool = False,
) -> dict[str, Owners]:
    """Return the memory of each phase. `process_bytes`: of a process that has loaded Python and torch.

    `saves`: whether checkpoints are saved. `ranks_here`: number of ranks of a machine; host memory that only some of
    them hold is divided among all of them.
    """
    cuts = Cuts.of(layout, sizes)
    at_rest = _count_weights_at_rest(sizes, layout, cuts, is_full=is_full)
    trained = cut(Elements(trained=sizes.whole.trained, expert_trained=sizes.whole.expert_trained), cuts)
    state = {"optimizer": MOMENTS * FP32_BYTES * trained}
    copies = _count_checkpoint_copy(sizes, layout, cuts, ranks_here, is_on_gpu=is_on_gpu) if saves else {}
    process = {"process": process_bytes}
    share = gradient_share(layout, sizes)
    activations = {f"activations: {kind}": size for kind, size in trace.saved_by_kind.items()}
    computed = trace.peak - trace.logits_at_peak
    activations = activations if sum(activations.values()) <= computed else {}
    step = {
        **at_rest,
        **state,
        "gathered weights": _count_gathered_bytes(sizes, layout),
        **_count_gradients(layout, trained, round(share * trace.gradients_at_peak)),
        "communication buffers": _count_reduction_buffers(sizes, layout, is_on_gpu=is_on_gpu),
        **activations,
        "logits": trace.logits_at_peak,
        "temporary": computed - sum(activations.values()),
        **({} if is_on_gpu else {"holes in the heap": round(HOLES * trace.peak)}),
    }
    optimizer = {**at_rest, **state, "gradients": FP32_BYTES * trained}
    host = {**process, **copies, **(_count_pinned_rounding(sizes, layout, cuts) if layout.offload else {})}
    loading = dict(process)
    if layout.offload and layout.zero_stage < 3:  # weights are read to the host, and moved once all are read
        loading["frozen weights on their way"] = at_rest["frozen weights"]
    phases = {
        "load": Owners({**at_rest, "tensor that is read": sizes.largest_tensor_bytes}, loading),
        "step": Owners(step, host),
        "update": Owners(optimizer, host),
        "save": Owners({**at_rest, **state}, host),
        "evaluate": Owners(
            {
                **at_rest,
                **state,
                "gathered weights": _count_gathered_bytes(sizes, layout),
                "temporary": trace.evaluation_peak,
            },
            host,
        ),
    }
    if rollout is not None:
        generation = _count_generation(rollout, sizes, layout, trace.evaluation_peak)
        phases["rollout"] = Owners(
            {**at_rest, **state, "gathered weights": _count_gathered_bytes(sizes, layout), **generation}, host
        )
    written = _count_written_weights(sizes, layout, is_full=is_full)
    if server is not None:
        phases["rollout"] = Owners({**at_rest, **state}, host)
        phases["sync"] = Owners({**at_rest, **state, **written.device}, {**host, **written.host})
    phases["export"] = Owners({**at_rest, **state, **written.device}, {**process, **written.host})
    if server is not None:
        _add_server(phases, server)
    return {name: _place_owners(owners, layout, is_on_gpu=is_on_gpu) for name, owners in phases.items()}


def _count_generation(rollout: Rollout, sizes: Sizes, layout: Layout, prefill_peak_bytes: int) -> dict[str, int]:
    """Return what the built-in engine holds besides the weights: keys and values, and the larger of its two stages."""
    generation = {
        "keys and values": rollout.completions * rollout.tokens * sizes.cache_elements * rollout.element_bytes
    }
    prefill_bytes = round(rollout.prompts_share * prefill_peak_bytes)  # prompts are read before tokens are drawn
    if rollout.element_bytes < FP32_BYTES and layout.zero_stage < 3:
        generation["copies for autocast"] = HALF_BYTES * sizes.whole.trained
    drawing_bytes = rollout.completions * sizes.vocabulary * DRAWING_BYTES
    is_prefill = prefill_bytes > drawing_bytes
    generation["reading prompts" if is_prefill else "drawing tokens"] = max(prefill_bytes, drawing_bytes)
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


def _count_checkpoint_copy(
    sizes: Sizes, layout: Layout, cuts: Cuts, ranks_here: int, *, is_on_gpu: bool
) -> dict[str, int]:
    """Count the host memory of a checkpoint's copy, pinned if it comes from a GPU. One rank copies each shard."""
    part = cut(Elements(trained=sizes.whole.trained, expert_trained=sizes.whole.expert_trained), cuts)
    copied = min(part * ranks_here, sizes.whole.all_trained)  # by all ranks of the machine
    size = (1 + MOMENTS) * FP32_BYTES * copied // ranks_here
    if not is_on_gpu or layout.offload or not part:
        return {"copy to save": size}
    pinned = (
        (1 + MOMENTS) * _count_pinned_bytes(sizes, cuts, FP32_BYTES, is_trained=True) * copied // (part * ranks_here)
    )
    return {"copy to save": size, ROUNDED: pinned - size}


def _count_gradients(layout: Layout, trained: int, computed_bytes: int) -> dict[str, int]:
    """Count the gradients of a backward; with offload also this rank's shard, which `_place_owners` moves away."""
    if not layout.offload:
        return {"gradients": computed_bytes}
    return {"gradients that are not summed": computed_bytes, "gradients": FP32_BYTES * trained}


def _count_pinned_bytes(sizes: Sizes, cuts: Cuts, each_bytes: int, *, is_trained: bool) -> int:
    """Count the bytes of this rank's shard of the trained or frozen weights in pinned memory."""
    return sum(
        count * shape.pinned_bytes(cuts.experts if shape.is_expert else cuts.dense, each_bytes)
        for shape, count in sizes.tensors.items()
        if shape.is_trained == is_trained
    )


def _count_pinned_rounding(sizes: Sizes, layout: Layout, cuts: Cuts) -> dict[str, int]:
    """Count the bytes that pinned memory adds to offloaded weights and gradients by rounding up."""
    at_rest = _count_weights_at_rest(sizes, layout, cuts, is_full=True)
    extra = 2 * (_count_pinned_bytes(sizes, cuts, FP32_BYTES, is_trained=True) - at_rest["trained weights"])
    if layout.zero_stage == 3:
        extra += _count_pinned_bytes(sizes, cuts, sizes.frozen_bytes_each, is_trained=False) - at_rest["frozen weights"]
    return {ROUNDED: max(0, extra)}


def _count_written_weights(sizes: Sizes, layout: Layout, *, is_full: bool) -> Owners:
    """Count what rank 0 holds to send or write the trained weights; tensors are gathered one at a time."""
    gathered = sizes.largest_tensor_bytes if is_full and layout.is_sharded else 0
    held = sizes.largest_tensor_bytes if is_full else FP32_BYTES * sizes.whole.all_trained
    return Owners({"tensor that is gathered": gathered}, {"weights that are written": held})


def _count_weights_at_rest(sizes: Sizes, layout: Layout, cuts: Cuts, *, is_full: bool) -> dict[str, int]:
    whole = sizes.whole
    frozen = whole.frozen + whole.expert_frozen // layout.expert_parallel
    if layout.zero_stage == 3:
        frozen = whole.frozen // cuts.dense + whole.expert_frozen // cuts.experts
    trained = cut(Elements(trained=whole.trained, expert_trained=whole.expert_trained), cuts)
    name = "trained weights" if is_full else "LoRA weights"
    return {"frozen weights": frozen * sizes.frozen_bytes_each, name: trained * FP32_BYTES}


def cut(elements: Elements, cuts: Cuts) -> int:
    """Return the number of trained elements in this rank's shard."""
    return -(-elements.trained // cuts.dense) + -(-elements.expert_trained // cuts.experts)


def _is_grouped_by_layer(layout: Layout, sizes: Sizes) -> bool:
    is_full = (
        sizes.layer.frozen + sizes.layer.expert_frozen == 0
    )  # a frozen vision tower changes nothing for the decoder
    return layout.zero_stage == 3 or is_full


def _count_gathered_bytes(sizes: Sizes, layout: Layout) -> int:
    """Count the gathered weights that exist besides this rank's shard while it computes."""
    if not layout.is_sharded:
        return 0
    if layout.zero_stage < 3:
        return FP32_BYTES * (sizes.whole.trained + gathered_experts(sizes.whole, layout))
    layers = min(GATHERED_LAYERS, sizes.num_layers)
    return _count_layer_bytes(sizes.outside, sizes, layout) + layers * _count_layer_bytes(sizes.layer, sizes, layout)


def gathered_experts(elements: Elements, layout: Layout) -> int:
    """Return the elements of this rank's share of the experts; 0 if no other rank has the same share."""
    return elements.expert_trained // layout.expert_parallel if layout.expert_parallel < layout.size else 0


def _count_layer_bytes(elements: Elements, sizes: Sizes, layout: Layout) -> int:
    experts = layout.expert_parallel
    frozen = elements.frozen + elements.expert_frozen // experts
    trained = elements.trained + elements.expert_trained // experts
    return frozen * sizes.frozen_bytes_each + trained * FP32_BYTES


def _count_reduction_buffers(sizes: Sizes, layout: Layout, *, is_on_gpu: bool) -> int:
    """Count the buffers of one group's gradients in a reduction: as computed, and as sent."""
    if not layout.is_sharded or layout.size == 1:
        return 0
    groups = (sizes.layer, sizes.outside) if _is_grouped_by_layer(layout, sizes) else (sizes.whole,)
    copies = IN_FLIGHT if is_on_gpu else IN_FLIGHT_GLOO
    if layout.expert_parallel > 1:  # experts of expert parallelism are reduced in a group of their own, if at all
        experts, dense = gathered_experts(sizes.layer, layout), max(group.trained for group in groups)
        largest = max(experts, dense) if is_on_gpu else experts + dense  # gloo holds the buffers of both groups
    else:
        largest = max(group.trained + group.expert_trained for group in groups)
    return copies * FP32_BYTES * largest


def _place_owners(owners: Owners, layout: Layout, *, is_on_gpu: bool) -> Owners:
    """Return the owners with their memory on its device: on a CPU all is host memory, and offloaded state is too."""
    device, host = dict(owners.device), dict(owners.host)
    if not is_on_gpu:
        return Owners({}, {name: size for name, size in {**host, **device}.items() if size})
    if layout.offload:
        offloaded = {"trained weights", "LoRA weights", "optimizer", "gradients"}
        offloaded |= {"frozen weights"} if layout.zero_stage == 3 else set()
        host |= {name: size for name, size in device.items() if name in offloaded}
        device = {name: size for name, size in device.items() if name not in offloaded}
    return Owners({n: s for n, s in device.items() if s}, {n: s for n, s in host.items() if s})
