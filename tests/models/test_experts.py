"""The grouped experts against transformers' own per-expert loop with merged weights."""

import copy
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call
from transformers import (
    AriaTextConfig,
    GptOssConfig,
    HYV4Config,
    Llama4TextConfig,
    LongcatFlashConfig,
    MixtralConfig,
    MuseSparkTextConfig,
    NemotronHConfig,
    OpenAIPrivacyFilterConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeTextConfig,
    Step3p7TextConfig,
)
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Experts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from surefoot.errors import ModelError
from surefoot.models.build import build_model
from surefoot.models.expert_gates import SwiGLU, select_gate
from surefoot.models.expert_layouts import expert_stacks, layout_of
from surefoot.models.experts import experts_forward, plug_in
from surefoot.models.kept_experts import KeptExperts
from surefoot.models.lora import LoraSettings
from surefoot.models.quantization import base
from surefoot.models.quantization.base import keep_stored
from surefoot.models.routing import KeptChoices
from tests.support import expert_models
from tests.support.cuda_branches import AMPERE, HOPPER, cuda_branches
from tests.support.stored_weights import FORMATS

H, I, E, K, R, T, SCALING = 16, 24, 5, 2, 3, 40, 0.7
ZERO_EXPERTS = 2
COMMON = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E}
LOCAL = {"hidden_size": H, "intermediate_size": I, "num_local_experts": E}
ROUTED = {"hidden_size": H, "moe_intermediate_size": I, "n_routed_experts": E}
FAMILIES = {
    "mixtral": lambda **extra: MixtralExperts(MixtralConfig(**LOCAL, **extra)),
    "qwen2_moe": lambda **extra: Qwen2MoeExperts(Qwen2MoeConfig(**COMMON, **extra)),
    "qwen3_moe": lambda **extra: Qwen3MoeExperts(Qwen3MoeConfig(**COMMON, **extra)),
    "qwen3_vl_moe": lambda **extra: Qwen3VLMoeTextExperts(Qwen3VLMoeTextConfig(**COMMON, **extra)),
    "gpt_oss": lambda **_: GptOssExperts(GptOssConfig(**LOCAL, swiglu_limit=0.7)),
    "openai_privacy_filter": lambda **_: OpenAIPrivacyFilterExperts(
        OpenAIPrivacyFilterConfig(**LOCAL, swiglu_limit=0.7)
    ),
    "aria": lambda **_: AriaExperts(
        AriaTextConfig(hidden_size=H, num_attention_heads=4, intermediate_size=I, moe_num_experts=E)
    ),
    "hy_v4": lambda **_: HYV4Experts(HYV4Config(**ROUTED, swiglu_limit=0.7)),
    "nemotron_h": lambda **_: NemotronHExperts(NemotronHConfig(**ROUTED)),
    "muse_spark": lambda **_: MuseSparkExperts(
        MuseSparkTextConfig(moe_hidden_size=H, moe_intermediate_size=I, num_local_experts=E)
    ),
    "step3p7": lambda **_: Step3p7Experts(
        Step3p7TextConfig(hidden_size=H, moe_intermediate_size=I, num_local_experts=E), swiglu_limit=0.7
    ),
    "longcat_flash": lambda **_: LongcatFlashExperts(
        LongcatFlashConfig(
            hidden_size=H, expert_ffn_hidden_size=I, n_routed_experts=E - ZERO_EXPERTS, zero_expert_num=ZERO_EXPERTS
        )
    ),
    "llama4": lambda **_: Llama4TextExperts(Llama4TextConfig(**LOCAL)),
    "dbrx": lambda **_: DbrxExperts(DbrxFFNConfig(hidden_size=H, ffn_hidden_size=I, moe_num_experts=E)),
    "jetmoe": lambda **_: JetMoeParallelExperts(E, H, I),
}


def experts_with_lora(family: str, **extra: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = FAMILIES[family](**extra)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    for _, stack in expert_stacks(module):
        lora_a = torch.randn(stack.num_experts, R, stack.in_features) * 0.3
        lora_b = torch.randn(stack.num_experts, stack.out_features, R) * 0.3
        setattr(stack.owner, f"{stack.leaf}_lora_A", nn.Parameter(lora_a))
        setattr(stack.owner, f"{stack.leaf}_lora_B", nn.Parameter(lora_b))
        stack.owner.lora_scaling = SCALING  # type: ignore[assignment]
    return module


def stacks_of(module: nn.Module) -> list[str]:
    return [name.removeprefix(".") for name, _ in expert_stacks(module)]


def routing(avoid: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    logits = torch.randn(T, E)
    logits[:, list(avoid)] = -100.0
    weights, index = logits.softmax(-1).topk(K, dim=-1)
    return index, weights.clone().requires_grad_()


def grouped(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The module's output as this project computes it."""
    plugged = copy.copy(module)
    layout = layout_of(module)
    assert layout is not None
    if layout.is_dispatched:
        return experts_forward(module, hidden, index, weights)
    plug_in(nn.ModuleList([plugged]))  # type: ignore[arg-type]
    assert "forward" not in vars(module)
    return call(plugged, plugged, hidden, index, weights)


def eager_with_merged_weights(
    module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> Any:
    """transformers' loop over experts with W + s B A in place of W, differentiable in A and B."""
    reference = copy.deepcopy(module)
    if hasattr(reference, "config"):
        reference.config._experts_implementation = "eager"
    plain = {name: parameter for name, parameter in module.named_parameters() if "lora" not in name}
    for name, stack in expert_stacks(module):
        pair = (getattr(stack.owner, f"{stack.leaf}_lora_{part}") for part in "BA")
        product = SCALING * torch.matmul(*pair)
        product = product.transpose(1, 2) if stack.is_transposed else product
        plain[name.removeprefix(".")] = plain[name.removeprefix(".")] + product.reshape(
            plain[name.removeprefix(".")].shape
        )
    return call(module, lambda *inputs: functional_call(reference, plain, inputs), hidden, index, weights)


def call(
    module: nn.Module, forward: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run a module of experts on tokens, as the block around it calls it."""
    if isinstance(module, Llama4TextExperts):
        scores = torch.zeros(len(hidden), E).scatter(1, index, weights)
        copies = hidden.repeat(E, 1) * scores.t().reshape(-1, 1)
        output: torch.Tensor = forward(copies).view(E, *hidden.shape).sum(0)
        return output
    if isinstance(module, JetMoeParallelExperts):
        order = index.flatten().argsort(stable=True)
        rows = forward(hidden[order // K], index.flatten().bincount(minlength=E).tolist())
        rows = rows * weights.flatten()[order, None]
        return torch.zeros(len(hidden), rows.shape[1]).index_add(0, order // K, rows)
    output = forward(hidden, index, weights)
    return output


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
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora" in name or trained == "full")
    index, weights = routing()
    hidden = torch.randn(T, H, requires_grad=True)
    ours = gradients(grouped(module, hidden, index, weights), module, [hidden, weights])
    theirs = gradients(eager_with_merged_weights(module, hidden, index, weights), module, [hidden, weights])
    assert len(ours) == 3 + sum(parameter.requires_grad for parameter in module.parameters())
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_base_weights_get_no_gradient_under_lora() -> None:
    module = experts_with_lora("mixtral")
    for name in stacks_of(module):
        getattr(module, name).requires_grad_(False)
    index, weights = routing()
    experts_forward(module, torch.randn(T, H), index, weights).sum().backward()
    assert all(getattr(module, name).grad is None for name in stacks_of(module))
    assert all(getattr(module, f"{name}_lora_{part}").grad is not None for name in stacks_of(module) for part in "AB")


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


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe"])
@pytest.mark.parametrize("activation", ["silu", "swish"])
def test_the_gate_of_most_models_has_a_gradient_of_its_own(family: str, activation: str) -> None:
    """transformers' classes for both names are others, and the model's own gate needs more memory and passes."""
    assert isinstance(select_gate(FAMILIES[family](hidden_act=activation)), SwiGLU)


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
    for name in stacks_of(module):
        setattr(module, name, nn.Parameter(getattr(module, name).bfloat16(), requires_grad=False))
    index, weights = routing()
    output = experts_forward(module, torch.randn(T, H, dtype=torch.bfloat16), index, weights.float())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    adapters = [getattr(module, f"{name}_lora_{part}") for name in stacks_of(module) for part in "AB"]
    assert all(adapter.grad.dtype == torch.float32 for adapter in adapters)


def model_gradients(kind: str, trained: str, checkpointing: bool = False, autocast: bool = False) -> dict[str, Any]:
    model = expert_models.build(kind, trained)
    expert_models.set_values(dict(model.named_parameters()), lambda parameter, value: parameter.data.copy_(value))
    if checkpointing:
        kept = KeptExperts(KeptChoices(model), keeps_outputs=False)
        options = {"use_reentrant": False, "context_fn": kept}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = expert_models.loss_of(model)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("kind", sorted(expert_models.CONFIGS.keys() - {"jetmoe"}))  # it supports no checkpointing
@pytest.mark.parametrize("trained", ["lora", "full"])
def test_gradient_checkpointing_changes_nothing(kind: str, trained: str) -> None:
    plain, again = model_gradients(kind, trained), model_gradients(kind, trained, checkpointing=True)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trained", ["lora", "full"])
def test_autocast_computes_in_bfloat16(family: str, trained: str) -> None:
    module = experts_with_lora(family)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora" in name or trained == "full")
    index, weights = routing()
    hidden = torch.randn(T, H, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(grouped(module, hidden, index, weights), module, [hidden, weights])
    wanted = gradients(grouped(module, hidden, index, weights), module, [hidden, weights])
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        error = (found[name] - value).norm() / value.norm()
        assert 1e-5 < error < 0.1 or name == "loss", (name, error)


@pytest.mark.parametrize("capability", [HOPPER, AMPERE], ids=["torch's", "Triton's"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_of_a_gpu_give_the_same_numbers(family: str, capability: tuple[int, int]) -> None:
    module = experts_with_lora(family)
    index, weights = routing(avoid=(1,))
    hidden = torch.randn(T, H, requires_grad=True)
    found = []
    for kernels in (nullcontext(), cuda_branches(capability)):
        with kernels:
            with torch.autocast("cpu", torch.bfloat16):
                output = grouped(module, hidden, index, weights)
            found.append(gradients(output, module, [hidden, weights]))
    for name, value in found[0].items():
        assert (found[1][name] - value).norm() <= 0.05 * value.norm() or name == "loss", name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_weights_are_multiplied_as_they_are_read_back(family: str, name: str) -> None:
    stored_as = FORMATS[name]
    module = experts_with_lora(family)
    stored = copy.deepcopy(module)
    for (_, plain), (_, other) in zip(expert_stacks(module), list(expert_stacks(stored)), strict=True):
        weight = getattr(plain.owner, plain.leaf)
        weight.requires_grad_(False).copy_(stored_as.read(stored_as.store(weight), torch.float32))
        keep_stored(other.owner, other.leaf, stored_as)
    index, weights = routing()
    hidden = torch.randn(T, H, requires_grad=True)
    ours = gradients(grouped(stored, hidden, index, weights), stored, [hidden, weights])
    wanted = gradients(grouped(module, hidden, index, weights), module, [hidden, weights])
    assert ours.keys() == wanted.keys()
    for parameter, value in wanted.items():
        torch.testing.assert_close(ours[parameter], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "aria", "dbrx"])
def test_a_gpu_multiplies_stored_weights_a_few_experts_at_a_time(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PART_BYTES", 2 * 2 * 2 * H * I)  # two experts of the larger stack
    module = experts_with_lora(family)
    for _, stack in list(expert_stacks(module)):
        getattr(stack.owner, stack.leaf).requires_grad_(False)
        keep_stored(stack.owner, stack.leaf, FORMATS["nf4"])
    index, weights = routing(avoid=(1,))
    hidden = torch.randn(T, H, requires_grad=True)
    found = []
    for kernels in (nullcontext(), cuda_branches(HOPPER)):
        with kernels:
            with torch.autocast("cpu", torch.bfloat16):
                output = grouped(module, hidden, index, weights)
            found.append(gradients(output, module, [hidden, weights]))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert (found[1][name] - value).norm() <= 0.05 * value.norm() or name == "loss", name


RANK_CASES = [
    *((kind, "lora", 3, 1) for kind in ("gpt_oss", "llama4", "dbrx", "jetmoe", "longcat")),
    ("gpt_oss", "lora", 0, 2),
    ("gpt_oss", "full", 2, 2),
    ("gpt_oss", "full", 3, 1),
    ("aria", "lora", 3, 2),
    ("dbrx", "full", 3, 1),
]


@pytest.mark.long
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps(RANK_CASES))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("expert_ranks.py")), str(tmp_path / "cases.json"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for number, (kind, trained, *layout) in enumerate(RANK_CASES):
        alone = expert_models.build(kind, trained)
        expert_models.set_values(dict(alone.named_parameters()), lambda parameter, value: parameter.data.copy_(value))
        expert_models.loss_of(alone).backward()
        found = load_file(tmp_path / f"{number}.safetensors")
        wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys(), (kind, layout)
        for name, gradient in found.items():  # both ranks train on the same tokens
            torch.testing.assert_close(
                gradient,
                2 * wanted[name],
                atol=1e-6,
                rtol=1e-4,
                msg=lambda text, at=(kind, trained, layout, name): f"{at}: {text}",
            )


def test_checkpointing_of_a_model_that_cannot_recompute_is_refused(tmp_path: Path) -> None:
    expert_models.build("jetmoe", "full").save_pretrained(tmp_path)
    lora = LoraSettings(rank=4, alpha=8, targets=("all",))
    with pytest.raises(ModelError, match="gradient_checkpointing: .*JetMoeForCausalLM"):
        build_model(tmp_path, lora=lora, device=torch.device("cpu"), dtype=torch.float32, gradient_checkpointing=True)
