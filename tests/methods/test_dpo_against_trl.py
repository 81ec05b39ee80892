"""The loss and the gradient of a step of DPO against TRL's trainers, for the same pairs."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer

from surefoot.data.collate import collate
from surefoot.data.dataset import Sample
from surefoot.methods.base import BatchTotals
from surefoot.methods.dpo.loss import Pairs, pair_losses
from surefoot.methods.dpo.method import DpoObjective
from surefoot.methods.dpo.settings import LOSS_TYPES, REFERENCE_FREE, DpoConfig
from surefoot.methods.preference import with_reference
from surefoot.models.build import BuiltModel, build_model

TOLERANCE = 1e-5
PARTS = ((4, 3, 6), (7, 5, 5), (2, 8, 1))
"""Tokens of the question and the two answers of three pairs."""
SMOOTHED = {"robust": 0.2, "exo_pair": 0.1}


def make_pairs() -> list[Sample]:
    rng = random.Random(3)
    samples = []
    for number, (question, chosen, rejected) in enumerate(PARTS):
        ids = np.array([rng.randrange(3, 500) for _ in range(question + chosen + rejected)], np.int32)
        weights = np.repeat(np.array([0, 1, 1], np.float32), [question, chosen, rejected])
        samples.append(Sample(ids, weights, f"x:{number}", parts=(question, chosen, rejected)))
    return samples


def make_config(**changes: Any) -> DpoConfig:
    return DpoConfig(model="x", dataset=[{"path": "x"}], output_dir="x", tuning="full", **changes)


def pad(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


@pytest.fixture(scope="module")
def trainer(model_folder: Callable[[str], Path], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    args = DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        precompute_ref_log_probs=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    row = {"prompt": "x", "chosen": "y", "rejected": "z"}
    made = DPOTrainer(
        str(model_folder("llama")), args=args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer
    )
    made.precompute_ref_logps = True
    made.model.eval()
    return made


def step(objective: DpoObjective, reference: Tensor, *, shares_questions: bool) -> Tensor:
    """Return the loss of the three pairs in two forwards, with its gradients in the model."""
    pairs = make_pairs()
    batches = [
        with_reference(collate(part, shares_questions=shares_questions), logps)
        for part, logps in ((pairs[:2], reference[:2]), (pairs[2:], reference[2:]))
    ]
    totals = BatchTotals(0, sum(batch.num_trained for batch in batches), 0.0, 6)
    total = torch.zeros(())
    for batch in objective.begin_step(batches):
        loss = objective.loss(batch, totals).total
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    objective.end_step()
    return total


@pytest.fixture
def built(model_folder: Callable[[str], Path]) -> Iterator[BuiltModel]:
    return build_model(model_folder("llama"), lora=None, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "shares_questions", [True, pytest.param(False, marks=pytest.mark.matrix)], ids=["shared", "apart"]
)
@pytest.mark.parametrize(
    ("losses", "changes"),
    [
        *(([loss], {}) for loss in LOSS_TYPES if loss not in REFERENCE_FREE),
        (["sigmoid"], {"ld_alpha": 0.3}),
        (["sigmoid", "bco_pair"], {"loss_weights": [0.8, 0.2]}),
        (["sigmoid"], {"sft_weight": 0.7}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list | dict) else str(value),
)
def test_loss_and_gradient_are_those_of_trl(
    trainer: Any, built: BuiltModel, losses: list[str], changes: dict[str, Any], shares_questions: bool
) -> None:
    smoothing = SMOOTHED.get(losses[0], 0.0)
    config = make_config(loss_type=losses, beta=0.3, label_smoothing=smoothing, **changes)
    objective = DpoObjective(built, config)
    generator = torch.Generator().manual_seed(5)
    reference = -20 - 15 * torch.rand(3, 2, generator=generator)
    ours = step(objective, reference, shares_questions=shares_questions)

    trainer.model.zero_grad()
    trainer.beta, trainer.label_smoothing, trainer.ld_alpha = 0.3, smoothing, changes.get("ld_alpha")
    has_sft = "sft_weight" in changes
    trainer.loss_types = [*losses, "sft"] if has_sft else losses
    weights = list(config.loss_settings.weights.values())
    trainer.loss_weights = [*weights, changes["sft_weight"]] if has_sft else weights
    rows: list[list[int]] = []
    masks: list[list[int]] = []
    for side in (1, 2):
        for sample in make_pairs():
            assert sample.parts is not None
            question, *answers = np.split(sample.ids, np.cumsum(sample.parts)[:2])
            answer = answers[side - 1].tolist()
            rows.append([*question.tolist(), *answer])
            masks.append([0] * len(question) + [1] * len(answer))
    theirs = trainer._compute_loss(
        trainer.model,
        {
            "input_ids": pad(rows),
            "attention_mask": pad([[1] * len(row) for row in rows]),
            "completion_mask": pad(masks),
            "ref_chosen_logps": reference[:, 0],
            "ref_rejected_logps": reference[:, 1],
        },
        return_outputs=False,
    )
    theirs.backward()
    assert float(ours) == pytest.approx(float(theirs.detach()), abs=TOLERANCE)
    gradients = dict(trainer.model.named_parameters())
    for name, parameter in built.model.named_parameters():
        expected = gradients[name].grad
        assert parameter.grad is not None
        assert (parameter.grad - expected).norm() <= TOLERANCE * max(expected.norm(), 1.0), name
    metrics = trainer._metrics["eval"]
    for name, value in objective.metrics.items():
        assert value == pytest.approx(metrics[name][-1], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("loss", sorted(REFERENCE_FREE))
def test_losses_without_a_reference_are_those_of_trl(loss: str) -> None:
    config = make_config(loss_type=loss, beta=2.0, **({"simpo_gamma": 0.7} if loss == "simpo" else {}))
    generator = torch.Generator().manual_seed(5)
    logps = -20 - 15 * torch.rand(5, 2, generator=generator)
    counts = torch.randint(3, 20, (5, 2), generator=generator).float()
    ours = pair_losses(Pairs(logps, torch.zeros_like(logps), counts), config.loss_settings)
    values = logps / counts if loss == "simpo" else logps
    theirs = SimpleNamespace(
        beta=2.0, simpo_gamma=0.7, label_smoothing=0.0, alpha=0.0, accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo" if loss == "simpo" else "sigmoid",
    )  # fmt: skip
    expected, _, _ = CPOTrainer.cpo_loss(theirs, values[:, 0], values[:, 1])
    torch.testing.assert_close(ours, expected)
