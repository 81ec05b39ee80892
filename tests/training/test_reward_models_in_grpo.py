"""GRPO on the rewards of a reward model: the numbers are those that transformers computes for the same texts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

import surefoot
from surefoot.errors import ConfigError
from tests.methods.test_dpo import pair_rows
from tests.support.data import write_jsonl
from tests.support.grpo import VOWELS
from tests.support.processes import surefoot as command


@pytest.fixture(scope="module")
def reward_run(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with `method: reward`."""
    folder = tmp_path_factory.mktemp("reward")
    settings = {
        "method": "reward", "model": str(model_folder("qwen2_moe")), "output_dir": str(folder / "run"),
        "dataset": str(write_jsonl(folder / "pairs.jsonl", pair_rows(8))), "max_steps": 2, "global_batch_size": 4,
        "learning_rate": 0.01, "lora_rank": 4, "device": "cpu", "report": False,
    }  # fmt: skip
    return surefoot.train(settings, screen=False).run_folder


def score(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerFast, line: dict[str, Any]) -> float:
    turns = [*line["prompt"], {"role": "assistant", "content": line["completion"]}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    with torch.no_grad():
        return float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["run", "adapter", "model"])
def test_the_rewards_are_those_of_the_model(
    grpo: dict[str, Any], reward_run: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, form: str
) -> None:
    base = json.loads((reward_run / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    model = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=1), reward_run / "adapter"
    )
    folder = {"run": reward_run, "adapter": reward_run / "adapter", "model": tmp_path / "merged"}[form]
    if form == "model":
        surefoot.export(reward_run, folder, merge=True)
    item = {"func": f"model:{folder}", "weight": 2.0}
    surefoot.train(grpo, reward_funcs=[item, VOWELS], max_steps=1, screen=False)
    lines = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    assert len(lines) >= 4
    for line in lines:
        by_model, by_function = line["rewards"].values()
        assert by_model == pytest.approx(score(model, tokenizer, line), abs=1e-5)
        assert line["reward"] == pytest.approx(2 * by_model + by_function)


@pytest.mark.slow
def test_a_relative_folder_is_that_beside_the_config(grpo: dict[str, Any], reward_run: Path, tmp_path: Path) -> None:
    shutil.copytree(reward_run, tmp_path / "judge")
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({**grpo, "reward_funcs": ["model:judge"], "max_steps": 1}))
    result = surefoot.train(str(config), screen=False)
    assert "reward/judge" in result.metrics[-1]


@pytest.mark.slow
def test_the_plan_has_the_reward_model_on_each_rank(grpo: dict[str, Any], reward_run: Path) -> None:
    settings = {name: value for name, value in grpo.items() if name != "device"}
    without = surefoot.plan(settings, ["device=h100"])
    with_model = surefoot.plan({**settings, "reward_funcs": [f"model:{reward_run}"]}, ["device=h100"])
    base = json.loads((reward_run / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    for name, phase in with_model.forecast.phases.items():
        more = phase.device_bytes - without.forecast.phases[name].device_bytes
        assert more == (0 if name == "load" else size), name
    elsewhere = surefoot.plan({**settings, "reward_funcs": ["model:org/judge"]}, ["device=h100"])
    assert "the reward model org/judge is not on this machine" in elsewhere.as_text()


@pytest.mark.long
def test_each_rank_scores_its_own_completions(grpo: dict[str, Any], reward_run: Path, tmp_path: Path) -> None:
    """Completions depend on the weights alone, so those of the first step are the same on two ranks."""
    lines = {}
    for ranks in (1, 2):
        run = {
            **grpo,
            "reward_funcs": [f"model:{reward_run}"],
            "max_steps": 1,
            "nproc_per_node": ranks,
            "zero_stage": 3,
        }
        config = tmp_path / f"{ranks}.yaml"
        config.write_text(json.dumps({**run, "output_dir": str(tmp_path / f"on{ranks}")}))
        ended = command("train", str(config))
        assert ended.returncode == 0, ended.stderr
        text = (tmp_path / f"on{ranks}/completions.jsonl").read_text()
        lines[ranks] = {
            (line["place"], line["completion"]): line["reward"] for line in map(json.loads, text.splitlines())
        }
    assert lines[1].keys() == lines[2].keys()
    for key, reward in lines[1].items():
        assert lines[2][key] == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("model:{base}", {}, "is a language model, which gives no scores"),
        ("model:nowhere/at/all", {}, "nowhere/at/all"),
        ("model:{run}", {"scale": 2}, "takes no args, found scale"),
    ],
)
def test_what_is_no_reward_model_is_refused_before_data_are_prepared(
    grpo: dict[str, Any], reward_run: Path, function: str, arguments: dict[str, Any], message: str
) -> None:
    bad = write_jsonl(Path(grpo["dataset"]).with_name("bad.jsonl"), [{"prompt": 7}])
    item = {"func": function.format(base=grpo["model"], run=reward_run), "args": arguments}
    with pytest.raises(ConfigError, match=message):
        surefoot.train(grpo, dataset=str(bad), reward_funcs=[item], screen=False)


@pytest.mark.slow
def test_a_completion_that_is_too_long_for_the_reward_model_has_no_reward(
    grpo: dict[str, Any], reward_run: Path, tmp_path: Path
) -> None:
    surefoot.export(reward_run, tmp_path / "short", merge=True)
    path = tmp_path / "short/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 8}))
    result = surefoot.train(
        grpo, reward_funcs=[{"func": f"model:{tmp_path / 'short'}", "weight": 0}, VOWELS], max_steps=1, screen=False
    )
    (finding,) = [finding for finding in result.findings if finding.code == "SF802"]
    assert "the reward model reads 8 at most" in finding.cause
