"""No sample sees another: layers that would mix samples are found, whatever they are, and run once per sample."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Florence2Config, PreTrainedModel

from surefoot.errors import ModelError
from surefoot.methods.token_loss import TokenLoss
from surefoot.models import isolation, sample_layout
from surefoot.models.attention import has_packed_attention, implementation_for
from surefoot.models.build import build_model, meta_model
from surefoot.models.isolation import can_share_prompts, isolate_samples
from surefoot.models.lora import LoraSettings
from surefoot.models.sample_layout import SampleLayout, accept_samples, keep_layout_on_recompute, num_positions
from surefoot.models.sample_masks import NeedsOwnAttentionError, SampleMask
from tests.models.architectures import model_class_of, tiny_config, tiny_model
from tests.support.shrinking import randomise

LENGTHS = [13, 7, 17]


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def prepare(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, dict[str, int]]:
    """Return a tiny model whose samples are kept apart, and the modules that run once per sample."""
    model = tiny_model(name).to(dtype)
    model.set_attn_implementation(implementation_for(type(model), model.config))
    return model, dict(isolate_samples(model, dtype, is_sharded=False).apart)


def draw_tokens(model: PreTrainedModel, count: int) -> Tensor:
    size = model.get_input_embeddings().weight.shape[0]
    return torch.randint(2, size, (1, count), generator=torch.Generator().manual_seed(1))


def run_alone(name: str, ids: Tensor, lengths: list[int]) -> Tensor:
    """Return the logits of each sample by transformers' own forward, laid end to end."""
    model = tiny_model(name).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize(
    ("name", "apart"),
    [
        ("llama", set()),
        ("gpt_oss", set()),
        ("phimoe", set()),
        ("qwen3_next", {"Qwen3NextGatedDeltaNet"}),
        ("mamba2", {"Mamba2Mixer"}),
        ("lfm2", {"Lfm2ShortConv"}),
        ("deepseek_v32", {"DeepseekV32Attention"}),
        ("doge", {"DogeAttention"}),
        ("roberta", set()),
        ("roformer", {"RoFormerModel"}),
    ],
)
def test_a_row_gives_each_sample_what_transformers_gives_it_alone(name: str, apart: set[str]) -> None:
    model, found = prepare(name)
    ids = draw_tokens(model, sum(LENGTHS))
    with torch.no_grad():
        packed = model(
            input_ids=ids, position_ids=positions(LENGTHS), samples=SampleLayout.of(LENGTHS), use_cache=False
        )
    wanted = run_alone(name, ids, LENGTHS)
    torch.testing.assert_close(packed.logits, wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)
    assert set(found) == apart


def test_parameters_have_gradients_whatever_the_length_of_a_sample() -> None:
    """Ranks sum the gradients of a layer together. DeepSeek-V4 compresses keys from a number of tokens on."""
    config = tiny_config("deepseek_v4")
    config.compress_rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    model = model_class_of(config)._from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.set_attn_implementation(implementation_for(type(model), model.config))
    isolate_samples(model, torch.float32, is_sharded=True)
    found = []
    for lengths in ([2], [45], [3, 40]):
        model.zero_grad()
        ids = draw_tokens(model, sum(lengths))
        row = {"position_ids": positions(lengths), "samples": SampleLayout.of(lengths)}
        model(input_ids=ids, use_cache=False, **row).logits.sum().backward()
        found.append({name for name, parameter in model.named_parameters() if parameter.grad is not None})
    assert found[0] == found[1] == found[2]
    assert any("compressor.kv_proj" in name for name in found[0])


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "bert", "big_bird", "roberta"])
def test_a_row_may_be_longer_than_the_longest_sample_of_a_model(name: str) -> None:
    """Positions and token types are counted in each sample, not in the row."""
    model, _ = prepare(name)
    lengths = [40, 30]
    assert model.config.max_position_embeddings < sum(lengths)
    ids = draw_tokens(model, sum(lengths))
    with torch.no_grad():
        packed = model(
            input_ids=ids, position_ids=positions(lengths), samples=SampleLayout.of(lengths), use_cache=False
        ).logits
    wanted = run_alone(name, ids, lengths)
    torch.testing.assert_close(packed, wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bloom", "falcon+alibi"])
def test_alibi_counts_from_the_first_token_of_a_sample(name: str) -> None:
    """In bfloat16 a term of position 3,000 is rounded to a multiple of 16, and would be another than in the sample."""
    model, _ = prepare(name, torch.bfloat16)
    alone = tiny_model(name).to(torch.bfloat16).eval()
    lengths = [3000, 60]
    ids = draw_tokens(model, sum(lengths))
    with torch.no_grad():
        packed = model(
            input_ids=ids, position_ids=positions(lengths), samples=SampleLayout.of(lengths), use_cache=False
        ).logits[:, lengths[0] :]
        wanted = alone(input_ids=ids[:, lengths[0] :], use_cache=False).logits
    assert (packed - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2", "jamba"])
def test_layers_that_mix_are_found_in_low_precision(name: str) -> None:
    in_full, in_half = prepare(name)[1], prepare(name, torch.bfloat16)[1]
    assert in_half == in_full
    assert in_full


def test_models_whose_layers_are_told_are_not_taken_apart_in_low_precision() -> None:
    for name in ("llama", "qwen3_moe", "gpt_oss", "gemma2", "deepseek_v3"):
        assert prepare(name, torch.bfloat16)[1] == {}, name


def test_a_model_that_still_mixes_is_refused_where_it_cannot_run_as_a_whole() -> None:
    model = tiny_model("roformer")
    model.set_attn_implementation(implementation_for(type(model), model.config))
    with pytest.raises(ModelError):
        isolate_samples(model, torch.float32, is_sharded=True)


def test_a_sample_that_continues_another_reads_its_state() -> None:
    """A recurrent layer computes each continuation of a shared prompt after the prompt."""
    model, _ = prepare("qwen3_next")
    prompt, first, second = draw_tokens(model, 20).split([9, 6, 5], dim=1)
    layout = SampleLayout([9, 6, 5], torch.tensor([0, 9, 15, 20], dtype=torch.int32), prefix_of=(-1, 0, 0))
    at = torch.cat([torch.arange(9), torch.arange(9, 15), torch.arange(9, 14)])[None]
    with torch.no_grad():
        shared = model(
            input_ids=torch.cat([prompt, first, second], dim=1), position_ids=at, samples=layout, use_cache=False
        ).logits
    rows = [torch.cat([prompt, first], dim=1), torch.cat([prompt, second], dim=1)]
    whole = [run_alone("qwen3_next", row, [row.shape[1]])[:, 9:] for row in rows]
    torch.testing.assert_close(shared[:, 9:], torch.cat(whole, dim=1), atol=1e-4, rtol=1e-4)


class _Indices(TorchDispatchMode):
    """Collects numbers of places that do not exist, on which a GPU would end the process."""

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0
        self.outside: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.scatter, torch.ops.aten.gather):
            tensor, dim, index = args[:3]
            self.checked += 1
            if not 0 <= int(index.min()) <= int(index.max()) < tensor.shape[dim]:
                self.outside.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["hy_v4", "deepseek_v32"])
def test_no_part_is_run_with_numbers_of_tokens_that_its_sample_does_not_have(name: str) -> None:
    with _Indices() as indices:
        prepare(name)
    assert indices.checked
    assert indices.outside == []


def test_transformers_does_not_look_for_samples_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the device to do so."""
    model, _ = prepare("llama")
    looks: list[Tensor] = []
    monkeypatch.setattr(sample_layout, "_find_samples", looks.append)
    row = {"input_ids": draw_tokens(model, sum(LENGTHS)), "position_ids": positions(LENGTHS), "use_cache": False}
    model(**row, samples=SampleLayout.of(LENGTHS))
    assert looks == []
    model.set_attn_implementation("eager")
    model(**row)
    assert looks


def test_a_recomputation_has_the_samples_of_its_own_forward() -> None:
    """Another batch runs between the forward and the backward."""
    model, _ = prepare("qwen3_next")
    ids = draw_tokens(model, sum(LENGTHS))

    def gradients(*, is_checkpointed: bool) -> list[Tensor]:
        if is_checkpointed:
            options = {"use_reentrant": False, "context_fn": keep_layout_on_recompute}
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        model.train()
        arguments = {"position_ids": positions(LENGTHS), "samples": SampleLayout.of(LENGTHS), "use_cache": False}
        loss = model(input_ids=ids, **arguments).logits.logsumexp(-1).sum()
        with torch.no_grad():
            model(input_ids=ids, position_ids=positions([37]), samples=SampleLayout.of([37]), use_cache=False)
        return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True))

    for plain, recomputed in zip(gradients(is_checkpointed=False), gradients(is_checkpointed=True), strict=True):
        assert (plain is None) == (recomputed is None)
        if plain is not None:
            torch.testing.assert_close(plain, recomputed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_one_long_sample_does_not_change_the_positions_of_the_others(kind: str) -> None:
    name = {"dynamic": "llama+dynamic_ntk", "longrope": "phi3+longrope"}[kind]
    model, _ = prepare(name)
    lengths = [5, 30, 20, 7]  # the frequencies change with the length of samples longer than 12 tokens
    ids = draw_tokens(model, sum(lengths))
    with torch.no_grad():
        packed = model(
            input_ids=ids, position_ids=positions(lengths), samples=SampleLayout.of(lengths), use_cache=False
        ).logits
    wanted = torch.cat([run_alone(name, part, [part.shape[1]]) for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)


def test_kernels_that_know_where_samples_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the kernels cut their inputs by `cu_seqlens` and `seq_idx`, as the real ones do."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    rule, convolution = (
        getattr(modeling, name).__wrapped__ for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    )

    def told_rule(*states: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **options: Any) -> Any:
        sizes = [g.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        parts = zip(*(each.split(sizes, dim=1) for each in (*states, g, beta)), strict=True)
        known = {name: options[name] for name in ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")}
        outputs = [rule(*part[:3], g=part[3], beta=part[4], **known)[0] for part in parts]
        return torch.cat(outputs, dim=1), None

    def told_convolution(x: Tensor, *weights: Any, activation: str, seq_idx: Tensor | None = None, **_: Any) -> Tensor:
        samples = torch.zeros(x.shape[-1]) if seq_idx is None else seq_idx[0]
        parts = x.split(samples.unique_consecutive(return_counts=True)[1].tolist(), dim=-1)
        return torch.cat([convolution(part, *weights, activation=activation) for part in parts], dim=-1)

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", told_rule)
    monkeypatch.setattr(modeling, "causal_conv1d_fn", told_convolution)
    monkeypatch.setattr("surefoot.models.isolation._wants_kernels", lambda _: True)
    model, apart = prepare("qwen3_next")
    assert apart == {}
    ids = draw_tokens(model, sum(LENGTHS))
    with torch.no_grad():
        packed = model(
            input_ids=ids, position_ids=positions(LENGTHS), samples=SampleLayout.of(LENGTHS), use_cache=False
        ).logits
    monkeypatch.undo()
    torch.testing.assert_close(packed, run_alone("qwen3_next", ids, LENGTHS), atol=1e-4, rtol=1e-4)


def test_a_missing_kernel_is_named_and_the_layer_runs_once_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.models.isolation._wants_kernels", lambda _: True)
    model = tiny_model("qwen3_next")
    model.set_attn_implementation(implementation_for(type(model), model.config))
    isolation = isolate_samples(model, torch.float32, is_sharded=False)
    assert isolation.missing_kernels in ("causal-conv1d", "flash-linear-attention")
    assert "Qwen3NextGatedDeltaNet" in isolation.apart


def test_generation_has_no_samples_and_is_not_cut() -> None:
    model, _ = prepare("qwen3_next")
    model.eval()
    model.set_attn_implementation("sdpa")
    ids = draw_tokens(model, 11)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits, run_alone("qwen3_next", ids, [11]), atol=1e-4, rtol=1e-4)


def test_a_checkpointed_function_may_be_recomputed_twice() -> None:
    model = tiny_model("llama")
    accept_samples(model)
    x = torch.randn(3, requires_grad=True)
    y = checkpoint(torch.sin, x, use_reentrant=False, context_fn=keep_layout_on_recompute).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], first)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt2", 64),
        ("opt", 64),
        ("roberta", 63),
        ("codegen", 64),
        ("gptj", 64),
        ("openai-gpt", 64),
        ("ctrl", 64),
        ("git", 64),
        ("llama", None),
        ("bloom", None),
    ],
)
def test_a_table_of_positions_is_known(name: str, size: int | None) -> None:
    assert num_positions(tiny_model(name)) == size


@pytest.mark.parametrize("weight", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_values_that_are_not_finite_are_left_to_the_first_step(weight: str) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(implementation_for(type(model), model.config))
    with torch.no_grad():
        model.get_parameter(weight).fill_(float("nan"))
    assert isolate_samples(model, torch.float32, is_sharded=False).apart == {}
    assert not TokenLoss(model).holds_all_logits, "Llama neither scales nor caps its logits"


def test_a_cap_is_known_although_the_logits_are_still_small() -> None:
    """As of a fresh model, whose logits a cap of 30 hardly changes; they grow while it is trained."""
    model = tiny_model("gemma2")
    model.config.final_logit_softcapping = 30.0
    model.model.norm.weight.data.fill_(-0.9)  # Gemma adds 1
    isolate_samples(model, torch.float32, is_sharded=False)
    assert model(input_ids=torch.arange(8)[None]).logits.abs().max() < 1
    assert TokenLoss(model).holds_all_logits
    model.config.final_logit_softcapping = None
    assert not TokenLoss(model).holds_all_logits


def build_llama() -> PreTrainedModel:
    model = tiny_model("llama")
    model.set_attn_implementation(implementation_for(type(model), model.config))
    return model


def fill_rows_of_several(module: nn.Module, value: float) -> None:
    """Let a module return a value in rows that are longer than each sample of the probe."""
    module.register_forward_hook(lambda _, args, output: output.fill_(value) if args[0].shape[1] > 20 else output)


def test_a_layer_that_is_finite_for_one_sample_only_is_taken_apart() -> None:
    model = build_llama()
    fill_rows_of_several(model.model.layers[0].mlp.act_fn, math.nan)
    assert isolate_samples(model, torch.float32, is_sharded=False).apart == {"LlamaMLP": 1}


@pytest.mark.parametrize("value", [0.0, math.nan])
@pytest.mark.parametrize(("is_sharded", "advises"), [(False, False), (True, True)])
def test_what_no_part_explains_is_refused(value: float, is_sharded: bool, advises: bool) -> None:
    model = build_llama()
    fill_rows_of_several(model.lm_head, value)
    with pytest.raises(ModelError) as refused:
        isolate_samples(model, torch.float32, is_sharded=is_sharded)
    assert ("nproc_per_node" in str(refused.value)) == advises


@pytest.mark.parametrize("error", [RuntimeError(), AssertionError(), KeyError("gate"), TypeError("no\nmore")])
def test_an_error_of_the_models_own_code_is_named_with_its_place(error: Exception) -> None:
    model = build_llama()

    def fail(*_: object) -> None:
        raise error

    model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(ModelError, match=rf"{type(error).__name__}.*\(test_isolation\.py:\d+\)"):
        isolate_samples(model, torch.float32, is_sharded=False)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bert", {"is_decoder": False}),
        ("xlnet", {"attn_type": "bi"}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
    ],
)
def test_a_model_that_looks_ahead_is_refused(name: str, changes: dict[str, Any]) -> None:
    """Each token would be shown the one that it must predict."""
    config = tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    model = model_class_of(config)._from_config(config, dtype=torch.float32)
    randomise(model, 0)
    with pytest.raises(ModelError, match=next(iter(changes))):
        isolate_samples(model, torch.float32, is_sharded=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_model_with_small_weights_looks_ahead_too(dtype: torch.dtype) -> None:
    """As transformers initialises them, a token changes those before it by a few percent only."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 128}
    for is_decoder in (False, True):
        config = tiny_config("bert")
        for key, value in {**sizes, "is_decoder": is_decoder}.items():
            setattr(config, key, value)
        model = model_class_of(config)._from_config(config, dtype=dtype)
        if is_decoder:
            isolate_samples(model, dtype, is_sharded=False)
        else:
            with pytest.raises(ModelError, match="looks ahead"):
                isolate_samples(model, dtype, is_sharded=False)


def test_code_that_mixes_types_is_told_to_compute_in_float32() -> None:
    model = build_llama()

    def fail(*_: object) -> None:
        torch.ones(1, 1) @ torch.ones(1, 1, dtype=torch.bfloat16)

    model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(ModelError, match="dtype: float32"):
        isolate_samples(model, torch.bfloat16, is_sharded=False)


def test_a_part_that_numbers_the_tokens_of_the_row_is_taken_apart() -> None:
    """Its numbers are not the positions in a sample, though they change nothing in the row of the probe."""
    model = build_llama()
    model.model.layers[1].mlp.act_fn.register_forward_hook(
        lambda _, args, output: output + (torch.arange(args[0].shape[1]) // 8192)[:, None]
    )
    assert isolate_samples(model, torch.float32, is_sharded=False).apart == {"LlamaMLP": 1}


def test_all_rows_of_a_described_mask_are_the_mask() -> None:
    """Gemma 4 cuts the mask of layers that share keys to the tokens whose logits are wanted."""
    mask = SampleMask(window=3)
    assert mask[:, :, slice(-0, None), :] is mask
    with pytest.raises(NeedsOwnAttentionError):
        mask[:, :, slice(-1, None), :]
    model, _ = prepare("gemma4_text+shared_kv")
    assert has_packed_attention(model)


@pytest.mark.parametrize(("name", "shares"), [("llama", True), ("phi3+longrope", False), ("gptj", False)])
def test_prompts_are_shared_where_their_keys_do_not_depend_on_the_completion(name: str, shares: bool) -> None:
    assert can_share_prompts(prepare(name)[0], torch.device("cpu"), torch.float32) == shares


@pytest.mark.parametrize(
    ("name", "dtype", "aligns", "shares"),
    [
        ("llama", torch.bfloat16, True, True),
        ("llama", torch.bfloat16, False, False),
        ("llama", torch.float32, True, False),
        ("qwen3_next", torch.bfloat16, True, False),
    ],
)
def test_a_gpu_shares_prompts_where_its_kernels_know_such_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, aligns: bool, shares: bool
) -> None:
    monkeypatch.setattr(isolation, "aligns_ends", lambda _: aligns)
    assert can_share_prompts(prepare(name)[0], torch.device("cuda"), dtype) == shares


@pytest.mark.parametrize("name", ["deepseek_v2", "llama4_text"])
def test_positions_as_complex_numbers_are_those_of_each_sample(name: str) -> None:
    """The threshold of 40 tokens lies beyond the row of the probe."""
    config = tiny_config(name)
    config.max_position_embeddings = 40
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    torch.manual_seed(0)
    stock = model_class_of(config)._from_config(config, dtype=torch.float32).eval()
    model = copy.deepcopy(stock)
    model.set_attn_implementation(implementation_for(type(model), config))
    stock.set_attn_implementation("eager")
    isolate_samples(model, torch.float32, is_sharded=False)
    lengths = [5, 60, 9]
    ids = draw_tokens(model, sum(lengths))
    with torch.no_grad():
        row = model(input_ids=ids, position_ids=positions(lengths), samples=SampleLayout.of(lengths), use_cache=False)
        for found, part in zip(row.logits.split(lengths, dim=1), ids.split(lengths, dim=1), strict=True):
            alone = copy.deepcopy(stock)(input_ids=part, use_cache=False).logits
            torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)


def test_a_model_is_refused_in_a_type_that_its_code_does_not_compute_in(tmp_path: Path) -> None:
    tiny_model("xlstm").save_pretrained(tmp_path)
    lora = LoraSettings(4, 8, targets=("all",))
    with pytest.raises(ModelError, match="dtype: float32"):
        build_model(tmp_path, lora=lora, device=torch.device("cpu"), dtype=torch.bfloat16)


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    Florence2Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="model_type=florence2 is an encoder-decoder"):
        meta_model(tmp_path)
