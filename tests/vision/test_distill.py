"""Distillation on rows with images: the student's and the teacher's distributions are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl.experimental.gkd import GKDTrainer

import surefoot
from surefoot.data.collate import collate
from surefoot.errors import ConfigError
from surefoot.methods.distill.method import DistillObjective
from surefoot.methods.distill.settings import DistillConfig
from surefoot.methods.distill.teacher import LocalTeacher
from surefoot.methods.token_loss import TokenLoss
from surefoot.models.build import build_model
from surefoot.models.frozen_model import load_frozen
from surefoot.models.pretrained import load_config, model_class
from tests.support.data import write_jsonl
from tests.support.runs import numbers
from tests.support.vision import opened, picture_rows
from tests.support.vision_families import FAMILIES, processed_by_transformers, text_of, write_family

pytestmark = pytest.mark.long


def write_teacher(base: Path, folder: Path) -> Path:
    """Write the model of a folder with other weights."""
    model = model_class(base, load_config(base)).from_pretrained(base, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    model.save_pretrained(folder)
    for file in base.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "internvl"])
def test_the_loss_on_answers_about_images_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    with FAMILIES[kind].stand_in():
        base = write_family(kind, tmp_path / "base")
        teacher = write_teacher(base, tmp_path / "teacher")
        rows = picture_rows(tmp_path / "data")[:4]
        settings: dict[str, Any] = {
            "method": "distill", "model": str(base), "teacher_model": str(teacher), "beta": 0.4,
            "output_dir": str(tmp_path / "run"), "max_length": 512, "max_steps": 1, "device": "cpu", "report": False,
            "global_batch_size": 4, "per_device_train_batch_size": 2,
            "dataset": str(write_jsonl(tmp_path / "data/rows.jsonl", rows)),
        }  # fmt: skip
        _, samples, reader = opened(settings)
        config = DistillConfig(
            model=str(base), dataset=[{"path": "x"}], output_dir="x", teacher_model=str(teacher), beta=0.4
        )
        built = build_model(base, lora=None, device=torch.device("cpu"), dtype=torch.float32)
        objective = DistillObjective(built, config)
        frozen = load_frozen(teacher, None, device=torch.device("cpu"), dtype=torch.float32)
        objective.teacher = LocalTeacher(TokenLoss(frozen).predict, config)
        expected = 0.0
        models = [model_class(folder, load_config(folder)).from_pretrained(folder).eval() for folder in (base, teacher)]
        with torch.no_grad():
            for row, sample in zip(rows, samples, strict=True):
                images = [tmp_path / "data" / name for name in row["images"]]
                inputs = processed_by_transformers(kind, base, text_of(row["messages"], base), images)
                assert inputs["input_ids"][0].tolist() == sample.ids.tolist()
                predicting = torch.from_numpy(sample.weights > 0).nonzero()[:, 0] - 1
                student, other = (model(**inputs).logits[0, predicting].float() for model in models)
                expected += float(GKDTrainer.generalized_jsd_loss(student, other, beta=0.4, reduction="sum"))
            built.model.eval()
            loss = float(objective.sum_losses(collate(samples, reader)))
        assert loss == pytest.approx(expected, rel=1e-4)
        assert expected > 1e-3
        surefoot.train(settings, screen=False)
        (first,) = (line["loss"] for line in numbers(tmp_path / "run") if "loss" in line)
        trained = sum(float(sample.weights.sum()) for sample in samples)
        assert first == pytest.approx(expected / trained, rel=1e-4)


def test_a_teacher_of_another_type_is_refused(tmp_path: Path) -> None:
    with FAMILIES["gemma3"].stand_in(), FAMILIES["internvl"].stand_in():
        base, other = (write_family(kind, tmp_path / kind) for kind in ("gemma3", "internvl"))
        rows = write_jsonl(tmp_path / "rows.jsonl", picture_rows(tmp_path / "data")[:2])
        settings = {"method": "distill", "model": str(base), "teacher_model": str(other), "dataset": str(rows)}
        with pytest.raises(ConfigError, match="it is a internvl and the student a gemma3"):
            surefoot.train({**settings, "output_dir": str(tmp_path / "run"), "device": "cpu"}, screen=False)


def test_completions_about_images_are_trained_on(tmp_path: Path) -> None:
    with FAMILIES["qwen3_5"].stand_in():
        base = write_family("qwen3_5", tmp_path / "base")
        teacher = write_teacher(base, tmp_path / "teacher")
        rows = picture_rows(tmp_path / "data")[:4]
        settings: dict[str, Any] = {
            "method": "distill", "model": str(base), "teacher_model": str(teacher), "lmbda": 1.0,
            "max_completion_length": 6, "output_dir": str(tmp_path / "run"), "max_length": 512, "max_steps": 3,
            "device": "cpu", "report": False, "global_batch_size": 4, "per_device_train_batch_size": 2,
            "learning_rate": 0.01, "dataset": str(write_jsonl(tmp_path / "data/rows.jsonl", rows)),
        }  # fmt: skip
        surefoot.train(settings, screen=False)
        lines = [line for line in numbers(tmp_path / "run") if "loss" in line]
        assert all(line["loss"] > 0 and 1 <= line["completion_length"] <= 6 for line in lines)
