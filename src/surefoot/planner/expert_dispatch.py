"""Expert parallelism on tensors without storage: a rank holds its share of the experts, and rows are exchanged.

It uses the ops of transformers' all-to-all dispatch (`distributed.fsdp` applies that), so that the trace counts their
tensors and what autograd saves of them. A rank receives as many rows as it sends: tokens go to the experts evenly.

Shape suffixes: T tokens, K experts per token, S = T*K rows, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.models.expert_layouts import is_fused_experts


class _AllToAll(torch.autograd.Function):
    """Exchange of rows [S, H] for rows [S, H]; the backward exchanges their gradients in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, exchange: "Exchange") -> Tensor:
        ctx.exchange = exchange
        return exchange.count_rows(rows_SH)

    @staticmethod
    def backward(ctx: Any, d_rows_SH: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.count_rows(d_rows_SH), None


class Exchange(nn.Module):
    """One all-to-all of a dispatch, which counts the bytes that it exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        """Bytes of all rows so far, including the rows that stay on their rank."""

    def count_rows(self, rows_SH: Tensor) -> Tensor:
        self.bytes += rows_SH.nbytes
        return torch.empty_like(rows_SH)


class _Dispatch(Exchange):
    """Dispatch of tokens to their experts: [T, H], [T, K] -> [S, H] and their order [S]."""

    def forward(self, hidden_TH: Tensor, index_TK: Tensor) -> tuple[Tensor, Tensor]:
        order_S = torch.argsort(index_TK.reshape(-1))
        return _AllToAll.apply(hidden_TH[order_S // index_TK.shape[1]], self), order_S  # type: ignore[no-untyped-call]


class _Combine(Exchange):
    """Weighted sum of the experts' outputs for each token: [S, H], [S], [T, K] -> [T, H]."""

    def forward(self, out_SH: Tensor, order_S: Tensor, weights_TK: Tensor) -> Tensor:
        back_SH = _AllToAll.apply(out_SH, self)  # type: ignore[no-untyped-call]
        by_token_SH = torch.empty_like(back_SH)
        by_token_SH[order_S] = back_SH
        by_token_TKH = by_token_SH.view(*weights_TK.shape, out_SH.shape[1])
        weighted: Tensor = (by_token_TKH * weights_TK[..., None]).sum(1)
        return weighted


def shard_experts(model: PreTrainedModel, ranks: int) -> None:
    """Keep one rank's share of the experts of a model without storage, and exchange rows. In place."""
    for module in [module for module in model.modules() if is_fused_experts(module)]:
        for name, weight in list(module.named_parameters(recurse=False)):
            shard = weight.new_empty(weight.shape[0] // ranks, *weight.shape[1:])
            setattr(module, name, nn.Parameter(shard, requires_grad=weight.requires_grad))
        dispatch, combine, run = _Dispatch(), _Combine(), module.forward
        module.add_module("dispatch", dispatch)
        module.add_module("combine", combine)

        def forward(
            hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor,
            dispatch: _Dispatch = dispatch, combine: _Combine = combine, run: Any = run,
        ) -> Tensor:  # fmt: skip
            rows_SH, order_S = dispatch(hidden_TH, index_TK)
            expert_S1 = order_S.new_empty(len(order_S), 1)
            expert_out_SH: Tensor = run(rows_SH, expert_S1, torch.ones_like(expert_S1, dtype=rows_SH.dtype))
            combined: Tensor = combine(expert_out_SH, order_S, weights_TK)
            return combined

        module.forward = forward


def exchanged_bytes(model: nn.Module) -> int:
    """Return the bytes of the rows that were exchanged so far."""
    return sum(module.bytes for module in model.modules() if isinstance(module, Exchange))
