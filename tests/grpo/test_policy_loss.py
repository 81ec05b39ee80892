"""The loss of tokens, worked out by hand, and its gradient against TRL's trainer."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from surefoot.config import load_config
from surefoot.errors import ConfigError
from surefoot.methods.grpo.batch import CompletionBatch, Trajectory, collate_completions
from surefoot.methods.grpo.loss import PolicyLoss

PROMPT = [5, 6, 7]
GRPO = {"model": "m", "dataset": "d", "output_dir": "o", "method": "grpo", "reward_funcs": ["exact_match"]}


def trajectory(ids: list[int], advantage: float, **changes: Any) -> Trajectory:
    defaults: dict[str, Any] = {"rollout_logprobs": [-1.0] * len(ids), "weight": 1.0, "place": "x:1"}
    return Trajectory(prompt=PROMPT, ids=ids, advantage=advantage, **{**defaults, **changes})


def batch_of(*trajectories: Trajectory) -> CompletionBatch:
    return collate_completions(trajectories, share_prompts=True)


def losses(
    loss_type: str, logprobs: list[float], batch: CompletionBatch, **changes: Any
) -> tuple[list[float], list[float]]:
    """(losses, gradient of their sum)."""
    options = {
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "importance_correction": "none",
        "importance_cap": 2.0,
    }
    at = torch.tensor(logprobs, requires_grad=True)
    found, _ = PolicyLoss(loss_type, **{**options, **changes})(at, batch)
    found.sum().backward()
    assert at.grad is not None
    return found.tolist(), at.grad.tolist()


def test_an_engine_whose_logprobs_are_of_fewer_tokens_is_not_compared() -> None:
    batch = batch_of(trajectory([5, 6, 7], 1.0, rollout_logprobs=[0.0, -0.1, -3.0]))
    knows = PolicyLoss("dapo", 0.2, 0.2, 0.0, "none", 2.0)
    found, measured = knows(torch.tensor([-1.0, -1.0, -1.0]), batch)
    cut, less = replace(knows, knows_rollout_logprobs=False)(torch.tensor([-1.0, -1.0, -1.0]), batch)
    assert torch.equal(found, cut)
    assert set(measured) - set(less) == {"importance_ratio", "logprob_difference"}


def test_the_first_step_on_completions_is_the_policy_gradient() -> None:
    batch = batch_of(trajectory([1, 2], 2.0), trajectory([3], -1.0))
    for loss_type in ("grpo", "dapo", "dr_grpo", "bnpo", "gspo"):
        found, gradient = losses(loss_type, [-0.5, -0.7, -0.1], batch)
        assert found == [-2.0, -2.0, 1.0]
        assert gradient == pytest.approx([-2.0, -2.0, 1.0])
    found, gradient = losses("cispo", [-0.5, -0.7, -0.1], batch, epsilon_high=5.0)
    assert found == pytest.approx([1.0, 1.4, -0.1])
    assert gradient == [-2.0, -2.0, 1.0]


def test_ratios_of_tokens_are_clipped_on_the_side_that_the_advantage_says() -> None:
    old = [math.log(0.5)] * 4
    logprobs = [math.log(p) for p in (0.5 * 1.1, 0.5 * 1.5, 0.5 * 0.9, 0.5 * 0.5)]
    better = batch_of(trajectory([1, 2, 3, 4], 1.0, old_logprobs=old))
    found, gradient = losses("dapo", logprobs, better)
    assert found == pytest.approx([-1.1, -1.28, -0.9, -0.5])
    assert gradient == pytest.approx([-1.1, 0.0, -0.9, -0.5])
    worse = batch_of(trajectory([1, 2, 3, 4], -1.0, old_logprobs=old))
    found, gradient = losses("grpo", logprobs, worse)
    assert found == pytest.approx([1.1, 1.5, 0.9, 0.8])
    assert gradient == pytest.approx([1.1, 1.5, 0.9, 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    old = [math.log(0.1), math.log(0.5)]
    logprobs = [math.log(0.8), math.log(0.25)]  # ratios 8 and 0.5
    found, gradient = losses("cispo", logprobs, batch_of(trajectory([1, 2], 2.0, old_logprobs=old)), epsilon_high=5.0)
    assert gradient == pytest.approx([-5.0 * 2.0, -0.5 * 2.0])
    assert found == pytest.approx([-10.0 * math.log(0.8), -1.0 * math.log(0.25)])


def test_gspo_takes_the_geometric_mean_over_the_completion() -> None:
    old = [math.log(0.5), math.log(0.5)]
    logprobs = [math.log(0.5 * 1.44), math.log(0.5)]  # ratios 1.44 and 1: their geometric mean is 1.2
    found, gradient = losses("gspo", logprobs, batch_of(trajectory([1, 2], 1.0, old_logprobs=old)))
    assert found == pytest.approx([-1.2, -1.2])
    assert gradient == pytest.approx([-1.2, -1.2])  # each of the two losses depends on both, by a half
    found, gradient = losses("gspo", logprobs, batch_of(trajectory([1, 2], 1.0, old_logprobs=old)), epsilon_high=0.1)
    assert found == pytest.approx([-1.1, -1.1])
    assert gradient == [0.0, 0.0]


def test_importance_is_truncated_or_masked() -> None:
    rollout = [math.log(p) for p in (0.5, 0.25, 0.1)]
    batch = batch_of(trajectory([1, 2, 3], 1.0, rollout_logprobs=rollout, old_logprobs=[math.log(0.5)] * 3))
    at = [math.log(0.5)] * 3  # the trainer's probability over the engine's: 1, 2, 5
    assert losses("dapo", at, batch)[0] == pytest.approx([-1, -1, -1])
    assert losses("dapo", at, batch, importance_correction="truncate")[0] == pytest.approx([-1, -2, -2])
    assert losses("dapo", at, batch, importance_correction="mask")[0] == pytest.approx([-1, -2, 0])
    engine = [math.log(p) for p in (0.5, 0.75, 0.9)]
    batch = batch_of(trajectory([1, 2, 3], 1.0, rollout_logprobs=engine, old_logprobs=[math.log(0.3)] * 3))
    at = [math.log(0.3)] * 3  # 0.6, 0.4, 1/3
    floor = {"importance_floor": 0.5, "importance_cap": 5.0}
    assert losses("dapo", at, batch, importance_correction="truncate", **floor)[0] == pytest.approx([-0.6, -0.5, -0.5])
    assert losses("dapo", at, batch, importance_correction="mask", **floor)[0] == pytest.approx([-0.6, 0, 0])
    assert losses("dapo", at, batch, importance_correction="sequence_mask", **floor)[0] == pytest.approx([0, 0, 0])


def test_importance_of_sequences_is_the_product_of_their_tokens() -> None:
    def completion(*rollout: float) -> Trajectory:
        half = [math.log(0.5)] * len(rollout)
        return trajectory([1] * len(rollout), 1.0, rollout_logprobs=[math.log(p) for p in rollout], old_logprobs=half)

    batch = batch_of(completion(0.5, 0.25), completion(0.1, 0.5, 0.9))
    at = [math.log(0.5)] * 5  # 1 x 2, and 5 x 1 x 5/9
    truncated, masked = (
        losses("dapo", at, batch, importance_correction=f"sequence_{what}", importance_cap=2.5)[0]
        for what in ("truncate", "mask")
    )
    assert truncated == pytest.approx([-2, -2, -2.5, -2.5, -2.5])
    assert masked == pytest.approx([-2, -2, 0, 0, 0])


def test_the_divergence_is_weighed_by_the_ratio() -> None:
    old, reference = [math.log(0.5)], [math.log(0.3)]
    batch = batch_of(trajectory([1], 0.0, old_logprobs=old, reference_logprobs=reference))
    found, gradient = losses("dapo", [math.log(0.6)], batch, beta=1.0)
    # r = 1.2 and reference / policy = 1/2: r (1/2 + log 2 - 1). Its gradient: r (1/2 + log 2 - 1) + r (1 - 1/2).
    assert found == pytest.approx([1.2 * (math.log(2) - 0.5)])
    assert gradient == pytest.approx([1.2 * math.log(2)])


def test_the_divergence_from_the_reference_is_never_negative() -> None:
    reference = [math.log(0.4), math.log(0.2)]
    batch = batch_of(trajectory([1, 2], 0.0, reference_logprobs=reference))
    found, gradient = losses("dapo", [math.log(0.4), math.log(0.4)], batch, beta=0.5)
    # reference / policy = 1 and 1/2: the divergence is 0 and 1/2 + log 2 - 1; its gradient that plus 1 - 1/2.
    assert found == pytest.approx([0.0, 0.5 * (math.log(2) - 0.5)])
    assert gradient == pytest.approx([0.0, 0.5 * math.log(2)])


@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "cispo"])
def test_a_masked_token_that_has_become_impossible_touches_nothing(loss_type: str) -> None:
    masked = trajectory([2], 0.0, weight=0.0, old_logprobs=[-101.0], reference_logprobs=[200.0])
    batch = batch_of(trajectory([1], 1.0, old_logprobs=[-0.5], reference_logprobs=[-0.5]), masked)
    found, gradient = losses(loss_type, [-0.5, -0.1], batch, beta=0.1, importance_correction="truncate")
    assert all(math.isfinite(value) for value in (*found, *gradient))
    assert gradient[0] < 0
    assert gradient[1] == 0


def test_an_infinite_importance_is_masked() -> None:
    batch = batch_of(trajectory([1], 1.0, rollout_logprobs=[-1e4], old_logprobs=[-0.5]))
    assert losses("dapo", [-0.5], batch, importance_correction="mask")[0] == [0.0]


def test_clips_are_those_of_each_paper_where_none_is_set() -> None:
    def clips(**settings: Any) -> tuple[float, float]:
        loss = PolicyLoss.of(load_config(None, (), {**GRPO, **settings}).run)
        return loss.epsilon, loss.epsilon_high

    assert clips() == (0.2, 0.2)
    assert clips(epsilon=0.1) == (0.1, 0.1)
    assert clips(epsilon=0.1, epsilon_high=0.3) == (0.1, 0.3)
    assert clips(loss_type="gspo") == (3e-4, 4e-4)
    assert clips(loss_type="gspo", epsilon=0.1) == (0.1, 0.1)
    assert clips(loss_type="cispo")[1] == 5.0
    assert clips(loss_type="cispo", epsilon_high=2.0)[1] == 2.0
    with pytest.raises(ConfigError, match="epsilon_high=0.28 .*loss_type=cispo"):
        clips(loss_type="cispo", epsilon_high=0.28)
    with pytest.raises(ConfigError, match="epsilon=0.1 .*loss_type=cispo"):
        clips(loss_type="cispo", epsilon=0.1)
