"""The loss and the gradient of distillation against TRL's losses on transformers' logits, for the same samples."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

from surefoot.data.collate import MicroBatch, collate
from surefoot.data.dataset import Sample
from surefoot.methods import output_layer
from surefoot.methods.base import BatchTotals
from surefoot.methods.distill.divergence import Divergence, LikeliestTokens, divergence_loss
from surefoot.methods.distill.method import DistillObjective, TaughtBatch
from surefoot.methods.distill.settings import DistillConfig
from surefoot.methods.distill.teacher import LocalTeacher
from surefoot.methods.output_layer import sum_of_logits
from surefoot.methods.token_loss import TokenLoss
from surefoot.models.build import build_model
from surefoot.models.frozen_model import load_frozen
from surefoot.models.lora import LoraSettings, perturbed_lora
from tests.support.models import SIZES

TOLERANCE = 1e-5
LENGTHS = ((3, 4), (6, 5), (2, 9))
"""Tokens of the question and the answer of three samples."""
LORA = LoraSettings(rank=4, alpha=8.0, targets=("attention", "mlp"))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_TOKENS", 5)


def make_samples() -> list[Sample]:
    rng = random.Random(3)
    samples = []
    for number, (question, answer) in enumerate(LENGTHS):
        ids = np.array([rng.randrange(3, 500) for _ in range(question + answer)], np.int32)
        samples.append(Sample(ids, np.repeat(np.array([0, 1], np.float32), [question, answer]), f"x:{number}"))
    return samples


def make_config(**changes: Any) -> DistillConfig:
    values = {"model": "x", "dataset": [{"path": "x"}], "output_dir": "x", "teacher_model": "y"}
    return DistillConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def folders(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> the folder of a model. Teachers are larger than the students; one has more rows than tokens."""
    root = tmp_path_factory.mktemp("teachers")

    def folder(name: str) -> Path:
        kind, _, role = name.partition("-")
        if not role and kind != "gemma2":
            return model_folder(kind)
        path = root / name
        if not path.exists():
            torch.manual_seed(11 if role else 12)
            if kind == "gemma2":
                sizes = {**SIZES, "head_dim": 8, "final_logit_softcapping": 20.0, "sliding_window": 64}
                model: PreTrainedModel = Gemma2ForCausalLM(Gemma2Config(**sizes))
            else:
                config = AutoModelForCausalLM.from_pretrained(model_folder(kind)).config
                config.hidden_size = 64
                config.vocab_size += 64 if role == "wider" else 0
                model = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():  # logits that differ
                parameter.data.mul_(6.0 if kind == "gemma2" else 3.0)
            model.save_pretrained(path)
        return path

    return folder


def logits_of(model: PreTrainedModel, samples: list[Sample]) -> Tensor:
    """Return the logits at which the answers' tokens are predicted, one sample at a time. Shapes: [N, V]."""
    rows = []
    for sample in samples:
        logits = model(torch.from_numpy(sample.ids.astype(np.int64))[None]).logits[0]
        rows.append(logits[np.flatnonzero(sample.weights) - 1])
    return torch.cat(rows).float()


def expected_loss(student: Tensor, teacher: Tensor, config: DistillConfig) -> Tensor:
    """Return TRL's loss, averaged over tokens."""
    if not config.teacher_top_k:
        return GKDTrainer.generalized_jsd_loss(
            student, teacher, beta=config.beta, temperature=config.temperature, reduction="batchmean"
        )
    own = torch.log_softmax(student / config.temperature, -1)
    logprobs, ids = torch.log_softmax(teacher / config.temperature, -1).topk(config.teacher_top_k, -1)
    if not config.teacher_top_k_tail:
        return GKDTrainer.generalized_jsd_loss(own.gather(-1, ids), logprobs, beta=config.beta)
    is_valid = torch.ones_like(ids, dtype=torch.bool)
    coarse_own, mask = _add_tail_bucket(own.gather(-1, ids), is_valid)
    coarse_teacher, _ = _add_tail_bucket(logprobs, is_valid)
    return _jsd_divergence(coarse_own, coarse_teacher, config.beta, mask).sum() / len(student)


def check(objective: DistillObjective, samples: list[Sample], expected: Tensor, parameters: Any, theirs: Any) -> None:
    """Compare loss and gradients of two micro-batches, one of which is packed, with those of the oracle."""
    expected.backward()
    trained = float(sum(sample.weights.sum() for sample in samples))
    totals = BatchTotals(0, round(trained), trained, 3)
    total = 0.0
    for part in (samples[:2], samples[2:]):
        loss = objective.loss(collate(part), totals).total
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    assert total == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    for name, parameter in parameters.items():
        size = max(float(theirs[name].grad.norm()), 1.0)
        assert (parameter.grad - theirs[name].grad).norm() <= TOLERANCE * size, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe", "gemma2"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "tokens",
    [{}, {"teacher_top_k": 3}, {"teacher_top_k": 3, "teacher_top_k_tail": False}],
    ids=["all", "tail", "no tail"],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradient_are_those_of_trl(
    folders: Callable[[str], Path], kind: str, beta: float, tokens: dict[str, Any], temperature: float
) -> None:
    config = make_config(beta=beta, temperature=temperature, tuning="full", **tokens)
    built = build_model(folders(kind), lora=None, device=torch.device("cpu"), dtype=torch.float32)
    built.model.eval()  # Gemma and others have dropout
    samples = make_samples()
    student = AutoModelForCausalLM.from_pretrained(folders(kind), dtype=torch.float32, attn_implementation="eager")
    teacher = AutoModelForCausalLM.from_pretrained(folders(f"{kind}-large"), attn_implementation="eager")
    with torch.no_grad():
        teacher_logits = logits_of(teacher, samples)
    expected = expected_loss(logits_of(student, samples), teacher_logits, config)
    assert float(expected.detach()) > 3e-4

    objective = DistillObjective(built, config)
    ours = load_frozen(folders(f"{kind}-large"), None, device=torch.device("cpu"), dtype=torch.float32)
    objective.teacher = LocalTeacher(TokenLoss(ours).predict, config)
    theirs = {name: parameter for name, parameter in student.named_parameters() if parameter.grad is None}
    expected_names = dict(built.model.named_parameters())
    check(objective, samples, expected, {n: p for n, p in expected_names.items() if n in theirs}, theirs)
    assert all(parameter.grad is None for parameter in ours.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe"])
def test_the_trained_model_without_its_adapter_is_its_own_teacher(folders: Callable[[str], Path], kind: str) -> None:
    built = build_model(folders(kind), lora=LORA, device=torch.device("cpu"), dtype=torch.float32)
    samples = make_samples()
    objective = DistillObjective(built, make_config(beta=0.5, teacher_model="x"))
    assert float(objective.sum_losses(collate(samples)).detach()) == pytest.approx(0.0, abs=1e-6)
    base = AutoModelForCausalLM.from_pretrained(folders(kind), dtype=torch.float32)
    with torch.no_grad(), perturbed_lora(built.model, 0.5):
        adapted = objective.token_loss.predict(collate(samples)).logits(slice(None))
        value = objective.sum_losses(collate(samples))
        expected = GKDTrainer.generalized_jsd_loss(adapted, logits_of(base, samples), beta=0.5, reduction="sum")
    assert float(value) == pytest.approx(float(expected), rel=1e-4)
    assert float(expected) > 1e-4


@pytest.mark.slow
def test_a_teacher_with_more_rows_than_tokens_is_compared_over_those_of_both(folders: Callable[[str], Path]) -> None:
    """Of one family, larger models often have more rows of padding, with which TRL refuses them."""
    built = build_model(folders("llama"), lora=None, device=torch.device("cpu"), dtype=torch.float32)
    samples = make_samples()
    student = AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(folders("llama-wider"))
    config = make_config(beta=0.5, tuning="full")
    with torch.no_grad():
        teacher_logits = logits_of(teacher, samples)
    own = logits_of(student, samples)
    assert teacher_logits.shape[1] == own.shape[1] + 64
    expected = expected_loss(own, teacher_logits[:, : own.shape[1]], config)
    objective = DistillObjective(built, config)
    ours = load_frozen(folders("llama-wider"), None, device=torch.device("cpu"), dtype=torch.float32)
    objective.teacher = LocalTeacher(TokenLoss(ours).predict, config)
    parameters = dict(built.model.named_parameters())
    check(objective, samples, expected, parameters, dict(student.named_parameters()))


@pytest.mark.slow
def test_the_likelihood_is_added_for_rows_and_not_for_completions(folders: Callable[[str], Path]) -> None:
    built = build_model(folders("llama"), lora=None, device=torch.device("cpu"), dtype=torch.float32)
    samples = make_samples()
    student = AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(folders("llama-large"))
    config = make_config(beta=0.0, sft_weight=0.25, tuning="full")
    with torch.no_grad():
        teacher_logits = logits_of(teacher, samples)
    own = logits_of(student, samples)
    targets = torch.cat([torch.from_numpy(s.ids[s.weights > 0].astype(np.int64)) for s in samples])
    divergence = expected_loss(own, teacher_logits, config)
    expected = divergence + 0.25 * torch.nn.functional.cross_entropy(own, targets)
    objective = DistillObjective(built, config)
    ours = load_frozen(folders("llama-large"), None, device=torch.device("cpu"), dtype=torch.float32)
    objective.teacher = LocalTeacher(TokenLoss(ours).predict, config)
    with torch.no_grad():
        own_batch: MicroBatch = TaughtBatch(**vars(collate(samples)), is_own=True)
        value = float(objective.sum_losses(own_batch)) / len(targets)
    assert value == pytest.approx(float(divergence.detach()), abs=TOLERANCE)
    check(objective, samples, expected, dict(built.model.named_parameters()), dict(student.named_parameters()))


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_gradients_of_likeliest_tokens_hold_in_double_precision(beta: float) -> None:
    """`gradcheck` by differences, with weights, and where the teacher's tokens have nearly all probability."""
    torch.manual_seed(0)
    logits = torch.randn(4, 9, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(4, 9) * 4, -1)
    logprobs, ids = teacher.topk(3, -1)
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0])
    loss = divergence_loss(LikeliestTokens(ids, logprobs), Divergence(beta, temperature=0.8), weights)
    total = sum_of_logits(logits, loss)
    total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    for row, column in ((0, 0), (1, 4), (2, int(ids[2, 0])), (3, 1)):
        moved = logits.detach().clone()
        ends = []
        for step in (1e-2, -1e-2):
            moved[row, column] = logits.detach()[row, column] + step
            ends.append(float(sum_of_logits(moved, loss)))
        assert float(logits.grad[row, column]) == pytest.approx((ends[0] - ends[1]) / 2e-2, abs=2e-4)


def test_a_teacher_that_is_certain_gives_finite_numbers() -> None:
    """All of a teacher's probability on its likeliest tokens leaves none for the others."""
    logits = torch.randn(2, 6, requires_grad=True)
    certain = LikeliestTokens(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.0, -40.0], [-0.5, -0.9329]]))
    for beta in (0.0, 0.5, 1.0):
        value = sum_of_logits(logits, divergence_loss(certain, Divergence(beta), None))
        (gradient,) = torch.autograd.grad(value, logits)
        assert value.isfinite()
        assert gradient.isfinite().all()
