"""Grouped experts with LoRA, plugged into transformers under the name `surefoot`.

Serves every model whose experts follow transformers' fused convention: `gate_up_proj [E, 2I, H]` and
`down_proj [E, H, I]` (Mixtral, Qwen2-MoE, Qwen3-MoE, the text part of Qwen3-VL-MoE and more). Where a module carries
`<name>_lora_A [E, r, in]` and `<name>_lora_B [E, out, r]` (see `lora.py`), they are added as low-rank grouped GEMMs.
The backward computes only the requested gradients: under LoRA dX, dA and dB, never a dense dW.

Independent of how LoRA parameters are created, frozen or sharded, and of routers.

Shape suffixes: T tokens, K experts per token, S = T*K rows sorted by expert, E experts, H hidden, I intermediate,
R rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from surefoot.errors import ModelError
from surefoot.models.grouped_gemm import (
    STRIDE_ELEMENTS,
    Groups,
    grouped_linear,
    grouped_linear_add_,
    grouped_linear_dw,
    grouped_linear_dx,
    grouped_linear_dx_add_,
)
from surefoot.models.quantization.base import FLOAT, WeightFormat, format_of, stored_weight

IMPLEMENTATION = "surefoot"
PROJECTIONS = ("gate_up_proj", "down_proj")


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether `module` holds experts in the layout that this file computes."""
    return (
        all(
            isinstance(getattr(module, name, None), Tensor) and getattr(module, name).dim() == 3 for name in PROJECTIONS
        )
        and getattr(module, "has_gate", False)
        and not any(getattr(module, flag, True) for flag in ("has_bias", "is_transposed", "has_post_expert_norm"))
    )


def experts_of(module: nn.Module) -> int:
    """Return the number of experts of a fused experts module, over all ranks."""
    stack: Any = module.gate_up_proj
    return int(stack.shape[0])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the forward of a fused experts module, as `ALL_EXPERTS_FUNCTIONS` calls it.

    Shapes: hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H].
    """
    if not is_fused_experts(self):
        raise ModelError(
            f"{type(self).__name__} has biased, transposed or ungated experts, which are not computed here."
        )
    adapters = [getattr(self, f"{name}_lora_{part}", None) for name in PROJECTIONS for part in "AB"]
    gate_up, down = (stored_weight(self, name) for name in PROJECTIONS)
    return _Experts.apply(  # type: ignore[no-any-return,no-untyped-call]
        hidden_states,
        top_k_index,
        top_k_weights,
        _Variant(getattr(self, "lora_scaling", 0.0), _select_gate(self), format_of(self)),
        gate_up[0],
        down[0],
        *adapters,
        *gate_up[1:],
        *down[1:],
    )


class _SwiGLU:
    """The gate silu(gate) * up over concatenated halves, with few passes over memory."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def backward(self, d_act: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Return (activation, gradient by gate_up); `d_act` is overwritten."""
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        act = F.silu(gate)
        torch.mul(d_act, act, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_act.mul_(up), gate, grad_input=d_gate)
        return act.mul_(up), d_gate_up


class _ModuleGate:
    """The gate that the model defines, differentiated by autograd."""

    def __init__(self, apply_gate: Callable[[Tensor], Tensor]) -> None:
        self.forward = apply_gate

    def backward(self, d_act: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            act = self.forward(leaf)
            (d_gate_up,) = torch.autograd.grad(act, leaf, d_act)
        return act.detach(), d_gate_up


def _select_gate(module: nn.Module) -> _SwiGLU | _ModuleGate:
    is_silu = isinstance(module.act_fn, nn.SiLU)
    apply_gate: Any = module._apply_gate
    is_plain = apply_gate.__func__ is _default_apply_gate and module.is_concatenated
    return _SwiGLU() if is_silu and is_plain else _ModuleGate(apply_gate)


def _prepare_lora_pair(
    a: Tensor | None, b: Tensor | None, like: Tensor, groups: Groups
) -> tuple[Tensor, Tensor] | None:
    """Return the pair in the computing type, its rank padded with zeros where the fused kernel needs wider rows."""
    if a is None or b is None:
        return None
    a, b = a.to(like.dtype), b.to(like.dtype)
    missing = -a.shape[1] % STRIDE_ELEMENTS if groups.spans is None else 0
    return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else (a, b)


@dataclass(frozen=True)
class _Variant:
    """Settings of a module of experts."""

    scaling: float
    """Factor of the LoRA products."""
    gate: _SwiGLU | _ModuleGate
    weight_format: WeightFormat


def _add_companions(gate_up: Tensor, down: Tensor, companions: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the stored tensors of both projections; each has half of the companions."""
    half = len(companions) // 2
    return [gate_up, *companions[:half]], [down, *companions[half:]]


class _Experts(torch.autograd.Function):
    """Gather, gate-up, gate, down, weigh and combine, with LoRA on both projections, as one node of the graph.

    Saved for the backward: the tokens [T, H], the gate-up output [S, 2I] and the low-rank products [S, R]. The gathered
    rows [S, H] and the activation [S, I] are recomputed. With u = g @ W_down the gradient of a routing weight is
    <u, act>, so the down projection's output is not saved either.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
        variant: _Variant,
        gate_up_E2IH: Tensor,
        down_EHI: Tensor,
        *others: Any,
    ) -> Tensor:
        """`others`: A and B of both projections, each a tensor or None; then the other stored tensors of both."""
        gate_up_A, gate_up_B, down_A, down_B, *companions = others
        scaling, gate, weight_format = variant.scaling, variant.gate, variant.weight_format
        tokens, top_k = index_TK.shape
        device_type = hidden_TH.device.type
        is_autocast = torch.is_autocast_enabled(device_type)
        own_dtype = gate_up_E2IH.dtype if weight_format is FLOAT else hidden_TH.dtype
        dtype = torch.get_autocast_dtype(device_type) if is_autocast else own_dtype
        gate_up, down = _add_companions(gate_up_E2IH, down_EHI, companions)
        ids, order_S = torch.sort(index_TK.reshape(-1), stable=True)
        groups = Groups.of(ids, gate_up_E2IH.shape[0], dtype)
        token_S = order_S // top_k

        x_SH = hidden_TH.to(dtype)[token_S]
        gate_up_S = weight_format.grouped_linear(x_SH, gate_up, groups)
        first = _prepare_lora_pair(gate_up_A, gate_up_B, x_SH, groups)
        first_low_SR = None
        if first is not None:
            first_low_SR = grouped_linear(x_SH, first[0], groups)
            grouped_linear_add_(gate_up_S, first_low_SR, first[1], groups, scaling)

        act_SI = gate.forward(gate_up_S)
        out_SH = weight_format.grouped_linear(act_SI, down, groups)
        second = _prepare_lora_pair(down_A, down_B, x_SH, groups)
        second_low_SR = None
        if second is not None:
            second_low_SR = grouped_linear(act_SI, second[0], groups)
            grouped_linear_add_(out_SH, second_low_SR, second[1], groups, scaling)

        weight_S = weights_TK.reshape(-1)[order_S].to(dtype)
        position_S = torch.empty_like(order_S)
        position_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
        out_TH = out_SH.mul_(weight_S[:, None])[position_S].view(tokens, top_k, out_SH.shape[1]).sum(1)

        ctx.save_for_backward(
            hidden_TH, token_S, position_S, weight_S, gate_up_S, first_low_SR, second_low_SR,
            gate_up_E2IH, down_EHI, gate_up_A, gate_up_B, down_A, down_B, *companions,
        )  # fmt: skip
        ctx.variant, ctx.groups, ctx.top_k, ctx.weights_dtype = variant, groups, top_k, weights_TK.dtype
        return out_TH.to(hidden_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        (
            hidden_TH, token_S, position_S, weight_S, gate_up_S, first_low_SR, second_low_SR,
            gate_up_E2IH, down_EHI, gate_up_A, gate_up_B, down_A, down_B, *companions,
        ) = ctx.saved_tensors  # fmt: skip
        gate_up, down = _add_companions(gate_up_E2IH, down_EHI, companions)
        groups, scaling, needs = ctx.groups, ctx.variant.scaling, ctx.needs_input_grad
        weight_format: WeightFormat = ctx.variant.weight_format
        dtype = gate_up_S.dtype
        tokens = hidden_TH.shape[0]
        g_SH = d_out_TH.to(dtype)[token_S]  # gradient by the combined rows, before the routing weight
        second = _prepare_lora_pair(down_A, down_B, g_SH, groups)
        d_act_SI = weight_format.grouped_linear_dx(g_SH, down, groups)
        g_low_SR = None
        if second is not None:
            g_low_SR = grouped_linear_dx(g_SH, second[1], groups)
            grouped_linear_dx_add_(d_act_SI, g_low_SR, second[0], groups, scaling)
        unweighted_SI = d_act_SI.clone() if needs[2] else None
        act_SI, d_gate_up_S = ctx.variant.gate.backward(d_act_SI.mul_(weight_S[:, None]), gate_up_S)

        d_weights = d_down = d_down_A = d_down_B = d_gate_up = d_gate_up_A = d_gate_up_B = d_hidden = None
        if unweighted_SI is not None:
            d_weight_S = unweighted_SI.mul_(act_SI).sum(-1)
            d_weights = d_weight_S[position_S].view(tokens, ctx.top_k).to(ctx.weights_dtype)
        if needs[5]:
            d_down = grouped_linear_dw(g_SH * weight_S[:, None], act_SI, groups)
        if second is not None:
            rank = down_A.shape[1]
            if needs[8]:
                d_low = g_low_SR * weight_S[:, None]
                d_down_A = grouped_linear_dw(d_low, act_SI, groups, scaling)[:, :rank].to(down_A.dtype)
            if needs[9]:
                low = second_low_SR * weight_S[:, None]
                d_down_B = grouped_linear_dw(g_SH, low, groups, scaling)[:, :, :rank].to(down_B.dtype)
        del act_SI, d_act_SI, unweighted_SI

        first = _prepare_lora_pair(gate_up_A, gate_up_B, g_SH, groups)
        x_SH = hidden_TH.to(dtype)[token_S] if needs[4] or needs[6] else g_SH.new_empty(0)
        d_first_low_SR = None
        if first is not None:
            rank = gate_up_A.shape[1]
            d_first_low_SR = grouped_linear_dx(d_gate_up_S, first[1], groups)
            if needs[6]:
                d_gate_up_A = grouped_linear_dw(d_first_low_SR, x_SH, groups, scaling)[:, :rank].to(gate_up_A.dtype)
            if needs[7]:
                d_gate_up_B = grouped_linear_dw(d_gate_up_S, first_low_SR, groups, scaling)[:, :, :rank].to(
                    gate_up_B.dtype
                )
        if needs[4]:
            d_gate_up = grouped_linear_dw(d_gate_up_S, x_SH, groups)
        if needs[0]:
            d_x_SH = weight_format.grouped_linear_dx(d_gate_up_S, gate_up, groups)
            if first is not None and d_first_low_SR is not None:
                grouped_linear_dx_add_(d_x_SH, d_first_low_SR, first[0], groups, scaling)
            d_hidden = d_x_SH[position_S].view(tokens, ctx.top_k, d_x_SH.shape[1]).sum(1).to(hidden_TH.dtype)
        return (
            d_hidden, None, d_weights, None, d_gate_up, d_down,
            d_gate_up_A, d_gate_up_B, d_down_A, d_down_B, *(None for _ in companions),
        )  # fmt: skip


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
