"""Two ranks with stored weights: `stored_ranks.py MODEL FORMAT ZERO_STAGE EXPERT_PARALLEL_SIZE OUT [DTYPE [dora]]`.

Rank 0 writes the loss and the gradients, and the bytes of frozen weights that it holds.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from surefoot.distributed.fsdp import Sharding
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import init_distributed
from surefoot.models.build import build_model
from tests.support.ranks import run_on_ranks
from tests.support.stored_weights import loss_and_gradients, stored_in

model, name, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[5])
zero_stage, expert_parallel = int(sys.argv[3]), int(sys.argv[4])
dtype = getattr(torch, sys.argv[6]) if len(sys.argv) > 6 else torch.float32
CPU = torch.device("cpu")


def main() -> None:
    with init_distributed("cpu") as ranks:
        replicas = 2 if zero_stage == 0 else 1
        sharding = Sharding(Layout(2, zero_stage, replicas, expert_parallel, False), CPU)
        lora = stored_in(name)
        if sys.argv[7:] == ["dora"]:
            lora = replace(lora, dora=True, targets=("attention",))
        built = build_model(model, lora=lora, device=CPU, dtype=dtype, sharding=sharding)
        frozen = [p for p in built.model.parameters() if not p.requires_grad]
        held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in frozen)
        loss, gradients = loss_and_gradients(built)
        if ranks.is_first:
            save_file({**gradients, "loss": torch.tensor(loss), "held": torch.tensor(held)}, out)


run_on_ranks(main, 2)
