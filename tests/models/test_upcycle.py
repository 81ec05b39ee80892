"""Up-cycled models are ordinary folders and compute what the dense model computes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from surefoot.errors import ModelError
from surefoot.models.upcycle import upcycle
from tests.support.models import SIZES


@pytest.mark.parametrize(
    ("kind", "form", "top_k"),
    [("llama", "mixtral", 2), ("llama", "qwen2_moe", 2), ("qwen2", "qwen2_moe", 3), ("llama", "mixtral", 1)],
)
def test_the_function_is_unchanged(
    kind: str, form: str, top_k: int, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = upcycle(str(model_folder(kind)), tmp_path / "moe", num_experts=4, top_k=top_k, form=form)  # type: ignore[arg-type]
    ids = torch.randint(3, 500, (2, 16))
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained(model_folder(kind))(ids).logits
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        sparse = model(ids).logits
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (sparse - dense).abs().max() < 1e-4
    assert model.config.model_type == form
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None
    gate = model.model.layers[0].mlp.gate.weight
    assert gate.std() > 0.01, "a router of zeros would send every token to the same experts"


@pytest.mark.parametrize(
    ("dense", "form"),
    [
        (LlamaConfig(**SIZES), "mixtral"),
        (LlamaConfig(**SIZES), "qwen2_moe"),
        (MistralConfig(**SIZES, sliding_window=6), "mixtral"),
        (MistralConfig(**SIZES, sliding_window=6), "qwen2_moe"),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1), "qwen2_moe"),
    ],
    ids=["llama to mixtral", "llama to qwen2_moe", "mistral to mixtral", "mistral to qwen2_moe", "qwen2"],
)
def test_what_a_config_leaves_out_is_not_what_the_other_model_takes_for_granted(
    dense: PreTrainedConfig, form: str, tmp_path: Path
) -> None:
    """As older configs are: Llama's base of the rotary embedding is 1e4, Mixtral's 1e6. Windows stay what they are."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(dense).save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    for name in ("rope_parameters", "rope_theta", "rms_norm_eps", "dtype"):
        config.pop(name, None)
    config["torch_dtype"] = "float32"
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    folder = upcycle(str(tmp_path / "dense"), tmp_path / "moe", num_experts=2, form=form)  # type: ignore[arg-type]
    ids = torch.randint(3, 500, (2, 24))
    with torch.no_grad():
        models = [AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "dense", folder)]
        one, other = (model(ids).logits for model in models)
    assert (one - other).abs().max() < 1e-4
    assert models[1].config.dtype == torch.float32


def test_the_same_seed_gives_the_same_folder(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folders = [upcycle(str(model_folder("llama")), tmp_path / name, num_experts=2, seed=5) for name in "ab"]
    names = sorted(path.name for path in folders[0].iterdir())
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)
    index = json.loads((folders[0] / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] > 0


def test_what_cannot_be_upcycled_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_experts=2, top_k=3"):
        upcycle(str(model_folder("llama")), tmp_path / "moe", num_experts=2, top_k=3)
    with pytest.raises(ModelError, match="llama, mistral .*qwen2 .* mixtral, attention_bias=False"):
        upcycle(str(model_folder("mixtral")), tmp_path / "moe")
    with pytest.raises(ModelError, match="biases.*qwen2_moe"):
        upcycle(str(model_folder("qwen2")), tmp_path / "moe", form="mixtral")
    lacking = shutil.copytree(model_folder("llama"), tmp_path / "lacking")
    (path,) = lacking.glob("*.safetensors")
    save_file({"model.norm.weight": torch.ones(3)}, path)
    with pytest.raises(ModelError, match=r"lacking: .*no model\.layers\.0\.mlp\.gate_proj\.weight"):
        upcycle(str(lacking), tmp_path / "moe")
    config = json.loads((lacking / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (lacking / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ModelError, match=r"lacking.*\(gptq, "):
        upcycle(str(lacking), tmp_path / "moe")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ModelError, match="/taken .*not empty"):
        upcycle(str(model_folder("llama")), tmp_path / "taken")
    assert not (tmp_path / "moe").exists()
