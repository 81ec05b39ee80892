"""Samples laid end to end see only themselves, whatever shares their pack."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from surefoot.errors import ModelError
from surefoot.models import attention  # registers the implementation
from tests.support.models import SIZES, make_model


def packed_arguments(lengths: list[int]) -> dict[str, object]:
    return {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "lengths": lengths,
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        "max_length_q": max(lengths),
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
        packed = model(input_ids=ids, **packed_arguments(lengths)).logits
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


def test_a_sliding_window_is_honoured() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()
    ids = torch.randint(3, 500, (1, 20))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        model.set_attn_implementation(attention.IMPLEMENTATION)
        found = model(input_ids=ids, **packed_arguments([20])).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_variants_that_would_be_wrong_are_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ModelError, match="softcap"):
        attention.packed_attention(
            torch.nn.Identity(),
            q,
            q,
            q,
            None,
            lengths=[4],
            cu_seq_lens_q=torch.tensor([0, 4]),
            max_length_q=4,
            softcap=30.0,
        )


def test_cost_follows_sample_length_not_pack_length() -> None:
    """The number of scores computed: 16 samples of 64 need a sixteenth of one sample of 1024."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(lengths: list[int]) -> int:
        q = torch.randn(1, 2, sum(lengths), 8)
        with FlopCounterMode(display=False) as counter:
            attention.packed_attention(
                torch.nn.Identity(), q, q, q, None, lengths=lengths, cu_seq_lens_q=torch.tensor([0]), max_length_q=0
            )
        return int(counter.get_total_flops())

    assert flops([64] * 16) * 16 == flops([1024])


def test_registered_for_every_model_that_uses_the_interface(model_folder: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"), attn_implementation=attention.IMPLEMENTATION)
    assert model.config._attn_implementation == "surefoot"
