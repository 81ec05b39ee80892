"""The gradient of a step against TRL's GRPOTrainer, for the same completions."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from surefoot.distributed.parallel_dims import Layout
from surefoot.methods.base import BatchTotals
from surefoot.methods.grpo.advantage import token_weights
from surefoot.methods.grpo.batch import Trajectory, completion_batches
from surefoot.methods.grpo.loss import GrpoObjective
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.models.build import build_model

MAX_LENGTH = 9
ONE_RANK = Layout(size=1, zero_stage=0, dp_replicate=1, expert_parallel=1, offload=False)
TEMPERATURE = 0.7
TOLERANCE = 1e-5
LEFT_OUT = 2
"""The completion that is masked, as TRL masks those without an end."""
CLIPS: dict[str, dict[str, float]] = {
    "cispo": {"epsilon_high": 1.5},
    "sapo": {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5},
}
OWN_TRAINER = "rloo"
LOSSES = {
    loss: "grpo" if loss == "gspo" else loss
    for loss in get_args(GrpoConfig.model_fields["loss_type"].annotation)
    if loss != OWN_TRAINER
}
"""Ours -> TRL's, which has GSPO as ratios of sequences, and another trainer for RLOO."""


def completions() -> list[Trajectory]:
    """Two groups of three, of varied lengths, whose old policies are near and far."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in (4, 7)]
    return [
        Trajectory(
            prompt=prompts[index // 3],
            ids=[rng.randrange(3, 500) for _ in range(1 + (index * 4) % MAX_LENGTH)],
            rollout_logprobs=[],
            advantage=rng.uniform(-2, 2),
            weight=0.0,
            place=f"x:{index}",
        )
        for index in range(6)
    ]


def near(logprobs: list[float], spread: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [value + rng.uniform(-spread, spread) for value in logprobs]


def padded(rows: list[list[Any]], value: Any, *, left: bool = False) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[value] * (longest - len(r)) + r if left else r + [value] * (longest - len(r)) for r in rows])


@pytest.fixture(scope="module")
def trainer(model_folder: Callable[[str], Path], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    args = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=MAX_LENGTH,
        temperature=TEMPERATURE,
        beta=0.1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    made = GRPOTrainer(
        str(model_folder("llama")),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "x"}]),
        processing_class=tokenizer,
    )
    made.current_gradient_accumulation_steps = 1
    made.model.eval()  # as in an evaluation, where the loss is that of one step without accumulation
    made.accelerator.gradient_state._set_sync_gradients(True)
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("correction", ["truncate", "mask", "sequence_truncate", "sequence_mask", "none"])
@pytest.mark.parametrize("loss_type", list(LOSSES))
@pytest.mark.parametrize("share_prompts", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_the_gradient_is_that_of_trl(
    trainer: Any, model_folder: Callable[[str], Path], loss_type: str, correction: str, share_prompts: bool
) -> None:
    rows = completions()
    floor = 0.0 if correction == "none" else 0.3 if correction.startswith("sequence") else 0.9
    config = GrpoConfig(
        model="x", dataset=[{"path": "x"}], output_dir="x", method="grpo", tuning="full", loss_type=loss_type,
        temperature=TEMPERATURE, beta=0.1, importance_correction=correction, importance_cap=1.2,
        importance_floor=floor,
        max_completion_length=MAX_LENGTH, **CLIPS.get(loss_type, {"epsilon": 0.2, "epsilon_high": 0.3}),
    )  # fmt: skip
    built = build_model(model_folder("llama"), lora=None, device=torch.device("cpu"), dtype=torch.float32)
    objective = GrpoObjective(built, config)
    trained = [0 if number == LEFT_OUT else len(one.ids) for number, one in enumerate(rows)]
    weights = token_weights(loss_type, trained, MAX_LENGTH)
    for number, (one, weight) in enumerate(zip(rows, weights, strict=True)):
        one.weight, one.rollout_logprobs = weight, [0.0] * len(one.ids)
        (alone,) = completion_batches([one], 1, share_prompts=False, layout=ONE_RANK)
        with torch.no_grad():
            own = objective._logprobs(alone)[0].tolist()
        one.old_logprobs, one.reference_logprobs = near(own, 0.5, number), near(own, 1.0, number + 10)
        one.rollout_logprobs = near(one.old_logprobs, 0.3, number + 20)

    total = torch.zeros(())
    for batch in completion_batches(
        rows, 4, share_prompts=share_prompts, layout=ONE_RANK
    ):  # 4 of 6: the second group is cut
        loss = objective.loss(batch, BatchTotals(0, 0, 0.0)).total
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()

    trainer.model.zero_grad()
    trainer.loss_type = LOSSES[loss_type]
    trainer.importance_sampling_level = "sequence" if loss_type == "gspo" else "token"
    trainer.epsilon_low, trainer.epsilon_high = config.epsilon or 0.2, config.epsilon_high or 0.3
    trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg = 1.5, 2.5
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = correction != "none", True
    mask = padded([[int(number != LEFT_OUT)] * len(one.ids) for number, one in enumerate(rows)], 0)
    old = padded([one.old_logprobs or [] for one in rows], 0.0)
    off_rollout = (old - padded([one.rollout_logprobs for one in rows], 0.0)) * mask
    importance = (off_rollout.sum(1, keepdim=True) if correction.startswith("sequence") else off_rollout).exp()
    is_within = (importance >= floor) & (importance <= 1.2)
    kept = importance * is_within if correction.endswith("mask") else importance.clamp(floor, 1.2)
    theirs = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": padded([one.prompt for one in rows], 0, left=True),
            "prompt_mask": padded([[1] * len(one.prompt) for one in rows], 0, left=True),
            "completion_ids": padded([one.ids for one in rows], 0),
            "completion_mask": mask,
            "advantages": torch.tensor([one.advantage for one in rows]),
            "old_per_token_logps": old,
            "ref_per_token_logps": padded([one.reference_logprobs or [] for one in rows], 0.0),
            "importance_sampling_ratio": kept,
            "num_items_in_batch": mask.sum(),
        },
    )
    theirs.backward()

    assert total.item() == pytest.approx(theirs.item(), abs=TOLERANCE)
    expected = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    found = {name: parameter.grad for name, parameter in built.model.named_parameters()}
    assert found.keys() == expected.keys()
    norms = []
    for name, gradient in found.items():
        assert gradient is not None
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=TOLERANCE, msg=name)
        norms.append(gradient.norm().item())
    assert math.hypot(*norms) > 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_loss_of_rloo_is_that_of_its_trainer(
    model_folder: Callable[[str], Path], tokenizer: Any, tmp_path: Path
) -> None:
    args = RLOOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=6, num_generations=3, max_completion_length=MAX_LENGTH,
        temperature=TEMPERATURE, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    theirs = RLOOTrainer(
        str(model_folder("llama")), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=Dataset.from_list([{"prompt": "x"}]), processing_class=tokenizer,
    )  # fmt: skip
    theirs.model.eval()
    rows = completions()
    config = GrpoConfig(
        model="x", dataset=[{"path": "x"}], output_dir="x", reward_funcs=[{"func": "length"}], loss_type="rloo",
        temperature=TEMPERATURE, importance_correction="none", max_completion_length=MAX_LENGTH,
    )  # fmt: skip
    built = build_model(model_folder("llama"), lora=None, device=torch.device("cpu"), dtype=torch.float32)
    objective = GrpoObjective(built, config)
    weights = token_weights("rloo", [len(one.ids) for one in rows], MAX_LENGTH)
    for number, (one, weight) in enumerate(zip(rows, weights, strict=True)):
        one.weight, one.rollout_logprobs = weight, [0.0] * len(one.ids)
        (alone,) = completion_batches([one], 1, share_prompts=False, layout=ONE_RANK)
        with torch.no_grad():
            one.old_logprobs = near(objective._logprobs(alone)[0].tolist(), 0.1, number)
    total = torch.zeros(())
    for batch in completion_batches(rows, 4, share_prompts=True, layout=ONE_RANK):
        loss = objective.loss(batch, BatchTotals(0, 0, 0.0)).total
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    expected = theirs._compute_loss(
        theirs.model,
        {
            "prompt_ids": padded([one.prompt for one in rows], 0, left=True),
            "prompt_mask": padded([[1] * len(one.prompt) for one in rows], 0, left=True),
            "completion_ids": padded([one.ids for one in rows], 0),
            "completion_mask": padded([[1] * len(one.ids) for one in rows], 0),
            "advantages": torch.tensor([one.advantage for one in rows]),
            "old_logps": torch.tensor([sum(one.old_logprobs or []) for one in rows]),
        },
    )
    expected.backward()
    assert float(total) == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    gradients = dict(theirs.model.named_parameters())
    for name, parameter in built.model.named_parameters():
        other = gradients[name].grad
        assert parameter.grad is not None
        assert (parameter.grad - other).norm() <= TOLERANCE * max(float(other.norm()), 1.0), name
