"""LoRA parameters: where they go, what they start from, and that their arithmetic is right."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from surefoot.errors import ModelError
from surefoot.models.build import build_model, trainable_parameters
from surefoot.models.generate import generating
from surefoot.models.lora import LoraLinear, LoraSettings, attach, find_targets, initial_value, perturbed_lora
from tests.support.models import make_model

CPU = torch.device("cpu")


def settings(*targets: str, **extra: float) -> LoraSettings:
    return LoraSettings(rank=4, alpha=8, targets=targets or ("attention", "experts"), **extra)  # type: ignore[arg-type]


def test_linear_gradients_equal_plain_autograd() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        linear = nn.Linear(12, 20, bias=bias)
        linear.requires_grad_(False)
        LoraLinear.adopt(linear, settings())
        nn.init.normal_(linear.lora_A)
        nn.init.normal_(linear.lora_B)
        x = torch.randn(3, 5, 12, requires_grad=True)
        wanted = F.linear(x, linear.weight, linear.bias) + 2.0 * x @ linear.lora_A.t() @ linear.lora_B.t()
        found = linear(x)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        scores = torch.randn_like(wanted)
        inputs = [x, linear.lora_A, linear.lora_B]
        for ours, theirs in zip(
            torch.autograd.grad(found, inputs, scores), torch.autograd.grad(wanted, inputs, scores), strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    linear = nn.Linear(64, 8)
    LoraLinear.adopt(linear, settings(dropout=0.5))
    nn.init.normal_(linear.lora_A)
    nn.init.normal_(linear.lora_B)
    x = torch.randn(4, 64)
    assert not torch.equal(linear(x), linear(x))
    linear.eval()
    assert torch.equal(linear(x), linear(x))


def test_scaling_is_alpha_over_rank_or_over_its_root() -> None:
    assert LoraSettings(rank=16, alpha=8).scaling == 0.5
    assert LoraSettings(rank=16, alpha=8, rslora=True).scaling == 2.0


def test_base_parameters_keep_their_names() -> None:
    model = make_model("qwen2_moe")
    before = dict(model.named_parameters())
    attach(model, settings("all"))
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(name.endswith(("lora_A", "lora_B")) for name in after.keys() - before.keys())


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    name, shape = "model.layers.0.self_attn.q_proj.lora_A", torch.Size([4, 32])
    torch.manual_seed(1)
    first = initial_value(name, shape, seed=3)
    torch.manual_seed(2)
    assert torch.equal(first, initial_value(name, shape, seed=3))
    assert not torch.equal(first, initial_value(name, shape, seed=4))
    assert not torch.equal(first, initial_value(name.replace("0", "1"), shape, seed=3))
    assert initial_value(name.replace("_A", "_B"), shape, seed=3).abs().max() == 0
    assert first.abs().max() <= 32**-0.5


@pytest.mark.parametrize(
    ("target", "linears", "experts", "routers"),
    [
        ("attention", 8, 0, 0),
        ("mlp", 6, 0, 0),
        ("experts", 0, 4, 0),
        ("router", 0, 0, 2),
        ("all", 14, 4, 0),
        ("q_proj", 2, 0, 0),
        ("down_proj", 2, 0, 0),
        ("experts.down_proj", 0, 2, 0),
        ("model.layers.1.self_attn.q_proj", 1, 0, 0),
    ],
)
def test_groups_and_names(target: str, linears: int, experts: int, routers: int) -> None:
    found = find_targets(make_model("qwen2_moe"), [target])
    assert (len(found.linears), len(found.experts), len(found.routers)) == (linears, experts, routers)
    assert not any("shared_expert_gate" in name for name in found.linears)


def test_a_target_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"'qproj' .*Qwen2MoeForCausalLM.* q_proj"):
        find_targets(make_model("qwen2_moe"), ["attention", "qproj"])
    with pytest.raises(ModelError, match="'experts' .*empty .*LlamaForCausalLM"):
        find_targets(make_model("llama"), ["experts"])


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "llama"])
def test_only_lora_is_trained_and_kept_in_float32_under_bfloat16(
    kind: str, model_folder: Callable[[str], Path]
) -> None:
    built = build_model(model_folder(kind), lora=settings("all"), device=CPU, dtype=torch.bfloat16)
    trained = trainable_parameters(built.model)
    assert trained
    assert all(name.endswith(("lora_A", "lora_B")) and p.dtype == torch.float32 for name, p in trained.items())
    frozen = [p for p in built.model.parameters() if not p.requires_grad]
    assert all(p.dtype == torch.bfloat16 for p in frozen)
    assert not built.autocast


def test_the_router_is_frozen_unless_it_is_targeted(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("mixtral")
    frozen = build_model(folder, lora=settings("all"), device=CPU, dtype=torch.float32)
    assert not any("gate.weight" in name for name in trainable_parameters(frozen.model))
    trained = build_model(folder, lora=settings("all", "router"), device=CPU, dtype=torch.bfloat16)
    routers = {n: p for n, p in trainable_parameters(trained.model).items() if n.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    assert all(p.dtype == torch.float32 for p in routers.values())
    assert trained.autocast


def test_full_tuning_trains_everything_in_float32(model_folder: Callable[[str], Path]) -> None:
    built = build_model(model_folder("llama"), lora=None, device=CPU, dtype=torch.bfloat16)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in built.model.parameters())
    assert built.autocast


def test_a_checkpoint_that_does_not_fill_the_model_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(model_folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 .*missing .*layers\.1\.self_attn\.q_proj\.weight"):
        build_model(folder, lora=settings("all"), device=CPU, dtype=torch.float32)


def test_no_weight_stays_in_the_checkpoint_file(model_folder: Callable[[str], Path]) -> None:
    built = build_model(model_folder("mixtral"), lora=settings(), device=CPU, dtype=torch.float32)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(model_folder("mixtral")) in line]
    spans = [tuple(int(end, 16) for end in line.split(" ")[0].split("-")) for line in mapped]
    assert not any(begin <= p.data_ptr() < end for begin, end in spans for p in built.model.parameters())


def test_noise_in_an_adapter_is_gone_afterwards(model_folder: Callable[[str], Path]) -> None:
    model = build_model(model_folder("mixtral"), lora=settings(), device=CPU, dtype=torch.float32).model.eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ids = torch.arange(8)[None]
    with torch.no_grad(), generating(model):
        usual = model(ids).logits
        with perturbed_lora(model, 0.1):
            changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
            assert (model(ids).logits - usual).abs().max() > 1e-3
        assert torch.equal(model(ids).logits, usual)
    assert changed == set(trainable_parameters(model))
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
