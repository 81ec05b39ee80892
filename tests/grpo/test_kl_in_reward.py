"""The divergence from the reference as a part of rewards: taken before advantages are computed, and once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.config import load_config
from surefoot.distributed.process_group import World
from surefoot.methods.base import BatchTotals
from surefoot.methods.grpo.advantage import advantages
from surefoot.methods.grpo.batch import CompletionBatch, Trajectory, collate_completions
from surefoot.methods.grpo.loss import GrpoObjective
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.models.build import build_model
from surefoot.models.lora import LoraSettings

SETTINGS = ["model=m", "dataset=d", "output_dir=o", "method=grpo", "reward_funcs=[length]", "beta=0.5",
            "kl_in_reward=true"]  # fmt: skip
REWARDS = (1.0, 0.0, None, 2.0, 0.5, 0.25)
"""Of two groups of three; the third completion is masked."""


def make_batches() -> list[CompletionBatch]:
    completions = []
    for number, reward in enumerate(REWARDS):
        group, length = number // 3, 1 + number % 3
        ids, logprobs = [9 + number, 11, 12][:length], [-1.0, -2.0, -3.0][:length]
        weight = 0.0 if reward is None else 1.0
        made = Trajectory([5, 6, 7 + group], ids, logprobs, 0.0, weight, f"x:{number}", group=group, reward=reward)
        completions.append(made)
    return [collate_completions(part, share_prompts=False) for part in (completions[:4], completions[4:])]


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_beta_times_the_divergence_is_taken_from_rewards(model_folder: Callable[[str], Path], estimator: str) -> None:
    config = load_config(None, [*SETTINGS, f"advantage_estimator={estimator}"]).run
    assert isinstance(config, GrpoConfig)
    lora = LoraSettings(4, 8.0, targets=("attention",))
    built = build_model(model_folder("llama"), lora=lora, device=torch.device("cpu"), dtype=torch.float32)
    objective = GrpoObjective(built, config)
    ready = [batch for batch in objective.begin_step(make_batches()) if isinstance(batch, CompletionBatch)]
    rewards: list[float] = []
    for batch in ready:
        assert batch.reference_logprobs is not None
        distance = batch.rollout_logprobs - batch.reference_logprobs
        for number, one in enumerate(batch.trajectories):
            divergence = float(distance[batch.answer_of == number].sum())
            rewards.append(float("nan") if one.reward is None else one.reward - 0.5 * divergence)
    expected = advantages([rewards[:3], rewards[3:]], "group", estimator)  # type: ignore[arg-type]
    found = [one.advantage for batch in ready for one in batch.trajectories]
    assert found[2] == 0.0, "masked"
    flat = [value for group in expected for value in group]
    assert found[:2] + found[3:] == pytest.approx(flat[:2] + flat[3:], rel=1e-5)
    for batch in ready:
        each = torch.tensor([one.advantage for one in batch.trajectories])
        torch.testing.assert_close(batch.advantages, each[batch.answer_of])
    kept = [one.advantage for batch in ready for one in batch.trajectories]
    again = [collate_completions(batch.trajectories, share_prompts=False) for batch in ready]
    for batch in again:
        for one in batch.trajectories:
            one.reference_logprobs = [-1.0] * len(one.ids)
    objective.begin_step([collate_completions(batch.trajectories, share_prompts=False) for batch in again])
    assert [one.advantage for batch in again for one in batch.trajectories] == kept, "a further step on them"


@pytest.mark.slow
def test_the_loss_has_no_divergence_then(model_folder: Callable[[str], Path]) -> None:
    built = build_model(model_folder("llama"), lora=None, device=torch.device("cpu"), dtype=torch.float32)
    losses = []
    for words in (SETTINGS, [word for word in SETTINGS if not word.startswith(("beta", "kl"))]):
        config = load_config(None, words).run
        assert isinstance(config, GrpoConfig)
        objective = GrpoObjective(built, config, World())
        (batch, _) = make_batches()
        for one in batch.trajectories:
            one.reference_logprobs, one.advantage = [-4.0] * len(one.ids), 1.0
        batch = collate_completions(batch.trajectories, share_prompts=False)
        (ready,) = objective.begin_step([batch])
        losses.append(float(objective.loss(ready, BatchTotals(0, 0, 0.0)).total.detach()))
    assert losses[0] == pytest.approx(losses[1])
