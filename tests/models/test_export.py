"""Models that were trained in full, written layer by layer."""

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import surefoot
from surefoot.models import safetensors_writer
from surefoot.models.build import meta_model
from surefoot.models.export import _get_layer, in_layers, untrained_names, write_model
from surefoot.models.stored_layout import StoredLayout
from surefoot.training.sharded_tensors import ShardedTensors


def values_of(base: Path) -> tuple[dict[str, Tensor], list[str]]:
    """What a model has learned (random values), and the order in which it is written."""
    torch.manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in meta_model(base).named_parameters()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}, in_layers(shapes)


def shapes_of(values: dict[str, Tensor], names: list[str]) -> dict[str, torch.Size]:
    return {name: values[name].shape for name in names}


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("most_bytes", [safetensors_writer.MOST_BYTES, 20_000])
def test_transformers_reads_what_was_written(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, most_bytes: int
) -> None:
    monkeypatch.setattr(safetensors_writer, "MOST_BYTES", most_bytes)
    base = model_folder(kind)
    values, names = values_of(base)
    write_model(tmp_path, base, shapes_of(values, names), ((name, values[name]) for name in names))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (most_bytes > 20_000) == (not (tmp_path / safetensors_writer.INDEX).exists())
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    for name, value in read.state_dict().items():
        if name in names:
            torch.testing.assert_close(value, values[name], rtol=0, atol=0)
    theirs = {name for path in base.glob("*.safetensors") for name in load_file(path)}
    assert {name for path in files for name in load_file(path)} == theirs
    if len(files) > 1:
        index = json.loads((tmp_path / safetensors_writer.INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for path in files for t in load_file(path).values())


def test_no_more_than_one_layer_is_held(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder("mixtral")
    values, names = values_of(base)
    alive: dict[str, weakref.ref[Tensor]] = {}
    most = 0

    def coming() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name in names:
            value = values.pop(name)
            alive[name] = weakref.ref(value)
            yield name, value
            del value
            most = max(most, len({_get_layer(known) for known, one in alive.items() if one() is not None}))

    write_model(tmp_path, base, shapes_of(values, names), coming())
    assert len(alive) == len(names) > 20
    assert most == 1


@pytest.mark.parametrize("step", [None, 2])
def test_a_head_of_its_own_is_kept_where_the_config_says_tied(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, step: int | None
) -> None:
    """transformers does not tie what a checkpoint holds twice with different values."""
    base = shutil.copytree(model_folder("llama"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    changes = {"model": str(base), "tuning": "full", "max_steps": 2, "save_steps": 1, "lora_rank": None}
    result = surefoot.train({**settings, **changes}, screen=False)
    folder = result.artifact if step is None else surefoot.export(result.run_folder, tmp_path / "out", step=step)
    assert folder is not None
    trained, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert not trained.config.tie_word_embeddings
    saved = ShardedTensors(result.run_folder / "checkpoints" / "step-00000002" / "model")
    torch.testing.assert_close(trained.lm_head.weight, saved.read("lm_head.weight"), rtol=0, atol=0)
    assert not torch.equal(trained.lm_head.weight, trained.model.embed_tokens.weight)


def test_what_a_model_keeps_in_float32_stays_so_and_buffers_are_exported(tmp_path: Path) -> None:
    """DeepSeek-V3's routers add a stored buffer to the scores, which rounding would send to other experts."""
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias = torch.rand(4)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    base = tmp_path / "base"
    model.save_pretrained(base)
    buffers = StoredLayout(base).read(untrained_names(model, dict(model.named_parameters())))
    assert buffers.keys() == {bias}
    tensors = {**{name: p.detach().float() for name, p in model.named_parameters()}, **buffers}
    names = in_layers(tensors)
    target = tmp_path / "out"
    target.mkdir()
    write_model(target, base, shapes_of(tensors, names), ((name, tensors[name]) for name in names))
    stored = load_file(target / "model.safetensors")
    assert stored[bias].dtype == torch.float32
    assert torch.equal(stored[bias], load_file(base / "model.safetensors")[bias].float())
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert stored.keys() == load_file(base / "model.safetensors").keys()
    (base / "generation_config.json").unlink()
    again = tmp_path / "again"
    again.mkdir()
    write_model(again, base, shapes_of(tensors, names), ((name, tensors[name]) for name in names))
    assert (again / "generation_config.json").is_file()


def test_values_in_another_order_are_never_written(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder("llama")
    values, names = values_of(base)
    with pytest.raises(AssertionError):
        write_model(tmp_path, base, shapes_of(values, names), ((name, values[name]) for name in reversed(names)))
