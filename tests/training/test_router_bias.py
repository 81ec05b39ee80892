"""The correction bias of routers: its update, and that it is saved, resumed and exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

import surefoot
from surefoot.config import load_config
from surefoot.errors import ConfigError, ModelError
from surefoot.models.build import build_model, trainable_parameters
from surefoot.models.router_bias import RouterBiases
from surefoot.models.routing import router_names
from surefoot.training.export import export
from tests.models.architectures import tiny_model
from tests.support import expert_models
from tests.support.models import make_model

RATE = 0.01


@pytest.fixture
def full(settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    changes = {"tuning": "full", "learning_rate": 1e-3, "max_steps": 4, "output_dir": str(tmp_path / "run")}
    kept = {name: value for name, value in settings.items() if name != "lora_rank"}
    return {**kept, **changes, "model": str(model_folder("deepseek_v3")), "router_bias_update_rate": RATE}


def biases(folder: Path) -> dict[str, torch.Tensor]:
    found = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    return {name: value for name, value in found.items() if name.endswith("e_score_correction_bias")}


def test_overloaded_experts_lose_and_others_gain() -> None:
    model = make_model("deepseek_v3", num_experts=4)
    correction = RouterBiases(model)
    assert list(correction.tensors) == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1)]
    correction.update(torch.tensor([[10, 0, 5, 5], [1, 2, 3, 4]]), RATE)
    correction.update(torch.tensor([[10, 0, 5, 5], [4, 3, 2, 1]]), RATE)
    first, second = (layer.mlp.gate.e_score_correction_bias for layer in model.model.layers)
    torch.testing.assert_close(first, torch.tensor([-2 * RATE, 2 * RATE, 0.0, 0.0]))
    assert second.abs().max() == 0


def test_biases_are_found_where_models_hold_them() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_dense_layers": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    block = Lfm2MoeForCausalLM(Lfm2MoeConfig(**sizes, **heads, num_experts=4, moe_intermediate_size=24))
    assert list(RouterBiases(block).tensors) == ["model.layers.0.feed_forward.expert_bias"]
    hashed = RouterBiases(expert_models.build("deepseek_v4", "full"))
    assert list(hashed.tensors) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    hashed.update(torch.tensor([[9, 0, 0, 0, 0, 0, 0, 0], [0, 9, 0, 0, 0, 0, 0, 0]]), RATE)
    (bias,) = hashed.tensors.values()
    assert bias.argmin() == 1
    with pytest.raises(ModelError, match="1 of the 2 routers"):
        hashed.update(torch.tensor([[1, 2, 3, 4]]), RATE)


def test_routers_of_a_vision_tower_are_not_counted() -> None:
    model = tiny_model("dots3_note")
    assert any(type(module).__name__ == "Dots3NoteVisionTopKRouter" for module in model.modules())
    routers = router_names(model)
    assert routers
    assert not any("vision" in name for name in routers)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("ernie4_5_moe", "e_score_correction_bias"),
        ("roformer", "embed_positions"),
        ("deepseek_v32", ".indexer."),
        ("deepseek_v4", ".indexer."),
        ("minimax_m3_vl_text", ".indexer."),
    ],
)
def test_full_fine_tuning_leaves_what_gets_no_gradient(name: str, frozen: str, tmp_path: Path) -> None:
    """Decay of weights would change it, though no gradient reaches it."""
    tiny_model(name).save_pretrained(tmp_path)
    model = build_model(tmp_path, lora=None, device=torch.device("cpu"), dtype=torch.float32).model
    assert any(frozen in parameter for parameter, _ in model.named_parameters())
    assert not any(frozen in parameter for parameter in trainable_parameters(model))


def test_a_first_step_moves_each_bias_by_the_rate(full: dict[str, Any]) -> None:
    result = surefoot.train({**full, "max_steps": 1}, screen=False)
    assert result.artifact is not None
    for bias in biases(Path(result.artifact)).values():
        assert set(bias.unique().tolist()) <= {-torch.tensor(RATE).item(), 0.0, torch.tensor(RATE).item()}
        assert bias.abs().max() > 0


def test_a_resumed_run_has_the_biases_of_one_that_was_not_stopped(full: dict[str, Any], tmp_path: Path) -> None:
    whole = surefoot.train({**full, "save_steps": 3}, screen=False)
    assert whole.artifact is not None
    third = tmp_path / "run/checkpoints/step-00000003"
    settings = {**full, "output_dir": str(tmp_path / "again"), "resume_from_checkpoint": str(third)}
    resumed = surefoot.train(settings, screen=False)
    assert resumed.artifact is not None
    wanted, found = biases(Path(whole.artifact)), biases(Path(resumed.artifact))
    assert len(wanted) == 2
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    saved, exported = biases(third / "model"), export(tmp_path / "run", tmp_path / "out", merge=False, step=3)
    assert max(bias.abs().max() for bias in saved.values()) > 0
    assert all(torch.equal(biases(exported)[name], value) for name, value in saved.items())
    assert any(not torch.equal(saved[name], value) for name, value in wanted.items())


def test_without_a_rate_the_bias_of_the_model_stays(full: dict[str, Any]) -> None:
    result = surefoot.train({**full, "router_bias_update_rate": 0, "max_steps": 2}, screen=False)
    assert result.artifact is not None
    assert all(bias.abs().max() == 0 for bias in biases(Path(result.artifact)).values())


def test_it_is_refused_with_lora_and_where_there_is_no_bias(
    full: dict[str, Any], model_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match="router_bias_update_rate"):
        load_config(None, (), {**full, "tuning": "lora"})
    with pytest.raises(ConfigError, match="router_bias_update_rate"):
        surefoot.train({**full, "model": str(model_folder("qwen2_moe"))}, screen=False)
