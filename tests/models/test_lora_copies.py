"""Low-rank pairs are copied once for a layer in the type of its products, and never stale."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models.build import BuiltModel, build_model
from surefoot.models.lora import LoraSettings, is_lora
from surefoot.models.lora_copies import COPIES
from tests.models.architectures import tiny_model
from tests.support.batches import LENGTHS, batch
from tests.support.processes import run_program
from tests.support.stored_weights import loss_and_gradients, set_lora, stored_in

CPU = torch.device("cpu")
PROGRAM = Path(__file__).with_name("stored_ranks.py")


class Casts(TorchDispatchMode):
    """Counter of casts of low-rank parameters, and of copies of many."""

    def __init__(self, built: BuiltModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        pairs = (parameter for name, parameter in built.model.named_parameters() if is_lora(name))
        self._storages = {pair.untyped_storage().data_ptr() for pair in pairs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_foreach_copy_" or (name == "_to_copy" and args[0].untyped_storage().data_ptr() in self._storages):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def build(folder: Path, dtype: torch.dtype, *, checkpointing: bool = False) -> BuiltModel:
    lora = LoraSettings(rank=4, alpha=6.0, targets=("attention", "experts"))
    return build_model(folder, lora=lora, device=CPU, dtype=dtype, gradient_checkpointing=checkpointing)


def run(objective: SftObjective) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a batch, and the gradients."""
    torch.manual_seed(1)  # of the batch
    tokens = sum(LENGTHS)
    objective.model.zero_grad()
    loss = objective.loss(batch(), BatchTotals(tokens, tokens - 2, float(tokens - 2))).total
    loss.backward()
    gradients = {name: p.grad for name, p in objective.model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("kind", ["qwen2_moe", "llama4_text"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_pair_is_cast_alone(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    """The experts of Llama 4 are put together from single products."""
    tiny_model(kind).save_pretrained(tmp_path)
    built = build(tmp_path, torch.bfloat16, checkpointing=checkpointing)
    objective = SftObjective(built, 0.0)
    with Casts(built) as casts:
        run(objective)
    layers = built.model.config.get_text_config().num_hidden_layers
    assert casts.counts == {"_foreach_copy_": layers * (2 if checkpointing else 1)}
    assert not any(COPIES in vars(module) for module in built.model.modules()), "nothing is left of a forward"


def test_a_pair_that_has_the_type_of_the_products_is_not_copied(model_folder: Callable[[str], Path]) -> None:
    built = build(model_folder("qwen2_moe"), torch.float32)
    assert built.pair_copies is None
    objective = SftObjective(built, 0.0)
    with Casts(built) as casts:
        run(objective)
    assert not casts.counts


def test_each_forward_takes_the_newest_values(model_folder: Callable[[str], Path]) -> None:
    built = build(model_folder("qwen2_moe"), torch.bfloat16, checkpointing=True)
    objective = SftObjective(built, 0.0)
    before, _ = run(objective)
    set_lora(built)
    after, gradients = run(objective)
    assert built.pair_copies is not None
    built.pair_copies.remove()
    alone, wanted = run(objective)  # each layer casts its own
    assert before != after == alone
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.long
@pytest.mark.parametrize(("zero_stage", "expert_parallel"), [(2, 1), (3, 1), (3, 2)])
def test_ranks_copy_what_they_have_gathered(
    zero_stage: int, expert_parallel: int, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("mixtral")
    run_program(PROGRAM, folder, "int8", zero_stage, expert_parallel, tmp_path / "out.safetensors", "bfloat16")
    of_ranks = load_file(tmp_path / "out.safetensors")
    built = build_model(folder, lora=stored_in("int8"), device=CPU, dtype=torch.bfloat16)
    loss, gradients = loss_and_gradients(built)
    assert of_ranks["loss"].item() == pytest.approx(loss, rel=1e-3)
    for name, gradient in gradients.items():
        difference = (of_ranks[name] - 2 * gradient).norm() / (2 * gradient).norm()
        assert difference < 0.05, name
