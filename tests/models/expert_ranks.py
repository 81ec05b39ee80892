"""Two ranks with experts in layouts of many kinds: `expert_ranks.py CASES.json OUT_FOLDER`.

A case is [kind, what is trained, ZeRO stage, expert-parallel size]. Rank 0 writes the gradients of each case.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from surefoot.distributed.fsdp import Sharding
from surefoot.distributed.parallel_dims import Layout
from surefoot.distributed.process_group import init_distributed
from surefoot.models.dtensor_blocks import gather_full, load_full
from tests.support.expert_models import build, loss_of, set_values
from tests.support.ranks import run_on_ranks

CPU = torch.device("cpu")


def main() -> None:
    with init_distributed("cpu") as ranks:
        for number, (kind, trained, zero_stage, expert_parallel) in enumerate(
            json.loads(Path(sys.argv[1]).read_text())
        ):
            model = build(kind, trained)
            Sharding(Layout(2, zero_stage, 2 if zero_stage == 0 else 1, expert_parallel, False), CPU).apply(model)
            set_values(dict(model.named_parameters()), load_full)
            loss_of(model).backward()
            gradients = {
                name: gather_full(parameter.grad)
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            if ranks.is_first:
                save_file(gradients, Path(sys.argv[2], f"{number}.safetensors"))


run_on_ranks(main, 2)
