"""What is trained says what it is, how it was made and how it is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
from surefoot.training.model_card import make_card


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_card_is_written_and_its_code_loads_the_model(settings: dict[str, Any], tuning: str) -> None:
    values = {name: value for name, value in settings.items() if tuning == "lora" or name != "lora_rank"}
    result = surefoot.train(values, screen=False, tuning=tuning, eval_fraction=0.2, max_steps=1)
    assert result.artifact is not None
    card = (result.artifact / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == ("peft" if tuning == "lora" else "transformers")
    assert f"| mean training loss | {result.train_loss:.4f} |" in card
    assert f"| eval_loss | {result.evaluation['eval_loss']:.4f} |" in card
    assert f"| eval_trained_tokens | {result.evaluation['eval_trained_tokens']:,} |" in card
    assert str(Path(settings["model"]).parent) not in card, "folders of this machine are not told"
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace("THIS_FOLDER", str(result.artifact)).replace("FOLDER_OF_THE_BASE_MODEL", settings["model"])
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"](torch.tensor([[1, 2]])).logits.isfinite().all()
    assert len(names["tokenizer"]) > 0
    assert {AutoModelForCausalLM, AutoTokenizer} <= set(map(names.get, ("AutoModelForCausalLM", "AutoTokenizer")))
    assert tuning == "full" or isinstance(names["model"], PeftModel)


def test_names_of_the_hub_are_linked(settings: dict[str, Any]) -> None:
    result = surefoot.train(settings, screen=False, max_steps=1)
    config = yaml.safe_load((result.run_folder / "run.yaml").read_text(encoding="utf-8"))
    config |= {"model": "Qwen/Qwen3-8B", "dataset": [{"path": "org/rows"}, {"path": "/data/own.jsonl"}]}
    card = make_card(config, result.as_dict(), has_images=True)
    header = yaml.safe_load(card.split("---")[1])
    assert (header["base_model"], header["datasets"]) == ("Qwen/Qwen3-8B", ["org/rows"])
    assert header["pipeline_tag"] == "image-text-to-text"
    assert 'AutoModelForImageTextToText.from_pretrained("Qwen/Qwen3-8B")' in card
    assert "| data | org/rows, own.jsonl |" in card


def test_a_merged_model_has_a_card_of_its_own(settings: dict[str, Any], tmp_path: Path) -> None:
    result = surefoot.train(settings, screen=False, max_steps=1)
    merged = surefoot.export(result.run_folder, tmp_path / "merged", merge=True)
    card = (merged / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---")[1])
    assert (header["library_name"], "lora" in header["tags"]) == ("transformers", True)
    assert f"| mean training loss | {result.train_loss:.4f} |" in card
    assert "PeftModel" not in card
