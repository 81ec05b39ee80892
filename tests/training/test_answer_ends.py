"""Models whose chat template ends answers with another token than their texts end with, as base models often do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

import surefoot
from surefoot.data.render import answer_ends
from surefoot.data.turn_ends import WAITS_FOR_TOOL
from surefoot.methods.rollout import setup
from surefoot.training.model_notices import NO_SWITCH, UNNAMED_ENDS
from tests.support.grpo import EagerEngine
from tests.support.models import CHATML

OF_TEXTS, OF_TURNS = "<|endoftext|>", "<|im_end|>"
ALL_ENDS = (OF_TEXTS, OF_TURNS, WAITS_FOR_TOOL)
"""The last one is in the vocabulary, and no template here writes it."""


@pytest.fixture
def base(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = shutil.copytree(model_folder("llama"), tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = OF_TEXTS
    tokenizer.add_special_tokens({"additional_special_tokens": [WAITS_FOR_TOOL]})
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, bos_token_id=7).save_pretrained(folder)
    return folder


def ids(folder: Path, *tokens: str) -> list[int]:
    found: list[int] = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(tokens))
    return found


def test_both_tokens_end_answers(base: Path) -> None:
    assert answer_ends(AutoTokenizer.from_pretrained(base)) == set(ids(base, *ALL_ENDS))


def test_a_template_that_cannot_be_rendered_ends_nothing(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    for template in ("{% if %}", None):
        tokenizer.chat_template = template
        assert answer_ends(tokenizer) == frozenset()


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_model_that_is_written_names_the_end_of_its_answers(
    base: Path, settings: dict[str, Any], tmp_path: Path, tuning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    del settings["lora_rank"]
    changes = {"model": str(base), "tuning": tuning, "max_steps": 1, "save_steps": 1, "enable_thinking": False}
    run = surefoot.train(settings, **changes).run_folder
    notices = capsys.readouterr().err
    assert UNNAMED_ENDS.format(OF_TURNS) in notices
    assert NO_SWITCH in notices
    is_lora = tuning == "lora"
    written = [surefoot.export(run, tmp_path / f"at-{step}", merge=is_lora, step=step) for step in (None, 1)]
    for folder in written:
        about = json.loads((folder / "generation_config.json").read_text())
        assert about["eos_token_id"] == sorted(ids(base, *ALL_ENDS))
        assert about["bos_token_id"] == 7
    model, _ = surefoot.load(run)
    assert set(model.generation_config.eos_token_id) == set(ids(base, *ALL_ENDS))


def test_rollouts_end_where_answers_do(base: Path, grpo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "LocalEngine", EagerEngine)
    EagerEngine.ends.clear()
    surefoot.train(grpo, model=str(base), max_steps=1, screen=False)
    assert set(EagerEngine.ends) == {frozenset(ids(base, *ALL_ENDS))}


def test_a_merged_model_has_the_chat_template_of_its_training(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = CHATML.replace("<|im_start|>'", "<|im_start|>The '")
    assert other != CHATML
    (tmp_path / "other.jinja").write_text(other)
    run = surefoot.train(settings, chat_template=str(tmp_path / "other.jinja"), max_steps=1).run_folder
    assert UNNAMED_ENDS.partition("{}")[0] not in capsys.readouterr().err
    merged = surefoot.export(run, tmp_path / "merged", merge=True)
    assert AutoTokenizer.from_pretrained(merged).chat_template == other
