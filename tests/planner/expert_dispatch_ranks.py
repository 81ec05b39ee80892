"""Two ranks that share experts: `expert_dispatch_ranks.py MODEL TOKENS`.

Rank 0 prints on one line, in bytes: what a forward saves for its backward, the peak of both, and the rows exchanged in
the forward.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers.distributed.expert_parallel as dispatch
from torch import Tensor

from surefoot.data.collate import MicroBatch
from surefoot.distributed.fsdp import Sharding
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import init_distributed
from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models.build import build_model
from surefoot.models.lora import LoraSettings
from surefoot.planner.live_tensors import LiveTensors
from tests.support.ranks import run_on_ranks

model, tokens = Path(sys.argv[1]), int(sys.argv[2])
exchanged_bytes = [0]
exchange_rows = dispatch.all_to_all_single_autograd


def count_rows(rows: Tensor, *arguments: Any) -> Any:
    exchanged_bytes[0] += rows.nbytes
    return exchange_rows(rows, *arguments)


dispatch.all_to_all_single_autograd = count_rows


def main() -> None:
    with init_distributed("cpu") as ranks:
        sharding = Sharding(Layout(2, 0, 1, 2, False), torch.device("cpu"))
        built = build_model(
            model, lora=LoraSettings(4, 8, targets=("attention",)), device=torch.device("cpu"), dtype=torch.float32,
            sharding=sharding,
        )  # fmt: skip
        batch = MicroBatch(
            ids=torch.randint(0, 40, (1, tokens)),
            position_ids=torch.arange(tokens)[None],
            lengths=[tokens],
            cu_seq_lens=torch.tensor([0, tokens], dtype=torch.int32),
            target_positions=torch.arange(tokens - 1),
            targets=torch.randint(0, 40, (tokens - 1,)),
            weights=None,
            row_refs=(),
            answer_of=torch.zeros(tokens - 1, dtype=torch.int64),
        )
        objective, totals = SftObjective(built, 0.0), BatchTotals(tokens, tokens - 1, float(tokens - 1))
        # The first pass sets up what stays: process groups, flat weights.
        objective.loss(batch, totals).total.backward()
        excluded = [
            *built.model.parameters(),
            *built.model.buffers(),
            batch.ids,
            batch.position_ids,
            batch.target_positions,
        ]
        measured = []
        for _ in range(5):
            live = LiveTensors([getattr(tensor, "_local_tensor", tensor) for tensor in excluded])
            exchanged_bytes[0] = 0
            with live:
                loss = objective.loss(batch, totals).total
                saved = live.now
                forward_bytes = exchanged_bytes[0]
                loss.backward()
            peak = max(moment[0] for moment in (*live.forward_moments(), *live.backward_moments()))
            measured.append((saved, peak, forward_bytes))
        if ranks.is_first:
            # Gloo's threads may hold the rows of an exchange for a moment after it ended, so the least is what stays.
            print(*(min(one) for one in zip(*measured, strict=True)))


run_on_ranks(main, 2)
