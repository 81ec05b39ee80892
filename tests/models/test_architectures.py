"""Every text-generation class of transformers trains on packed samples as on each of them alone.

`make test-models` runs all of them and writes docs/models.md; `make test` runs those of `REPRESENTATIVE`.
"""

import json
import os
from dataclasses import replace
from math import gcd
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from surefoot.data.collate import MicroBatch
from surefoot.errors import ModelError
from surefoot.models.build import build_model
from surefoot.models.lora import LoraSettings
from surefoot.models.quantization.base import format_of, stored_weight
from surefoot.models.quantization.formats import Int8Format, Nf4Format
from tests.models.architectures import ARCHITECTURES, CAUSAL, Line, tiny_model
from tests.support import model_check
from tests.support.model_check import (
    CPU,
    GRADIENT_WITHIN,
    IMAGES_ARE_TESTED,
    LONG,
    LONG_TIMES,
    LOSS_WITHIN,
    Reference,
    Result,
    check_architecture,
    packed_batch,
    sample_tokens,
    train_two_steps,
    wanted_of,
    worst_difference,
)
from tests.support.processes import run_program
from tests.support.stored_weights import set_lora

pytestmark = pytest.mark.slow

REPRESENTATIVE = (
    "llama", "mixtral", "deepseek_v3", "qwen3_5_moe_text", "mamba2", "lfm2", "gpt_oss", "gemma2", "mistral",
    "llama4_text", "qwen2_5_vl", "gpt2",
)  # fmt: skip
"""One architecture per kind of layer."""
TIMES_ROUNDING = 5
"""Largest difference of a gradient as a multiple of the rounding of transformers' own; samples that mix: a thousand."""
RESULTS = "SUREFOOT_MODEL_RESULTS"
"""Environment variable: the folder that the results are written to."""


def write_row(result: Result, line: Line) -> None:
    """Write a row of docs/models.json where the results are wanted."""
    if folder := os.environ.get(RESULTS):
        row = {**result.as_row(), "reason": line.reason or ""}
        (Path(folder) / f"{result.name}.json").write_text(json.dumps(row))


def test_every_text_generation_class_has_a_line() -> None:
    assert sorted(CAUSAL) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_check_sees_samples_that_mix(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed(samples: list[Tensor]) -> MicroBatch:
        batch = packed_batch(samples)
        tokens = sum(batch.lengths)
        return replace(batch, lengths=[tokens], cu_seq_lens=torch.tensor([0, tokens], dtype=torch.int32))

    monkeypatch.setattr(model_check, "packed_batch", mixed)
    result = check_architecture("llama", tiny_model("llama"), tmp_path, tokenizer, {"full": None})
    assert result.modes["full"].state == "wrong"
    assert result.modes["full"].loss_difference > 1e-2


def test_the_results_are_those_of_the_table() -> None:
    """`make test-models` writes them; a line that changes needs another run."""
    rows = json.loads((Path(__file__).parents[2] / "docs" / "models.json").read_text("utf-8"))
    assert {row["type"]: row["reason"] for row in rows} == {
        name: line.reason or "" for name, line in ARCHITECTURES.items()
    }
    assert all(row["trains"] == (row["reason"] == "") for row in rows)
    assert {row["type"] for row in rows if row["images"]} == IMAGES_ARE_TESTED


@pytest.mark.parametrize(("name", "targets"), [("mamba2", ("all",)), ("gpt_oss", None), ("gpt_oss", ("all",))])
def test_states_and_weights_of_two_types_train(
    name: str, targets: tuple[str, ...] | None, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Mamba's states are float32 beside weights in bfloat16; queries of autocast are bfloat16 beside float32 sinks."""
    tiny_model(name).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = LoraSettings(rank=2, alpha=3.0, targets=targets) if targets else None
    built = build_model(tmp_path, lora=settings, device=CPU, dtype=torch.bfloat16)
    wanted, _ = wanted_of(built, settings, Reference(tmp_path))
    losses, _, _ = train_two_steps(built, packed_batch(sample_tokens()))
    assert losses[0] == pytest.approx(wanted, rel=0.01)
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.models] * (name not in ("deepseek_v3", "gpt_oss")))
        for name in REPRESENTATIVE
        if name != "gpt2"
    ],
)
def test_each_kind_of_layer_trains_beside_weights_in_four_bits(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """As beside the weights that are read back of them."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    widths = [weight.shape[-1] for weight in model.parameters() if weight.dim() > 1 and not weight.shape[-1] % 4]
    settings = LoraSettings(rank=2, alpha=3.0, targets=("all",))
    stored, plain = (
        build_model(tmp_path, lora=lora, device=CPU, dtype=torch.float32)
        for lora in (replace(settings, weight_format=Nf4Format(gcd(*widths), is_double=True)), settings)
    )
    for owner, module in stored.model.named_modules():
        for leaf in getattr(module, "stored_weights", ()):
            back = format_of(module).read(stored_weight(module, leaf), torch.float32)
            plain.model.get_parameter(f"{owner}.{leaf}").data.copy_(back)
    for built in (stored, plain):
        set_lora(built)
    (losses, gradients, _), (wanted, wanted_gradients, _) = (
        train_two_steps(built, packed_batch(sample_tokens())) for built in (stored, plain)
    )
    assert losses == pytest.approx(wanted, abs=LOSS_WITHIN)
    difference, where = worst_difference(gradients, wanted_gradients)
    assert difference <= GRADIENT_WITHIN, where


def test_a_model_without_a_layer_that_can_be_stored_is_refused(tmp_path: Path) -> None:
    """GPT-2's are of a class of their own."""
    tiny_model("gpt2").save_pretrained(tmp_path)
    lora = LoraSettings(rank=2, alpha=3.0, targets=("all",), weight_format=Int8Format())
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no linear layers or experts"):
        build_model(tmp_path, lora=lora, device=CPU, dtype=torch.float32)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "olmo_hybrid",
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("falcon_h1", "hrm_text", "hy_v4", "kimi_linear")),
    ],
)
def test_two_ranks_begin_with_the_weights_and_buffers_of_one(name: str, tmp_path: Path) -> None:
    """Weights that the loader joins, splits or permutes, a computed buffer, an initialiser that fails on parts."""
    tiny_model(name).save_pretrained(tmp_path / "model")
    run_program(Path(__file__).with_name("loaded_ranks.py"), tmp_path / "model", "full", 3, 1, tmp_path / "out")
    found = load_file(tmp_path / "out")
    alone = build_model(tmp_path / "model", lora=None, device=CPU, dtype=torch.float32).model
    wanted = dict([*alone.named_parameters(), *alone.named_buffers()])
    assert found.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.models] * (name not in REPRESENTATIVE)) for name in ARCHITECTURES]
)
def test_packed_samples_train_as_each_of_them_alone(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Losses, gradients, the exported model and the adapter, in full and with LoRA; or the refusal says why not."""
    line = ARCHITECTURES[name]
    if not line.is_built:
        write_row(Result(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]), line)
        pytest.skip(line.reason or "")
    result = check_architecture(name, tiny_model(name), tmp_path, tokenizer)
    write_row(result, line)
    assert not [problem for problem in result.problems if "traceback" in problem], result.problems
    if line.reason is None:
        assert result.trains, result.problems
    else:
        assert not result.trains, f"it trains: remove its reason, {line.reason!r}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.models] * (name not in ("doge", "hy_v4", "llama4_text")))
        for name, line in ARCHITECTURES.items()
        if line.is_built and line.reason is None
    ],
)
def test_thresholds_beyond_the_row_of_the_probe_mix_no_samples(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """A window, top-k or scale of released models begins after thousands of tokens, and the probe has a few dozen."""
    tiny_model(name, times=LONG_TIMES).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    samples = sample_tokens(LONG)
    wanted_loss, wanted = Reference(tmp_path).loss(samples, {})
    built = build_model(tmp_path, lora=None, device=CPU, dtype=torch.float32)
    losses, gradients, _ = train_two_steps(built, packed_batch(samples))
    assert losses[0] == pytest.approx(float(wanted_loss), abs=LOSS_WITHIN)
    difference, where = worst_difference(gradients, wanted)
    if difference > GRADIENT_WITHIN:  # a model that amplifies rounding: transformers' own is then far from exact, too
        _, exact = Reference(tmp_path, dtype=torch.float64).loss(samples, {})
        rounding, _ = worst_difference(wanted, exact)
        assert difference <= TIMES_ROUNDING * rounding, where
