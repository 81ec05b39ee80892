"""Rotary positions are computed in fewer kernels where a model rotates the halves of each head, and nowhere else."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3

from surefoot.models.fused_rotary import fuse_rotary
from tests.models.architectures import tiny_model

IDS = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0))


def run(model: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    """Return the logits, and the gradients of all parameters that have one."""
    logits = model(input_ids=IDS).logits
    parameters = list(model.parameters())
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    gradients = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    return logits.detach(), [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "phi", "deepseek_v3", "gemma3_text"])
def test_logits_and_gradients_stay(kind: str) -> None:
    """Phi rotates a part of each head."""
    model = tiny_model(kind)
    wanted, wanted_gradients = run(model)
    assert fuse_rotary(model) == model.config.get_text_config().num_hidden_layers
    logits, gradients = run(model)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    for gradient, expected in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)


def test_what_a_model_rotates_with_other_arguments_is_left_to_its_function() -> None:
    """Qwen4's indexer names its arguments."""
    model = tiny_model("qwen4_exp_text").eval()
    wanted, _ = run(model)
    assert fuse_rotary(model) > 0
    torch.testing.assert_close(run(model)[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["glm", "cohere", "gptj", "gpt2", "modernbert-decoder"])
def test_models_that_rotate_otherwise_are_left_alone(kind: str) -> None:
    """ModernBERT rotates in float32."""
    model = tiny_model(kind)
    assert fuse_rotary(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_function_of_the_file_is_called_for_what_it_alone_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    own = modeling_qwen3.apply_rotary_pos_emb

    def record(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(args)
        rotated: tuple[Tensor, Tensor] = own(*args)
        return rotated

    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", record)
    model = tiny_model("qwen3")
    fuse_rotary(model)
    calls.clear()  # of the check
    model(input_ids=IDS)
    assert not calls
    states = torch.randn(1, 2, 5, 8)
    attention = next(module for module in model.modules() if "forward" in vars(module))
    rotate = attention.forward.__func__.__globals__["apply_rotary_pos_emb"]
    table = torch.randn(1, 5, 8, dtype=torch.float64)
    assert rotate(states, states, table, table)[0].dtype == torch.float64, "other types are left to the model"
    assert len(calls) == 1
