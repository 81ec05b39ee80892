"""Norms that compute RMSNorm use torch's kernel, and no others."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from surefoot.models.fused_norms import fuse_norms
from tests.support.models import make_model


def with_random_weight(norm: nn.Module) -> nn.Module:
    nn.init.normal_(norm.get_parameter("weight"))
    return norm


def run(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the gradients by the input and by the weight."""
    x = x.clone().requires_grad_()
    y = norm(x)
    d_x, d_weight = torch.autograd.grad(
        y, [x, norm.get_parameter("weight")], torch.linspace(-1, 1, y.numel()).view_as(y)
    )
    return y.detach(), d_x, d_weight


def test_a_fused_norm_has_the_numbers_of_transformers() -> None:
    torch.manual_seed(0)
    norm = with_random_weight(Qwen3RMSNorm(32))
    x = torch.randn(2, 5, 32)
    wanted = run(norm, x)
    assert fuse_norms(norm) == 1
    for found, expected in zip(run(norm, x), wanted, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm", [Gemma2RMSNorm(32), Qwen3NextRMSNorm(32), MambaRMSNormGated(32, group_size=16)])
def test_norms_that_compute_something_else_are_left_alone(norm: nn.Module) -> None:
    assert fuse_norms(norm) == 0
    assert "forward" not in vars(norm)


def test_all_norms_of_a_model_are_fused_and_its_logits_stay() -> None:
    model = make_model("qwen3_moe").eval()
    ids = torch.randint(3, 500, (1, 20))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        assert fuse_norms(model) == 2 * 4 + 1  # of each layer two, and those of queries and keys; one at the end
        torch.testing.assert_close(model(input_ids=ids).logits, wanted, atol=1e-5, rtol=1e-5)


def test_states_of_another_type_than_the_weight_keep_the_type_that_transformers_gives_them() -> None:
    norm = with_random_weight(Qwen3RMSNorm(32))
    fuse_norms(norm)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    assert norm(x).dtype == Qwen3RMSNorm.forward(norm, x).dtype == torch.float32  # type: ignore[arg-type]
