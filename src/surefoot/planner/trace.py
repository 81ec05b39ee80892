"""Trace of the memory and FLOPs of a forward and backward, from the model's own code on tensors without storage.

The ops are those of a real step, so what autograd saves, recomputes and frees is not guessed. Two assumptions replace
the missing values: tokens go to the experts evenly, and plain attention saves what the flash kernels save.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from surefoot.data.collate import MicroBatch
from surefoot.data.image_processor import Vision
from surefoot.errors import ModelError
from surefoot.models.attention import attend_sample_by_sample, read_settings, samples_of_row
from surefoot.models.attention_math import attend, attend_by_definition, with_heads_of
from surefoot.models.build import BuiltModel
from surefoot.models.decoder_layers import decoder_layers
from surefoot.models.expert_layouts import is_fused_experts
from surefoot.models.sample_masks import SampleMask, describe_mask
from surefoot.models.varlen_attention import SHARES_HEADS
from surefoot.models.vision import vision_tower
from surefoot.planner.expert_dispatch import Exchange, exchanged_bytes
from surefoot.planner.op_costs import ATTEND, ATTENTION_OPS, count_flops, count_moved_bytes, list_tensors

ATTENTION = "surefoot_plan"
DEADLINE_S: ContextVar[float] = ContextVar("deadline_s", default=math.inf)
"""Time of `time.monotonic` at which traces are given up."""
READ_DEVICE = torch.ops.prim.device.default
Moment = tuple[int, int, int]
"""Bytes that are alive at once: (all tensors but gradients, unsharded gradients, logits among the former)."""


@dataclass(frozen=True)
class Trace:
    """Memory and FLOPs of one rank's micro-batches of one step, in bytes, without parameters and optimizer state."""

    moments: tuple[Moment, ...]
    """Candidates for the peak. Forward: before the decoder layers, in the first, in the last, after them. Backward:
    before the decoder layers, in the last, in the second, from the first on. Memory is linear between them, so one of
    these is the peak; each is also linear in the number of layers."""
    gradient_share: float
    """This rank's share of the gradients."""
    saved_by_kind: dict[str, int] = field(default_factory=dict)
    """Bytes that a forward saves for its backward, by kind of layer."""
    evaluation: tuple[Moment, ...] = ((0, 0, 0),)
    """The four moments of a forward without backward."""
    flops: int = 0
    """FLOPs of matrix products in forward and backward of one micro-batch."""
    moved_bytes: int = 0
    """Bytes that all other ops of one micro-batch read and write."""
    exchanged_bytes: int = 0
    """Bytes of rows sent to and from experts on other ranks, in forward and backward of one micro-batch."""

    @property
    def _peak_moment(self) -> Moment:
        return max(self.moments, key=lambda moment: moment[0] + self.gradient_share * moment[1])

    @property
    def evaluation_peak(self) -> int:
        """Peak bytes of a forward without backward."""
        return max(moment[0] for moment in self.evaluation)

    @property
    def peak(self) -> int:
        """Bytes of all tensors but gradients, at the peak of their sum with this rank's share of the gradients."""
        return self._peak_moment[0]

    @property
    def gradients_at_peak(self) -> int:
        """Bytes of unsharded gradients at that peak."""
        return self._peak_moment[1]

    @property
    def logits_at_peak(self) -> int:
        """Bytes of logits and of tensors derived from them at that peak."""
        return self._peak_moment[2]

    def with_layers(self, deeper: "Trace", num_layers: int, deeper_layers: int, target_layers: int) -> "Trace":
        """Return the trace of `target_layers` layers, linear through this one (`num_layers`) and a deeper one."""

        def interpolate(a: int, b: int) -> int:
            return a + (b - a) * (target_layers - num_layers) // (deeper_layers - num_layers)

        def interpolate_moments(few: tuple[Moment, ...], many: tuple[Moment, ...]) -> tuple[Moment, ...]:
            pairs = zip(few, many, strict=True)
            return tuple((interpolate(a[0], b[0]), interpolate(a[1], b[1]), interpolate(a[2], b[2])) for a, b in pairs)

        return Trace(
            moments=interpolate_moments(self.moments, deeper.moments),
            gradient_share=self.gradient_share,
            saved_by_kind={kind: interpolate(self.saved_by_kind.get(kind, 0), size) for kind, size in
                           deeper.saved_by_kind.items()},
            evaluation=interpolate_moments(self.evaluation, deeper.evaluation),
            flops=interpolate(self.flops, deeper.flops),
            moved_bytes=interpolate(self.moved_bytes, deeper.moved_bytes),
            exchanged_bytes=interpolate(self.exchanged_bytes, deeper.exchanged_bytes),
        )  # fmt: skip


EMPTY_TRACE = Trace(moments=((0, 0, 0),), gradient_share=0.0)
LOGITS = "logits"


@contextmanager
def limit_trace_time(seconds: float) -> Iterator[None]:
    """Give traces up after so many seconds: they raise ModelError."""
    token = DEADLINE_S.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        DEADLINE_S.reset(token)


class _LiveTensors(TorchDispatchMode):
    """Counter of the bytes of tensors that are alive, except those in `excluded`."""

    def __init__(self, excluded: Sequence[Tensor], gradient_share: float = 1.0, vocabulary: int = 0) -> None:
        """`vocabulary`: width of logits."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.flops = self.moved = self.gradients = 0
        self._gradient_share, self._vocabulary_size = gradient_share, vocabulary
        self._num_entered, self._is_backward = 0, False
        self._peaks: dict[tuple[bool, int], tuple[float, Moment]] = {}
        """(in the backward?, number of layers entered in it or in the forward) -> the most bytes alive then."""
        self.kind = "other"
        self.by_kind: dict[str, int] = defaultdict(int)
        self._alive: dict[int, Any] = {}
        self._excluded_storages = [tensor.untyped_storage() for tensor in excluded]
        self._excluded_keys = {storage._cdata for storage in self._excluded_storages}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > DEADLINE_S.get():
            raise ModelError("the model's code takes too long to trace")
        if func is READ_DEVICE:  # more than half of all calls; FakeTensorMode takes long to find it
            return args[0].fake_device
        output = func(*args, **(kwargs or {}))
        for tensor in list_tensors(output):
            self._track_tensor(tensor)
        if func in ATTENTION_OPS or func.overloadpacket in flop_registry:
            self.flops += count_flops(func, args, kwargs or {}, output)
        elif not func.is_view:
            self.moved += count_moved_bytes(func, (args, kwargs), output)
        return output

    def begin_backward(self) -> None:
        """Begin the backward; layers whose forward is entered from now on are recomputed."""
        self._num_entered, self._is_backward = 0, True

    def enter_layer(self, *, is_backward: bool = False) -> None:
        """Count the start of a decoder layer's forward, or the end of the last one's; or the start of its backward."""
        if is_backward == self._is_backward:
            self._num_entered += 1

    def forward_moments(self) -> tuple[Moment, ...]:
        """Return the first four of `Trace.moments`."""
        after = self._last_progress(False)
        return self._moments_at(False, (0, 1, after - 1, after))

    def backward_moments(self) -> tuple[Moment, ...]:
        """Return the last four of `Trace.moments`."""
        count = self._last_progress(True)
        return self._moments_at(True, (0, min(1, count), max(count - 1, 0), count))

    def _last_progress(self, is_backward: bool) -> int:
        return max((progress for in_backward, progress in self._peaks if in_backward == is_backward), default=0)

    def _moments_at(self, is_backward: bool, progresses: tuple[int, ...]) -> tuple[Moment, ...]:
        nothing: tuple[float, Moment] = (0.0, (0, 0, 0))
        return tuple(self._peaks.get((is_backward, progress), nothing)[1] for progress in progresses)

    def keep_gradient(self, parameter: Tensor) -> None:
        """Count the tensor in `parameter.grad` as a gradient from now on."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        tracked = self._alive.pop(storage._cdata, None)
        if tracked is not None:
            self.add_gradient(parameter.grad)
            self._subtract(storage.nbytes(), tracked[1])

    def add_gradient(self, gradient: Tensor) -> None:
        """Count a tensor that is not tracked as a gradient from now on."""
        storage = gradient.untyped_storage()
        self._excluded_storages.append(storage)
        self._excluded_keys.add(storage._cdata)
        self.gradients += storage.nbytes()

    def _track_tensor(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._excluded_keys or key in self._alive or not size:
            return
        kind = LOGITS if tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary_size else self.kind
        self._alive[key] = (ref(storage, lambda _: self._on_storage_freed(key, size, kind)), kind)
        self.now += size
        self.by_kind[kind] += size
        total = self.now + self._gradient_share * self.gradients
        progress = self._is_backward, self._num_entered
        if progress not in self._peaks or total > self._peaks[progress][0]:
            self._peaks[progress] = (total, (self.now, self.gradients, self.by_kind[LOGITS]))

    def _on_storage_freed(self, key: int, size: int, kind: str) -> None:
        if self._alive.pop(key, None) is not None:
            self._subtract(size, kind)

    def _subtract(self, size: int, kind: str) -> None:
        self.now -= size
        self.by_kind[kind] -= size


class _FlashAttention:
    """Attention over packed samples with the shapes of `models.attention` on a CPU or a GPU."""

    def __init__(self) -> None:
        self.is_on_gpu = False

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | SampleMask | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        samples = samples_of_row(module, query, key)
        layer = read_settings(attention_mask, options)
        if not layer.is_plain:
            has_scores = self.is_on_gpu and (layer.terms.sinks is not None or layer.terms.softcap is not None)
            math = attend_by_definition if has_scores else attend
            return attend_sample_by_sample(query, key, value, samples, layer, math), None
        lengths = samples.lengths
        width = value.shape[-1]
        if width != query.shape[-1]:  # latent attention has narrower values; the op needs one width
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
            return self(module, query, key, value, attention_mask)[0][..., :width], None
        if self.is_on_gpu:
            if not SHARES_HEADS:
                key, value = (with_heads_of(query, states) for states in (key, value))
            query, key, value = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in (query, key, value))
            if len(lengths) > 1 and len(set(lengths)) == 1:  # samples attend to themselves only, at equal cost
                rows = (states.unflatten(2, (len(lengths), -1))[0].transpose(0, 1) for states in (query, key, value))
                return ATTEND(*rows, 0.0, True)[0].transpose(1, 2).flatten(0, 1)[None], None
            return ATTEND(query, key, value, 0.0, True)[0].transpose(1, 2), None
        outputs, begin = [], 0
        for length in lengths:
            span = slice(begin, begin + length)
            outputs.append(ATTEND(query[:, :, span], key[:, :, span], value[:, :, span], 0.0, True)[0].transpose(1, 2))
            begin += length
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


_attention = _FlashAttention()
AttentionInterface.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, describe_mask)


def make_shaped_batch(lengths: Sequence[int], trained: int, vision: Vision | None = None) -> MicroBatch:
    """Return a micro-batch of samples of these lengths without values; `trained` of their tokens are in the loss."""
    tokens = sum(lengths)
    return MicroBatch(
        ids=torch.empty(1, tokens, dtype=torch.int64),
        position_ids=torch.empty(1, tokens, dtype=torch.int64),
        lengths=list(lengths),
        cu_seq_lens=torch.empty(len(lengths) + 1, dtype=torch.int32),
        target_positions=torch.empty(trained, dtype=torch.int64),
        targets=torch.empty(trained, dtype=torch.int64),
        weights=None,
        row_refs=(),
        answer_of=torch.empty(trained, dtype=torch.int64),
        vision=vision,
    )


def trace_step(
    built: BuiltModel,
    batch: MicroBatch,
    forward: Callable[[], Tensor],
    *,
    is_on_gpu: bool,
    is_accumulated: bool,
    gradient_share: float = 1.0,
) -> Trace:
    """Run a model of `build_without_storage` over one micro-batch.

    Call it in the FakeTensorMode in which the model was built. `forward` returns the loss of `batch`; `is_accumulated`:
    whether the gradients of an earlier micro-batch are there; `gradient_share`: this rank's share of the gradients.
    """
    _attention.is_on_gpu = is_on_gpu
    model = built.model
    excluded = [*model.parameters(), *model.buffers(), batch.ids, batch.position_ids, batch.cu_seq_lens,
             batch.target_positions, batch.targets]  # fmt: skip
    output_layer = model.get_output_embeddings()  # None for a model with a score
    vocabulary_size = output_layer.out_features if output_layer is not None else 0
    live = _LiveTensors(excluded, gradient_share, vocabulary_size)
    saved: dict[str, int] = {}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(live.keep_gradient) for parameter in parameters]
    is_mixed = built.autocast
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=is_mixed, cache_enabled=False)
    if is_accumulated:
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
            live.add_gradient(parameter.grad)
    with _track_kinds(model, live), _track_layers(model, live), live:
        with autocast():
            loss = forward()
        saved = dict(live.by_kind)
        live.begin_backward()
        loss.backward()
        del loss
    for hook in hooks:
        hook.remove()
    exchanged = exchanged_bytes(model)
    saved.pop(LOGITS, None)  # see `logits_at_peak`
    model.zero_grad(set_to_none=True)
    evaluation = _LiveTensors(excluded)
    with torch.no_grad(), _track_layers(model, evaluation), evaluation, autocast():
        forward()
    return Trace(
        moments=(*live.forward_moments(), *live.backward_moments()),
        gradient_share=gradient_share,
        saved_by_kind={kind: size for kind, size in sorted(saved.items()) if size},
        evaluation=evaluation.forward_moments(),
        flops=live.flops,
        moved_bytes=live.moved,
        exchanged_bytes=exchanged,
    )


@contextmanager
def _track_layers(model: PreTrainedModel, live: _LiveTensors) -> Iterator[None]:
    """Report each decoder layer that a forward or a backward enters to `live`."""

    def enter(*_: Any) -> None:
        live.enter_layer()

    def enter_backward(_: Tensor) -> None:
        live.enter_layer(is_backward=True)

    def watch_gradient(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        states = next(tensor for tensor in list_tensors(output))
        if states.requires_grad:  # its gradient is what the backward of the layer begins with
            states.register_hook(enter_backward)

    layers = list(decoder_layers(model))
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(watch_gradient) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(enter))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _track_kinds(model: PreTrainedModel, live: _LiveTensors) -> Iterator[None]:
    """Report the kind of layer whose forward runs to `live`."""
    hooks, active_kinds = [], ["other"]

    def enter(kind: str) -> Any:
        def hook(*_: Any) -> None:
            active_kinds.append(kind)
            live.kind = kind

        return hook

    def leave(*_: Any) -> None:
        active_kinds.pop()
        live.kind = active_kinds[-1]

    named_tower = vision_tower(model)
    for name, module in model.named_modules():
        kind = get_module_kind(name, module)
        if named_tower is not None and f"{name}.".startswith(f"{named_tower[0]}."):
            kind = "vision" if module is named_tower[1] else None
        if kind is not None:
            hooks += [module.register_forward_pre_hook(enter(kind)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def get_module_kind(name: str, module: nn.Module) -> str | None:
    """Return the kind of a module that is counted as a unit; None for its submodules and for containers of units."""
    last = name.rpartition(".")[2]
    if isinstance(module, Exchange):
        return "rows to and from experts"
    if is_fused_experts(module):
        return "experts"
    if last in ("self_attn", "attention"):
        return "attention"
    if last in ("mlp", "block_sparse_moe", "feed_forward", "shared_expert"):
        return "mlp"
    if "norm" in last:
        return "norms"
    return "embeddings" if isinstance(module, nn.Embedding) else None
