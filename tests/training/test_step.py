"""One optimizer step against plain maths, and the loss in chunks."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.data.collate import MicroBatch
from surefoot.distributed.process_group import SINGLE_PROCESS
from surefoot.methods.base import BatchTotals, LossTerms, TrainContext
from surefoot.training.step import NotFinite, train_step


class Quadratic:
    """The loss w . x summed over the batch's tokens, over the step's trained tokens."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.begun: list[int] = []

    def begin_step(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        self.begun.append(len(batches))
        return batches

    def end_step(self) -> None: ...

    def loss(self, batch: MicroBatch, totals: BatchTotals) -> LossTerms:
        return LossTerms((self.weight * batch.ids.float().sum()).sum() / totals.trained)


def batch(*ids: int) -> MicroBatch:
    tokens = torch.tensor([ids])
    return MicroBatch(
        tokens, tokens, [len(ids)], torch.tensor([0, len(ids)]), tokens[0], tokens[0], None, ("x:1",), tokens[0]
    )


def step(weight: nn.Parameter, batches: list[MicroBatch], **changes: float) -> tuple[float, float]:
    optimizer = torch.optim.SGD([weight], lr=0.0)
    options = {"learning_rate": 1.0, "max_grad_norm": 0.0, **changes}
    totals = BatchTotals(
        *(sum(getattr(b, name) for b in batches) for name in ("num_tokens", "num_trained", "trained_weight"))
    )
    no_model: Any = None  # a step works through the objective
    train_context = TrainContext(
        no_model, {"weight": weight}, optimizer, Quadratic(weight), SINGLE_PROCESS, torch.device("cpu")
    )
    result = train_step(batches, totals, train_context, **options)
    return result.loss, result.grad_norm


def test_micro_batches_are_normalised_by_the_whole_step() -> None:
    for batches in ([batch(1, 2, 3)], [batch(1), batch(2, 3)]):
        weight = nn.Parameter(torch.tensor([1.0]))
        assert step(weight, batches) == (2.0, 2.0)
        assert weight.item() == -1.0
        assert weight.grad is None


def test_gradients_are_clipped_to_the_norm() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    assert step(weight, [batch(2)], max_grad_norm=1.0)[1] == pytest.approx(2.0 * 2**0.5)
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) - 0.5**0.5, atol=1e-5, rtol=0)


def test_a_loss_or_gradient_that_is_not_finite_leaves_the_weights_alone() -> None:
    weight = nn.Parameter(torch.tensor([float("inf")]))
    with pytest.raises(NotFinite) as caught:
        step(weight, [batch(1)])
    assert caught.value.what == "loss"
    weight = nn.Parameter(torch.tensor([1e38]))
    weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NotFinite) as caught:
        step(weight, [batch(1)])
    assert (caught.value.what, caught.value.parameters) == ("gradient", ["weight"])
    assert weight.item() == pytest.approx(1e38)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_gradient_of_28_million_elements_is_exact(dtype: torch.dtype) -> None:
    gradient = torch.randn(28_000_000, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(dtype)
    exact = sum(float(part.double().square().sum()) for part in gradient.split(1 << 20)) ** 0.5
    for shape in ((-1,), (7000, 4000)):
        weight = nn.Parameter(torch.zeros(28_000_000, dtype=dtype).view(shape))
        weight.register_hook(lambda _: gradient.view(weight.shape))  # noqa: B023 - called in this pass
        assert step(weight, [batch(1)])[1] == pytest.approx(exact, rel=1e-9)


@pytest.mark.long
def test_the_norm_is_taken_without_a_copy_of_the_gradient() -> None:
    """In a process of its own, because the largest use of memory so far cannot be reset."""
    probe = (
        "import resource, torch\n"
        "from surefoot.models.dtensor_blocks import block_of\n"
        "from surefoot.training.step import _sum_of_squares\n"
        "blocks = [block_of(torch.ones(40_000_000, dtype=torch.bfloat16))]\n"
        "_sum_of_squares([block_of(torch.ones(1000))], torch.device('cpu'))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert float(_sum_of_squares(blocks, torch.device('cpu'))) == 40_000_000\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40_000  # KiB; the gradient has 78,000


@pytest.mark.parametrize(("value", "is_finite"), [(1e18, True), (1e20, False), (float("inf"), False)])
def test_a_gradient_whose_squares_are_too_large_for_float32_is_not_finite(value: float, is_finite: bool) -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    weight.register_hook(lambda gradient: torch.full_like(gradient, value))
    if is_finite:
        assert step(weight, [batch(1)], max_grad_norm=1.0)[1] == pytest.approx(value)
        assert weight.item() == pytest.approx(0.0, abs=1e-6)
        return
    with pytest.raises(NotFinite) as caught:
        step(weight, [batch(1)], max_grad_norm=1.0)
    assert (caught.value.what, caught.value.value, caught.value.is_here) == ("gradient", float("inf"), True)
    assert weight.item() == 1.0
