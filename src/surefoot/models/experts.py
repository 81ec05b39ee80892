"""Grouped experts with LoRA, plugged into transformers under the name `surefoot`.

Serves every model whose experts are in a layout of `expert_layouts.py`. Those of transformers' fused convention are
computed in one node of the graph: two stacks, `gate_up_proj [E, 2I, H]` (without a gate `up_proj [E, I, H]`) and
`down_proj [E, H, I]`, stored transposed or not, with biases or without, around a gate of the model's own. Other layouts
are put together from single products (`composed_experts.py`). Where a module carries
`<stack>_lora_A [E, r, in]` and `<stack>_lora_B [E, out, r]` (see `lora.py`), they are added as low-rank grouped GEMMs.
The backward computes only the requested gradients: under LoRA dX, dA and dB, never a dense dW.

Independent of how LoRA parameters are created, frozen or sharded, and of routers.

Shape suffixes: T tokens, K experts per token, S = T*K rows sorted by expert, E experts, H hidden, I intermediate,
R rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from surefoot.errors import ModelError
from surefoot.models.composed_experts import forward_copies, forward_sorted, forward_tokens
from surefoot.models.expert_gates import ModuleGate, SwiGLU, select_gate
from surefoot.models.expert_layouts import expert_stacks, layout_of
from surefoot.models.grouped_gemm import Groups, find_triton_failure, integers, kernel_for
from surefoot.models.grouped_projection import GroupedProjection, Pair, StackKind, StackTensors, computing_dtype
from surefoot.models.kept_experts import compute_or_take, sort_or_take
from surefoot.models.lora_copies import copies_of_pair
from surefoot.models.quantization.base import FLOAT, format_of, stored_weight

IMPLEMENTATION = "surefoot"
PROJECTIONS = ("gate_up_proj", "down_proj")
"""Names of the two stacks of gated experts."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the forward of a fused experts module, as `ALL_EXPERTS_FUNCTIONS` calls it.

    Shapes: hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H].
    """
    layout = layout_of(self)
    if layout is None:
        raise ModelError(f"{type(self).__name__} has experts in a layout that is not computed here.")
    if not layout.is_conventional:
        return forward_tokens(self, hidden_states, top_k_index, top_k_weights)
    kind = StackKind(format_of(self), bool(layout.transposed), getattr(self, "lora_scaling", 0.0))
    up, down = (stored_weight(self, name) for name in layout.stacks)
    adapters = [getattr(self, f"{name}_lora_{part}", None) for name in layout.stacks for part in "AB"]
    biases = [getattr(self, f"{name}_bias") if layout.has_bias else None for name in layout.stacks]
    dtype = computing_dtype(hidden_states, up[0], kind.weight_format)
    pairs = [copies_of_pair(self, name, dtype) for name in layout.stacks]
    tensors = (up[0], down[0], *adapters, *biases, *up[1:], *down[1:])
    widths, in_parts = (*up[0].shape[1:], *down[0].shape[1:]), kind.weight_format is not FLOAT

    def compute() -> Tensor:
        num_experts = up[0].shape[0]
        rows = sort_or_take(lambda: _Rows.of(top_k_index, top_k_weights, num_experts, dtype, widths, in_parts=in_parts))
        variant = _Variant(kind, select_gate(self), rows.groups)
        return _Experts.apply(hidden_states, top_k_weights, rows, variant, dtype, pairs, *tensors)  # type: ignore[no-any-return,no-untyped-call]

    return compute_or_take(compute)


def can_keep_outputs(model: PreTrainedModel) -> bool:
    """Return whether selective checkpointing can keep what experts of a model return."""
    return any((layout := layout_of(module)) is not None and layout.is_conventional for module in model.modules())


def describe_missing_kernel(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a GPU multiplies the experts of a model one after the other; None if it does not."""
    stacks = [stack for _, stack in expert_stacks(model)]
    kinds = {(stack.out_features, stack.in_features, format_of(stack.owner) is not FLOAT) for stack in stacks}
    if all(kernel_for(device, dtype, widths, in_parts=in_parts) != "triton" for *widths, in_parts in kinds):
        return None
    if (failure := find_triton_failure(device)) is None:
        return None
    return (
        "the experts of this model are multiplied one after the other, which takes several times as long: Triton "
        f"compiles the kernel that multiplies all of them, and this failed ({failure}). Triton "
        "comes with torch; it needs a compiler for C and Python's headers (`apt-get install gcc python3-dev`)"
    )


FORWARDS = {
    "tokens": experts_forward,
    "copies": torch.compiler.disable(forward_copies),
    "sorted": torch.compiler.disable(forward_sorted),
}
"""Forwards of modules of experts, by how they are called."""


def plug_in(model: PreTrainedModel) -> None:
    """Let the modules of experts of a model compute what this file does, before the model is shared out over ranks."""
    layouts = [(module, layout) for module in model.modules() if (layout := layout_of(module)) is not None]
    for module, layout in layouts:
        if not layout.is_dispatched and "forward" not in vars(module):
            module.forward = MethodType(FORWARDS[layout.call], module)
    if any(layout.is_dispatched for _, layout in layouts):
        model.set_experts_implementation(IMPLEMENTATION)


@dataclass(frozen=True)
class _Rows:
    """A row for each expert that a token chose, sorted by expert. Shapes: [S]."""

    groups: Groups
    weights: Tensor
    """Routing weight of each row, in the type of the products and without graph."""
    tokens: Tensor
    """Token of each row."""
    positions: Tensor
    """Row of each choice."""

    @classmethod
    def of(
        cls,
        index_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        dtype: torch.dtype,
        widths: Iterable[int],
        *,
        in_parts: bool,
    ) -> "_Rows":
        """Sort the choices of tokens and their weights; the other arguments are those of `Groups.of`."""
        # Sorting takes a pass for each byte of a key.
        key_dtype = torch.int16 if num_experts < torch.iinfo(torch.int16).max else torch.int32
        ids, choice_S = torch.sort(index_TK.reshape(-1).to(key_dtype), stable=True)
        groups = Groups.of(ids, num_experts, dtype, widths, in_parts=in_parts)
        position_S = torch.empty_like(choice_S)
        position_S.scatter_(0, choice_S, integers(0, choice_S.numel(), choice_S))
        weight_S = weights_TK.detach().reshape(-1)[choice_S].to(dtype)
        return cls(groups, weight_S, choice_S // index_TK.shape[1], position_S)


@dataclass(frozen=True)
class _Variant:
    """Settings of a module of experts, for the rows of one batch."""

    kind: StackKind
    gate: SwiGLU | ModuleGate
    groups: Groups

    def projections(
        self, tensors: Sequence[Any], dtype: torch.dtype, pairs: Sequence[Pair | None]
    ) -> tuple[GroupedProjection, GroupedProjection]:
        """Return both projections, with their low-rank pairs; `tensors` as `_Experts.forward` takes them."""
        up, down, up_a, up_b, down_a, down_b, up_bias, down_bias, *companions = tensors
        half = len(companions) // 2
        first = StackTensors([up, *companions[:half]], up_a, up_b, up_bias)
        second = StackTensors([down, *companions[half:]], down_a, down_b, down_bias)
        return (
            GroupedProjection(self.kind, first, self.groups, dtype, pairs[0]),
            GroupedProjection(self.kind, second, self.groups, dtype, pairs[1]),
        )


class _Experts(torch.autograd.Function):
    """Gather, gate-up, gate, down, weigh and combine, with LoRA on both projections, as one node of the graph.

    Saved for the backward: the tokens [T, H], the gate-up output [S, 2I] and the low-rank products [S, R]. The gathered
    rows [S, H] and the activation [S, I] are recomputed. With u = g @ W_down the gradient of a routing weight is
    <u, act> + <g, bias>, so the down projection's output is not saved either.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weights_TK: Tensor,
        rows: _Rows,
        variant: _Variant,
        dtype: torch.dtype,
        pairs: Sequence[Pair | None],
        *tensors: Any,
    ) -> Tensor:
        """`dtype`: of the products; `pairs`: the low-rank pair of each stack in it.

        `tensors`: both stacks; A and B of both, and both biases, each a tensor or None; other stored tensors.
        """
        up, down = variant.projections(tensors, dtype, pairs)
        gate_up_S, up_low_SR = up.forward(hidden_TH.to(dtype)[rows.tokens])
        out_SH, down_low_SR = down.forward(variant.gate.forward(gate_up_S))

        out_TH = out_SH.mul_(rows.weights[:, None])[rows.positions].view(*weights_TK.shape, out_SH.shape[1]).sum(1)

        multiplied = [tensor for projection in (up, down) for tensor in projection.pair or (None, None)]
        ctx.save_for_backward(
            hidden_TH,
            rows.tokens,
            rows.positions,
            rows.weights,
            gate_up_S,
            up_low_SR,
            down_low_SR,
            *multiplied,
            *tensors,
        )
        ctx.variant, ctx.choices_shape, ctx.weights_dtype = variant, weights_TK.shape, weights_TK.dtype
        return out_TH.to(hidden_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, token_S, position_S, weight_S, gate_up_S, up_low_SR, down_low_SR, *others = ctx.saved_tensors
        up_a, up_b, down_a, down_b, *tensors = others
        pairs = [(a, b) if a is not None else None for a, b in ((up_a, up_b), (down_a, down_b))]
        dtype = gate_up_S.dtype
        up, down = ctx.variant.projections(tensors, dtype, pairs)
        needs_hidden, needs_weights, _, _, _, _, *needs = ctx.needs_input_grad
        needs_of_up, needs_of_down = (needs[0], *needs[2:4], needs[6]), (needs[1], *needs[4:6], needs[7])

        g_SH = d_out_TH.to(dtype)[token_S]  # gradient by the combined rows, before the routing weight
        g_low_SR = down.low_gradient(g_SH)
        d_act_SI = down.input_gradient(g_SH, g_low_SR)
        unweighted_SI = d_act_SI if needs_weights else None
        d_act_SI = d_act_SI * weight_S[:, None] if needs_weights else d_act_SI.mul_(weight_S[:, None])
        act_SI, d_gate_up_S = ctx.variant.gate.backward(d_act_SI, gate_up_S)
        d_weights = None
        if unweighted_SI is not None:
            d_weight_S = unweighted_SI.mul_(act_SI).sum(-1)
            from_bias_S = down.dot_bias(g_SH)
            d_weight_S = d_weight_S if from_bias_S is None else d_weight_S.add_(from_bias_S)
            d_weights = d_weight_S[position_S].view(ctx.choices_shape).to(ctx.weights_dtype)
        by_down = down.parameter_gradients(needs_of_down, g_SH, act_SI, down_low_SR, g_low_SR, weight_S[:, None])
        del act_SI, d_act_SI, unweighted_SI

        x_SH = hidden_TH.to(dtype)[token_S] if needs_of_up[0] or needs_of_up[1] else g_SH.new_empty(0)
        d_low_SR = up.low_gradient(d_gate_up_S)
        by_up = up.parameter_gradients(needs_of_up, d_gate_up_S, x_SH, up_low_SR, d_low_SR)
        d_hidden = None
        if needs_hidden:
            d_x_SH = up.input_gradient(d_gate_up_S, d_low_SR)
            d_hidden = d_x_SH[position_S].view(*ctx.choices_shape, d_x_SH.shape[1]).sum(1).to(hidden_TH.dtype)
        return (
            d_hidden, d_weights, None, None, None, None, by_up[0], by_down[0],
            *by_up[1:3], *by_down[1:3], by_up[3], by_down[3], *(None for _ in tensors[8:]),
        )  # fmt: skip


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
