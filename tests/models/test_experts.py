"""The grouped experts against transformers' own per-expert loop with merged weights."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers import Qwen3VLMoeTextConfig
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

from surefoot.models.experts import PROJECTIONS, experts_forward

H, I, E, K, R, T, SCALING = 16, 24, 5, 2, 3, 40, 0.7
COMMON = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E}
FAMILIES = {
    "mixtral": lambda **extra: MixtralExperts(
        MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, **extra)
    ),
    "qwen2_moe": lambda **extra: Qwen2MoeExperts(Qwen2MoeConfig(**COMMON, **extra)),
    "qwen3_moe": lambda **extra: Qwen3MoeExperts(Qwen3MoeConfig(**COMMON, **extra)),
    "qwen3_vl_moe": lambda **extra: Qwen3VLMoeTextExperts(Qwen3VLMoeTextConfig(**COMMON, **extra)),
}


def experts_with_lora(family: str, **extra: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = FAMILIES[family](**extra)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    for name in PROJECTIONS:
        _, out_features, in_features = getattr(module, name).shape
        setattr(module, f"{name}_lora_A", nn.Parameter(torch.randn(E, R, in_features) * 0.3))
        setattr(module, f"{name}_lora_B", nn.Parameter(torch.randn(E, out_features, R) * 0.3))
    module.lora_scaling = SCALING
    return module


def routing(avoid: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    logits = torch.randn(T, E)
    logits[:, list(avoid)] = -100.0
    weights, index = logits.softmax(-1).topk(K, dim=-1)
    return index, weights.clone().requires_grad_()


def eager_with_merged_weights(
    module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> Any:
    """transformers' loop over experts with W + s B A in place of W, differentiable in A and B."""
    reference = copy.deepcopy(module)
    reference.config._experts_implementation = "eager"
    merged = {
        name: getattr(module, name) + SCALING * getattr(module, f"{name}_lora_B") @ getattr(module, f"{name}_lora_A")
        for name in PROJECTIONS
    }
    return functional_call(reference, merged, (hidden, index, weights))


def gradients(output: torch.Tensor, module: nn.Module, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    loss = (output * torch.randn_like(output)).sum()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    wanted = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [*wanted, *inputs])
    return {"loss": loss.detach(), **dict(zip([*names, "hidden", "weights"], found, strict=True))}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trained", ["lora", "full"])
def test_loss_and_every_gradient_equal_the_eager_loop(family: str, trained: str) -> None:
    module = experts_with_lora(family)
    for name in PROJECTIONS:
        getattr(module, name).requires_grad_(trained == "full")
    index, weights = routing()
    hidden = torch.randn(T, H, requires_grad=True)
    ours = gradients(experts_forward(module, hidden, index, weights), module, [hidden, weights])
    theirs = gradients(eager_with_merged_weights(module, hidden, index, weights), module, [hidden, weights])
    assert len(ours) == (7 if trained == "lora" else 9)
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_base_weights_get_no_gradient_under_lora() -> None:
    module = experts_with_lora("mixtral")
    for name in PROJECTIONS:
        getattr(module, name).requires_grad_(False)
    index, weights = routing()
    experts_forward(module, torch.randn(T, H), index, weights).sum().backward()
    assert all(getattr(module, name).grad is None for name in PROJECTIONS)
    assert all(getattr(module, f"{name}_lora_{part}").grad is not None for name in PROJECTIONS for part in "AB")


def test_experts_without_tokens_get_zero_gradients_not_none() -> None:
    module = experts_with_lora("qwen2_moe")
    index, weights = routing(avoid=(1, 4))
    assert not torch.isin(index, torch.tensor([1, 4])).any()
    experts_forward(module, torch.randn(T, H), index, weights).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad[[1, 4]].abs().max() == 0, name
        assert parameter.grad[[0, 2, 3]].abs().amax(dim=(1, 2)).min() > 0, name


def test_all_tokens_on_one_expert_and_no_tokens_at_all() -> None:
    module = experts_with_lora("mixtral")
    hidden = torch.randn(T, H)
    one = torch.full((T, 1), 3)
    weights = torch.ones(T, 1)
    torch.testing.assert_close(
        experts_forward(module, hidden, one, weights), eager_with_merged_weights(module, hidden, one, weights)
    )
    empty = experts_forward(module, hidden[:0], one[:0], weights[:0])
    assert empty.shape == (0, H)
    empty.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in module.parameters())


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations_are_differentiated_through_the_models_own_gate(activation: str) -> None:
    module = experts_with_lora("qwen3_moe", hidden_act=activation)
    index, weights = routing()
    hidden = torch.randn(T, H, requires_grad=True)
    ours = gradients(experts_forward(module, hidden, index, weights), module, [hidden, weights])
    theirs = gradients(eager_with_merged_weights(module, hidden, index, weights), module, [hidden, weights])
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5)


def test_bfloat16_base_with_float32_adapters_gives_float32_adapter_gradients() -> None:
    module = experts_with_lora("mixtral")
    for name in PROJECTIONS:
        setattr(module, name, nn.Parameter(getattr(module, name).bfloat16(), requires_grad=False))
    index, weights = routing()
    output = experts_forward(module, torch.randn(T, H, dtype=torch.bfloat16), index, weights.float())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(
        getattr(module, f"{name}_lora_{part}").grad.dtype == torch.float32 for name in PROJECTIONS for part in "AB"
    )
