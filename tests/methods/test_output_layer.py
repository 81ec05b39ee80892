"""Likelihoods in chunks and their gradients are those of plain cross-entropy over all logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.methods import output_layer
from surefoot.methods.output_layer import sum_nll, token_logprobs

TOKENS, HIDDEN, VOCABULARY = 23, 16, 50
TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_TOKENS", 7)


def plain_nll(hidden: Tensor, head: nn.Linear, targets: Tensor, weights: Tensor | None) -> Tensor:
    losses = F.cross_entropy(head(hidden).float(), targets, reduction="none")
    return losses.sum() if weights is None else losses @ weights


def with_gradients(value: Tensor, hidden: Tensor, head: nn.Linear) -> list[Tensor]:
    """Return a value and its gradients by the states and the trained parameters."""
    trained = [parameter for parameter in (hidden, *head.parameters()) if parameter.requires_grad]
    return [value.detach(), *torch.autograd.grad(value * 0.5, trained)]


def make(bias: bool, *, is_frozen: bool = False, count: int = TOKENS) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias).requires_grad_(not is_frozen)
    return torch.randn(count, HIDDEN).requires_grad_(), head, torch.randint(0, VOCABULARY, (count,))


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [TOKENS, 7, 0])
def test_the_loss_in_chunks_is_the_loss(bias: bool, is_frozen: bool, has_weights: bool, count: int) -> None:
    hidden, head, targets = make(bias, is_frozen=is_frozen, count=count)
    weights = torch.linspace(0.1, 2.0, count) if has_weights else None
    found = with_gradients(sum_nll(hidden, head, targets, weights), hidden, head)
    wanted = with_gradients(plain_nll(hidden, head, targets, weights), hidden, head)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(sum_nll(hidden, head, targets, weights), wanted[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("banned", [[], [3, 8]])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_logprobs_in_chunks_are_those_of_all_logits(bias: bool, is_frozen: bool, banned: list[int]) -> None:
    hidden, head, targets = make(bias, is_frozen=is_frozen)
    targets[torch.isin(targets, torch.tensor(banned))] = 0
    options: dict[str, Any] = {"banned": torch.tensor(banned, dtype=torch.int64), "temperature": TEMPERATURE}
    logits = head(hidden) / TEMPERATURE
    logits[:, banned] = -1e30
    scores = torch.log_softmax(logits, -1)
    factors = torch.linspace(-1.0, 1.0, TOKENS)
    found, entropies = token_logprobs(hidden, head, targets, **options)
    assert not entropies.requires_grad
    torch.testing.assert_close(entropies, -(scores.exp() * scores).sum(-1), atol=1e-5, rtol=1e-5)
    wanted = scores.gather(1, targets[:, None])[:, 0]
    for ours, theirs in zip(
        with_gradients(found @ factors, hidden, head), with_gradients(wanted @ factors, hidden, head), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_loss_of_a_bfloat16_model_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_TOKENS", 512)
    torch.manual_seed(0)
    head = nn.Linear(8, 64).bfloat16()
    hidden, targets = torch.randn(6000, 8).bfloat16(), torch.randint(0, 64, (6000,))
    torch.testing.assert_close(
        sum_nll(hidden, head, targets), plain_nll(hidden, head, targets, None), atol=0, rtol=1e-5
    )


def test_weighted_losses_are_summed_in_float32_under_autocast() -> None:
    hidden, head, targets = make(bias=False, count=600)
    weights = torch.linspace(0.1, 2.0, 600)
    with torch.autocast("cpu", torch.bfloat16):
        found = sum_nll(hidden, head, targets, weights)
        losses = F.cross_entropy(head(hidden).float(), targets, reduction="none")
    torch.testing.assert_close(found, (losses * weights).sum(), atol=0, rtol=1e-5)


@pytest.mark.parametrize("function", ["nll", "logprobs"])
def test_gradients_of_a_weight_are_summed_over_chunks_in_float32(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Products in bfloat16: the error is that of one rounding, however many chunks there are."""
    torch.manual_seed(0)
    head = nn.Linear(32, 64, bias=False)
    hidden, targets = torch.randn(4096, 32).abs(), torch.randint(0, 64, (4096,))

    def gradient(chunk: int, *, is_mixed: bool) -> Tensor:
        monkeypatch.setattr(output_layer, "CHUNK_TOKENS", chunk)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            if function == "nll":
                value = sum_nll(hidden, head, targets)
            else:
                value = token_logprobs(hidden, head, targets, banned=targets[:0], temperature=1.0)[0].sum()
        return torch.autograd.grad(value, head.weight)[0]

    def error(chunk: int) -> float:
        difference = gradient(chunk, is_mixed=True) - exact
        return float(difference.norm() / exact.norm())

    exact = gradient(4096, is_mixed=False)
    assert gradient(16, is_mixed=True).dtype == torch.float32
    assert error(16) <= error(4096)


def test_a_loss_has_one_backward() -> None:
    hidden, head, targets = make(bias=False)
    loss = sum_nll(hidden, head, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()
