"""Frozen weights in a format: they are stored, cut over ranks, multiplied, read back and counted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses import FakeTensorMode

from surefoot.models.build import BuiltModel, build_model, build_without_storage
from surefoot.models.lora import LoraSettings
from surefoot.models.lora_linear import LoraLinear
from surefoot.models.quantization.base import (
    FLOAT,
    FrozenLinear,
    count_weights,
    format_of,
    keep_stored,
    stored_weight,
)
from surefoot.planner.sizes import count_sizes
from tests.support.processes import run_program
from tests.support.stored_weights import FORMATS, is_stored, loss_and_gradients, stored_in, write_as_read

CPU = torch.device("cpu")
PROGRAM = Path(__file__).with_name("stored_ranks.py")
INT8 = FORMATS["int8"]
STORED = stored_in("int8")
PLAIN = LoraSettings(STORED.rank, STORED.alpha, targets=STORED.targets)
every_format = pytest.mark.parametrize("name", FORMATS)


def build(folder: Path, lora: LoraSettings, **options: bool) -> BuiltModel:
    targets = ("attention",) if "llama" in str(folder) else lora.targets
    lora = LoraSettings(lora.rank, lora.alpha, targets=targets, weight_format=lora.weight_format)
    return build_model(folder, lora=lora, device=CPU, dtype=torch.float32, **options)


@every_format
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_computes_with_the_weights_that_are_read_back(
    name: str, kind: str, checkpointing: bool, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder(kind)
    stored = build(folder, stored_in(name), gradient_checkpointing=checkpointing)
    plain = build(write_as_read(folder, tmp_path / kind, FORMATS[name]), PLAIN)
    loss, gradients = loss_and_gradients(stored)
    wanted_loss, wanted = loss_and_gradients(plain)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert gradients.keys() == wanted.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[parameter], atol=1e-6, rtol=1e-4)
    assert abs(loss - loss_and_gradients(build(folder, PLAIN))[0]) > 1e-6, "the format must have changed something"


def test_weights_of_the_decoder_are_stored_and_read_back(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen2_moe")
    model, plain = build(folder, STORED).model, build(folder, PLAIN).model
    weights = dict(plain.named_parameters())
    seen = set()
    for owner, module in model.named_modules():
        for leaf in getattr(module, "stored_weights", ()):
            name = f"{owner}.{leaf}"
            back = INT8.read(stored_weight(module, leaf), torch.float32)
            step = weights[name].abs().amax(-1, keepdim=True) / 127
            assert ((back - weights[name]).abs() <= step / 2 * 1.001).all(), name
            seen.add(name)
    assert seen == {name for name in weights if is_stored(name) and "lora" not in name}
    assert format_of(model.get_submodule("lm_head")) is FLOAT


@every_format
def test_bytes_and_weights_are_counted_as_they_are_held(name: str, model_folder: Callable[[str], Path]) -> None:
    folder, lora = model_folder("mixtral"), stored_in(name)
    model, plain = build(folder, lora).model, build(folder, PLAIN).model
    assert sum(count_weights(model).values()) == sum(parameter.numel() for parameter in plain.parameters())
    held = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    assert held < sum(p.nbytes for p in plain.parameters() if not p.requires_grad) * 0.6
    with FakeTensorMode():
        planned = count_sizes(
            build_without_storage(
                folder, lora=lora, dtype=torch.float32, gradient_checkpointing=False, packed_attention=None
            )
        ).whole
    assert planned.frozen_bytes + planned.expert_frozen_bytes == held
    assert planned.total == sum(parameter.numel() for parameter in plain.parameters())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "zero_stage", "expert_parallel"),
    [
        ("int8", 0, 1),
        ("int8", 3, 2),
        ("nf4, double", 3, 1),
        *(pytest.param("int8", *sizes, marks=pytest.mark.matrix) for sizes in ((2, 2), (3, 1))),
        *(pytest.param("nf4, double", *sizes, marks=pytest.mark.matrix) for sizes in ((0, 1), (2, 2), (3, 2))),
    ],
)
def test_two_ranks_compute_what_one_does(
    name: str, zero_stage: int, expert_parallel: int, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("mixtral")
    run_program(PROGRAM, folder, name, zero_stage, expert_parallel, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    alone = build(folder, stored_in(name))
    loss, gradients = loss_and_gradients(alone)
    assert found.pop("loss").item() == pytest.approx(loss, rel=1e-6)
    frozen = sum(parameter.nbytes for parameter in alone.model.parameters() if not parameter.requires_grad)
    experts = sum(
        parameter.nbytes for place, parameter in alone.model.named_parameters()
        if ".experts." in place and not parameter.requires_grad
    )  # fmt: skip
    held = found.pop("held").item()
    if zero_stage == 3:
        assert held <= frozen / 2 * 1.1
    else:
        assert held == frozen - (experts // 2 if expert_parallel == 2 else 0)
    assert found.keys() == gradients.keys()
    for parameter, gradient in found.items():  # both ranks train on the same batch
        torch.testing.assert_close(gradient, 2 * gradients[parameter], atol=1e-6, rtol=1e-4)


def test_models_may_add_to_the_output_of_a_stored_layer_in_place() -> None:
    """Llama 4 adds its experts' output to that of its shared expert."""
    layer = nn.Linear(6, 4)
    keep_stored(layer, "weight", INT8)
    states = torch.randn(1, 3, 6, requires_grad=True)
    output = layer(states)
    output += 1.0
    output.sum().backward()
    wanted = INT8.read(stored_weight(layer, "weight"), torch.float32).sum(0)
    assert states.grad is not None
    torch.testing.assert_close(states.grad, wanted.expand(1, 3, 6))


def test_a_module_keeps_its_names_and_its_kind(model_folder: Callable[[str], Path]) -> None:
    model = build(model_folder("llama"), STORED).model
    layer = model.get_submodule("model.layers.0")
    assert type(layer.get_submodule("self_attn.q_proj")) is LoraLinear
    assert type(layer.get_submodule("mlp.up_proj")) is FrozenLinear
    assert type(model.get_submodule("lm_head")) is nn.Linear
    assert model.state_dict()["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert not getattr(model.config, "quantization_config", None)
