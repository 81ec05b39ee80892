"""Checkpoints that transformers saved in bitsandbytes' four or eight bits are read back as bitsandbytes does."""

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional as bnb
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from surefoot.errors import ModelError
from surefoot.models.build import build_model
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.lora import LoraSettings
from surefoot.models.model_size import weights_of
from surefoot.models.quantization.base import stored_weight
from surefoot.models.quantization.formats import Nf4Format
from tests.support.models import make_tokenizer
from tests.support.quantised import WEIGHTS, make_wide_model

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 in bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj.weight"


def read_plainly(packed: Tensor, state: Any) -> Tensor:
    """Return levels times factors. bitsandbytes up to 0.50 itself reads blocks that cross rows wrongly on a CPU."""
    factors = state.absmax
    if state.nested:
        factors = bnb.dequantize_blockwise(factors, state.state2) + state.offset
    packed = packed.view(torch.uint8)
    codes = torch.stack([packed >> 4, packed & 0xF], dim=-1).flatten().long()
    numbers: Tensor = state.code[codes] * factors.repeat_interleave(state.blocksize)[: len(codes)]
    return numbers.view(state.shape)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """kind -> a folder that transformers saved, and its weights as bitsandbytes reads them back."""
    root, done = tmp_path_factory.mktemp("saved"), {}

    def save(kind: str) -> tuple[Path, dict[str, Tensor]]:
        if kind not in done:
            # Rows of 96 numbers: blocks of 64 cross them.
            make_wide_model("llama", hidden_size=96, intermediate_size=160).save_pretrained(root / "plain")
            config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **KINDS[kind])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = AutoModelForCausalLM.from_pretrained(
                    root / "plain", quantization_config=config, dtype=torch.float32
                )
            folder = root / kind.replace(", ", "-").replace(" ", "-")
            wanted = {}
            for name, module in model.named_modules():
                if isinstance(module, Linear4bit):
                    wanted[f"{name}.weight"] = read_plainly(module.weight.data, module.weight.quant_state)
                elif isinstance(module, Linear8bitLt):
                    scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
                    wanted[f"{name}.weight"] = bnb.int8_vectorwise_dequant(module.weight.data, scales)
            model.save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            done[kind] = folder, wanted
        return done[kind]

    return save


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_read_back_as_bitsandbytes_reads_them(
    kind: str, saved: Callable[[str], tuple[Path, dict[str, Tensor]]]
) -> None:
    folder, wanted = saved(kind)
    stored = CheckpointWeights(folder, torch.float32)
    assert wanted
    for name, value in wanted.items():
        torch.testing.assert_close(stored.read(name), value, atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(stored.slices[name][5:17], value[5:17], atol=1e-7, rtol=1e-6)
    assert weights_of(folder) is not None
    model = build_model(folder, lora=LoraSettings(4, 8.0, targets=("all",)), device=CPU, dtype=torch.float32).model
    torch.testing.assert_close(model.get_parameter(UP).data, wanted[UP], atol=1e-7, rtol=1e-6)


def test_four_bits_stay_the_same_numbers_in_four_bits(tmp_path: Path) -> None:
    """Where blocks do not cross rows."""
    make_wide_model("llama", intermediate_size=128).save_pretrained(tmp_path / "plain")
    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **KINDS["nf4"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "nf4")
    make_tokenizer().save_pretrained(tmp_path / "nf4")
    lora = LoraSettings(4, 8.0, targets=("all",), weight_format=Nf4Format(64, is_double=False))
    model = build_model(tmp_path / "nf4", lora=lora, device=CPU, dtype=torch.float32).model
    for layer in ("self_attn.q_proj", "mlp.down_proj"):
        values, factors = stored_weight(model.get_submodule(f"model.layers.1.{layer}"), "weight")
        weight = theirs.get_submodule(f"model.layers.1.{layer}").weight
        assert torch.equal(values.view(-1), weight.data.view(-1))
        torch.testing.assert_close(factors.view(-1), weight.quant_state.absmax, atol=0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.long
def test_a_run_trains_on_one_and_refuses_another_number_of_bits(
    saved: Callable[[str], tuple[Path, dict[str, Tensor]]], data_file: Path, tmp_path: Path, here: Callable[..., Any]
) -> None:
    folder, _ = saved("nf4, double")
    settings = {"model": str(folder), "dataset": str(data_file), "output_dir": str(tmp_path / "run"), "max_steps": 1,
                "device": "cpu", "report": False, "quantization": "nf4", "quantization_block_size": 32}  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    done = here("train", str(tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    assert "bitsandbytes, nf4): they are read back and stored in nf4 again" in done.stderr
    other = here(
        "train",
        str(tmp_path / "run.yaml"),
        "quantization=int8",
        "quantization_block_size=64",
        f"output_dir={tmp_path / 'o'}",
    )
    assert other.returncode == 2
    assert "they would be rounded twice. Set quantization: nf4" in other.stderr


@pytest.mark.long
def test_four_bits_of_another_kind_are_not_stored_again(
    saved: Callable[[str], tuple[Path, dict[str, Tensor]]], data_file: Path, tmp_path: Path, here: Callable[..., Any]
) -> None:
    folder, _ = saved("fp4")
    settings = {"model": str(folder), "dataset": str(data_file), "output_dir": str(tmp_path / "run"), "device": "cpu",
                "quantization": "nf4", "quantization_block_size": 32}  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    refused = here("train", str(tmp_path / "run.yaml"))
    assert refused.returncode == 2
    assert "stored as fp4" in refused.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{UP}.absmax"), "its scales"),
        (lambda tensors: tensors.pop(f"{UP}.quant_state.bitsandbytes__nf4"), "its settings .* are missing"),
        (lambda tensors: tensors.update({f"{UP}.quant_map": torch.zeros(3)}), r"quant_map has shape \[3\]"),
        (lambda tensors: tensors.update({f"{UP}.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}),
         "is no JSON"),
        (lambda tensors: tensors[f"{UP}.absmax"].fill_(float("nan")), "not finite"),
    ],
)  # fmt: skip
def test_damaged_ones_are_named(
    change: Callable[[dict[str, Tensor]], object],
    message: str,
    saved: Callable[[str], tuple[Path, dict[str, Tensor]]],
    tmp_path: Path,
) -> None:
    folder, _ = saved("nf4")
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        CheckpointWeights(tmp_path, torch.float32).read(UP)
