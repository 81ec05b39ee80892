"""The loss and the gradient of a step of KTO and of ORPO against TRL's trainers, for the same rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as Rows
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import KTOConfig as TrlConfig
from trl import KTOTrainer
from trl.experimental.orpo import ORPOTrainer

from surefoot.data.collate import collate
from surefoot.data.dataset import Dataset, Sample
from surefoot.data.images import Image
from surefoot.methods.base import BatchTotals
from surefoot.methods.dpo.method import DpoObjective
from surefoot.methods.kto.method import KtoObjective, LabelledBatch, find_partners, mismatch
from surefoot.methods.kto.settings import KtoConfig
from surefoot.methods.orpo.settings import OrpoConfig
from surefoot.models.build import BuiltModel, build_model
from tests.data.opening import prepared
from tests.methods.test_dpo_against_trl import make_pairs, pad
from tests.support.data import counting_rows, write_jsonl

TOLERANCE = 1e-5
LABELS = [True, False, False, True]
ROWS = [{**row, "label": label} for row, label in zip(counting_rows(4), LABELS, strict=True)]


@pytest.fixture(scope="module")
def trainer(model_folder: Callable[[str], Path], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    args = TrlConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=4,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = Rows.from_list([{"prompt": "x", "completion": "y", "label": True}] * 2)
    made = KTOTrainer(str(model_folder("llama")), args=args, train_dataset=rows, processing_class=tokenizer)
    made.precompute_ref_logps = True
    made.model.eval()
    return made


@pytest.fixture
def built(model_folder: Callable[[str], Path]) -> Iterator[BuiltModel]:
    return build_model(model_folder("llama"), lora=None, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def dataset(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    return prepared(write_jsonl(tmp_path / "labelled.jsonl", ROWS), tokenizer, labels=True)


def mismatched(dataset: Dataset, most: int = 1000) -> list[Sample]:
    partners = find_partners(dataset, 0)
    return [mismatch(dataset.sample(0, own), dataset.sample(0, other), most, None) for own, other in partners.items()]


def as_inputs(samples: list[Sample], prefix: str = "") -> dict[str, Tensor]:
    rows = [sample.ids.tolist() for sample in samples]
    return {
        f"{prefix}input_ids": pad(rows),
        f"{prefix}attention_mask": pad([[1] * len(row) for row in rows]),
        f"{prefix}completion_mask": pad([(sample.weights > 0).astype(int).tolist() for sample in samples]),
    }


def assert_same_gradients(built: BuiltModel, model: torch.nn.Module) -> None:
    gradients = dict(model.named_parameters())
    for name, parameter in built.model.named_parameters():
        expected = gradients[name].grad
        assert parameter.grad is not None
        assert expected is not None
        assert (parameter.grad - expected).norm() <= TOLERANCE * max(float(expected.norm()), 1.0), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("shift", [2.0, -2.0], ids=["far from the reference", "divergence below zero"])
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto_is_that_of_trl(trainer: Any, built: BuiltModel, dataset: Dataset, loss: str, shift: float) -> None:
    config = KtoConfig(
        model="x", dataset=[{"path": "x"}], output_dir="x", tuning="full", beta=0.3, loss_type=loss,
        desirable_weight=1.5, undesirable_weight=0.7,
    )  # fmt: skip
    keys = list(dataset.sample_keys())
    samples = [dataset.sample(*key) for key in keys]
    others = mismatched(dataset)
    objective = KtoObjective(built, config)
    labels = torch.tensor(LABELS)
    scored = objective.score(LabelledBatch(**vars(collate(samples)), is_desired=labels, mismatched=collate(others)))
    reference = scored - shift + torch.rand(4, 2, generator=torch.Generator().manual_seed(5))

    total = torch.zeros(())
    batches = [
        LabelledBatch(
            **vars(collate(samples[part])),
            is_desired=labels[part],
            mismatched=collate(others[part]),
            reference_logps=reference[part],
        )
        for part in (slice(3), slice(3, 4))
    ]
    for batch in objective.begin_step(batches):
        share = objective.loss(batch, BatchTotals(0, 0, 0.0, 4)).total
        share.backward()  # type: ignore[no-untyped-call]
        total += share.detach()
    objective.end_step()

    trainer.model.zero_grad()
    trainer.beta, trainer.loss_type, trainer.calculate_KL = 0.3, loss, loss == "kto"
    trainer.desirable_weight, trainer.undesirable_weight = 1.5, 0.7
    inputs = {**as_inputs(samples), **as_inputs(others, "KL_"), "label": labels}
    inputs |= {"ref_logps": reference[:, 0], "ref_KL_logps": reference[:, 1]}
    theirs = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    theirs.backward()
    assert float(total) == pytest.approx(float(theirs.detach()), abs=TOLERANCE)
    assert_same_gradients(built, trainer.model)
    assert objective.metrics.get("kl", 0.0) == pytest.approx(trainer._metrics["eval"]["kl"][-1], abs=1e-4)
    assert (objective.metrics.get("kl", 0.0) > 0) == (shift > 0 and loss == "kto")


def test_a_batch_without_its_reference_has_a_loss(built: BuiltModel, dataset: Dataset) -> None:
    """As where the origin of a value that is not finite is looked for."""
    keys = list(dataset.sample_keys())
    batch = LabelledBatch(
        **vars(collate([dataset.sample(*key) for key in keys])),
        is_desired=torch.tensor(LABELS),
        mismatched=collate(mismatched(dataset)),
    )
    config = KtoConfig(model="x", dataset=[{"path": "x"}], output_dir="x")
    objective = KtoObjective(built, config)
    objective.probe_forward([batch])
    distance = 0.1 * objective.score(batch)[:, 0]
    expected = 1 - torch.where(torch.tensor(LABELS), distance, -distance).sigmoid()
    loss = objective.loss(batch, BatchTotals(0, 0, 0.0, 4)).total.detach()
    torch.testing.assert_close(loss, expected.mean(), msg="the reference counts as uniform")


def test_answers_are_mismatched_as_in_a_batch_of_trl(dataset: Dataset) -> None:
    """TRL gives each question of a batch the answer to the one before it, and the first that to the last."""
    samples = [dataset.sample(*key) for key in dataset.sample_keys()]
    shortest = min(sample.parts[0] for sample in samples if sample.parts is not None) + 1
    for index, (found, cut) in enumerate(zip(mismatched(dataset), mismatched(dataset, shortest), strict=True)):
        question, other = samples[index], samples[index - 1]
        assert question.parts is not None
        assert other.parts is not None
        expected = [*question.ids[: question.parts[0]].tolist(), *other.ids[other.parts[0] :].tolist()]
        assert found.ids.tolist() == expected
        assert cut.ids.tolist() == expected[:shortest]


def test_an_answer_to_the_same_question_is_no_other(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = counting_rows(2)
    rows = [{**first, "label": True}, {**second, "label": True}, {**second, "label": False}]
    dataset = prepared(write_jsonl(tmp_path / "twice.jsonl", rows), tokenizer, labels=True)
    assert find_partners(dataset, 0) == {0: 2, 1: 0, 2: 0}
    same = prepared(write_jsonl(tmp_path / "same.jsonl", rows[1:]), tokenizer, labels=True)
    assert find_partners(same, 0) == {0: 1, 1: 0}, "all questions are equal: as TRL has it"


def test_images_go_with_the_part_that_they_are_in() -> None:
    """4 stands for an image, of two tokens each; an answer may begin with the image of a tool."""
    pictures = [Image(f"{name}.png", name, (1, 1), 1, 2) for name in "abcd"]

    def sample(ids: list[int], images: list[Image]) -> Sample:
        weights = np.array([0] * 4 + [1] * (len(ids) - 4), np.float32)
        return Sample(np.array(ids, np.int32), weights, "x:1", images=tuple(images), parts=(4, len(ids) - 4, 0))

    one, other = sample([9, 4, 4, 9, 7, 4, 4, 7], pictures[:2]), sample([8, 4, 4, 8, 6, 4, 4, 6], pictures[2:])
    whole = mismatch(one, other, 100, 4)
    assert whole.ids.tolist() == [9, 4, 4, 9, 6, 4, 4, 6]
    assert [image.path for image in whole.images] == ["a.png", "d.png"]
    cut = mismatch(one, other, 6, 4)
    assert cut.ids.tolist() == [9, 4, 4, 9, 6], "not within an image"
    assert [image.path for image in cut.images] == ["a.png"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("shares_questions", [True, False], ids=["shared", "apart"])
def test_orpo_is_that_of_trl(trainer: Any, built: BuiltModel, shares_questions: bool) -> None:
    """TRL trains the likelihood of the questions, too: `train_on: all`."""
    config = OrpoConfig(
        model="x", dataset=[{"path": "x"}], output_dir="x", tuning="full", beta=0.3, train_on="all"
    )  # fmt: skip
    pairs = [Sample(pair.ids, pair.weights * 0 + 1, pair.place, parts=pair.parts) for pair in make_pairs()]
    objective = DpoObjective(built, config)
    total = torch.zeros(())
    batches = [collate(part, shares_questions=shares_questions) for part in (pairs[:2], pairs[2:])]
    for batch in objective.begin_step(batches):
        share = objective.loss(batch, BatchTotals(0, 0, 0.0, 6)).total
        share.backward()  # type: ignore[no-untyped-call]
        total += share.detach()
    objective.end_step()

    inputs: dict[str, Tensor] = {}
    for side, name in ((1, "chosen"), (2, "rejected")):
        rows, labels = [], []
        for pair in pairs:
            assert pair.parts is not None
            question, ids = pair.parts[0], pair.ids.tolist()
            begin = question if side == 1 else question + pair.parts[1]
            rows.append([*ids[:question], *ids[begin : begin + pair.parts[side]]])
            labels.append([-100] * question + rows[-1][question:])
        mask = pad([[1] * len(row) for row in rows])
        padded = pad(labels)
        inputs |= {f"{name}_input_ids": pad(rows), f"{name}_attention_mask": mask}
        inputs[f"{name}_labels"] = torch.where(mask == 1, padded, -100)
    logged: dict[str, Any] = {}
    theirs = SimpleNamespace(
        beta=0.3, is_encoder_decoder=False, aux_loss_enabled=False, padding_value=0,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value),
        concatenated_inputs=ORPOTrainer.concatenated_inputs, get_batch_logps=ORPOTrainer.get_batch_logps,
    )  # fmt: skip
    theirs.concatenated_forward = lambda model, batch: ORPOTrainer.concatenated_forward(theirs, model, batch)
    theirs.odds_ratio_loss = lambda chosen, rejected: ORPOTrainer.odds_ratio_loss(theirs, chosen, rejected)
    trainer.model.zero_grad()
    loss, logged = ORPOTrainer.get_batch_loss_metrics(theirs, trainer.model, inputs)
    loss.backward()
    assert float(total) == pytest.approx(float(loss.detach()), abs=TOLERANCE)
    assert_same_gradients(built, trainer.model)
    for name, value in objective.metrics.items():
        assert value == pytest.approx(logged[name], abs=1e-5), name
