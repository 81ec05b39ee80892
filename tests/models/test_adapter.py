"""Our adapters in PEFT's hands, and merged folders in transformers'."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from surefoot.errors import ModelError
from surefoot.models.adapter import read_adapter, write_adapter
from surefoot.models.build import BuiltModel, build_model, trainable_parameters
from surefoot.models.export import merge_adapter
from surefoot.models.generate import generating
from surefoot.models.lora import LoraSettings, adaptable_names

KINDS = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen2", "llama"]
TARGETS = {
    "mixtral": ("attention", "experts", "router"),
    "qwen2_moe": ("all",),
    "qwen3_moe": ("experts.down_proj", "q_proj"),
}


def trained_model(
    folder: Path, kind: str, rslora: bool = False, targets: tuple[str, ...] | None = None
) -> tuple[BuiltModel, LoraSettings]:
    """A built model whose trainable parameters are far from their initial values."""
    settings = LoraSettings(rank=4, alpha=8, rslora=rslora, targets=targets or TARGETS.get(kind, ("all",)))
    built = build_model(folder, lora=settings, device=torch.device("cpu"), dtype=torch.float32)
    torch.manual_seed(11)
    for parameter in trainable_parameters(built.model).values():
        parameter.data += torch.randn_like(parameter) * 0.2
    return built, settings


def save(built: BuiltModel, settings: LoraSettings, folder: Path, base: Path) -> Path:
    folder.mkdir()
    parameters = {name: p.data for name, p in trainable_parameters(built.model).items()}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    write_adapter(folder, shapes, parameters.items(), settings, str(base), adaptable_names(built.model))
    return folder


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.randint(3, 500, (2, 12))).logits
    return result


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_the_merged_folder_give_the_trained_models_logits(
    kind: str, rslora: bool, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = model_folder(kind)
    built, settings = trained_model(base, kind, rslora)
    with generating(built.model):
        wanted = logits_of(built.model)
    untouched = logits_of(AutoModelForCausalLM.from_pretrained(base))
    assert (wanted - untouched).abs().max() > 1e-2, "the adapter must matter for this test to mean anything"

    adapter = save(built, settings, tmp_path / "adapter", base)
    with_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logits_of(with_peft), wanted, atol=1e-4, rtol=1e-4)

    merged = merge_adapter(base, adapter, tmp_path / "merged")
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=1e-4, rtol=1e-4)
    assert {p.name for p in merged.iterdir()} == {p.name for p in base.iterdir()}


@pytest.mark.parametrize(
    "targets",
    [
        ("experts",),
        ("experts.gate_up_proj",),
        ("model.layers.1.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_any_choice_of_targets_means_the_same_to_peft(
    targets: tuple[str, ...], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = model_folder("qwen2_moe")
    built, settings = trained_model(base, "qwen2_moe", targets=targets)
    with generating(built.model):
        wanted = logits_of(built.model)
    adapter = save(built, settings, tmp_path / "adapter", base)
    with_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logits_of(with_peft), wanted, atol=1e-4, rtol=1e-4)
    merged = merge_adapter(base, adapter, tmp_path / "merged")
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_gives_back_what_was_written(kind: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder(kind)
    built, settings = trained_model(base, kind)
    adapter = save(built, settings, tmp_path / "adapter", base)
    parameters = trainable_parameters(built.model)
    values = read_adapter(adapter, {name: p.shape for name, p in parameters.items()}, settings)
    assert values.keys() == parameters.keys()
    assert all(torch.equal(values[name], parameters[name]) for name in values)


def test_merging_into_fused_and_per_expert_files_is_the_same(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = model_folder("qwen2_moe")
    names = load_file(base / "model.safetensors").keys()
    assert any("experts.3.gate_proj" in name for name in names), "the base is stored per expert, as on the hub"
    model = AutoModelForCausalLM.from_pretrained(base)
    fused = tmp_path / "fused"
    model.save_pretrained(fused, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(fused / "model.safetensors"))
    built, settings = trained_model(base, "qwen2_moe")
    adapter = save(built, settings, tmp_path / "adapter", base)
    results = []
    for source in (base, fused):
        merged = merge_adapter(source, adapter, tmp_path / f"merged-{source.name}")
        results.append(logits_of(AutoModelForCausalLM.from_pretrained(merged)))
    torch.testing.assert_close(*results)


def test_an_adapter_for_another_model_is_not_merged_in_silence(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    built, settings = trained_model(model_folder("qwen2_moe"), "qwen2_moe")
    adapter = save(built, settings, tmp_path / "adapter", model_folder("qwen2_moe"))
    with pytest.raises(ModelError, match="found no weight"):
        merge_adapter(model_folder("qwen2"), adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_other_settings_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder("llama")
    built, settings = trained_model(base, "llama")
    adapter = save(built, settings, tmp_path / "adapter", base)
    shapes = {name: p.shape for name, p in trainable_parameters(built.model).items()}
    with pytest.raises(ModelError, match="lora_rank=2 but the adapter has 4"):
        read_adapter(adapter, shapes, LoraSettings(rank=2, alpha=8))
    fewer = {name: shape for name, shape in shapes.items() if "q_proj" in name}
    with pytest.raises(ModelError, match="also adapts"):
        read_adapter(adapter, fewer, settings)
    with pytest.raises(ModelError, match="is no PEFT adapter"):
        read_adapter(tmp_path, shapes, settings)
