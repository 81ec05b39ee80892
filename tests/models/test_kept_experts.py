"""Selective checkpointing computes the same numbers as checkpointing, without computing experts again."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.config.schema import Checkpointing
from surefoot.errors import ModelError
from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models import experts
from surefoot.models.build import BuiltModel, build_model, trainable_parameters
from surefoot.models.lora import LoraSettings
from tests.support.batches import batch as make_batch

Make = Callable[[str], Path]
AUX = 0.01


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each forward of experts."""
    rows: list[int] = []
    compute = experts._Experts.forward

    def count(context: object, hidden: Tensor, *arguments: object) -> Tensor:
        rows.append(len(hidden))
        return compute(context, hidden, *arguments)

    monkeypatch.setattr(experts._Experts, "forward", staticmethod(count))
    return rows


def build(folder: Path, checkpointing: Checkpointing, *, is_full: bool) -> BuiltModel:
    lora = None if is_full else LoraSettings(rank=4, alpha=8.0, targets=("all",))
    return build_model(
        folder, lora=lora, device=torch.device("cpu"), dtype=torch.float32, gradient_checkpointing=checkpointing
    )


def gradients(built: BuiltModel, forwards: list[int]) -> dict[str, Tensor]:
    """Return the loss and the gradients of a step; `forwards` are then those of the step alone."""
    torch.manual_seed(0)
    objective, batch = SftObjective(built, AUX), make_batch([9, 20, 14])
    objective.begin_step([batch])
    forwards.clear()
    terms = objective.loss(batch, BatchTotals(batch.num_tokens, batch.num_trained, batch.trained_weight))
    terms.total.backward()
    found = {"loss": terms.total.detach()}
    return found | {name: p.grad for name, p in trainable_parameters(built.model).items() if p.grad is not None}


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "deepseek_v3"])
def test_experts_are_computed_once_with_the_same_numbers(
    kind: str, is_full: bool, model_folder: Make, forwards: list[int]
) -> None:
    folder = model_folder(kind)
    found, counts = [], []
    for checkpointing in (False, True, "selective"):
        found.append(gradients(build(folder, checkpointing, is_full=is_full), forwards))
        counts.append(len(forwards))
    plain, recomputed, selective = found
    layers = counts[0]
    assert counts == [layers, 2 * layers, layers]
    assert plain.keys() == recomputed.keys() == selective.keys()
    for name, gradient in recomputed.items():
        assert torch.equal(selective[name], gradient), name


def test_a_model_without_such_experts_is_refused(model_folder: Make) -> None:
    with pytest.raises(ModelError, match="gradient_checkpointing: selective .*LlamaForCausalLM"):
        build(model_folder("llama"), "selective", is_full=False)
