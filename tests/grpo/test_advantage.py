"""Advantages, penalties and token weights against numbers worked out by hand."""

from math import isnan, nan, sqrt

import pytest

from surefoot.methods.grpo.advantage import advantages, has_learning_signal, overlong_penalty, token_weights

E = 1e-4


def test_rewards_are_compared_within_their_group() -> None:
    groups = [[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 2.0, 4.0]]
    # Means 0.25 and 3; deviations of samples sqrt(0.75 / 3) = 0.5 and sqrt(4 / 3).
    second = 1 / (sqrt(4 / 3) + E)
    assert advantages(groups, "group")[0] == pytest.approx([0.75 / (0.5 + E), *[-0.25 / (0.5 + E)] * 3])
    assert advantages(groups, "group")[1] == pytest.approx([-second, second, -second, second])
    assert advantages(groups, "none") == [pytest.approx([0.75, -0.25, -0.25, -0.25]), pytest.approx([-1, 1, -1, 1])]
    # All eight: mean 13/8, sum of squares 41 - 8 (13/8)^2 = 19.875, deviation sqrt(19.875 / 7).
    assert advantages(groups, "batch")[1] == pytest.approx([x / (sqrt(19.875 / 7) + E) for x in (-1, 1, -1, 1)])


def test_a_reward_may_be_compared_with_the_others_of_its_group() -> None:
    """TRL's RLOO: the baseline of 1 is the mean of 0, 0 and 0.5."""
    ((first, *_, last),) = advantages([[1.0, 0.0, 0.0, 0.5]], "none", "rloo")
    assert (first, last) == (pytest.approx(1 - 0.5 / 3), pytest.approx(0.5 - 1 / 3))
    ((first, _, last),) = advantages([[1.0, nan, 0.0]], "none", "rloo")
    assert (first, last) == (1.0, -1.0)
    assert advantages([[nan, 3.0]], "none", "rloo")[0][1] == 0.0


def test_the_deviation_may_be_that_of_the_differences_of_all_groups() -> None:
    """The means of the groups, 0.5 and 10, do not count: the differences are +-0.5 and +-1."""
    groups = [[1.0, 0.0], [9.0, 11.0]]
    deviation = sqrt((2 * 0.25 + 2 * 1) / 3) + E
    found = advantages(groups, "batch", "reinforce_plus_plus")
    assert found == [pytest.approx([0.5 / deviation, -0.5 / deviation]), pytest.approx([-1 / deviation, 1 / deviation])]
    assert advantages(groups, "group", "reinforce_plus_plus") == advantages(groups, "group")


def test_a_masked_completion_does_not_count_in_its_group() -> None:
    ((first, masked, last),) = advantages([[1.0, nan, 0.0]], "none")
    assert (first, last) == (0.5, -0.5)
    assert isnan(masked)
    assert advantages([[nan, 3.0]], "group")[0][1] == 0.0


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1.0, 1.0], False), ([1.0, 0.5], True), ([1.0, nan], False), ([nan, nan], False), ([nan, 1.0, 0.0], True)],
)
def test_a_group_has_spread_where_known_rewards_differ(rewards: list[float], expected: bool) -> None:
    assert has_learning_signal(rewards) is expected


def test_the_overlong_penalty_falls_over_the_last_tokens() -> None:
    assert [overlong_penalty(n, 100, 20) for n in (80, 81, 90, 100, 120)] == [0, -0.05, -0.5, -1, -1]
    assert overlong_penalty(100, 100, 0) == 0


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [1 / (2 * 3), 1 / (6 * 3), 0]),
        ("gspo", [1 / (2 * 3), 1 / (6 * 3), 0]),
        ("dapo", [1 / 8, 1 / 8, 0]),
        ("bnpo", [1 / 8, 1 / 8, 0]),
        ("cispo", [1 / 8, 1 / 8, 0]),
        ("dr_grpo", [1 / 30, 1 / 30, 0]),
    ],
)
def test_each_loss_type_weighs_tokens_in_its_own_way(loss_type: str, expected: list[float]) -> None:
    assert token_weights(loss_type, [2, 6, 0], 10) == pytest.approx(expected)


def test_a_step_of_masked_completions_weighs_nothing() -> None:
    assert token_weights("dapo", [0], 10) == [0.0]
