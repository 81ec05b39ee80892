"""Forwards of modules of experts outside transformers' fused convention, put together from grouped products.

Each product is one node of the graph, so that gates, norms and the sums over experts are differentiated by autograd.
`experts.py` computes the convention in one node, which saves less for the backward.

Shape suffixes: T tokens, K experts per token, S rows sorted by expert, E experts, H hidden, R rank.
"""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable

from surefoot.models.expert_layouts import ExpertLayout, layout_of, stack_of
from surefoot.models.grouped_gemm import Groups
from surefoot.models.grouped_projection import GroupedProjection, Pair, StackKind, StackTensors, computing_dtype
from surefoot.models.lora_copies import copies_of_pair
from surefoot.models.quantization.base import FLOAT, format_of, stored_weight


class _GroupedLinear(torch.autograd.Function):
    """The product of sorted rows with one stack of experts, its biases and its low-rank pair."""

    @staticmethod
    def forward(ctx: Any, x_S: Tensor, kind: StackKind, groups: Groups, pair: Pair | None, *tensors: Any) -> Tensor:
        """`tensors`: A, B and the bias, each a tensor or None; then the stored tensors."""
        projection = _project(kind, groups, tensors, x_S.dtype, pair)
        y_S, low_SR = projection.forward(x_S)
        ctx.save_for_backward(x_S, low_SR, *(projection.pair or (None, None)), *tensors)
        ctx.kind, ctx.groups = kind, groups
        return y_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_S: Tensor) -> tuple[Tensor | None, ...]:
        x_S, low_SR, a, b, *tensors = ctx.saved_tensors
        projection = _project(ctx.kind, ctx.groups, tensors, x_S.dtype, (a, b) if a is not None else None)
        needs_x, _, _, _, needs_a, needs_b, needs_bias, needs_weight, *others = ctx.needs_input_grad
        d_low_SR = projection.low_gradient(dy_S)
        d_weight, d_a, d_b, d_bias = projection.parameter_gradients(
            (needs_weight, needs_a, needs_b, needs_bias), dy_S, x_S, low_SR, d_low_SR
        )
        d_x_S = projection.input_gradient(dy_S, d_low_SR) if needs_x else None
        return d_x_S, None, None, None, d_a, d_b, d_bias, d_weight, *(None for _ in others)


def _project(kind: StackKind, groups: Groups, tensors: Any, dtype: torch.dtype, pair: Pair | None) -> GroupedProjection:
    a, b, bias, *stored = tensors
    return GroupedProjection(kind, StackTensors(stored, a, b, bias), groups, dtype, pair)


def forward_tokens(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the weighed sum of the experts of each token.

    Shapes: hidden_states [T, H], or [.., H] of T tokens; top_k_index and top_k_weights [T, K].
    """
    layout = _layout(module)
    num_experts = _num_experts(module, layout)
    ids_S, order_S = torch.sort(top_k_index.reshape(-1), stable=True)
    top_k = top_k_index.shape[-1]
    x_SH = hidden_states.reshape(-1, hidden_states.shape[-1])[order_S // top_k]
    routed = len(ids_S)
    if layout.has_identity and not isinstance(ids_S, FakeTensor):
        routed = int((ids_S < num_experts).sum())
    out_SH = _apply_experts(module, layout, x_SH[:routed], ids_S[:routed])
    if layout.has_post_norm:
        out_SH = module.post_expert_norm(out_SH)
    if layout.has_identity:
        out_SH = torch.cat([out_SH, x_SH[routed:].to(out_SH.dtype)])
    position_S = torch.empty_like(order_S)
    position_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    weighed_SH = out_SH[position_S] * top_k_weights.reshape(-1, 1)
    return weighed_SH.view(-1, top_k, weighed_SH.shape[1]).sum(1).view_as(hidden_states).to(hidden_states.dtype)


def forward_copies(module: Any, hidden_states: Tensor) -> Tensor:
    """Compute each expert on its copy of all tokens, [E * T, H] -> [E * T, H].

    A token that was not sent to an expert is zero in that expert's copy. Without biases the output is zero then, and so
    is every gradient: such rows are left out.
    """
    layout = _layout(module)
    num_experts = _num_experts(module, layout)
    copy_rows = hidden_states.shape[0] // num_experts
    if isinstance(hidden_states, FakeTensor):
        rows_S = torch.arange(copy_rows, device=hidden_states.device)
    else:
        rows_S = hidden_states.detach().any(-1).nonzero()[:, 0]
    out_SH = _apply_experts(module, layout, hidden_states[rows_S], rows_S // copy_rows)
    return hidden_states.new_zeros(hidden_states.shape).index_copy(0, rows_S, out_SH.to(hidden_states.dtype))


def forward_sorted(module: Any, inputs: Tensor, expert_size: list[int]) -> Tensor:
    """Compute the products of rows that are sorted by expert; `expert_size` has the number of rows of each."""
    sizes = torch.tensor(expert_size, device=inputs.device)
    ids_S = torch.arange(len(expert_size), device=inputs.device).repeat_interleave(sizes, output_size=len(inputs))
    return _apply_experts(module, _layout(module), inputs, ids_S)


def _apply_experts(module: Any, layout: ExpertLayout, x_S: Tensor, ids_S: Tensor) -> Tensor:
    """Return the experts' outputs for rows sorted by expert, before norms and weights."""
    num_experts = _num_experts(module, layout)
    owners = [(stack.owner, stack.leaf) for stack in (stack_of(module, name) for name in layout.stacks)]
    stored = [getattr(owner, leaf) for owner, leaf in owners]
    dtype = computing_dtype(x_S, stored[0], format_of(owners[0][0]))
    widths, in_parts = [width for stack in stored for width in stack.shape[-2:]], format_of(owners[0][0]) is not FLOAT
    groups = Groups.of(ids_S, num_experts, dtype, widths, in_parts=in_parts)
    x_S = x_S.to(dtype)
    outputs = [_multiply(module, name, x_S, groups) for name in layout.up]
    up_S = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return up_S if layout.down is None else _multiply(module, layout.down, _apply_gate(module, layout, up_S), groups)


def _multiply(module: Any, name: str, x_S: Tensor, groups: Groups) -> Tensor:
    stack, num_experts = stack_of(module, name), groups.count
    owner, leaf = stack.owner, stack.leaf
    kind = StackKind(format_of(owner), stack.is_transposed, getattr(owner, "lora_scaling", 0.0))
    others = [getattr(owner, f"{leaf}_{part}", None) for part in ("lora_A", "lora_B", "bias")]
    stored = [tensor.view(stack.num_experts, -1, tensor.shape[-1]) for tensor in stored_weight(owner, leaf)]
    tensors = (*others, *stored)
    pair = copies_of_pair(owner, leaf, x_S.dtype)
    if stack.num_experts > num_experts:  # a stack may have a place for experts that return their input
        tensors = tuple(tensor[:num_experts] if tensor is not None else None for tensor in tensors)
        pair = (pair[0][:num_experts], pair[1][:num_experts]) if pair is not None else None
    return _GroupedLinear.apply(x_S, kind, groups, pair, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def _apply_gate(module: Any, layout: ExpertLayout, up_S: Tensor) -> Tensor:
    if hasattr(module, "_apply_gate"):
        activation: Tensor = module._apply_gate(up_S)
        return activation
    gate, up = up_S.chunk(2, dim=-1)
    return attrgetter(layout.activation)(module)(gate) * up  # type: ignore[no-any-return]


def _layout(module: nn.Module) -> ExpertLayout:
    layout = layout_of(module)
    assert layout is not None
    return layout


def _num_experts(module: nn.Module, layout: ExpertLayout) -> int:
    return stack_of(module, layout.stacks[-1]).num_experts
