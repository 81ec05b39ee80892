"""Trace of the memory and FLOPs of a forward and backward, from the model's own code on tensors without storage.

The ops are those of a real step, so what autograd saves, recomputes and frees is not guessed. Two assumptions replace
the missing values: tokens go to the experts evenly, and plain attention saves what the flash kernels save.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from surefoot.data.collate import MicroBatch
from surefoot.data.image_processor import Vision
from surefoot.models.attention import attend_sample_by_sample, read_settings, samples_of_row
from surefoot.models.attention_math import attend, attend_by_definition, with_heads_of
from surefoot.models.build import BuiltModel
from surefoot.models.decoder_layers import decoder_layers
from surefoot.models.expert_layouts import is_fused_experts
from surefoot.models.sample_masks import SampleMask, describe_mask
from surefoot.models.varlen_attention import SHARES_HEADS
from surefoot.models.vision import tower_blocks, vision_tower
from surefoot.planner.expert_dispatch import Exchange, exchanged_bytes
from surefoot.planner.live_tensors import LOGITS, LiveTensors, Moment
from surefoot.planner.op_costs import ATTEND, list_tensors

ATTENTION = "surefoot_plan"


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
    live = LiveTensors(excluded, gradient_share, vocabulary_size)
    saved: dict[str, int] = {}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(live.keep_gradient) for parameter in parameters]
    is_mixed = built.autocast
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=is_mixed, cache_enabled=False)
    if is_accumulated:
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
            live.add_gradient(parameter.grad)
    with _track_kinds(model, live), _track_layers(model, live), _repeat_tower_blocks(model, live), live:
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
    evaluation = LiveTensors(excluded)
    repeat = _repeat_tower_blocks(model, evaluation)
    with torch.no_grad(), _track_layers(model, evaluation), repeat, evaluation, autocast():
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
def _track_layers(model: PreTrainedModel, live: LiveTensors) -> Iterator[None]:
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
def _repeat_tower_blocks(model: PreTrainedModel, live: LiveTensors) -> Iterator[None]:
    """Run one of the equal blocks of a vision tower that keeps nothing for a backward; towers have dozens of them."""
    blocks = tower_blocks(model)
    forwards = [block.forward for block in blocks]

    def repeated(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(block.parameters())
        kind = type(block), tuple(parameter.shape for parameter in parameters)

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *parameters))
            if keeps or not all(isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves):
                return forward(*args, **kwargs)
            described = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return live.run_block((kind, str(tree), *described), lambda: forward(*args, **kwargs))

        return run

    for block, forward in zip(blocks, forwards, strict=True):
        block.forward = repeated(block, forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward


@contextmanager
def _track_kinds(model: PreTrainedModel, live: LiveTensors) -> Iterator[None]:
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
