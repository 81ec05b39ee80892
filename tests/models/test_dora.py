"""DoRA: the lengths of rows are trained apart from their directions, with PEFT's numbers."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import surefoot
from surefoot.errors import ConfigError, ModelError
from surefoot.inference.load import ModelFiles
from surefoot.inference.serve import vllm_options
from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models.adapter import read_adapter
from surefoot.models.adapter_files import WEIGHTS
from surefoot.models.build import build_model, trainable_parameters
from surefoot.models.export import merge_adapter
from surefoot.models.generate import generating
from surefoot.models.lora import LoraSettings, disable_adapter
from surefoot.training.checkpoint import list_checkpoints
from tests.support.adapters import logits_of, save
from tests.support.batches import batch
from tests.support.processes import run_program
from tests.support.stored_weights import loss_and_gradients, stored_in

CPU = torch.device("cpu")
DORA = LoraSettings(rank=4, alpha=6.0, dora=True, targets=("linear",))
PROGRAM = Path(__file__).with_name("stored_ranks.py")


def trained(folder: Path, settings: LoraSettings = DORA) -> Any:
    """A model whose adapter is far from its initial values."""
    built = build_model(folder, lora=settings, device=CPU, dtype=torch.float32)
    torch.manual_seed(11)
    for parameter in trainable_parameters(built.model).values():
        parameter.data += torch.randn_like(parameter) * 0.2
    return built


def test_it_begins_as_the_base(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen2")
    built = build_model(folder, lora=DORA, device=CPU, dtype=torch.float32)
    with generating(built.model):
        logits = logits_of(built.model)
    torch.testing.assert_close(logits, logits_of(AutoModelForCausalLM.from_pretrained(folder)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_loss_and_gradients_are_those_of_peft(kind: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Qwen2's linear layers have biases, which no length scales."""
    folder = model_folder(kind)
    built = trained(folder)
    adapter = save(built, DORA, tmp_path / "adapter", folder)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(adapter), is_trainable=True)
    rows = batch([24])
    totals = BatchTotals(rows.num_tokens, rows.num_trained, rows.trained_weight)
    loss = SftObjective(built, 0.0).loss(rows, totals).total
    wanted = F.cross_entropy(peft(input_ids=rows.ids).logits[0, rows.target_positions], rows.targets)
    loss.backward()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    names = trainable_parameters(built.model)
    assert sum(name.endswith("lora_magnitude") for name in names) == len(names) / 3
    for name, parameter in names.items():
        peft_name = name.replace("lora_magnitude", "lora_magnitude_vector")
        other = peft.get_parameter(f"base_model.model.{peft_name}.default.weight").grad
        assert parameter.grad is not None
        assert other is not None
        torch.testing.assert_close(parameter.grad, other, atol=1e-5, rtol=1e-4)


def test_it_is_read_back_merged_and_left_out(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model_folder("llama")
    built = trained(folder)
    with generating(built.model):
        wanted = logits_of(built.model)
        with disable_adapter(built.model):
            alone = logits_of(built.model)
    torch.testing.assert_close(alone, logits_of(AutoModelForCausalLM.from_pretrained(folder)), atol=1e-5, rtol=1e-5)
    assert (wanted - alone).abs().max() > 1e-2
    adapter = save(built, DORA, tmp_path / "adapter", folder)
    merged = merge_adapter(folder, adapter, tmp_path / "merged")
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=1e-4, rtol=1e-4)
    parameters = trainable_parameters(built.model)
    values = read_adapter(adapter, {name: p.shape for name, p in parameters.items()}, DORA, built.model)
    assert all(torch.equal(values[name], parameter) for name, parameter in parameters.items())
    with pytest.raises(ConfigError, match=r"vLLM serves no adapter with magnitudes.*--merge"):
        vllm_options(ModelFiles(folder, adapter, "it"))
    weights = load_file(adapter / WEIGHTS)
    lone = next(name for name in weights if name.endswith("lora_magnitude_vector"))
    del weights[lone]
    broken = shutil.copytree(adapter, tmp_path / "broken")
    save_file(weights, broken / WEIGHTS)
    with pytest.raises(ModelError, match=r"the pair of .* has no magnitude \(use_dora\)"):
        merge_adapter(folder, broken, tmp_path / "nothing")
    plain = replace(DORA, dora=False)
    with pytest.raises(ModelError, match="use_dora=False but the adapter has True"):
        read_adapter(adapter, {}, plain, built.model)


def test_dropout_changes_what_the_adapter_sees_alone(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen2")
    losses = []
    for dropout in (0.0, 1e-9, 0.5):
        built = trained(folder, replace(DORA, dropout=dropout))
        torch.manual_seed(0)
        rows = batch([24])
        totals = BatchTotals(rows.num_tokens, rows.num_trained, rows.trained_weight)
        losses.append(SftObjective(built, 0.0).loss(rows, totals).total.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)


def test_dropout_has_the_numbers_of_peft(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one mask for all inputs of a width."""
    folder, settings = model_folder("qwen2"), replace(DORA, dropout=0.5)

    def drop(x: Tensor, p: float = 0.5, training: bool = True, *_: bool) -> Tensor:
        if not (p and training):
            return x
        mask = torch.rand(x.shape[-1], generator=torch.Generator().manual_seed(0)) < p
        return x.masked_fill(mask, 0.0) / (1 - p)

    monkeypatch.setattr(F, "dropout", drop)
    built = trained(folder, settings)
    adapter = save(built, settings, tmp_path / "adapter", folder)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(adapter), is_trainable=True)
    peft.train()
    rows = batch([24])
    totals = BatchTotals(rows.num_tokens, rows.num_trained, rows.trained_weight)
    objective = SftObjective(built, 0.0)
    losses = [objective.loss(rows, totals).total.item()]
    built.model.eval()
    losses.append(objective.loss(rows, totals).total.item())
    wanted = F.cross_entropy(peft(input_ids=rows.ids).logits[0, rows.target_positions], rows.targets).item()
    assert losses[0] == pytest.approx(wanted, rel=1e-5)
    assert losses[1] != pytest.approx(wanted, rel=1e-3)


def test_products_of_low_precision_have_lengths_in_float32(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    built = build_model(folder, lora=DORA, device=CPU, dtype=torch.bfloat16)
    layer = built.model.get_submodule("model.layers.0.self_attn.q_proj")
    lengths = layer._row_lengths(torch.bfloat16)  # type: ignore[operator]
    assert lengths.dtype == torch.float32
    torch.testing.assert_close(lengths, layer.get_parameter("weight").float().norm(dim=1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(layer.get_parameter("lora_magnitude"), lengths, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        layer.get_parameter("lora_B").normal_(generator=torch.Generator().manual_seed(0))
    added = 1.5 * layer.get_parameter("lora_B").bfloat16().float() @ layer.get_parameter("lora_A").bfloat16().float()
    wanted = (layer.get_parameter("weight").float() + added).norm(dim=1)
    torch.testing.assert_close(layer._row_lengths(torch.bfloat16), wanted, atol=1e-3, rtol=1e-3)  # type: ignore[operator]


def test_a_run_goes_on_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    options = {"use_dora": True, "target_modules": "linear", "max_steps": 4, "save_steps": 2, "screen": False}
    first = surefoot.train(settings, **options)
    middle = list_checkpoints(first.run_folder)[0]
    again = surefoot.train(settings, **options, output_dir=tmp_path / "again", resume_from_checkpoint=middle)
    assert first.artifact is not None
    assert again.artifact is not None
    one, other = (load_file(result.artifact / "adapter_model.safetensors") for result in (first, again))
    assert any("lora_magnitude_vector" in name for name in one)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert surefoot.load(first.run_folder)


@pytest.mark.parametrize(
    ("target", "reason"),
    [("all", r"use_dora with \d+ expert stacks.* such as linear"), ("router", "target_modules names none")],
)
def test_experts_and_routers_have_no_magnitudes(target: str, reason: str, model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=reason):
        build_model(model_folder("qwen3_moe"), lora=replace(DORA, targets=(target,)), device=CPU, dtype=torch.float32)


def test_a_layer_without_rows_has_no_rows(model_folder: Callable[[str], Path]) -> None:
    built = build_model(model_folder("llama"), lora=replace(DORA, dropout=0.1), device=CPU, dtype=torch.float32)
    layer = built.model.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer(torch.zeros(0, 32)).shape == (0, 32)


@pytest.mark.long
@pytest.mark.parametrize(("name", "zero_stage"), [("nf4", 3), ("int8", 2)])
def test_two_ranks_compute_what_one_does(
    name: str, zero_stage: int, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("mixtral")
    out = tmp_path / "out.safetensors"
    run_program(PROGRAM, folder, name, zero_stage, 1, out, "float32", "dora")
    of_ranks = load_file(out)
    lora = replace(stored_in(name), dora=True, targets=("attention",))
    loss, gradients = loss_and_gradients(build_model(folder, lora=lora, device=CPU, dtype=torch.float32))
    assert of_ranks["loss"].item() == pytest.approx(loss, rel=1e-6)
    assert any(parameter.endswith("lora_magnitude") for parameter in gradients)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(of_ranks[parameter], 2 * gradient, atol=1e-6, rtol=1e-4)
