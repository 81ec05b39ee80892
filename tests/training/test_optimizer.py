"""Optimizers against those of libraries, on one rank and on two, and what they decay."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.optimization import Adafactor

import surefoot
from surefoot.config import DatasetItem
from surefoot.methods.sft.settings import SftConfig
from surefoot.training.optimizers import BUILDERS, build_optimizer, create_state, find_block_size, state_blocks
from tests.support.optimizing import STEPS, config_of, gradients_of, parameters_of
from tests.support.processes import run_program
from tests.support.runs import SignalAfter, assert_same_run, numbers, train_with

PROGRAM = Path(__file__).with_name("optimizer_ranks.py")
ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
LIBRARIES: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, **ADAM),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "lion": lambda groups: bitsandbytes.optim.Lion32bit(groups, lr=0.01, betas=(0.9, 0.999)),
    "adafactor": lambda groups: Adafactor(groups, lr=0.01, scale_parameter=False, relative_step=False),
    "muon": lambda groups: torch.optim.Muon(groups, lr=0.01, adjust_lr_fn="match_rms_adamw"),
    "adamw_8bit": lambda groups: bitsandbytes.optim.AdamW8bit(groups, min_8bit_size=0, **ADAM),
}
"""Optimizer -> that of a library; AdamW8bit has blocks of 256 numbers, and Muon takes matrices alone."""
COMPARED = {
    "muon": ("layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight"),
    "adamw_8bit": ("layers.0.mlp.experts.gate_up_proj",),
}
TOLERANCE = {"adamw_8bit": 1e-4}
"""bitsandbytes adds epsilon to the root before it is corrected."""


def take_steps(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    for step in range(STEPS):
        for name, gradient in gradients_of(step).items():
            if name in parameters:
                parameters[name].grad = gradient
        optimizer.step()


@pytest.mark.parametrize("optim", BUILDERS)
def test_steps_equal_those_of_a_library(optim: str) -> None:
    chosen = COMPARED.get(optim, ("",))
    ours, theirs = ({name: value for name, value in parameters_of().items() if name.endswith(chosen)} for _ in range(2))
    groups = [
        {"params": [p], "weight_decay": 0.1 if p.dim() >= 2 and not name.endswith("bias") else 0.0}
        for name, p in theirs.items()
    ]
    take_steps(build_optimizer(ours, config_of(optim)), ours)
    take_steps(LIBRARIES[optim](groups), theirs)
    for name, value in theirs.items():
        tolerance = TOLERANCE.get(optim, 1e-6)
        torch.testing.assert_close(
            ours[name], value, atol=tolerance, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_muon_steps_each_expert_as_its_own_matrix_and_the_rest_as_adamw() -> None:
    together, name = parameters_of(), "model.layers.0.mlp.experts.gate_up_proj"
    take_steps(build_optimizer(together, config_of("muon")), together)
    for expert in range(4):
        alone = nn.Parameter(parameters_of()[name][expert].detach().clone())
        optimizer = build_optimizer({"layers.0.weight": alone}, config_of("muon"))
        for step in range(STEPS):
            alone.grad = gradients_of(step)[name][expert]
            optimizer.step()
        torch.testing.assert_close(together[name][expert], alone, atol=2e-4, rtol=0)
    adamw = parameters_of()
    take_steps(build_optimizer(adamw, config_of("adamw")), adamw)
    for other in ("embed_tokens.weight", "layers.0.input_layernorm.weight", "layers.0.mlp.experts.gate_up_proj_bias"):
        torch.testing.assert_close(together[f"model.{other}"], adamw[f"model.{other}"], atol=1e-6, rtol=1e-5)


def test_eight_bits_are_where_blocks_divide_the_rows() -> None:
    parameters = parameters_of()
    optimizer = build_optimizer(parameters, config_of("adamw_8bit"))
    create_state(optimizer, parameters.values())
    blocks = state_blocks(optimizer, parameters)
    assert blocks["exp_avg.model.layers.0.mlp.up_proj.weight"].local.dtype == torch.uint8
    assert blocks["exp_avg_absmax.model.layers.0.mlp.up_proj.weight"].shape == (7, 2)
    assert blocks["exp_avg.model.embed_tokens.weight"].local.dtype == torch.uint8
    assert blocks["exp_avg.model.layers.0.mlp.down_proj.weight"].local.dtype == torch.float32
    assert [find_block_size(torch.empty(3, width)) for width in (2048, 1408, 576, 96, 8)] == [256, 128, 64, None, None]


@pytest.mark.parametrize("optim", BUILDERS)
def test_creating_state_changes_no_weight(optim: str) -> None:
    parameters = parameters_of()
    create_state(build_optimizer(parameters, config_of(optim)), parameters.values())
    for name, value in parameters_of().items():
        assert torch.equal(parameters[name], value), name


@pytest.mark.long
def test_two_ranks_step_as_one_does(tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    for optim in BUILDERS:
        parameters = parameters_of()
        take_steps(build_optimizer(parameters, config_of(optim)), parameters)
        for name, value in parameters.items():
            torch.testing.assert_close(found[f"{optim} {name}"], value.data, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim", [pytest.param(optim, marks=() if optim == "adafactor" else pytest.mark.long) for optim in BUILDERS]
)
def test_a_run_learns_and_resumes_bit_for_bit(optim: str, settings: dict[str, Any], tmp_path: Path) -> None:
    rate = {"lion": 3e-3, "sgd": 0.3, "muon": 0.05}.get(optim, 1e-2)
    settings = {**settings, "optim": optim, "learning_rate": rate, "max_steps": 6, "save_steps": 2}
    run = surefoot.train({**settings, "output_dir": str(tmp_path / "whole")}, screen=False)
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    assert train_with(settings, SignalAfter(3, signal.SIGTERM)).steps == 3
    assert_same_run(run.run_folder, surefoot.train(settings, screen=False).run_folder)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("optim", ["adamw_8bit", "adafactor", "muon"])
def test_full_fine_tuning_resumes_on_two_ranks(optim: str, settings: dict[str, Any], tmp_path: Path) -> None:
    del settings["lora_rank"]
    settings = {
        **settings, "optim": optim, "tuning": "full", "learning_rate": 1e-3, "max_steps": 6, "global_batch_size": 4,
        "per_device_train_batch_size": 2,
    }  # fmt: skip
    whole = surefoot.train({**settings, "output_dir": str(tmp_path / "whole")}, screen=False)
    assert train_with(settings, SignalAfter(3, signal.SIGTERM)).steps == 3
    again = surefoot.train({**settings, "nproc_per_node": 2, "zero_stage": 3}, screen=False)
    losses = [[line["loss"] for line in numbers(run.run_folder)] for run in (whole, again)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_b_of_low_rank_pairs_may_have_a_learning_rate_of_its_own() -> None:
    parameters = {name: nn.Parameter(torch.ones(4, 4)) for name in ("q_proj.lora_A", "q_proj.lora_B")}
    config = config_of("sgd").model_copy(update={"loraplus_lr_ratio": 16.0, "weight_decay": 0.0})
    optimizer = build_optimizer(parameters, config)
    ratios = {group["lr_ratio"]: group["params"][0] for group in optimizer.param_groups}
    assert ratios[16.0] is parameters["q_proj.lora_B"]
    assert ratios[1.0] is parameters["q_proj.lora_A"]


@pytest.mark.slow
def test_a_step_uses_that_learning_rate(settings: dict[str, Any], tmp_path: Path) -> None:
    from surefoot.training.checkpoint import list_checkpoints
    from surefoot.training.sharded_tensors import ShardedTensors

    settings = {**settings, "optim": "sgd", "max_steps": 1, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    moved = []
    for name, ratio in (("one", None), ("four", 4.0)):
        run = surefoot.train(
            {**settings, "output_dir": str(tmp_path / name), **({"loraplus_lr_ratio": ratio} if ratio else {})},
            screen=False,
        ).run_folder
        saved = ShardedTensors(list_checkpoints(run)[-1] / "model")
        moved.append(next(saved.read(each) for each in saved.shapes if each.endswith("q_proj.lora_B")))
    torch.testing.assert_close(moved[1], 4 * moved[0])


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
