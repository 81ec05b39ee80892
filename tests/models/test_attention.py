"""Samples laid end to end see only themselves, whatever shares their pack."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from surefoot.models import attention  # registers the implementation
from surefoot.models.attention_math import AttentionTerms, attend
from surefoot.models.sample_layout import SampleLayout, accept_samples, samples_are
from surefoot.models.sample_masks import SampleMask
from tests.support.models import SIZES, make_model


def packed_arguments(lengths: list[int]) -> dict[str, object]:
    return {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "samples": SampleLayout.of(lengths),
        "use_cache": False,
    }


@pytest.mark.parametrize("kind", ["llama", "qwen2_moe", "qwen3_moe"])
def test_a_pack_gives_each_sample_the_logits_it_has_alone(kind: str) -> None:
    lengths = [5, 17, 1, 9]
    model = make_model(kind).eval()
    ids = torch.randint(3, 500, (1, sum(lengths)))
    with torch.no_grad():
        alone = [model(input_ids=part).logits for part in ids.split(lengths, dim=1)]
        model.set_attn_implementation(attention.IMPLEMENTATION)
        accept_samples(model)
        packed = model(input_ids=ids, **packed_arguments(lengths)).logits
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


def test_a_sliding_window_is_honoured() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()
    ids = torch.randint(3, 500, (1, 20))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        model.set_attn_implementation(attention.IMPLEMENTATION)
        accept_samples(model)
        found = model(input_ids=ids, **packed_arguments([20])).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def softmax_by_definition(query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms, allowed: Tensor) -> Tensor:
    """Attention written as its formula, with scores, sinks and cap in sight."""
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    scores = query @ key.transpose(-1, -2) * (terms.scaling or query.shape[-1] ** -0.5)
    if terms.softcap:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if terms.bias is not None:
        scores = scores + terms.bias
    weights = scores.masked_fill(~allowed, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if terms.sinks is not None:
        total = total + terms.sinks.exp()[None, :, None, None]
    return (weights / total) @ value


@pytest.mark.parametrize("width", [8, 5, 12], ids=["same head size", "narrower values", "wider values"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("term", ["sinks", "softcap", "bias", "sinks and softcap"])
def test_terms_of_scores_have_the_values_and_gradients_of_their_formula(
    term: str, window: int | None, width: int
) -> None:
    torch.manual_seed(0)
    length = 20
    parts = [torch.randn(1, heads, length, size) for heads, size in ((4, 8), (2, 8), (2, width))]
    query, key, value = (part.requires_grad_() for part in parts)
    sinks = torch.randn(4, requires_grad=True) if "sinks" in term else None
    terms = AttentionTerms(
        scaling=0.4,
        softcap=2.0 if "softcap" in term else None,
        sinks=sinks,
        bias=torch.randn(1, 4, length, length) if term == "bias" else None,
    )
    mask = SampleMask(window=window)
    allowed = mask.allowed_after(0, length, torch.device("cpu"))
    leaves = [query, key, value, *([sinks] if sinks is not None else [])]
    wanted = softmax_by_definition(query, key, value, terms, allowed)
    found = attend(query, key, value, mask.allowed(length, torch.device("cpu")), terms)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    direction = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(result, leaves, direction) for result in (found, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_cost_follows_sample_length_not_pack_length() -> None:
    """The number of scores computed: 16 samples of 64 need a sixteenth of one sample of 1024."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(lengths: list[int]) -> int:
        q = torch.randn(1, 2, sum(lengths), 8)
        with FlopCounterMode(display=False) as counter, samples_are(SampleLayout.of(lengths)):
            attention.packed_attention(torch.nn.Identity(), q, q, q)
        return int(counter.get_total_flops())

    assert flops([64] * 16) * 16 == flops([1024])


def test_registered_for_every_model_that_uses_the_interface(model_folder: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"), attn_implementation=attention.IMPLEMENTATION)
    assert model.config._attn_implementation == "surefoot"
