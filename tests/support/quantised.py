"""Tiny checkpoints, quantised as they are released, and what transformers reads from them."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from surefoot.models.quantization.dequantize import FP4_NUMBERS
from tests.support.models import SIZES, make_tokenizer

WIDE: dict[str, Any] = {**SIZES, "hidden_size": 64, "intermediate_size": 96}
BLOCK = [32, 32]
FP8_MOST = 448.0
WEIGHTS = "model.safetensors"


def make_wide_model(kind: str, **sizes: int) -> PreTrainedModel:
    torch.manual_seed(3)
    wide = {**WIDE, **sizes}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**wide, head_dim=16))
    if kind == "deepseek_v3":
        wide |= {"num_attention_heads": 2, "num_key_value_heads": 2}
        config = DeepseekV3Config(
            **{"moe_intermediate_size": 32, **wide}, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32,
            qk_nope_head_dim=32, v_head_dim=32,
        )  # fmt: skip
        return DeepseekV3ForCausalLM(config)
    if kind == "gpt_oss":
        return GptOssForCausalLM(GptOssConfig(**wide, num_local_experts=4, num_experts_per_tok=2, head_dim=16))
    return LlamaForCausalLM(LlamaConfig(**wide))


def _to_fp8(weight: Tensor, block: list[int] | None) -> tuple[Tensor, Tensor]:
    """Return FP8 numbers and the factors of their blocks, which may reach over the edge."""
    rows, columns = weight.shape
    height, width = block or weight.shape
    padded = torch.zeros(-(-rows // height) * height, -(-columns // width) * width)
    padded[:rows, :columns] = weight
    blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
    scales = blocks.abs().amax((1, 3)) / FP8_MOST
    numbers = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return numbers.to(torch.float8_e4m3fn).contiguous(), scales


def _fp8(name: str, weight: Tensor, block: list[int] | None) -> dict[str, Tensor]:
    numbers, scales = _to_fp8(weight.float(), block)
    return {name: numbers, f"{name}_scale_inv": scales if block else scales[0, 0].clone()}


def _mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """[E, in, out] -> blocks of 32 numbers of an output row, in pairs, and the exponents of their scales."""
    rows = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(rows.abs().amax(-1) / 6)) + 1
    numbers = torch.tensor(FP4_NUMBERS)
    codes = ((rows / exponents.exp2()[..., None])[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}


def _scheme(bits: int) -> dict[str, Any]:
    grouped = {"strategy": "group", "group_size": 32} if bits == 4 else {"strategy": "channel"}
    return {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "symmetric": True, **grouped}}


def _compress(name: str, weight: Tensor, bits: int) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    most = weight.unflatten(-1, (-1, 32) if bits == 4 else (1, -1)).abs().amax(-1)
    scale = (most / (2 ** (bits - 1) - 1)).to(torch.bfloat16)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized" if bits == 4 else "int-quantized")
    stored = compressor.compress({"weight": weight, "weight_scale": scale}, QuantizationScheme(**_scheme(bits)))
    owner = name.removesuffix("weight")
    return {owner + part: value.contiguous() for part, value in stored.items()}


def _compressed_settings(bits: int) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if bits == 4 else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": _scheme(bits)},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Release:
    """A way in which a kind of model is released."""

    kind: str
    settings: dict[str, Any]
    """Its quantization_config."""
    endings: tuple[str, ...]
    """Endings of the names of the weights that are quantised."""
    quantise: Callable[[str, Tensor], dict[str, Tensor]]
    read_back: Callable[[], Any]
    """transformers' quantization_config that reads it back."""


def _release_fp8(kind: str, block: list[int] | None) -> Release:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    return Release(
        kind, settings, ("_proj.weight", "_mqa.weight"), lambda name, weight: _fp8(name, weight, block),
        lambda: FineGrainedFP8Config(dequantize=True),
    )  # fmt: skip


def _release_compressed(bits: int) -> Release:
    return Release(
        "llama", _compressed_settings(bits), ("_proj.weight",), lambda name, weight: _compress(name, weight, bits),
        lambda: CompressedTensorsConfig(dequantize=True),
    )  # fmt: skip


RELEASES = {
    "fp8": _release_fp8("qwen3", BLOCK),
    "fp8-tensor": _release_fp8("qwen3", None),
    "fp8-experts": _release_fp8("deepseek_v3", BLOCK),
    "mxfp4": Release(
        "gpt_oss", {"quant_method": "mxfp4"}, ("experts.gate_up_proj", "experts.down_proj"), _mxfp4,
        lambda: Mxfp4Config(dequantize=True),
    ),
    "int8": _release_compressed(8),
    "int4": _release_compressed(4),
}  # fmt: skip


def release(name: str, folder: Path, **sizes: int) -> Path:
    """Write a tiny model as it is released: in bfloat16, its linear layers or experts quantised."""
    about = RELEASES[name]
    make_wide_model(about.kind, **sizes).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for stored, weight in load_file(folder / WEIGHTS).items():
        tensors |= about.quantise(stored, weight) if stored.endswith(about.endings) else {stored: weight}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    edit_config(folder, quantization_config=about.settings)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Copy a model and change its tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / WEIGHTS)
    change(tensors)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


def split_scales(source: Path, target: Path) -> Path:
    """Copy a model into two files and their index, with the scales in another than their weights."""
    shutil.copytree(source, target)
    tensors = load_file(target / WEIGHTS)
    (target / WEIGHTS).unlink()
    places = {name: f"model-{1 + ('scale' in name)}-of-2.safetensors" for name in tensors}
    (target / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, target / file)
    return target


def read_by_transformers(name: str, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model that transformers reads back itself. What is not quantised may keep its stored type there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about arguments that win over config.json
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=RELEASES[name].read_back()
        )
    return model.to(dtype)
