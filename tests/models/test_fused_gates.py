"""Gated layers keep two wide tensors for the backward, with the numbers of the model's own code, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.models.beam.modeling_beam import BeamMLP
from transformers.models.llama.modeling_llama import LlamaMLP

from surefoot.models.fused_gates import fuse_gates
from surefoot.models.lora import LoraSettings, attach
from tests.models.architectures import tiny_model

IDS = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0))
ATTENTION, ALL = (
    LoraSettings(rank=4, alpha=8.0, targets=("attention",)),
    LoraSettings(rank=4, alpha=8.0, targets=("all",)),
)


def build(kind: str, lora: LoraSettings | None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = tiny_model(kind).to(dtype)
    if lora is not None:
        attach(model, lora)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
            if "lora" in name:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        for module in model.modules():
            if getattr(module, "lora_magnitude", None) is not None:
                module.set_magnitude(torch.device("cpu"))  # type: ignore[operator]
    return model.train()


def run(model: PreTrainedModel) -> tuple[dict[str, Tensor], int]:
    """Return the logits with all gradients, and the number of bytes that are kept for the backward."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(0)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=IDS).logits
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    size = sum(kept.values())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}, size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [ATTENTION, ALL, None], ids=["attention", "all", "full"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2_moe", "deepseek_v3"])
def test_numbers_stay_and_less_is_kept(kind: str, lora: LoraSettings | None, dtype: torch.dtype) -> None:
    wanted, before = run(build(kind, lora, dtype))
    model = build(kind, lora, dtype)
    assert fuse_gates(model) > 0
    found, after = run(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert after < before


def test_of_four_wide_tensors_two_are_kept() -> None:
    """In each layer silu(gate) is not kept, and the product not for the low-rank pair either."""
    config = tiny_model("llama").config
    wide = IDS.numel() * config.intermediate_size * 4 * config.num_hidden_layers
    for lora, count in ((ATTENTION, 1), (ALL, 2)):
        sizes = []
        for is_fused in (False, True):
            model = build("llama", lora)
            assert fuse_gates(model) if is_fused else True
            sizes.append(run(model)[1])
        assert sizes[0] - sizes[1] == count * wide


@pytest.mark.parametrize("change", [{"dropout": 0.3}, {"dora": True}])
def test_dropout_and_magnitudes_see_the_product(change: dict[str, float]) -> None:
    lora = LoraSettings(rank=4, alpha=8.0, targets=("all",), **change)  # type: ignore[arg-type]
    wanted, _ = run(build("llama", lora))
    model = build("llama", lora)
    assert fuse_gates(model)
    found, _ = run(model)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["gemma2", "phi", "gpt2", "glm"])
def test_other_layers_are_left_alone(kind: str) -> None:
    """Gemma's gate is a GELU, GLM has one projection for both, and the others have no gate."""
    assert fuse_gates(tiny_model(kind)) == 0


def test_a_layer_that_computes_its_gate_in_float32_is_left_alone() -> None:
    """In float32 it computes the same, in bfloat16 it does not."""
    config = SimpleNamespace(hidden_size=8, intermediate_size=16, hidden_act="silu", mlp_bias=False)
    assert fuse_gates(BeamMLP(config)) == 0


class OfRows(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return super().forward(x)  # type: ignore[no-any-return]


class Bounded(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=50.0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", [OfRows, Bounded])
def test_a_layer_that_refuses_or_bounds_values_is_left_alone(cls: type[LlamaMLP]) -> None:
    assert fuse_gates(cls(tiny_model("llama").config)) == 0


def test_a_layer_with_dropout_is_left_alone() -> None:
    """While the model is loaded it is in evaluation mode, in which dropout does nothing."""
    model = tiny_model("llama").eval()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.dropout = torch.nn.Dropout(0.5)  # type: ignore[union-attr]
    assert fuse_gates(model) == 0


def test_a_layer_that_computes_more_is_left_alone() -> None:
    model = tiny_model("llama")
    mlp = type(model.model.layers[0].mlp)  # type: ignore[union-attr,operator,index]
    own = mlp.forward
    try:
        mlp.forward = lambda self, x: 0.5 * own(self, x)  # type: ignore[method-assign]
        assert fuse_gates(model) == 0
    finally:
        mlp.forward = own  # type: ignore[method-assign]
