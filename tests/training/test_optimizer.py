"""What the optimizer decays."""

import torch
from torch import nn

from surefoot.config import DatasetItem
from surefoot.methods.sft.settings import SftConfig
from surefoot.training.train_setup import build_optimizer


def test_matrices_are_decayed_and_norms_and_biases_are_not() -> None:
    parameters = {
        "weight": nn.Parameter(torch.ones(2, 2)),
        "norm": nn.Parameter(torch.ones(2)),
        "experts.gate_up_proj": nn.Parameter(torch.ones(3, 2, 2)),
        "experts.gate_up_proj_bias": nn.Parameter(torch.ones(3, 2)),
    }
    optimizer = build_optimizer(
        parameters,
        SftConfig(model="m", dataset=[DatasetItem(path="d")], output_dir="o", weight_decay=0.5, learning_rate=1.0),
    )
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert {name: float(parameter.detach().mean()) for name, parameter in parameters.items()} == {
        "weight": 0.5, "norm": 1.0, "experts.gate_up_proj": 0.5, "experts.gate_up_proj_bias": 1.0,
    }  # fmt: skip
