"""NF4 against bitsandbytes' own layers, with transformers and PEFT around them."""

import logging
from collections.abc import Callable
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional as bnb
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from surefoot.errors import ModelError
from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models.build import BuiltModel, build_model
from surefoot.models.lora import LoraSettings, is_lora
from surefoot.models.quantization import bitsandbytes_ops, formats
from surefoot.models.quantization.base import FrozenLinear, keep_stored
from surefoot.models.quantization.formats import Nf4Format
from tests.support.adapters import save
from tests.support.batches import batch
from tests.support.models import SIZES
from tests.support.stored_weights import set_lora

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
CPU = torch.device("cpu")
NF4, DOUBLE = Nf4Format(64, is_double=False), Nf4Format(64, is_double=True)


def random_weight(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", formats.BLOCK_SIZES)
def test_bytes_and_numbers_are_those_of_bitsandbytes(block_size: int, dtype: torch.dtype) -> None:
    weight = random_weight(24, 1024).to(dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=block_size, quant_type="nf4")
    stored_as = Nf4Format(block_size, is_double=False)
    values, factors = stored_as.store(weight)
    assert torch.equal(values.view(-1), packed.view(-1))
    assert torch.equal(factors.view(-1), state.absmax.view(-1))
    assert torch.equal(stored_as.read((values, factors), dtype), bnb.dequantize_4bit(packed, state))


def test_threads_of_bitsandbytes_do_not_compute_beside_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU they spin: beside another process that computes, each product took 20 times as long."""
    stored = NF4.store(random_weight(24, 128))
    wanted = NF4.read(stored, torch.float32)
    monkeypatch.delattr(formats, "operators")
    assert torch.equal(NF4.read(stored, torch.float32), wanted)


@pytest.mark.parametrize("stored_as", [NF4, DOUBLE], ids=["single", "double"])
def test_some_rows_and_experts_are_stored_as_in_the_whole(stored_as: Nf4Format) -> None:
    weight = random_weight(5, 24, 128)
    whole = stored_as.store(weight)
    for part in (stored_as.store(weight[1:3]), [tensor[1:3] for tensor in whole]):
        assert torch.equal(stored_as.read(part, torch.float32), stored_as.read(whole, torch.float32)[1:3])
    for expert in range(5):
        for tensor, alone in zip(whole, stored_as.store(weight[expert]), strict=True):
            assert torch.equal(tensor[expert], alone)


def test_double_quantisation_takes_less_and_changes_little() -> None:
    weight = random_weight(32, 2048)
    single, double = (NF4.store(weight), DOUBLE.store(weight))
    bits = [8 * sum(tensor.nbytes for tensor in stored) / weight.numel() for stored in (single, double)]
    assert bits == [4.5, 4.15625]
    lost = [(stored_as.read(stored_as.store(weight), torch.float32) - weight).norm() for stored_as in (NF4, DOUBLE)]
    assert lost[1] < 1.01 * lost[0]
    zeros = torch.zeros(4, 128)
    assert torch.equal(DOUBLE.read(DOUBLE.store(zeros), torch.float32), zeros)


def test_a_layer_equals_that_of_bitsandbytes() -> None:
    theirs = bitsandbytes.nn.Linear4bit(
        128, 48, compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4"
    )
    plain = torch.nn.Linear(128, 48)
    theirs.load_state_dict(plain.state_dict())
    theirs.requires_grad_(False).to("cpu")
    keep_stored(plain, "weight", NF4)
    assert isinstance(plain, FrozenLinear)
    outputs, gradients = [], []
    for layer in (theirs, plain):
        states = random_weight(7, 128).requires_grad_()
        outputs.append(layer(states))
        outputs[-1].square().sum().backward()
        assert states.grad is not None
        gradients.append(states.grad)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)


def write_model(folder: Path) -> Path:
    torch.manual_seed(3)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 128}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def build_nf4(folder: Path, stored_as: Nf4Format = NF4) -> BuiltModel:
    lora = LoraSettings(4, 8.0, targets=("all",), weight_format=stored_as)
    return build_model(folder, lora=lora, device=CPU, dtype=torch.float32)


def test_loss_and_gradients_equal_those_of_transformers_peft_and_bitsandbytes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    built = build_nf4(folder)
    set_lora(built)
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised, dtype=torch.float32)
    adapter = save(built, LoraSettings(4, 8.0, targets=("all",)), tmp_path / "adapter", folder)
    theirs = PeftModel.from_pretrained(theirs, str(adapter), is_trainable=True)
    theirs.train()  # in evaluation mode bitsandbytes' products on a CPU are rounded to bfloat16
    assert isinstance(theirs.base_model.model.model.layers[0].mlp.up_proj.base_layer, bitsandbytes.nn.Linear4bit)
    ours = {name: p for name, p in built.model.named_parameters() if is_lora(name)}
    rows = batch([24])
    totals = BatchTotals(rows.num_tokens, rows.num_trained, rows.trained_weight)
    ours_loss = SftObjective(built, 0.0).loss(rows, totals).total
    theirs_loss = F.cross_entropy(theirs(input_ids=rows.ids).logits[0, rows.target_positions], rows.targets)
    for loss in (ours_loss, theirs_loss):
        loss.backward()
    assert ours_loss.item() == pytest.approx(theirs_loss.item(), rel=1e-5)
    for name, parameter in ours.items():
        wanted = theirs.get_parameter(f"base_model.model.{name}.default.weight")
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted.grad, atol=1e-6, rtol=1e-4)


def test_widths_that_blocks_do_not_divide_are_named(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(
        ModelError, match=r"q_proj.weight has rows of 32 numbers.* quantization_block_size: 32, or null"
    ):
        build_nf4(model_folder("llama"))
    with pytest.raises(ModelError, match=r"down_proj.weight has rows of 48 numbers.* quantization: int8, or null"):
        build_nf4(model_folder("llama"), Nf4Format(32, is_double=False))


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    NF4.check_package()
    monkeypatch.setattr(bitsandbytes_ops, "version", lambda _: "0.45.5")
    with pytest.raises(ModelError, match=r"0\.46 or newer, and 0\.45\.5 is installed"):
        NF4.check_package()
    monkeypatch.undo()
    monkeypatch.setattr(bitsandbytes_ops, "PACKAGE", "bitsandbytes-missing")
    with pytest.raises(ModelError, match=r"which is not installed.*surefoot\[quantized\]"):
        NF4.check_package()
