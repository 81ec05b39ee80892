"""Losses that jump and routers that collapse, from what ranks write down."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.diagnostics.monitor.explain import explain
from surefoot.diagnostics.rules.numerics import Numbers
from surefoot.events import ExpertRanksUsed
from surefoot.findings import Finding
from surefoot.training.expert_load import STEPS, ExpertLoadCounter
from tests.support.models import make_model


def found(losses: list[float], norms: list[float] | None = None) -> list[Finding]:
    numbers = Numbers()
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1):
        numbers.add("step", step, {"loss": loss, "grad_norm": norm})
    return numbers.findings()


def falling(steps: int) -> list[float]:
    return [3.0 - 0.02 * step + 0.3 * math.sin(step) for step in range(steps)]


def with_rates(losses: list[float], norms: list[float], rates: list[float]) -> list[str]:
    numbers = Numbers()
    for step, (loss, norm, rate) in enumerate(zip(losses, norms, rates, strict=True), 1):
        numbers.add("learning rate", step, {"learning_rate": rate})
        numbers.add("step", step, {"loss": loss, "grad_norm": norm})
    return [finding.code for finding in numbers.findings()]


RISING_RATE = [1e-6 * step for step in range(60)]
RISING_NORMS = [1.0 * 1.05**step for step in range(60)]
FLAT = [2.0 + 0.01 * step for step in range(60)]


def test_gradients_that_grow_with_the_learning_rate_are_found() -> None:
    assert with_rates(FLAT, RISING_NORMS, RISING_RATE) == ["SF406"]


@pytest.mark.parametrize(
    ("losses", "norms", "rates"),
    [
        (falling(60), RISING_NORMS, RISING_RATE),
        (FLAT, [1.0 + 0.05 * step for step in range(60)], RISING_RATE),
        (FLAT, RISING_NORMS, RISING_RATE[::-1]),
        ([2.0 + random.Random(step).gauss(0, 0.01) for step in range(60)], RISING_NORMS, RISING_RATE),
        (FLAT, [1.0] * 40 + [8.0] * 20, RISING_RATE),
    ],
    ids=["the loss falls", "a little", "the rate falls", "the loss is noise", "at once"],
)
def test_other_gradients_that_grow(losses: list[float], norms: list[float], rates: list[float]) -> None:
    assert with_rates(losses, norms, rates) == []


JUMPED = [*falling(60), 6.0, 6.5, 6.2, 6.1, 6.3, 6.4, 6.5]
NORMS = [1.0] * 59 + [40.0] + [9.0] * 7
"""Of gradients that grew when the loss did."""


def test_a_loss_that_jumps_and_stays_is_found_once_with_its_step() -> None:
    (finding,) = found(JUMPED, NORMS)
    assert finding.code == "SF403"
    assert finding.evidence["step"] == 61
    assert " 40 times " in finding.cause
    assert (finding.evidence["grad_norm_before"], finding.evidence["grad_norm_at_the_jump"]) == (1.0, 40.0)


@pytest.mark.parametrize(
    "losses",
    [
        falling(100),
        [*falling(60), 9.0, 9.0, 9.0, 9.0, *falling(100)[64:]],  # four steps, and back
        [*falling(60), 2.9, 3.0, 2.9, 3.0, 3.0, 2.9],  # a little higher
        [0.0009] * 60 + [0.009] * 7,  # ten times nothing
        [math.nan] * 67,  # a trainer that has logged none
        falling(20) + [9.0] * 10,  # too early to know what is usual
    ],
)
def test_what_is_no_jump(losses: list[float]) -> None:
    assert found(losses, (NORMS + [9.0] * 40)[: len(losses)]) == []


@pytest.mark.parametrize(
    ("losses", "norms", "step"),
    [
        ([3.4, 61.0, 40.0, 12.0, 6.0, 4.5], [1.0, 90.0, 30.0, 9.0, 5.0, 3.0], 2),
        ([3.4, 3.3, 5.5, 6.0, 6.5, 7.0], [1.0, 2.0, 3.5, 2.0, 2.0, 2.0], 5),
        ([0.4, 0.4, 1.5, 1.6, 1.7, 1.8], [1.0, 2.0, 3.5, 2.0, 2.0, 2.0], 5),
    ],
)
def test_a_loss_that_rises_above_its_first_value_early_is_found(
    losses: list[float], norms: list[float], step: int
) -> None:
    (finding,) = found(losses, norms)
    assert (finding.code, finding.evidence["step"]) == ("SF407", step)


@pytest.mark.parametrize(
    ("losses", "norms"),
    [
        ([0.5, 2.0, 2.2, 2.1, 0.6], [1.0] * 5),  # harder rows
        ([3.4, 5.5, 5.5, 3.4, 5.5, 5.5, 3.3], [1.0, 5.0] * 3 + [1.0]),  # two in a row
        ([2.0, 2.9, 2.9, 2.9, 2.9], [1.0, 9.0, 9.0, 9.0, 9.0]),  # by less than a nat
        ([0.001, 1.2, 1.3, 1.4, 1.5], [0.1, 2.0, 2.0, 2.0, 2.0]),  # an objective of GRPO
        ([10.9, 10.8, 13.1, 10.9, 10.7], [1.0] * 5),  # one hard step of a model that knows nothing
    ],
)
def test_what_is_no_early_rise(losses: list[float], norms: list[float]) -> None:
    assert found(losses, norms) == []


def test_gradients_that_are_exactly_zero_are_found() -> None:
    (finding,) = found([3.0] * 3 + [11.0, 11.1, 11.0, 11.2, 11.0], [1.0] * 3 + [0.0] * 5)
    assert (finding.code, finding.evidence["step"]) == ("SF408", 8)


@pytest.mark.parametrize(
    ("losses", "norms"),
    [
        ([3.0] * 9, [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        ([0.0] * 9, [0.0] * 9),  # no completion is better than another, or all rows are known by heart
    ],
)
def test_gradients_that_may_be_zero(losses: list[float], norms: list[float]) -> None:
    assert found(losses, norms) == []


def test_a_loss_that_does_not_move_is_found() -> None:
    (finding,) = found([3.25] * 50)
    assert (finding.code, finding.evidence["step"]) == ("SF409", 50)
    assert found([3.25] * 49) == []
    assert found([3.25 - 1e-5 * step for step in range(60)]) == []
    assert found([1e-5] * 60) == []


def evaluated(evaluations: list[float], *, falls: bool = True, is_loss: bool = True) -> list[str]:
    """Return the codes found in a run that is evaluated after every two steps."""
    numbers = Numbers()
    for number, loss in enumerate(evaluations):
        for step in (2 * number + 1, 2 * number + 2):
            numbers.add("step", step, {"loss": 2.0 - 0.02 * step * falls, "grad_norm": 1.0})
        numbers.add("evaluated", 2 * number + 2, {"measured": loss, "is_loss": float(is_loss)})
    return [finding.code for finding in numbers.findings()]


def test_an_evaluation_loss_that_rises_while_training_falls_is_found() -> None:
    assert evaluated([2.0, 1.5, 1.55, 1.6, 1.7]) == ["SF410"]


@pytest.mark.parametrize(
    "evaluations",
    [
        [2.0, 1.5, 1.55, 1.7],  # two
        [2.0, 1.5, 1.55, 1.6, 1.62],  # by less than a tenth
        [2.0, 1.5, 1.55, 1.7, 1.65, 1.75],
        [2.0, 1.8, 1.7, 1.6, 1.5],
        [math.nan] * 6,
    ],
)
def test_what_is_no_overfitting(evaluations: list[float]) -> None:
    assert evaluated(evaluations) == []


def test_rewards_that_rise_and_losses_that_rise_together_are_no_overfitting() -> None:
    assert evaluated([2.0, 1.5, 1.55, 1.6, 1.7], is_loss=False) == []
    assert evaluated([2.0, 1.5, 1.55, 1.6, 1.7], falls=False) == []


def test_harder_data_are_no_jump() -> None:
    assert found(JUMPED) == []


def test_a_trainer_that_logs_now_and_then_is_heard_only_then() -> None:
    """The same value again and again would look like many steps."""
    random.seed(3)
    losses = [random.gauss(2.0, 0.6) if step % 10 == 0 else math.nan for step in range(5000)]
    assert found(losses, [random.uniform(0.3, 4.0) for _ in losses]) == []


def counts(steps: int, rows: list[list[int]], tokens: int) -> list[Any]:
    use = ExpertLoadCounter(0)
    return [one for step in range(1, steps + 1) for one in use.add(step, torch.tensor(rows), tokens)]


def test_use_of_experts_is_added_up_over_many_steps() -> None:
    (used,) = counts(STEPS + 3, [[8, 8, 8, 8], [0, 16, 16, 0]], 16)
    assert (used.step, used.layer, used.silent) == (STEPS, 1, 0)
    assert (used.share, used.even_share, used.rows) == (1.0, 0.5, 8.0 * STEPS)


def test_what_ranks_that_share_experts_get_is_told_also_where_routers_are_frozen() -> None:
    use = ExpertLoadCounter(0, trains_routers=False, expert_parallel_size=2)
    said = [
        one for step in range(1, STEPS + 1) for one in use.add(step, torch.tensor([[8, 4, 2, 2], [1, 3, 4, 8]]), 16)
    ]
    assert said == [ExpertRanksUsed(0, STEPS, 1.5, 2)]  # of each layer the busiest rank is waited for
    alone = ExpertLoadCounter(0, trains_routers=False)
    assert [alone.add(step, torch.tensor([[9, 0]]), 9) for step in range(STEPS)] == [[]] * STEPS


@pytest.mark.parametrize(
    ("rows", "tokens", "codes"),
    [
        ([[100, 0, 0, 0, 0, 0, 0, 0]], 100, ["SF404"]),
        ([[100, 100, 0, 0, 0, 0, 0, 0]], 100, ["SF404"]),
        ([[100, 20, 15, 15, 15, 15, 10, 10]], 100, []),  # one that every token chooses is no collapse
        ([[100, 100, 99, 1]], 100, []),  # three of four
        ([[100, 0]], 100, ["SF404"]),
        ([[1, 0, 0, 0, 0, 0, 0, 0]], 1, []),  # hardly a token
    ],
)
def test_what_is_a_collapse(rows: list[list[int]], tokens: int, codes: list[str]) -> None:
    numbers = Numbers()
    for used in counts(STEPS, rows, tokens):
        values = {name: float(getattr(used, name)) for name in ("layer", "share", "even_share", "silent", "rows")}
        numbers.add("experts", used.step, values)
    assert [finding.code for finding in numbers.findings()] == codes


def test_an_expert_that_is_used_no_more_is_named_and_one_that_never_was_is_not() -> None:
    use, numbers = ExpertLoadCounter(0), Numbers()
    for step, rows in enumerate([[[50, 25, 20, 5, 0]]] * STEPS + [[[60, 40, 0, 0, 0]]] * STEPS, 1):
        for used in use.add(step, torch.tensor(rows), 100):
            values = {name: float(getattr(used, name)) for name in ("layer", "share", "even_share", "silent", "rows")}
            numbers.add("experts", used.step, values)
    (finding,) = numbers.findings()
    assert (finding.code, finding.evidence["experts_without_a_token"]) == ("SF405", 1)
    assert finding.evidence["step"] == 2 * STEPS


@pytest.mark.long
def test_routers_that_collapse_are_found_in_a_real_run_that_trains_them(
    settings: dict[str, Any], tmp_path: Path, tokenizer: Any
) -> None:
    model = make_model("mixtral", num_experts=8, top_k=1)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.zero_()  # all are equally good: the same one is always chosen
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    changes = {"model": str(tmp_path / "model"), "max_steps": STEPS, "save_steps": 0, "learning_rate": 0.0}

    trained = surefoot.train(settings, screen=False, **changes, target_modules=["attention", "router"]).run_folder
    findings = {finding.code: finding for finding in explain(trained).findings}
    assert findings["SF404"].evidence["layer"] == 1
    assert findings["SF404"].evidence["share"] == 1.0

    frozen = surefoot.train(settings, screen=False, **changes, output_dir=str(tmp_path / "frozen")).run_folder
    assert explain(frozen).findings == [], "routers that came like this are no fault of the run"


@pytest.mark.parametrize(("learning_rate", "codes"), [(1.0, ["SF407"]), (1e-2, [])])
def test_a_learning_rate_that_ruins_the_model_is_found_in_a_real_run(
    settings: dict[str, Any], model_folder: Any, learning_rate: float, codes: list[str]
) -> None:
    del settings["lora_rank"]
    changes = {"tuning": "full", "model": str(model_folder("mixtral")), "save_steps": 0, "max_steps": 20}
    run = surefoot.train(settings, screen=False, **changes, learning_rate=learning_rate).run_folder
    assert [finding.code for finding in explain(run).findings] == codes


def test_healthy_routers_are_no_finding(settings: dict[str, Any]) -> None:
    changes = {"max_steps": STEPS, "save_steps": 0, "target_modules": ["attention", "experts", "router"]}
    assert explain(surefoot.train(settings, screen=False, **changes).run_folder).findings == []
