"""The loss and the gradient of a step of a reward model against TRL's trainer, for the same pairs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig as TrlRewardConfig
from trl import RewardTrainer

from surefoot.data.collate import collate
from surefoot.methods.base import BatchTotals
from surefoot.methods.reward.method import RatedBatch, RewardObjective
from surefoot.methods.reward.settings import RewardConfig
from surefoot.models.build import build_model
from tests.methods.test_dpo_against_trl import make_pairs, pad

TOLERANCE = 1e-5
MARGINS = (0.7, -0.2, 1.5)
PADDING = 0


def make_config(**changes: Any) -> RewardConfig:
    return RewardConfig(model="x", dataset=[{"path": "x"}], output_dir="x", tuning="full", **changes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("shares_questions", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("margins", [None, MARGINS], ids=["plain", "margins"])
@pytest.mark.parametrize("centering", [0.0, 0.3], ids=["free", "centred"])
def test_loss_and_gradient_are_those_of_trl(
    model_folder: Callable[[str], Path],
    tokenizer: Any,
    tmp_path: Path,
    kind: str,
    shares_questions: bool,
    margins: tuple[float, ...] | None,
    centering: float,
) -> None:
    built = build_model(
        model_folder(kind), lora=None, device=torch.device("cpu"), dtype=torch.float32, has_score=True, seed=3
    )
    theirs = AutoModelForSequenceClassification.from_pretrained(model_folder(kind), num_labels=1, dtype=torch.float32)
    theirs.load_state_dict(built.model.state_dict())
    arguments = TrlRewardConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], center_rewards_coefficient=centering,
        gradient_checkpointing=False, pad_token=tokenizer.convert_ids_to_tokens(PADDING),
    )  # fmt: skip
    row = {"prompt": "x", "chosen": "y", "rejected": "z"}
    trainer = RewardTrainer(theirs, args=arguments, train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
    trainer.model.eval()
    pairs = make_pairs()
    # TRL reads a reward at the last token that is no padding, wherever a row ends.
    pairs[1].ids[-1] = PADDING
    rows = [
        np.concatenate([question, sides[side]]).tolist()
        for side in (0, 1)
        for question, *sides in (np.split(sample.ids, np.cumsum(sample.parts)[:2]) for sample in pairs)
    ]
    inputs: dict[str, Any] = {"input_ids": pad(rows), "attention_mask": pad([[1] * len(row) for row in rows])}
    if margins is not None:
        inputs["margin"] = torch.tensor(margins)
    expected = trainer.compute_loss(trainer.model, inputs)
    expected.backward()

    objective = RewardObjective(built, make_config(center_rewards_coefficient=centering))
    totals = BatchTotals(0, 0, 0.0, sequences=6)
    found = 0.0
    for part in (slice(0, 2), slice(2, 3)):
        batch = RatedBatch(**vars(collate(pairs[part], shares_questions=shares_questions)))
        if margins is not None:
            batch = replace(batch, margins=torch.tensor(margins[part]))
        loss = objective.loss(batch, totals).total
        loss.backward()  # type: ignore[no-untyped-call]
        found += float(loss.detach())
    assert found == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    gradients = dict(trainer.model.named_parameters())
    for name, parameter in built.model.named_parameters():
        theirs_grad = gradients[name].grad
        if theirs_grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None
        assert (parameter.grad - theirs_grad).norm() <= TOLERANCE * max(theirs_grad.norm(), 1.0), name
