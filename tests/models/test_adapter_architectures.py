"""The adapter of every architecture in PEFT's hands, in ours, and merged into a folder that transformers opens."""

import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.models.adapter import read_adapter
from surefoot.models.adapter_contents import read_contents
from surefoot.models.build import BuiltModel, build_model, trainable_parameters
from surefoot.models.export import merge_adapter
from surefoot.models.lora import LoraSettings, find_targets
from surefoot.models.peft_layout import find_unmergeable, find_unreadable
from surefoot.models.vision import attention
from tests.models.architectures import ARCHITECTURES, tiny_model
from tests.support.adapters import save
from tests.support.model_check import attention_of

REPRESENTATIVE = ("deepseek_v3", "laguna", "qwen3_moe+dense_layer", "qwen3_vl_moe", "kimi_k25", "gemma4", "dots3_note")
"""Dense layers beside experts; a router that stores more than its weight, and layers that PEFT renames; experts that
are stored transposed; a tower that is stored fused; towers whose modules or routers have the names of the decoder's."""
REFUSALS = "(?i)incompatible|size mismatch|no modules were targeted|missing adapter keys"
"""Errors with which PEFT refuses an adapter."""
TARGETS = (("attention", "experts"), ("attention", "mlp"), ("all", "router"), ("router",), ("attention", "vision"))


def logits_of(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits


def assert_equal_logits(model: nn.Module, expected: Tensor) -> None:
    """Raise AssertionError unless a model's logits are `expected` but for the rounding of float32."""
    difference = (logits_of(model) - expected).abs().max() / expected.abs().max()
    assert difference < 5e-5, difference


def train(base: Path, targets: tuple[str, ...]) -> tuple[BuiltModel, LoraSettings, Tensor]:
    """Return a model with random LoRA weights, its settings and its logits."""
    settings = LoraSettings(rank=4, alpha=8, targets=targets)
    built = build_model(base, lora=settings, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    for parameter in trainable_parameters(built.model).values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    with attention(built.model, attention_of(built.model.config)):
        return built, settings, logits_of(built.model)


def stock(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """Return transformers' model of a folder, whose weights fill it exactly."""
    cls = type(like)
    model, info = cls.from_pretrained(folder, attn_implementation=attention_of(like.config), output_loading_info=True)
    assert not any(info.values()), info
    return model


def choose_targets(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the sets of targets that a model has, without groups that are empty in it."""

    def has(group: str) -> bool:
        try:
            return bool(find_targets(model, [group]))
        except ModelError:
            return False

    chosen = dict.fromkeys(tuple(group for group in targets if has(group)) for targets in TARGETS)
    return [targets for targets in chosen if targets]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.models)
        for name, line in ARCHITECTURES.items()
        if line.reason is None
    ],
)
def test_the_adapter_means_the_same_to_peft_and_in_a_merged_folder(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    original = tiny_model(name)
    original.save_pretrained(base)
    refusals = []
    for targets in choose_targets(original):
        try:
            built, settings, expected = train(base, targets)
        except ModelError as error:
            refusals.append(str(error))
            continue
        folder = tmp_path / "-".join(targets)
        folder.mkdir()
        adapter = save(built, settings, folder / "adapter", base)
        parameters = trainable_parameters(built.model)
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        values = read_adapter(adapter, shapes, settings, built.model)
        assert all(torch.equal(values[name], parameter) for name, parameter in parameters.items())

        found = find_targets(original, read_contents(adapter, original).as_parameters(original).settings.targets)
        assert built.targets is not None
        assert (found.linears, found.experts) == (built.targets.linears, built.targets.experts)

        if find_unmergeable(original, targets):
            with pytest.raises(ModelError, match="are one weight"):
                merge_adapter(base, adapter, folder / "merged")
        else:
            merged = merge_adapter(base, adapter, folder / "merged")
            assert_equal_logits(stock(merged, original), expected)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", FutureWarning)
            if find_unreadable(original, targets):
                with pytest.raises((ValueError, RuntimeError, UserWarning), match=REFUSALS):
                    PeftModel.from_pretrained(stock(base, original), adapter)
            else:
                assert_equal_logits(PeftModel.from_pretrained(stock(base, original), adapter), expected)
    if refusals:
        assert name not in REPRESENTATIVE
        pytest.skip(f"not all of it trains: {refusals[0]}")


def test_layers_that_share_a_weight_are_named_with_it() -> None:
    tied = find_unmergeable(tiny_model("zamba"), ["attention"])
    shared = "shared_transf.self_attn"
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert tied == [
        (f"model.layers.3.{shared}.{leaf}.weight", f"model.layers.1.{shared}.{leaf}.weight") for leaf in leaves
    ]
    assert find_unmergeable(tiny_model("llama"), ["all"]) == []
