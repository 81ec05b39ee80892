"""Memory of one rank, by owner, at the peak of each phase. Pure.

at rest     weights as they lie between steps, gradients' place taken by nothing, optimizer state
load        at rest without optimizer state, and the tensor that is being read, once as it is in the file
step        forward and backward, when activations and gradients together are the most; optimizer state is there
            from the second step on
save        at rest, and the copy in host memory that is written while training goes on
rollout     with GRPO and the built-in engine: at rest, the keys and values of all tokens, and what one is drawn from;
            with a server on the same GPUs: at rest, and what the server takes
sync        what a server is sent: an adapter whole, or all weights tensor by tensor
export      the same, to a file, when the run is over
"""

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.distributed.parallel_dims import Layout
from surefoot.planner.sizes import FP32_BYTES, HALF_BYTES, Elements, Sizes
from surefoot.planner.trace import Trace

MOMENTS = 2
"""Of AdamW, in float32."""
HOLES = 0.75
"""Of activations on a CPU: what glibc's heap keeps between them; measured, see docs/plan-accuracy.md."""
IN_FLIGHT, IN_FLIGHT_GLOO = 2, 3
"""Copies of a group's gradients: as they were formed, as they are sent; gloo adds what comes."""
GATHERED_LAYERS = 2
"""FSDP gathers the next layer while one computes."""
ROUNDED = "rounding of pinned memory"
FILLED = 0.9
"""Of a server's share, by weights: keys, values and what it computes want the rest; an assumption."""
DRAWING_BYTES = 36
"""Bytes per token of the vocabulary: logits, and their copies in float32 and float64 in the local engine."""


@dataclass(frozen=True)
class Rollout:
    """What one rank generates at a time."""

    completions: int
    tokens: int
    """Of a prompt and its completion, at most."""
    element_bytes: int
    """Of keys and values."""
    prompts_share: float = 0.0
    """Tokens of the prompts that are read in one forward, over those of a forward that trains."""


@dataclass(frozen=True)
class Server:
    """A vLLM server."""

    bytes_here: int
    """Of each device that trains; 0 where it has others."""
    sleeps: bool
    """Whether it gives them back but for rollouts."""
    share_bytes: int = 0
    """What it may take of each of its devices; 0 where that is not known."""
    weights_bytes: int = 0
    """Of the model, on each of its devices. The rest of its share is for keys and values, and what it computes with."""
    asleep_bytes: int = 0
    """Of host memory for each rank, where its weights lie while it sleeps."""

    @property
    def has_room(self) -> bool:
        """Whether it can hold the model, and a little besides."""
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
    """Into how many parts a rank's training state is cut."""

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
    """How much of the gradients it has formed a rank's device keeps while the rest of the backward runs; of the mean.

    It forms those of its own experts alone, and of all else. With offload they leave once they are summed.
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
    """By phase. `process_bytes`: of a process that has loaded Python and torch. `saves`: whether checkpoints are.

    `ranks_here`: of a machine; what only some of them hold in host memory is dealt to all of them.
    """
    cuts = Cuts.of(layout, sizes)
    at_rest = _at_rest(sizes, layout, cuts, is_full=is_full)
    trained = cut(Elements(trained=sizes.whole.trained, expert_trained=sizes.whole.expert_trained), cuts)
    state = {"optimizer": MOMENTS * FP32_BYTES * trained}
    copies = _copied_to_save(sizes, layout, cuts, ranks_here, is_on_gpu=is_on_gpu) if saves else {}
    process = {"process": process_bytes}
    share = gradient_share(layout, sizes)
    activations = {f"activations: {kind}": size for kind, size in trace.saved_by_kind.items()}
    computed = trace.peak - trace.logits_at_peak
    activations = activations if sum(activations.values()) <= computed else {}
    step = {
        **at_rest,
        **state,
        "gathered weights": _gathered(sizes, layout),
        **_gradients(layout, trained, round(share * trace.gradients_at_peak)),
        "communication buffers": _being_summed(sizes, layout, is_on_gpu=is_on_gpu),
        **activations,
        "logits": trace.logits_at_peak,
        "temporary": computed - sum(activations.values()),
        **({} if is_on_gpu else {"holes in the heap": round(HOLES * trace.peak)}),
    }
    optimizer = {**at_rest, **state, "gradients": FP32_BYTES * trained}
    on_host = {**process, **copies, **(_rounding(sizes, layout, cuts) if layout.offload else {})}
    loading = dict(process)
    if layout.offload and layout.zero_stage < 3:  # read to the host, from where the device gets it when all is there
        loading["frozen weights on their way"] = at_rest["frozen weights"]
    phases = {
        "load": Owners({**at_rest, "tensor that is read": sizes.largest_tensor_bytes}, loading),
        "step": Owners(step, on_host),
        "update": Owners(optimizer, on_host),
        "save": Owners({**at_rest, **state}, on_host),
        "evaluate": Owners(
            {**at_rest, **state, "gathered weights": _gathered(sizes, layout), "temporary": trace.evaluation_peak},
            on_host,
        ),
    }
    if rollout is not None:
        drawing = {
            "keys and values": rollout.completions * rollout.tokens * sizes.cache_elements * rollout.element_bytes,
        }
        reading = round(rollout.prompts_share * trace.evaluation_peak)  # one after the other
        if rollout.element_bytes < FP32_BYTES and layout.zero_stage < 3:
            drawing["copies for autocast"] = HALF_BYTES * sizes.whole.trained
        at_work = rollout.completions * sizes.vocabulary * DRAWING_BYTES
        drawing["reading prompts" if reading > at_work else "drawing tokens"] = max(reading, at_work)
        phases["rollout"] = Owners(
            {**at_rest, **state, "gathered weights": _gathered(sizes, layout), **drawing}, on_host
        )
    written = _written(sizes, layout, is_full=is_full)
    if server is not None:
        phases["rollout"] = Owners({**at_rest, **state}, on_host)
        phases["sync"] = Owners({**at_rest, **state, **written.device}, {**on_host, **written.host})
    phases["export"] = Owners({**at_rest, **state, **written.device}, {**process, **written.host})
    if server is not None and server.bytes_here:
        weights = min(server.weights_bytes, server.bytes_here)
        shared = {"vLLM's weights": weights, "vLLM's keys and values": server.bytes_here - weights}
        for name in ("rollout", "sync") if server.sleeps else tuple(phases):
            phases[name] = Owners({**phases[name].device, **shared}, phases[name].host)
    if server is not None and server.asleep_bytes:
        for name in phases.keys() - {"rollout", "sync"}:
            phases[name] = Owners(phases[name].device, {**phases[name].host, "sleeping server": server.asleep_bytes})
    return {name: _placed(owners, layout, is_on_gpu=is_on_gpu) for name, owners in phases.items()}


def _copied_to_save(sizes: Sizes, layout: Layout, cuts: Cuts, ranks_here: int, *, is_on_gpu: bool) -> dict[str, int]:
    """In host memory: pinned where it comes from a GPU. Of the same parts one rank makes a copy."""
    part = cut(Elements(trained=sizes.whole.trained, expert_trained=sizes.whole.expert_trained), cuts)
    copied = min(part * ranks_here, sizes.whole.all_trained)  # by all ranks of the machine
    size = (1 + MOMENTS) * FP32_BYTES * copied // ranks_here
    if not is_on_gpu or layout.offload or not part:
        return {"copy to save": size}
    pinned = (1 + MOMENTS) * _pinned(sizes, cuts, FP32_BYTES, is_trained=True) * copied // (part * ranks_here)
    return {"copy to save": size, ROUNDED: pinned - size}


def _gradients(layout: Layout, trained: int, formed: int) -> dict[str, int]:
    """In a backward: those that are formed, and with offload this rank's part of all, which `_placed` moves away."""
    if not layout.offload:
        return {"gradients": formed}
    return {"gradients that are not summed": formed, "gradients": FP32_BYTES * trained}


def _pinned(sizes: Sizes, cuts: Cuts, each_bytes: int, *, is_trained: bool) -> int:
    """Of this rank's part of the trained or frozen weights in pinned memory."""
    return sum(
        count * shape.pinned_bytes(cuts.experts if shape.is_expert else cuts.dense, each_bytes)
        for shape, count in sizes.tensors.items()
        if shape.is_trained == is_trained
    )


def _rounding(sizes: Sizes, layout: Layout, cuts: Cuts) -> dict[str, int]:
    """What pinned memory of offloaded weights and gradients takes beyond them."""
    at_rest = _at_rest(sizes, layout, cuts, is_full=True)
    more = 2 * (_pinned(sizes, cuts, FP32_BYTES, is_trained=True) - at_rest["trained weights"])
    if layout.zero_stage == 3:
        more += _pinned(sizes, cuts, sizes.frozen_bytes_each, is_trained=False) - at_rest["frozen weights"]
    return {ROUNDED: max(0, more)}


def _written(sizes: Sizes, layout: Layout, *, is_full: bool) -> Owners:
    """What rank 0 holds to send or write the trained weights: tensors are gathered one at a time."""
    gathered = sizes.largest_tensor_bytes if is_full and layout.is_sharded else 0
    held = sizes.largest_tensor_bytes if is_full else FP32_BYTES * sizes.whole.all_trained
    return Owners({"tensor that is gathered": gathered}, {"weights that are written": held})


def _at_rest(sizes: Sizes, layout: Layout, cuts: Cuts, *, is_full: bool) -> dict[str, int]:
    whole = sizes.whole
    frozen = whole.frozen + whole.expert_frozen // layout.expert_parallel
    if layout.zero_stage == 3:
        frozen = whole.frozen // cuts.dense + whole.expert_frozen // cuts.experts
    trained = cut(Elements(trained=whole.trained, expert_trained=whole.expert_trained), cuts)
    name = "trained weights" if is_full else "LoRA weights"
    return {"frozen weights": frozen * sizes.frozen_bytes_each, name: trained * FP32_BYTES}


def cut(elements: Elements, cuts: Cuts) -> int:
    """Elements of this rank's part."""
    return -(-elements.trained // cuts.dense) + -(-elements.expert_trained // cuts.experts)


def _is_grouped_by_layer(layout: Layout, sizes: Sizes) -> bool:
    is_full = sizes.layer.frozen + sizes.layer.expert_frozen == 0  # a frozen tower changes nothing for the decoder
    return layout.zero_stage == 3 or is_full


def _gathered(sizes: Sizes, layout: Layout) -> int:
    """Whole weights that exist beside this rank's part of them while it computes."""
    if not layout.is_sharded:
        return 0
    if layout.zero_stage < 3:
        return FP32_BYTES * (sizes.whole.trained + gathered_experts(sizes.whole, layout))
    layers = min(GATHERED_LAYERS, sizes.num_layers)
    return _bytes(sizes.outside, sizes, layout) + layers * _bytes(sizes.layer, sizes, layout)


def gathered_experts(elements: Elements, layout: Layout) -> int:
    """Of this rank's share of the experts; none where no other rank has the same share."""
    return elements.expert_trained // layout.expert_parallel if layout.expert_parallel < layout.size else 0


def _bytes(elements: Elements, sizes: Sizes, layout: Layout) -> int:
    experts = layout.expert_parallel
    frozen = elements.frozen + elements.expert_frozen // experts
    trained = elements.trained + elements.expert_trained // experts
    return frozen * sizes.frozen_bytes_each + trained * FP32_BYTES


def _being_summed(sizes: Sizes, layout: Layout, *, is_on_gpu: bool) -> int:
    """Gradients of one group on their way over the ranks: as they were formed, and as they are sent."""
    if not layout.is_sharded or layout.size == 1:
        return 0
    groups = (sizes.layer, sizes.outside) if _is_grouped_by_layer(layout, sizes) else (sizes.whole,)
    copies = IN_FLIGHT if is_on_gpu else IN_FLIGHT_GLOO
    if layout.expert_parallel > 1:  # experts that are shared out are summed apart, if at all
        experts, dense = gathered_experts(sizes.layer, layout), max(one.trained for one in groups)
        largest = max(experts, dense) if is_on_gpu else experts + dense  # gloo holds those of both groups
    else:
        largest = max(one.trained + one.expert_trained for one in groups)
    return copies * FP32_BYTES * largest


def _placed(owners: Owners, layout: Layout, *, is_on_gpu: bool) -> Owners:
    """Where each owner's memory is: with one device all is host memory; offloaded state is there too."""
    device, host = dict(owners.device), dict(owners.host)
    if not is_on_gpu:
        return Owners({}, {name: size for name, size in {**host, **device}.items() if size})
    if layout.offload:
        away = {"trained weights", "LoRA weights", "optimizer", "gradients"}
        away |= {"frozen weights"} if layout.zero_stage == 3 else set()
        host |= {name: size for name, size in device.items() if name in away}
        device = {name: size for name, size in device.items() if name not in away}
    return Owners({n: s for n, s in device.items() if s}, {n: s for n, s in host.items() if s})
