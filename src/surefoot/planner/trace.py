"""What a forward and backward hold and compute, by running the model's own code on tensors without storage.

The ops are those of a real step, so what autograd saves, what is formed again and what is thrown away are not guessed.
Two things are not known without values and are assumed: tokens go to the experts evenly, and attention saves what the
flash kernels save.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from surefoot.data.collate import MicroBatch
from surefoot.data.image_processor import Vision
from surefoot.models.attention import SHARES_HEADS, with_heads_of
from surefoot.models.build import BuiltModel
from surefoot.models.experts import is_fused_experts
from surefoot.models.vision import vision_tower
from surefoot.planner.expert_dispatch import Exchange, exchanged_bytes

ATTENTION = "surefoot_plan"
ATTEND = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTEND_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
aten = torch.ops.aten
RESERVING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Ops that touch nothing of what they return."""
PICKING = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Ops that read as much of a table as they return."""
OVERWRITING = {aten.copy_, aten.fill_, aten.zero_}
"""Ops that do not read what they write."""


Moment = tuple[int, int, int]
"""Bytes of (all tensors but gradients, whole gradients, those of the first that are logits) that are alive at once."""


@dataclass(frozen=True)
class Trace:
    """Of one rank's micro-batches of one step, without parameters and optimizer state. In bytes."""

    moments: tuple[Moment, ...]
    """Where most may be alive. Forward: before the decoder layers, in the first, in the last, after them. Backward:
    before any layer has gradients, when the last one has them, when all but the first one have them, and when all have
    them. In between it is on a line, so one of these is the peak; in models of other depths each is on a line too."""
    gradient_share: float
    """This rank's part of gradients."""
    saved_by_kind: dict[str, int] = field(default_factory=dict)
    """What a forward leaves for its backward, by kind of layer."""
    evaluation: tuple[Moment, ...] = ((0, 0, 0),)
    """The same four of a forward without backward."""
    flops: int = 0
    """Of matrix products, forward and backward of one micro-batch."""
    moved_bytes: int = 0
    """That all other ops of those read and write."""
    exchanged_bytes: int = 0
    """Of rows that travel to and from experts on other ranks, in forward and backward of one micro-batch."""

    @property
    def _most(self) -> Moment:
        return max(self.moments, key=lambda moment: moment[0] + self.gradient_share * moment[1])

    @property
    def evaluation_peak(self) -> int:
        """Of a forward without backward."""
        return max(moment[0] for moment in self.evaluation)

    @property
    def peak(self) -> int:
        """Of all tensors but gradients, when they and this rank's part of the gradients are the most."""
        return self._most[0]

    @property
    def gradients_at_peak(self) -> int:
        """Of whole gradients, then."""
        return self._most[1]

    @property
    def logits_at_peak(self) -> int:
        """Of logits and what is made of them, then."""
        return self._most[2]

    def with_layers(self, more: "Trace", here: int, there: int, wanted: int) -> "Trace":
        """Of a model of `wanted` equal layers, from this one of `here` layers and one of `there`."""

        def line(a: int, b: int) -> int:
            return a + (b - a) * (wanted - here) // (there - here)

        def lines(few: tuple[Moment, ...], many: tuple[Moment, ...]) -> tuple[Moment, ...]:
            both = zip(few, many, strict=True)
            return tuple((line(a[0], b[0]), line(a[1], b[1]), line(a[2], b[2])) for a, b in both)

        return Trace(
            moments=lines(self.moments, more.moments),
            gradient_share=self.gradient_share,
            saved_by_kind={kind: line(self.saved_by_kind.get(kind, 0), size) for kind, size in
                           more.saved_by_kind.items()},
            evaluation=lines(self.evaluation, more.evaluation),
            flops=line(self.flops, more.flops),
            moved_bytes=line(self.moved_bytes, more.moved_bytes),
            exchanged_bytes=line(self.exchanged_bytes, more.exchanged_bytes),
        )  # fmt: skip


NOTHING = Trace(moments=((0, 0, 0),), gradient_share=0.0)
LOGITS = "logits"


class _Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, but for those it was told of."""

    def __init__(
        self, known: Sequence[Tensor], gradient_share: float = 1.0, layers: Mapping[Tensor, int] | None = None,
        vocabulary: int = 0,
    ) -> None:  # fmt: skip
        """`layers`: parameter -> the decoder layer it is of. `vocabulary`: what rows of logits are as long as."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.flops = self.moved = self.gradients = 0
        self._share, self._layers, self._vocabulary = gradient_share, layers or {}, vocabulary
        self._entered, self._is_backward = 0, False
        self._with_gradients: set[int] = set()
        self._most: dict[tuple[bool, int], tuple[float, Moment]] = {}
        """(in the backward?, layers that were entered or have gradients) -> the most that was alive then."""
        self.kind = "other"
        self.by_kind: dict[str, int] = defaultdict(int)
        self._alive: dict[int, Any] = {}
        self._kept = [tensor.untyped_storage() for tensor in known]
        self._known = {storage._cdata for storage in self._kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, output)
        if func is ATTEND:
            is_causal = len(args) > 4 and args[4]  # defaults are left out
            self.flops += sdpa_flop_count(*(one.shape for one in args[:3])) // (2 if is_causal else 1)
        elif func is ATTEND_BACKWARD:  # five products for the two of the forward
            is_causal = args[7]
            self.flops += sdpa_flop_count(*(one.shape for one in args[1:4])) * 5 // (4 if is_causal else 2)
        elif func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=output)
        elif not func.is_view:
            self.moved += _moved_bytes(func, (args, kwargs), output)
        return output

    def begin_pass(self) -> None:
        """Another micro-batch: its backward goes through all layers again."""
        self._with_gradients.clear()
        self._entered, self._is_backward = 0, False

    def begin_backward(self) -> None:
        """Layers that are entered from now on are formed again."""
        self._is_backward = True

    def enter_layer(self) -> None:
        """A decoder layer begins its forward, or the last one has ended it."""
        if not self._is_backward:
            self._entered += 1

    def forward_moments(self) -> tuple[Moment, ...]:
        """The first four of `Trace.moments`."""
        after = self._last(False)
        return self._at(False, (0, 1, after - 1, after))

    def backward_moments(self) -> tuple[Moment, ...]:
        """The last four."""
        count = self._last(True)
        return self._at(True, (0, min(1, count), max(count - 1, 0), count))

    def _last(self, is_backward: bool) -> int:
        return max((progress for one, progress in self._most if one == is_backward), default=0)

    def _at(self, is_backward: bool, places: tuple[int, ...]) -> tuple[Moment, ...]:
        nothing: tuple[float, Moment] = (0.0, (0, 0, 0))
        return tuple(self._most.get((is_backward, place), nothing)[1] for place in places)

    def keep_gradient(self, parameter: Tensor) -> None:
        """Count the gradient that a parameter got as one, from now on."""
        assert parameter.grad is not None
        if parameter in self._layers:
            self._with_gradients.add(self._layers[parameter])
        storage = parameter.grad.untyped_storage()
        seen = self._alive.pop(storage._cdata, None)
        if seen is not None:
            self._kept.append(storage)
            self._known.add(storage._cdata)
            self.gradients += storage.nbytes()
            self._give_back(storage.nbytes(), seen[1])

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive or not size:
            return
        kind = LOGITS if tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary else self.kind
        self._alive[key] = (ref(storage, lambda _: self._died(key, size, kind)), kind)
        self.now += size
        self.by_kind[kind] += size
        joint = self.now + self._share * self.gradients
        place = self._is_backward, len(self._with_gradients) if self._is_backward else self._entered
        if place not in self._most or joint > self._most[place][0]:
            self._most[place] = (joint, (self.now, self.gradients, self.by_kind[LOGITS]))

    def _died(self, key: int, size: int, kind: str) -> None:
        if self._alive.pop(key, None) is not None:
            self._give_back(size, kind)

    def _give_back(self, size: int, kind: str) -> None:
        self.now -= size
        self.by_kind[kind] -= size


def _moved_bytes(func: Any, args: Any, output: Any) -> int:
    """What an op reads and writes."""
    written = sum(one.nbytes for one in tree_leaves(output) if isinstance(one, Tensor))
    if not written or func.overloadpacket in RESERVING:  # the first: asks a tensor for its device, or the like
        return 0
    read = sum(one.nbytes for one in tree_leaves(args) if isinstance(one, Tensor))
    if func.overloadpacket in OVERWRITING:
        return read
    return written + (min(read, written) if func.overloadpacket in PICKING else read)


class _FlashAttention:
    """Attention over packed samples as `models.attention` computes it on a CPU or a GPU, by shapes."""

    def __init__(self) -> None:
        self.is_on_gpu = False

    def __call__(
        self, _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, *,
        lengths: list[int], **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        width = value.shape[-1]
        if width != query.shape[-1]:  # latent attention: values are narrower; these shapes want one width
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
            return self(_module, query, key, value, _mask, lengths=lengths)[0][..., :width], None
        if self.is_on_gpu:
            if not SHARES_HEADS:
                key, value = (with_heads_of(query, one) for one in (key, value))
            query, key, value = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (query, key, value))
            if len(lengths) > 1 and len(set(lengths)) == 1:  # samples see themselves alone, and each costs as much
                rows = (one.unflatten(2, (len(lengths), -1))[0].transpose(0, 1) for one in (query, key, value))
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
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *_, **__: None)


def shaped_batch(lengths: Sequence[int], trained: int, vision: Vision | None = None) -> MicroBatch:
    """A micro-batch of samples of these lengths, of whose tokens `trained` are in the loss; without values."""
    tokens = sum(lengths)
    return MicroBatch(
        ids=torch.empty(1, tokens, dtype=torch.int64),
        position_ids=torch.empty(1, tokens, dtype=torch.int64),
        lengths=list(lengths),
        cu_seq_lens=torch.empty(len(lengths) + 1, dtype=torch.int32),
        target_positions=torch.empty(trained, dtype=torch.int64),
        targets=torch.empty(trained, dtype=torch.int64),
        weights=None,
        places=(),
        vision=vision,
    )


def trace_step(
    built: BuiltModel,
    batch: MicroBatch,
    forward: Callable[[], Tensor],
    *,
    is_on_gpu: bool,
    twice: bool,
    gradient_share: float = 1.0,
) -> Trace:
    """Run a model of `build_without_storage` over one micro-batch, or two where gradients are accumulated.

    In the FakeTensorMode in which the model was made. `forward` gives the loss of `batch`; `gradient_share`: this
    rank's part of the gradients.
    """
    _attention.is_on_gpu = is_on_gpu
    model = built.model
    known = [*model.parameters(), *model.buffers(), batch.ids, batch.position_ids, batch.cu_seq_lens,
             batch.target_positions, batch.targets]  # fmt: skip
    layers = {one: number for number, layer in enumerate(model.get_decoder().layers) for one in layer.parameters()}
    live = _Live(known, gradient_share, layers, model.get_output_embeddings().out_features)
    saved: dict[str, int] = {}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(live.keep_gradient) for parameter in parameters]
    is_mixed = built.autocast
    computes = partial(torch.autocast, "cpu", torch.bfloat16, enabled=is_mixed, cache_enabled=False)
    with _kinds(model, live), _layers(model, live), live:
        for _ in range(2 if twice else 1):
            live.begin_pass()
            with computes():
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
    evaluating = _Live(known)
    with torch.no_grad(), _layers(model, evaluating), evaluating, computes():
        forward()
    return Trace(
        moments=(*live.forward_moments(), *live.backward_moments()),
        gradient_share=gradient_share,
        saved_by_kind={kind: size for kind, size in sorted(saved.items()) if size},
        evaluation=evaluating.forward_moments(),
        flops=live.flops // (2 if twice else 1),
        moved_bytes=live.moved // (2 if twice else 1),
        exchanged_bytes=exchanged // (2 if twice else 1),
    )


@contextmanager
def _layers(model: PreTrainedModel, live: _Live) -> Iterator[None]:
    """Let `live` know how far a forward is."""

    def enter(*_: Any) -> None:
        live.enter_layer()

    layers = list(model.get_decoder().layers)
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(enter))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _kinds(model: PreTrainedModel, live: _Live) -> Iterator[None]:
    """Let `live` know the kind of layer whose forward runs."""
    hooks, outer = [], ["other"]

    def enter(kind: str) -> Any:
        def hook(*_: Any) -> None:
            outer.append(kind)
            live.kind = kind

        return hook

    def leave(*_: Any) -> None:
        outer.pop()
        live.kind = outer[-1]

    tower = vision_tower(model)
    for name, module in model.named_modules():
        kind = kind_of(name, module)
        if tower is not None and f"{name}.".startswith(f"{tower[0]}."):
            kind = "vision" if module is tower[1] else None
        if kind is not None:
            hooks += [module.register_forward_pre_hook(enter(kind)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def kind_of(name: str, module: nn.Module) -> str | None:
    """Of a module that is counted as a whole; None for those inside others, and for those that hold others."""
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
