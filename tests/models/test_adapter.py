"""Our adapters in PEFT's hands, and merged folders in transformers'."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surefoot.errors import ModelError
from surefoot.inference.load import ModelFiles, load
from surefoot.models.adapter import read_adapter
from surefoot.models.build import trainable_parameters
from surefoot.models.export import merge_adapter
from surefoot.models.generate import generating
from surefoot.models.lora import LoraSettings
from tests.models.architectures import tiny_config, tiny_model
from tests.support.adapters import check_peft_and_merge, logits_of, save, trained_model

pytestmark = pytest.mark.slow

KINDS = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen2", "llama"]


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
    check_peft_and_merge(base, adapter, wanted, tmp_path / "merged")


@pytest.mark.parametrize("kind", KINDS)
def test_reading_gives_back_what_was_written(kind: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder(kind)
    built, settings = trained_model(base, kind)
    adapter = save(built, settings, tmp_path / "adapter", base)
    parameters = trainable_parameters(built.model)
    values = read_adapter(adapter, {name: p.shape for name, p in parameters.items()}, settings, built.model)
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
    with pytest.raises(ModelError, match=r"\d+ .*no weight in "):
        merge_adapter(model_folder("qwen2"), adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_other_settings_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder("llama")
    built, settings = trained_model(base, "llama")
    adapter = save(built, settings, tmp_path / "adapter", base)
    shapes = {name: p.shape for name, p in trainable_parameters(built.model).items()}
    with pytest.raises(ModelError, match=r"lora_rank=2 .* 4\b"):
        read_adapter(adapter, shapes, LoraSettings(rank=2, alpha=8), built.model)
    fewer = {name: shape for name, shape in shapes.items() if "q_proj" in name}
    with pytest.raises(ModelError, match="also adapts"):
        read_adapter(adapter, fewer, settings, built.model)
    with pytest.raises(ModelError, match=r"PEFT adapter.*adapter_config\.json"):
        read_adapter(tmp_path, shapes, settings, built.model)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"alpha_pattern": {"v_proj": "64"}}, "alpha_pattern=.*a number is needed"),
        ({"rank_pattern": {"v_proj": 0}}, "rank_pattern=.*a whole number above 0"),
        ({"rank_pattern": {"(?i)v_proj": 2}}, "is no regular expression"),
        ({"target_modules": "a{99999999999999999999}"}, "is no regular expression"),
        ({"rank_pattern": {"v_proj": 2}}, "no pair of rank 2"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is no regular expression"),
        ({"use_dora": True}, r"the pair of .* has no magnitude \(use_dora\)"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"r": "4"}, " r='4'"),
        ({"r": 0}, " r=0"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"target_modules": 7}, "target_modules=7"),
        ({"target_modules": "*proj"}, r"target_modules: '\*proj' is no regular expression"),
        ({"target_modules": ".*q_proj"}, "leaves out"),
    ],
)
def test_adapters_that_would_be_read_wrongly_are_refused(
    model_folder: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    base = model_folder("llama")
    built, settings = trained_model(base, "llama")
    adapter = save(built, settings, tmp_path / "adapter", base)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=reason):
        merge_adapter(base, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    if changes.keys() & {"init_lora_weights", "bias", "peft_type"}:
        shapes = {name: p.shape for name, p in trainable_parameters(built.model).items()}
        with pytest.raises(ModelError, match=reason):
            read_adapter(adapter, shapes, settings, built.model)


MADE_BY_PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear layers and experts": ("qwen3_moe", {"target_modules": "all-linear"}),
    "names of single experts": ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    "a stack by its bare name": ("qwen3_moe", {"target_modules": ["q_proj", "down_proj"]}),
    "a stack by its bare name, beside MLA": ("deepseek_v3", {"target_modules": ["q_a_proj", "down_proj"]}),
    "some layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "some layers of a named list": (
        "llama", {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    ),
    "all but some modules": (
        "llama", {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    ),
    "a regular expression": ("llama", {"target_modules": r".*\.1\..*(q|v)_proj"}),
    "ranks and alphas of their own": (
        "llama",
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"v_proj": 2, r"0\..*down_proj": 6},
         "alpha_pattern": {"1.self_attn.v_proj": 3}},
    ),
    "the same by rank-stabilised scaling": (
        "llama", {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}, "use_rslora": True},
    ),
    "lengths of rows": ("llama", {"target_modules": "all-linear", "use_dora": True}),
    "lengths of rows of transposed weights": (
        "gpt2", {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True},
    ),
    "the output layer": ("qwen2", {"target_modules": ["q_proj", "lm_head"]}),
    "an output layer with a bias": ("phi", {"target_modules": ["q_proj", "lm_head"]}),
    "an output layer in full": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "a linear router": ("afmoe", {"target_modules": "all-linear"}),
    "an indexer": ("deepseek_v32", {"target_modules": "all-linear"}),
    "a router alone": ("qwen3_moe", {"target_parameters": ["mlp.gate.weight"]}),
    "patterns that are not those of a parameter": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"],
         "alpha_pattern": {"gate": 48}, "rank_pattern": {"gate.weight": 2}},
    ),
}  # fmt: skip


WHILE_PEFT_CREATES_IT = pytest.mark.filterwarnings(
    "ignore:The following .*_pattern keys:RuntimeWarning",
    "ignore:Setting `save_embedding_layers`:UserWarning",
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
)


@WHILE_PEFT_CREATES_IT
@pytest.mark.parametrize(("kind", "options"), MADE_BY_PEFT.values(), ids=MADE_BY_PEFT)
def test_adapters_that_peft_makes_are_opened_and_merged(
    model_folder: Callable[[str], Path], tokenizer: Any, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    base = tmp_path / "base"
    if kind in ("phi", "afmoe", "deepseek_v32", "gpt2"):
        tiny_model(kind, vocab_size=512).save_pretrained(base)
        tokenizer.save_pretrained(base)
    else:
        base = model_folder(kind)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=12, **options))
    torch.manual_seed(5)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    wanted = logits_of(peft)
    peft.save_pretrained(tmp_path / "adapter")
    assert (wanted - logits_of(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2

    merged = merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=1e-4, rtol=1e-4)
    opened, _ = load(ModelFiles(base, tmp_path / "adapter", "it"))
    with generating(opened):
        torch.testing.assert_close(logits_of(opened), wanted, atol=1e-4, rtol=1e-4)


@WHILE_PEFT_CREATES_IT
def test_runs_continue_no_adapter_with_more_than_pairs_of_one_rank(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = model_folder("qwen3_moe")
    for number, (options, reason) in enumerate(
        (({"target_modules": "all-linear"}, "rank_pattern="), ({"target_modules": ["lm_head"]}, "base_layer.weight"))
    ):
        peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **options))
        peft.save_pretrained(tmp_path / str(number))
        built, settings = trained_model(base, "qwen3_moe", targets=("all",))
        shapes = {name: p.shape for name, p in trainable_parameters(built.model).items()}
        with pytest.raises(ModelError, match=f"{reason}.*export .* --merge"):
            read_adapter(tmp_path / str(number), shapes, settings, built.model)


@WHILE_PEFT_CREATES_IT
@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_a_shared_weight_that_was_trained_apart_is_refused(tokenizer: Any, tmp_path: Path, saved: str) -> None:
    """PEFT unties it."""
    base = tmp_path / "base"
    config = tiny_config("llama", vocab_size=512)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    options = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[saved])
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), options)
    for name, parameter in peft.named_parameters():
        parameter.data += 0.1 * ("modules_to_save" in name)
    peft.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match="PEFT opens it"):
        load(ModelFiles(base, tmp_path / "adapter", "it"))
    with pytest.raises(ModelError, match="PEFT opens it"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_pair_of_embeddings_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder("qwen2")
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["embed_tokens"]))
    peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ModelError, match="pair of embeddings"):
        load(ModelFiles(base, tmp_path / "adapter", "it"))


def test_an_adapter_of_another_base_is_not_opened(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    peft = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_folder("qwen2_moe")),
        LoraConfig(r=4, target_modules=["shared_expert_gate"]),
    )
    peft.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        ModelError,
        match=r"shared_expert_gate\.weight, which is not a part of the model.*the base this adapter was trained on",
    ):
        load(ModelFiles(model_folder("llama"), tmp_path / "adapter", "it"))


def test_adapters_of_inits_that_leave_the_base_alone_are_read(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = model_folder("llama")
    for init in (True, False, "gaussian"):
        model = AutoModelForCausalLM.from_pretrained(base)
        peft = get_peft_model(model, LoraConfig(r=4, init_lora_weights=init, target_modules=["q_proj", "v_proj"]))
        for name, parameter in peft.named_parameters():
            parameter.data += 0.1 * ("lora_" in name)
        wanted = logits_of(peft)
        peft.save_pretrained(tmp_path / f"adapter-{init}")
        merged = merge_adapter(base, tmp_path / f"adapter-{init}", tmp_path / f"merged-{init}")
        torch.testing.assert_close(
            logits_of(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_half_a_pair_is_not_dropped(model_folder: Callable[[str], Path], tmp_path: Path, half: str) -> None:
    base = model_folder("llama")
    adapter = save(*trained_model(base, "llama"), tmp_path / "adapter", base)
    stored = load_file(adapter / "adapter_model.safetensors")
    lost = next(name for name in stored if half in name)
    save_file({name: value for name, value in stored.items() if name != lost}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=rf"half .* {lost} "):
        merge_adapter(base, adapter, tmp_path / "merged")


def test_a_pair_of_other_shapes_is_not_turned_round(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder("llama")
    built, settings = trained_model(base, "llama")
    adapter = save(built, settings, tmp_path / "adapter", base)
    stored = load_file(adapter / "adapter_model.safetensors")
    turned = {name: value.T.contiguous() for name, value in stored.items()}
    save_file(turned, adapter / "adapter_model.safetensors")
    shapes = {name: p.shape for name, p in trainable_parameters(built.model).items()}
    with pytest.raises(ModelError, match=r"\(\d+, 4\) .*\(4, \d+\)"):
        read_adapter(adapter, shapes, settings, built.model)
    with pytest.raises(ModelError, match="pair of rank 4"):
        merge_adapter(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"r": 4}'])
def test_broken_adapters_and_bases_are_named(
    model_folder: Callable[[str], Path], tmp_path: Path, content: bytes
) -> None:
    base = Path(shutil.copytree(model_folder("llama"), tmp_path / "base"))
    adapter = save(*trained_model(base, "llama"), tmp_path / "adapter", base)
    config = (adapter / "adapter_config.json").read_bytes()
    (adapter / "adapter_config.json").write_bytes(content)
    with pytest.raises(ModelError, match="adapter_config.json"):
        merge_adapter(base, adapter, tmp_path / "merged")
    (adapter / "adapter_config.json").write_bytes(config)
    (path,) = base.glob("*.safetensors")
    for part in (path.read_bytes()[:40], path.read_bytes()[:-40]):
        path.write_bytes(part)
        with pytest.raises(ModelError, match=rf"{path.name}: "):
            merge_adapter(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_vl"])
def test_an_adapter_names_its_class_where_auto_classes_would_open_another(kind: str, tmp_path: Path) -> None:
    """AutoModelForCausalLM opens Qwen3.5 without its tower, where the names match nothing, and Qwen3-VL not at all."""
    torch.manual_seed(0)
    base = tmp_path / "base"
    tiny_model(kind).save_pretrained(base)
    built, settings = trained_model(base, kind, targets=("attention",))
    with generating(built.model):
        wanted = logits_of(built.model, 100)
    adapter = save(built, settings, tmp_path / "adapter", base)
    for auto in (AutoPeftModel, AutoPeftModelForCausalLM):
        torch.testing.assert_close(logits_of(auto.from_pretrained(adapter), 100), wanted, atol=1e-4, rtol=1e-4)


def test_experts_that_are_stored_transposed_stay_so_in_a_merged_folder(tmp_path: Path) -> None:
    """Releases of Qwen3-VL-MoE hold the experts' stacks as [E, in, out], and transformers writes [E, out, in]."""
    torch.manual_seed(0)
    model = tiny_model("qwen3_vl_moe")
    base = tmp_path / "base"
    model.save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    stacks = {name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(stacks) == 4
    released = {name: value.mT.contiguous() if name in stacks else value for name, value in stored.items()}
    save_file(released, base / "model.safetensors", {"format": "pt"})
    built, settings = trained_model(base, "qwen3_vl_moe", targets=("experts", "attention"))
    with generating(built.model):
        wanted = logits_of(built.model, 100)
    merged = merge_adapter(base, save(built, settings, tmp_path / "adapter", base), tmp_path / "merged")
    shapes = {name: value.shape for name, value in load_file(merged / "model.safetensors").items()}
    assert shapes == {name: value.shape for name, value in released.items()}
    opened, info = type(model).from_pretrained(merged, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(logits_of(opened, 100), wanted, atol=1e-4, rtol=1e-4)
