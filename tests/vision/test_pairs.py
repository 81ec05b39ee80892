"""Pairs of answers about images: each answer has the likelihood that it has as an answer of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import surefoot
from surefoot.data.collate import collate
from surefoot.methods.reward.scores import AnswerScores
from surefoot.methods.token_loss import TokenLogprobs, TokenLoss
from surefoot.models.build import build_model
from tests.support.data import write_jsonl
from tests.support.runs import numbers
from tests.support.vision import opened, picture_rows
from tests.support.vision_families import FAMILIES, processed_by_transformers, text_of, write_family

pytestmark = pytest.mark.long


def pair_of(row: dict[str, Any], later: str | None) -> dict[str, Any]:
    """The row with a rejected answer; `later`: an image of the next question on the rejected side."""
    question, answer = row["messages"]
    images = [*row["images"]]
    rejected = [{**answer, "content": "none of them"}]
    if later is not None:
        rejected += [{"role": "user", "content": [{"type": "image", "image": later}]}, answer]
        question = {**question, "content": question["content"].replace("<image>", "")}
        images = []
    return {"prompt": [question], "chosen": [answer], "rejected": rejected, "images": images}


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_a_reward_of_an_answer_about_images_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    with FAMILIES[kind].stand_in():
        base = write_family(kind, tmp_path / "base")
        rows = picture_rows(tmp_path / "data")[:4]
        pairs = [pair_of(row, None) for row in rows]
        settings: dict[str, Any] = {
            "method": "reward", "model": str(base), "output_dir": str(tmp_path / "run"), "max_length": 512,
            "max_steps": 2, "device": "cpu", "report": False, "global_batch_size": 4, "per_device_train_batch_size": 2,
            "dataset": str(write_jsonl(tmp_path / "data/pairs.jsonl", pairs)), "learning_rate": 0.01,
        }  # fmt: skip
        _, samples, reader = opened(settings)
        model = build_model(
            base, lora=None, device=torch.device("cpu"), dtype=torch.float32, has_score=True
        ).model.eval()
        own = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32).eval()
        own.load_state_dict(model.state_dict())
        expected = []
        with torch.no_grad():
            for pair in pairs:
                for side in ("chosen", "rejected"):
                    images = [tmp_path / "data" / name for name in pair["images"]]
                    text = text_of([*pair["prompt"], *pair[side]], base)
                    expected.append(float(own(**processed_by_transformers(kind, base, text, images)).logits))
            for shares in (True, False):
                found = AnswerScores(model)(collate(samples, reader, shares_questions=shares))
                torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
        result = surefoot.train(settings, screen=False)
        assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
        surefoot.export(result.run_folder, tmp_path / "whole", merge=True)
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["internvl", "qwen3_5_moe", "gemma3"])
def test_an_answer_is_as_likely_in_a_pair_as_alone(kind: str, tmp_path: Path) -> None:
    with FAMILIES[kind].stand_in():
        base = write_family(kind, tmp_path / "base")
        rows = picture_rows(tmp_path / "data")[:4]
        pairs = [pair_of(row, "0.png" if number == 3 else None) for number, row in enumerate(rows)]
        settings: dict[str, Any] = {
            "model": str(base), "output_dir": str(tmp_path / "run"), "max_length": 512, "max_steps": 2, "device": "cpu",
            "report": False, "global_batch_size": 4, "per_device_train_batch_size": 2,
        }  # fmt: skip
        dpo = {**settings, "method": "dpo", "dataset": str(write_jsonl(tmp_path / "data/pairs.jsonl", pairs))}
        _, samples, reader = opened(dpo)
        assert [len(sample.images) for sample in samples] == [1, 2, 0, 1]
        # The turns of both sides before the last are context of SFT too: prompt and completion.
        sides = [
            {"prompt": pair["prompt"], "completion": pair[side], "images": pair["images"]}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
        _, alone, sft_reader = opened({**settings, "dataset": str(write_jsonl(tmp_path / "data/sides.jsonl", sides))})
        model = build_model(base, lora=None, device=torch.device("cpu"), dtype=torch.float32).model.eval()
        with torch.no_grad():
            expected = [-float(TokenLoss(model)(collate([sample], sft_reader))) for sample in alone]
            for shares in (True, False):
                batch = collate(samples, reader, shares_questions=shares)
                logprobs, _ = TokenLogprobs(model, is_drawn=False)(batch)
                found = torch.zeros(len(expected)).index_add(0, batch.answer_of, logprobs)
                torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-4)
        surefoot.train(dpo, screen=False)
        losses = [line["loss"] for line in numbers(tmp_path / "run") if "loss" in line]
        assert losses[0] == pytest.approx(0.6931, abs=1e-4)
