"""Expert parallelism in a run without storage: a rank keeps its part of the experts, and rows travel to and from them.

With the ops of transformers' all-to-all dispatch (`distributed.fsdp` applies that), so that what they hold and what
autograd saves of them is counted. As many rows come to a rank as it sends: tokens go to the experts evenly.

Shape suffixes: T tokens, K experts per token, S = T*K rows, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.models.experts import is_fused_experts


class _AllToAll(torch.autograd.Function):
    """Rows [S, H] come for rows [S, H]; in the backward their gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, exchange: "Exchange") -> Tensor:
        ctx.exchange = exchange
        return exchange.counted(rows_SH)

    @staticmethod
    def backward(ctx: Any, d_rows_SH: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.counted(d_rows_SH), None


class Exchange(nn.Module):
    """One side of the journey of rows, which counts what travels."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        """Of all rows so far; a rank's own, which stay, among them."""

    def counted(self, rows_SH: Tensor) -> Tensor:
        self.bytes += rows_SH.nbytes
        return torch.empty_like(rows_SH)


class _Dispatch(Exchange):
    """Tokens to their experts: [T, H], [T, K] -> [S, H] and their order [S]."""

    def forward(self, hidden_TH: Tensor, index_TK: Tensor) -> tuple[Tensor, Tensor]:
        order_S = torch.argsort(index_TK.reshape(-1))
        return _AllToAll.apply(hidden_TH[order_S // index_TK.shape[1]], self), order_S  # type: ignore[no-untyped-call]


class _Combine(Exchange):
    """What experts made back to its tokens, weighed: [S, H], [S], [T, K] -> [T, H]."""

    def forward(self, out_SH: Tensor, order_S: Tensor, weights_TK: Tensor) -> Tensor:
        back_SH = _AllToAll.apply(out_SH, self)  # type: ignore[no-untyped-call]
        by_token_SH = torch.empty_like(back_SH)
        by_token_SH[order_S] = back_SH
        by_token_TKH = by_token_SH.view(*weights_TK.shape, out_SH.shape[1])
        weighed: Tensor = (by_token_TKH * weights_TK[..., None]).sum(1)
        return weighed


def share_out(model: PreTrainedModel, ranks: int) -> None:
    """Leave one rank's part of the experts of a model without storage, and let rows travel. In place."""
    for module in [one for one in model.modules() if is_fused_experts(one)]:
        for name, stack in list(module.named_parameters(recurse=False)):
            part = stack.new_empty(stack.shape[0] // ranks, *stack.shape[1:])
            setattr(module, name, nn.Parameter(part, requires_grad=stack.requires_grad))
        dispatch, combine, run = _Dispatch(), _Combine(), module.forward
        module.add_module("dispatch", dispatch)
        module.add_module("combine", combine)

        def forward(
            hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor,
            dispatch: _Dispatch = dispatch, combine: _Combine = combine, run: Any = run,
        ) -> Tensor:  # fmt: skip
            rows_SH, order_S = dispatch(hidden_TH, index_TK)
            expert_S1 = order_S.new_empty(len(order_S), 1)
            made_SH: Tensor = run(rows_SH, expert_S1, torch.ones_like(expert_S1, dtype=rows_SH.dtype))
            combined: Tensor = combine(made_SH, order_S, weights_TK)
            return combined

        module.forward = forward


def exchanged_bytes(model: nn.Module) -> int:
    """Of the rows that have travelled so far."""
    return sum(module.bytes for module in model.modules() if isinstance(module, Exchange))
