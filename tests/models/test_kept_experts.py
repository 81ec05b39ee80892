"""A layer that is recomputed computes the same numbers: it sorts no rows again, and selectively computes no experts."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of forwards of experts, and how often their rows were sorted."""
    counts = Counter[str]()

    def counting(name: str, function: Callable[..., Any]) -> Any:
        def count(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        return staticmethod(count)

    monkeypatch.setattr(experts._Experts, "forward", counting("forwards", experts._Experts.forward))
    monkeypatch.setattr(experts._Rows, "of", counting("sorts", experts._Rows.of))
    return counts


def build(folder: Path, checkpointing: Checkpointing, *, is_full: bool) -> BuiltModel:
    lora = None if is_full else LoraSettings(rank=4, alpha=8.0, targets=("all",))
    return build_model(
        folder, lora=lora, device=torch.device("cpu"), dtype=torch.float32, gradient_checkpointing=checkpointing
    )


def gradients(built: BuiltModel, calls: Counter[str]) -> dict[str, Tensor]:
    """Return the loss and the gradients of a step; `calls` are then those of the step alone."""
    torch.manual_seed(0)
    objective, batch = SftObjective(built, AUX), make_batch([9, 20, 14])
    objective.begin_step([batch])
    calls.clear()
    terms = objective.loss(batch, BatchTotals(batch.num_tokens, batch.num_trained, batch.trained_weight))
    terms.total.backward()
    found = {"loss": terms.total.detach()}
    return found | {name: p.grad for name, p in trainable_parameters(built.model).items() if p.grad is not None}


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "deepseek_v3"])
def test_a_recomputation_takes_what_the_first_forward_had(
    kind: str, is_full: bool, model_folder: Make, calls: Counter[str]
) -> None:
    folder = model_folder(kind)
    found, forwards, sorts = [], [], []
    for checkpointing in (False, True, "selective"):
        found.append(gradients(build(folder, checkpointing, is_full=is_full), calls))
        forwards.append(calls["forwards"])
        sorts.append(calls["sorts"])
    plain, recomputed, selective = found
    layers = forwards[0]
    assert forwards == [layers, 2 * layers, layers]
    assert sorts == [layers, layers, layers]
    assert plain.keys() == recomputed.keys() == selective.keys()
    for name, gradient in recomputed.items():
        assert torch.equal(selective[name], gradient), name


def test_a_model_without_such_experts_is_refused(model_folder: Make) -> None:
    with pytest.raises(ModelError, match="gradient_checkpointing: selective .*LlamaForCausalLM"):
        build(model_folder("llama"), "selective", is_full=False)
