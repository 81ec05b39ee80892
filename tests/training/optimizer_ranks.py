"""Two ranks that step each optimizer on parameters that are cut over them: `optimizer_ranks.py OUT`.

Rank 0 writes the parameters after the steps, by optimizer and name.
"""

import sys
from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from surefoot.distributed.process_group import init_distributed
from surefoot.models.dtensor_blocks import gather_full
from surefoot.training.optimizers import BUILDERS, build_optimizer
from tests.support.optimizing import STEPS, config_of, gradients_of, parameters_of
from tests.support.ranks import run_on_ranks

out = Path(sys.argv[1])


def main() -> None:
    with init_distributed("cpu") as ranks:
        mesh = init_device_mesh("cpu", (2,))
        results = {}
        for optim in BUILDERS:
            parameters = {
                name: nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
                for name, parameter in parameters_of().items()
            }
            optimizer = build_optimizer(parameters, config_of(optim))
            for step in range(STEPS):
                for name, gradient in gradients_of(step).items():
                    parameters[name].grad = distribute_tensor(gradient, mesh, [Shard(0)])
                optimizer.step()
            results |= {f"{optim} {name}": gather_full(parameter) for name, parameter in parameters.items()}
        if ranks.is_first:
            save_file(results, out)


run_on_ranks(main, 2)
