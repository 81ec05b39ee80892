"""Model folders and adapters of strangers: malformed ones are refused by file and key, and no code of theirs runs."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, JambaConfig

from surefoot import cli, describe_data, load
from surefoot.errors import ModelError, SurefootError
from surefoot.models.build import build_model, load_config, load_tokenizer
from surefoot.models.export import merge_adapter
from surefoot.models.pretrained import meta_model, read_template
from surefoot.models.resolve_model import weight_files
from surefoot.training.export import load_adapter
from tests.models.architectures import tiny_model
from tests.support.adapters import logits_of, save, trained_model
from tests.support.data import write_jsonl
from tests.support.processes import surefoot

NESTED = '{"a":' * 100_000
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model folder that a test may break."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **values}))


def build(folder: Path) -> None:
    build_model(folder, lora=None, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", None),
        ("hidden_size", -1),
        ("hidden_size", 10**30),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("vocab_size", [512]),
        ("vision_config", 7),
        ("attention_dropout", 1.5),
        ("attention_dropout", None),
        ("rms_norm_eps", "x"),
        ("eos_token_id", 10**30),
        ("rope_parameters", [1]),
    ],
)
def test_a_wrong_value_in_config_json_is_refused_by_file_and_key(folder: Path, key: str, value: Any) -> None:
    change(folder / "config.json", **{key: value})
    for read in (build, load_tokenizer):
        with pytest.raises(ModelError) as caught:
            read(folder)
        assert str(folder / "config.json") in str(caught.value)
        assert key in str(caught.value)


def test_settings_that_releases_leave_empty_are_no_mistakes(folder: Path) -> None:
    change(folder / "config.json", classifier_dropout=None, text_config=None, vision_config=None)
    build(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff{}", b"{", NESTED.encode(), b'{"model_type": 7}'])
def test_a_config_json_that_is_no_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(folder)
    assert cli.main(["upcycle", str(folder), str(folder.parent / "moe")]) == 2


def test_a_model_larger_than_its_files_takes_no_memory(folder: Path) -> None:
    change(folder / "config.json", hidden_size=2**20, head_dim=2**18)
    with pytest.raises(ModelError, match="of another shape"):
        build(folder)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("tokenizer_config.json", "model_max_length", "x"),
        ("generation_config.json", "eos_token_id", "x"),
        ("generation_config.json", "eos_token_id", 10**30),
        ("tokenizer.json", "model", 7),
        ("tokenizer.json", "added_tokens", {}),
    ],
)
def test_wrong_values_of_the_other_files_are_refused(folder: Path, file: str, key: str, value: Any) -> None:
    change(folder / file, **{key: value})
    with pytest.raises(ModelError) as caught:
        load(str(folder), None)
    assert file in str(caught.value)
    assert file == "tokenizer.json" or key in str(caught.value)


def test_settings_of_the_folder_do_not_change_how_chat_generates(folder: Path) -> None:
    change(folder / "generation_config.json", output_hidden_states="x", penalty_alpha=0.6, top_k=4, num_beams=3)
    assert cli.main(["chat", str(folder), "--prompt", "x", "--max-new-tokens", "2"]) == 0
    change(folder / "tokenizer_config.json", pad_token=None, eos_token=None)
    assert cli.main(["chat", str(folder), "--prompt", "x", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("template", ["{% endfor %}", "", "{% set x = messages %}"])
def test_a_chat_template_that_fails_or_renders_nothing_is_refused(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    assert cli.main(["chat", str(folder), "--prompt", "x"]) == 2


def test_a_chat_template_of_the_run_that_is_no_jinja_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ModelError, match=r"chat_template=.*t\.jinja:2: not valid Jinja"):
        read_template(str(path))
    path.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}")
    assert read_template(str(path)).startswith("{% for")


@pytest.mark.long
def test_a_chat_template_without_an_end_is_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    assert cli.main(["chat", str(folder), "--prompt", "x"]) == 2
    assert "chat template" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["adapter_model.bin", "other.safetensors.index.json", 5])
def test_weights_are_read_from_the_files_of_that_name_alone(folder: Path, value: Any) -> None:
    torch.save({"lm_head.weight": torch.ones(1)}, folder / "adapter_model.bin")
    change(folder / "config.json", transformers_weights=value)
    with pytest.raises(ModelError, match="transformers_weights="):
        build(folder)


def test_a_weight_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    path, name = folder / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    weights = load_file(path)
    rows, columns = weights[name].shape
    save_file({**weights, name: weights[name][:-1].clone()}, path, {"format": "pt"})
    pattern = rf"{re.escape(name)} \({re.escape(str((rows - 1, columns)))} .*{re.escape(str((rows, columns)))}"
    with pytest.raises(ModelError, match=pattern):
        build(folder)


def test_the_weights_that_are_checked_are_those_that_are_loaded(folder: Path) -> None:
    change(folder / INDEX, metadata={}, weight_map={"lm_head.weight": "other.safetensors"})
    assert weight_files(folder) == [folder / "model.safetensors"]
    build(folder)


def test_an_adapter_beside_a_model_is_not_loaded_with_it(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"adapter_config\.json.*config\.json"):
        build(folder)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_folder_does_not_choose_what_computes(folder: Path, key: str) -> None:
    change(folder / "config.json", **{key: "somebody/kernels"})
    assert meta_model(folder).config._attn_implementation == "sdpa"
    build(folder)


def test_a_tokenizer_on_which_the_library_panics_is_refused(folder: Path) -> None:
    change(folder / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AA=="})
    with pytest.raises(ModelError, match=r"tokenizer\.json.*Panic"):
        load_tokenizer(folder)


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    "steps",
    [
        [replaced({"String": "a"}, "aa")] * 40,
        [replaced({"Regex": "b?"}, "b")] * 40,
        [replaced({"Regex": "("}, "ab")] * 40,
        [{"type": "ByteLevel"}] * 40,
        [{"type": "Sequence", "normalizers": [replaced({"String": "a"}, "a" * 20)]}] * 2,
    ],
)
@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_multiplies_texts_is_refused_before_it_is_read(
    folder: Path, part: str, steps: list[dict[str, Any]]
) -> None:
    change(folder / "tokenizer.json", **{part: {"type": "Sequence", "normalizers": steps, "decoders": steps}})
    with pytest.raises(ModelError, match=rf"tokenizer\.json: its {part}"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
                             "pair": [], "special_tokens": {}}}, "post_processor makes 1000 parts"),
        ({"added_tokens": [{"id": 3, "content": "a" * 20_000, "single_word": False, "lstrip": False, "rstrip": False,
                            "normalized": False, "special": True}]}, "added token has 20000 characters"),
    ],
)  # fmt: skip
def test_a_tokenizer_with_parts_without_bound_is_refused_before_it_is_read(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    change(folder / "tokenizer.json", **values)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(folder)


def test_replacements_of_ordinary_tokenizers_are_read(folder: Path) -> None:
    steps = [
        {"type": "Prepend", "prepend": "_"},
        replaced({"String": " "}, "\u2581"),
        replaced({"Regex": " {2,}"}, " "),
        replaced({"String": "``"}, '"'),
    ]
    change(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": steps})
    assert load_tokenizer(folder)("one")["input_ids"]


def test_a_tokenizer_that_cuts_texts_at_random_is_refused(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(folder / "tokenizer.json", model={**content["model"], "dropout": 0.1})
    with pytest.raises(ModelError, match=r"tokenizer\.json: dropout=0\.1"):
        load_tokenizer(folder)


@pytest.mark.parametrize("how", ["panics", "raises", "has a token beyond all models"])
def test_a_tokenizer_that_fails_where_it_is_used_is_refused(folder: Path, tmp_path: Path, how: str) -> None:
    """The library reads these without an error."""
    content = json.loads((folder / "tokenizer.json").read_text())
    if how == "panics":
        change(folder / "tokenizer.json", pre_tokenizer={"type": "FixedLength", "length": 0})
    elif how == "raises":
        change(folder / "tokenizer.json", model={"type": "WordLevel", "unk_token": "none", "vocab": {"a": 0}})
    else:
        model = {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 2**32 - 1}}
        change(folder / "tokenizer.json", model=model, added_tokens=content["added_tokens"])
    assert cli.main(["chat", str(folder), "--prompt", "x", "--max-new-tokens", "2"]) == 2
    for text in ("one two", "one <|im_end|> two"):  # the second is cut piece by piece
        data = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "Count", "completion": text}])
        with suppress(SurefootError):
            report = describe_data({"model": str(folder), "dataset": str(data), "output_dir": str(tmp_path / "run")})
            assert report.refusal is not None


@pytest.mark.parametrize("num_experts", [0, 1])
def test_dense_variants_of_models_with_experts_are_read(tmp_path: Path, num_experts: int) -> None:
    """Jamba with one expert has none, and its number of experts per token means nothing."""
    JambaConfig(num_experts=num_experts, num_experts_per_tok=2).save_pretrained(tmp_path)
    assert load_config(tmp_path).num_experts == num_experts


def test_a_device_in_a_folder_is_not_copied(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("/dev/zero")
    (folder / "vocab.txt").symlink_to("/dev/zero")
    assert cli.main(["upcycle", str(folder), str(folder.parent / "moe")]) == 0
    assert not (folder.parent / "moe" / "vocab.txt").exists()


@pytest.mark.parametrize("weight_map", [[], {}, 7, None, {"a": 7}, {"a": ["x"]}, {"a": ""}])
def test_a_malformed_index_is_refused(folder: Path, weight_map: Any) -> None:
    change(folder / INDEX, metadata={}, weight_map=weight_map)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"index\.json: weight_map"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["../other/x.safetensors", "/etc/passwd", "sub/../../other/x", "\0", "\ud800"])
def test_a_weight_map_that_leaves_the_folder_is_refused(folder: Path, name: str) -> None:
    other = folder.parent / "other"
    other.mkdir()
    shutil.move(folder / "model.safetensors", other / "x.safetensors")
    change(folder / INDEX, metadata={}, weight_map={"lm_head.weight": name, "model.norm.weight": "a.safetensors"})
    with pytest.raises(ModelError, match=r"index\.json: weight_map .*'lm_head\.weight' .*outside"):
        weight_files(folder)


def test_links_that_the_owner_of_a_folder_has_put_there_are_followed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "on another disk.safetensors")
    (folder / "part.safetensors").symlink_to(folder.parent / "on another disk.safetensors")
    change(folder / INDEX, metadata={}, weight_map={"lm_head.weight": "part.safetensors"})
    build(folder)


def test_links_of_the_hubs_cache_are_followed(folder: Path) -> None:
    snapshot, blobs = folder.parent / "hub" / "snapshots" / "abc", folder.parent / "hub" / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    shutil.move(folder, snapshot)
    (snapshot / "model.safetensors").rename(blobs / "1")
    (snapshot / "part.safetensors").symlink_to("../../blobs/1")
    change(snapshot / INDEX, metadata={}, weight_map={"lm_head.weight": "part.safetensors"})
    assert weight_files(snapshot) == [snapshot / "part.safetensors"]
    build(snapshot)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, (2**62).to_bytes(8, "little") + b"{", (10**6).to_bytes(8, "little") + b'{"a":' * 200_000],
)
def test_malformed_headers_of_weights_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        build(folder)
    assert cli.main(["upcycle", str(folder), str(folder.parent / "moe")]) == 2


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["llama", "made_up"])
def test_no_code_of_a_folder_runs(folder: Path, model_type: str, settings: dict[str, Any]) -> None:
    marker = folder.parent / "marker"
    for name in ("configuration", "modeling", "tokenization", "processing", "custom_generate/generate"):
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(marker)!r}, 'w')\nclass X: pass\ndef generate(*_, **__): pass\n")
    code = {
        "AutoConfig": "configuration.X",
        "AutoModelForCausalLM": "modeling.X",
        "AutoTokenizer": ["tokenization.X", "tokenization.X"],
        "AutoProcessor": "processing.X",
        "AutoImageProcessor": "processing.X",
    }
    for file in ("config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json"):
        change(folder / file, auto_map=code)
    change(folder / "config.json", model_type=model_type)
    change(folder / "generation_config.json", custom_generate=str(folder))
    change(folder / "tokenizer_config.json", auto_map=code)
    config = folder.parent / "run.json"
    config.write_text(json.dumps({**settings, "model": str(folder), "max_steps": 1}))
    statuses = {
        verb[0]: cli.main(verb)
        for verb in (
            ["plan", str(config)],
            ["data", str(config)],
            ["doctor", str(config)],
            ["upcycle", str(folder), str(folder.parent / "moe")],
            ["chat", str(folder), "--prompt", "x", "--max-new-tokens", "1"],
        )
    }
    done = surefoot("train", str(config))
    assert not marker.exists()
    assert "trust_remote_code" not in done.stderr
    assert done.returncode == (0 if model_type == "llama" else 2), done.stderr
    assert statuses["chat"] == statuses["upcycle"] == statuses["data"] == (0 if model_type == "llama" else 2)


def test_an_architecture_and_a_tokenizer_with_code_of_their_own_are_named(folder: Path) -> None:
    change(folder / "config.json", auto_map={"AutoConfig": "configuration.X"})
    assert load_config(folder).model_type == "llama", "transformers has this one itself"
    change(folder / "config.json", model_type="made_up")
    with pytest.raises(ModelError, match=r"model_type='made_up' .*\(auto_map\)"):
        load_config(folder)
    change(folder / "config.json", model_type="llama")
    change(folder / "tokenizer_config.json", tokenizer_class="X", auto_map={"AutoTokenizer": ["t.X", "t.X"]})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError) as caught:
        load_tokenizer(folder)
    assert "tokenizer" in str(caught.value)
    assert "trust_remote_code" not in str(caught.value)


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    return save(*trained_model(folder, "llama", targets=("q_proj", "v_proj")), tmp_path / "adapter", folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", "4"),
        ("r", True),
        ("r", 10**30),
        ("r", 2),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("use_rslora", "false"),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", [7]),
        ("exclude_modules", "*"),
        ("layers_to_transform", "0"),
        ("layers_pattern", [7]),
        ("layers_pattern", "("),
        ("rank_pattern", {"q_proj": 0}),
        ("trainable_token_indices", [1]),
        ("peft_type", None),
    ],
)
def test_adapters_with_wrong_settings_are_refused_by_key(folder: Path, adapter: Path, key: str, value: Any) -> None:
    change(adapter / "adapter_config.json", **{key: value})
    for read in (
        lambda: load(str(folder), adapter),
        lambda: merge_adapter(folder, adapter, folder.parent / "merged"),
    ):
        with pytest.raises(ModelError) as caught:
            read()
        assert str(adapter) in str(caught.value)
        assert key in str(caught.value) or key == "r"
    assert not (folder.parent / "merged").exists()


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["q_proj"]}, {"exclude_modules": ["v_proj"]}, {"layers_to_transform": 0}]
)
def test_tensors_that_the_adapters_config_leaves_out_are_not_merged(
    folder: Path, adapter: Path, settings: dict[str, Any]
) -> None:
    change(adapter / "adapter_config.json", **settings)
    with pytest.raises(ModelError, match=r"model\.layers\.\d\.self_attn\.._proj, .*adapter_config\.json"):
        merge_adapter(folder, adapter, folder.parent / "merged")


def test_an_adapter_of_some_layers_is_merged_as_peft_does(folder: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1], exclude_modules=["v_proj"])
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    for name, parameter in peft.named_parameters():
        parameter.data += 0.1 * ("lora_" in name)
    peft.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(merged)), logits_of(read), atol=1e-4, rtol=1e-4
    )


def test_a_run_that_trains_other_targets_refuses_the_adapter_with_both_lists(folder: Path, adapter: Path) -> None:
    for targets in (("q_proj",), ("q_proj", "k_proj"), ("q_proj", "v_proj", "o_proj")):
        built, settings = trained_model(folder, "llama", targets=targets)
        with pytest.raises(ModelError) as caught:
            load_adapter(adapter, built.model, settings)
        assert "target_modules=['q_proj', 'v_proj']" in str(caught.value)
        assert f"target_modules={list(targets)}" in str(caught.value)


def test_damaged_tensors_of_an_adapter_are_refused(folder: Path, adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    stored = load_file(weights)
    save_file({name: value[..., :-1].contiguous() for name, value in stored.items()}, weights)
    with pytest.raises(ModelError, match=r"\(\d+, \d+\) .* rank 4\b"):
        merge_adapter(folder, adapter, folder.parent / "merged")
    os.truncate(weights, 9)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        merge_adapter(folder, adapter, folder.parent / "merged")


def test_the_tokenizer_of_an_adapter_that_brings_a_config_is_read(folder: Path, adapter: Path) -> None:
    """As axolotl writes adapters."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, adapter / name)
    model, tokenizer = load(str(folder), adapter)
    assert len(tokenizer) <= model.config.vocab_size


def test_several_templates_of_which_none_is_the_default_are_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "additional_chat_templates").mkdir()
    for name in ("one", "two"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text("{{ messages }}")
    assert cli.main(["chat", str(folder), "--prompt", "x"]) == 2


def test_an_unknown_kind_of_layer_is_named_after_a_long_list_of_the_known(tmp_path: Path) -> None:
    config = tiny_model("qwen3_next").config.to_dict()
    config["layer_types"] = ["linear_attention", "super_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="super_attention"):
        load_config(tmp_path)
