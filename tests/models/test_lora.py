"""LoRA parameters: where they go, what they start from, and that their arithmetic is right."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DbrxConfig,
    DbrxForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    JetMoeConfig,
    JetMoeForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from surefoot.errors import ModelError
from surefoot.models.build import build_model, trainable_parameters
from surefoot.models.generate import generating
from surefoot.models.lora import (
    LoraSettings,
    adaptable_names,
    attach,
    checked_targets,
    find_targets,
    initial_value,
    perturbed_lora,
    store_frozen_weights,
)
from surefoot.models.lora_linear import adopt
from surefoot.models.pretrained import meta_model
from surefoot.models.quantization.base import stored_weight
from tests.models.architectures import tiny_model
from tests.support.adapters import save
from tests.support.models import make_model
from tests.support.stored_weights import FORMATS

CPU = torch.device("cpu")


def settings(*targets: str, **extra: float) -> LoraSettings:
    return LoraSettings(rank=4, alpha=8, targets=targets or ("attention", "experts"), **extra)  # type: ignore[arg-type]


def test_linear_gradients_equal_plain_autograd() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        linear = nn.Linear(12, 20, bias=bias)
        linear.requires_grad_(False)
        adopt(linear, rank=4, scaling=2.0, dropout=0.0)
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


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_a_layer_with_a_transposed_weight_computes_what_its_transpose_does(dropout: float) -> None:
    torch.manual_seed(0)
    layer = Conv1D(20, 12)
    nn.init.normal_(layer.bias)
    layer.requires_grad_(False)
    adopt(layer, rank=4, scaling=2.0, dropout=dropout)
    assert layer.lora_A.shape == (4, 12)
    assert layer.lora_B.shape == (20, 4)
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(3, 5, 12, requires_grad=True)
    wanted = x @ layer.weight + layer.bias + 2.0 * x @ layer.lora_A.t() @ layer.lora_B.t()
    found = layer(x)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    scores, inputs = torch.randn_like(wanted), [x, layer.lora_A, layer.lora_B]
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, scores), torch.autograd.grad(wanted, inputs, scores), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    linear = nn.Linear(64, 8)
    adopt(linear, rank=4, scaling=2.0, dropout=0.5)
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
        ("linear", 14, 0, 0),
        ("q_proj", 2, 0, 0),
        ("down_proj", 2, 0, 0),
        ("experts.down_proj", 0, 2, 0),
        ("model.layers.1.self_attn.q_proj", 1, 0, 0),
        (r"model\.layers\.[\d]+\.self_attn\.(q|v)_proj", 4, 0, 0),
        (r"model\.layers\.0\..*_proj", 7, 2, 0),
        (".*q_proj", 2, 0, 0),
    ],
)
def test_groups_and_names(target: str, linears: int, experts: int, routers: int) -> None:
    found = find_targets(make_model("qwen2_moe"), [target])
    assert (len(found.linears), len(found.experts), len(found.routers)) == (linears, experts, routers)
    assert not any("shared_expert_gate" in name for name in found.linears)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64))


def opt() -> PreTrainedModel:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
    return OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, vocab_size=64))


def dbrx() -> PreTrainedModel:
    ffn = {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0}
    config = DbrxConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, ffn_config=ffn, attn_config=attention)
    return DbrxForCausalLM(config)


def jetmoe() -> PreTrainedModel:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "kv_channels": 8}
    return JetMoeForCausalLM(JetMoeConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=64))


def longcat() -> PreTrainedModel:
    sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24}
    heads = {"num_attention_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2}
    return LongcatFlashForCausalLM(LongcatFlashConfig(**sizes, **heads, **experts, qk_rope_head_dim=8, vocab_size=64))


@pytest.mark.parametrize(
    ("make", "attention", "mlp", "experts"),
    [
        (gpt2, 4, 4, 0),
        (opt, 8, 4, 0),
        (dbrx, 4, 0, 6),
        (jetmoe, 2, 0, 8),
        (longcat, 10, 6, 2),
        (partial(tiny_model, "falcon"), 4, 4, 0),
        (partial(tiny_model, "mamba"), 2, 0, 0),
        (partial(tiny_model, "modernbert-decoder"), 8, 4, 0),
        (partial(tiny_model, "nemotron_h"), 5, 4, 2),
        (partial(tiny_model, "xlnet"), 0, 4, 0),
        (partial(tiny_model, "bamba"), 5, 6, 0),
        (partial(tiny_model, "lfm2"), 6, 6, 0),
        (partial(tiny_model, "recurrent_gemma"), 10, 9, 0),
    ],
)
def test_groups_of_models_with_other_names(
    make: Callable[[], PreTrainedModel], attention: int, mlp: int, experts: int
) -> None:
    model = make()
    found = find_targets(model, ["all"])
    assert (len(found.linears), len(found.experts)) == (attention + mlp, experts)
    assert not any("router" in name for name in found.linears)
    for group, count in (("attention", attention), ("mlp", mlp), ("experts", experts)):
        if count:
            matched = find_targets(model, [group])
            assert len(matched.linears) + len(matched.experts) == count


def test_the_choice_of_tokens_has_no_gradient_and_is_in_no_group() -> None:
    model = tiny_model("minimax_m3_vl_text")
    chosen = find_targets(model, ["all"]).linears
    assert any("self_attn.q_proj" in name for name in chosen)
    assert "model.layers.1.self_attn.indexer.q_proj" in adaptable_names(model)
    assert not any("indexer" in name for name in chosen)
    assert not any("indexer" in name for name in find_targets(model, ["q_proj", "k_proj"]).linears)
    with pytest.raises(ModelError) as caught:
        find_targets(tiny_model("deepseek_v32"), ["wq_b"])
    assert "indexer" not in str(caught.value)


def test_layers_whose_weights_kernels_read_are_in_no_group() -> None:
    names = {name.rpartition(".")[2] for name in find_targets(tiny_model("falcon_mamba"), ["all"]).linears}
    assert names == {"in_proj"}


def test_a_linear_layer_of_another_class_is_stored_in_a_weight_format() -> None:
    model = tiny_model("falcon").requires_grad_(False)
    store_frozen_weights(model, FORMATS["int8"])
    layer = model.get_submodule("transformer.h.0.mlp.dense_h_to_4h")
    x = torch.randn(3, layer.weight.shape[1])
    wanted = F.linear(x, FORMATS["int8"].read(stored_weight(layer, "weight"), x.dtype))
    torch.testing.assert_close(layer(x), wanted)


def test_experts_that_are_modules_of_their_own_are_linear_layers_of_the_group_experts() -> None:
    model = make_model("llama")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(type(layer.mlp)(model.config) for _ in range(3))
    found = find_targets(model, ["experts"])
    assert len(found.linears) == 2 * 3 * 3
    assert not found.experts
    assert len(find_targets(model, ["all"]).linears) == len(find_targets(model, ["mlp", "attention"]).linears) + 18


def test_experts_that_cannot_be_adapted_say_why() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    model = DogeForCausalLM(DogeConfig(**sizes, is_moe=True, num_experts=16, num_experts_per_tok=4))
    with pytest.raises(ModelError, match=r"'experts' is empty in DogeForCausalLM \(an expert is one row"):
        find_targets(model, ["experts"])
    assert find_targets(model, ["mlp"]).linears


def test_a_target_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"'qproj' .*Qwen2MoeForCausalLM.* q_proj"):
        find_targets(make_model("qwen2_moe"), ["attention", "qproj"])
    with pytest.raises(ModelError, match=r"'qproj' matches nothing in Qwen3MoeForCausalLM\. Nearest"):
        find_targets(make_model("qwen3_moe"), ["qproj"])
    with pytest.raises(ModelError, match=r"'gate_proj' .*fused tensors: the group `experts`"):
        find_targets(make_model("qwen3_moe"), ["attention", "gate_proj"])
    with pytest.raises(
        ModelError, match=r"or their own names \(experts\.down_proj, experts\.gate_up_proj\)"
    ) as refused:
        find_targets(make_model("qwen3_moe"), ["gate_up_proj"])
    assert "Nearest: gate_up_proj," not in str(refused.value)
    with pytest.raises(ModelError, match="'experts' .*empty .*LlamaForCausalLM"):
        find_targets(make_model("llama"), ["experts"])
    with pytest.raises(ModelError, match=r"'self_attn\.\(q\|v\)_proj' .*whole names.* model\.layers\.0\."):
        find_targets(make_model("llama"), ["self_attn.(q|v)_proj"])


@pytest.mark.parametrize("pattern", [r"model\.layers\.[1-3]\.self_attn\.(q|v)_proj", r".*\.(gate|up)_proj", ".*_proj"])
def test_a_regular_expression_matches_the_linear_layers_that_it_does_in_peft(pattern: str) -> None:
    model = make_model("llama")
    adapted = get_peft_model(make_model("llama"), LoraConfig(target_modules=pattern, task_type="CAUSAL_LM"))
    modules = {name.removeprefix("base_model.model.").removesuffix(".lora_A.default") for name, _ in
               adapted.named_modules() if name.endswith(".lora_A.default")}  # fmt: skip
    assert set(find_targets(model, [pattern]).linears) == modules


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
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(model_folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 .*missing .*layers\.1\.self_attn\.q_proj\.weight"):
        build_model(folder, lora=settings("all"), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(("layers", "is_read"), [(1, True), (None, False)])
def test_a_layer_that_predicts_further_tokens_is_left_out_if_config_json_declares_it(
    layers: int | None, is_read: bool, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """As in DeepSeek V3's form with another number of layers, of which transformers ignores only layer 61."""
    folder = shutil.copytree(model_folder("deepseek_v3"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": layers}))
    tensors = load_file(folder / "model.safetensors")
    last = config["num_hidden_layers"] - 1
    more = {name.replace(f"layers.{last}.", f"layers.{last + 1}."): value.clone() for name, value in tensors.items()}
    save_file({**more, **tensors}, folder / "model.safetensors", {"format": "pt"})
    with nullcontext() if is_read else pytest.raises(ModelError, match=rf"are unknown .*layers\.{last + 1}\."):
        build_model(folder, lora=settings("attention"), device=CPU, dtype=torch.float32)


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


def test_only_some_layers_are_adapted(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """As PEFT does with the same setting; another layer than the model has is refused."""
    folder = model_folder("mixtral")
    lora = LoraSettings(4, 8.0, targets=("attention", "experts"), layers=(1,))
    built = build_model(folder, lora=lora, device=torch.device("cpu"), dtype=torch.float32)
    adapted = {name for name, parameter in built.model.named_parameters() if parameter.requires_grad}
    assert adapted
    assert all(name.startswith("model.layers.1.") for name in adapted)
    adapter = save(built, lora, tmp_path / "adapter", folder)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(adapter))
    assert all(".layers.1." in name for name, _ in theirs.named_parameters() if "lora_" in name)
    assert sum(p.numel() for name, p in theirs.named_parameters() if "lora_" in name) == sum(
        p.numel() for p in built.model.parameters() if p.requires_grad
    )
    with pytest.raises(ModelError, match="has 2 layers, from 0 to 1, and no layer 2"):
        checked_targets(meta_model(folder), LoraSettings(4, 8.0, layers=(0, 2)))
