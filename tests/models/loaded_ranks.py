"""Two ranks that load a checkpoint: `loaded_ranks.py MODEL TUNING ZERO_STAGE EXPERT_PARALLEL_SIZE OUT`.

Rank 0 writes the base's weights, gathered from both, and its buffers.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from surefoot.distributed.fsdp import Sharding
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import init_distributed
from surefoot.models.build import build_model
from surefoot.models.dtensor_blocks import gather_full
from surefoot.models.lora import LoraSettings, is_lora
from tests.support.ranks import run_on_ranks

model, tuning, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[5])
zero_stage, expert_parallel = int(sys.argv[3]), int(sys.argv[4])
CPU = torch.device("cpu")


def main() -> None:
    with init_distributed("cpu") as ranks:
        sharding = Sharding(Layout(2, zero_stage, 1, expert_parallel, False), CPU)
        lora = LoraSettings(rank=2, alpha=4, targets=("attention",)) if tuning == "lora" else None
        built = build_model(model, lora=lora, device=CPU, dtype=torch.bfloat16, sharding=sharding)
        full = {name: gather_full(p).clone() for name, p in built.model.named_parameters() if not is_lora(name)}
        if ranks.is_first:
            buffers = {name: buffer.clone() for name, buffer in built.model.named_buffers()}
            save_file(full | buffers, out)


run_on_ranks(main, 2)
