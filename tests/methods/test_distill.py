"""Runs of distillation: on rows and on completions, packed or not, on several ranks, resumed, and with bad teachers."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

import surefoot
from surefoot.errors import ConfigError, SurefootError
from tests.methods.test_dpo import pair_rows
from tests.support.data import write_jsonl
from tests.support.distill import conversations, losses
from tests.support.grpo import prompt_rows
from tests.support.processes import surefoot as command
from tests.support.runs import assert_same_run, numbers


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"beta": 0.0}, {"beta": 1.0}, {"lmbda": 1.0, "max_completion_length": 8}], ids=str)
def test_the_student_comes_closer_to_the_teacher(
    distill: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The teacher is the student's base after some training."""
    settings = {name: value for name, value in distill.items() if name != "teacher_model"}
    trained = surefoot.train(
        {**settings, "method": "sft", "max_steps": 8, "output_dir": str(tmp_path / "sft")}, screen=False
    )
    longer = {"eval_fraction": 0.2, "max_steps": 12, "report": True, "teacher_model": str(trained.run_folder)}
    result = surefoot.train({**distill, **longer, **changes}, screen=False)
    values = losses(result.run_folder)
    assert values[-1] < 0.5 * values[0]
    assert result.evaluation["eval_loss"] < 0.5 * values[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_packing_and_micro_batches_do_not_change_the_numbers(
    distill: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    data = str(write_jsonl(tmp_path / "seven.jsonl", conversations(7)))
    base = {**distill, "model": str(model_folder(kind)), "dataset": data, "max_steps": 2}
    ways: dict[str, dict[str, Any]] = {
        "one": {"per_device_train_batch_size": 1},
        "seven": {"per_device_train_batch_size": 7},
        "packed": {"packing": True, "max_length": 512, "global_batch_size": 1},
    }
    found = {}
    for name, changes in ways.items():
        surefoot.train({**base, **changes, "output_dir": str(tmp_path / name)}, screen=False)
        found[name] = [(line["loss"], line["grad_norm"]) for line in numbers(tmp_path / name) if "loss" in line]
    assert found["one"] == [pytest.approx(pair, rel=1e-4) for pair in found["seven"]]
    assert found["one"] == [pytest.approx(pair, rel=1e-4) for pair in found["packed"]]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["run", "adapter", "merged"])
def test_a_teacher_is_a_run_an_adapter_or_a_model(distill: dict[str, Any], tmp_path: Path, form: str) -> None:
    """A teacher that another run has trained from the student's base."""
    settings = {name: value for name, value in distill.items() if name != "teacher_model"}
    trained = surefoot.train({**settings, "method": "sft", "output_dir": str(tmp_path / "sft")}, screen=False)
    folder = {"run": trained.run_folder, "adapter": trained.artifact, "merged": tmp_path / "merged"}[form]
    if form == "merged":
        surefoot.export(trained.run_folder, folder, merge=True)
    one_step = {**distill, "teacher_model": str(folder), "max_steps": 1}
    surefoot.train(one_step, screen=False)
    surefoot.train(
        {**one_step, "teacher_model": distill["model"], "init_adapter": str(trained.artifact),
         "output_dir": str(tmp_path / "mirrored")}, screen=False,
    )  # fmt: skip
    (value,), (mirrored,) = losses(Path(distill["output_dir"])), losses(tmp_path / "mirrored")
    assert value > 1e-3
    assert value == pytest.approx(mirrored, rel=1e-3), "at beta 0.5 the divergence is the same in both directions"


@pytest.mark.slow
def test_a_student_that_is_its_own_teacher_has_nothing_to_learn(distill: dict[str, Any], tmp_path: Path) -> None:
    own = {**distill, "teacher_model": distill["model"], "max_steps": 2}
    with pytest.raises(SurefootError, match="the divergence is 0 and nothing is learned"):
        surefoot.train(own, screen=False)
    surefoot.train({**own, "sft_weight": 1.0, "learning_rate": 0.0}, screen=False)
    sft = {**own, "method": "sft", "learning_rate": 0.0, "output_dir": str(tmp_path / "sft")}
    surefoot.train({name: value for name, value in sft.items() if name != "teacher_model"}, screen=False)
    assert losses(Path(own["output_dir"])) == [pytest.approx(loss, abs=1e-6) for loss in losses(tmp_path / "sft")]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["prompts", "conversations"])
def test_every_step_trains_on_completions_of_the_student(distill: dict[str, Any], tmp_path: Path, rows: str) -> None:
    data = prompt_rows(12) if rows == "prompts" else conversations(12)
    own = {
        "lmbda": 1.0, "beta": 1.0, "max_completion_length": 6, "eval_fraction": 0.3, "max_steps": 3,
        "dataset": str(write_jsonl(tmp_path / "own.jsonl", data)),
    }  # fmt: skip
    result = surefoot.train({**distill, **own}, screen=False)
    steps = [line for line in numbers(result.run_folder) if "loss" in line]
    assert all(1 <= line["completion_length"] <= 6 for line in steps)
    assert all(line["trained_tokens"] > before["trained_tokens"] for before, line in pairwise(steps))
    assert result.evaluation["eval_completion_length"] <= 6
    (shown,) = (json.loads(line) for line in (result.run_folder / "samples.jsonl").read_text().splitlines()[:1])
    assert [trained for _, trained in shown["parts"]] == [False, True]


@pytest.mark.slow
def test_rows_are_cut_on_the_right_as_in_sft(distill: dict[str, Any]) -> None:
    cut = {"truncation": "right", "max_length": 40, "max_completion_length": 6, "max_steps": 3, "lmbda": 0.5}
    assert len(losses(surefoot.train({**distill, **cut}, screen=False).run_folder)) == 3


@pytest.mark.slow
def test_a_share_of_the_steps_trains_on_completions(distill: dict[str, Any]) -> None:
    mixed = {"lmbda": 0.5, "max_completion_length": 6, "max_steps": 12, "sft_weight": 0.5}
    result = surefoot.train({**distill, **mixed}, screen=False)
    steps = [line for line in numbers(result.run_folder) if "loss" in line]
    assert 3 <= sum(line["on_policy"] for line in steps) <= 9
    assert all(("completion_length" in line) == bool(line["on_policy"]) for line in steps)


@pytest.mark.long
@pytest.mark.parametrize("lmbda", [0.0, 0.5, 1.0])
def test_a_resumed_run_is_the_uninterrupted_one(distill: dict[str, Any], tmp_path: Path, lmbda: float) -> None:
    changes = {"lmbda": lmbda, **({"max_completion_length": 6} if lmbda else {})}
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    surefoot.train({**distill, **changes, "output_dir": whole}, screen=False)
    surefoot.train({**distill, **changes, "output_dir": parts, "max_steps": 2}, screen=False)
    surefoot.train({**distill, **changes, "output_dir": parts}, screen=False)
    assert_same_run(Path(whole), Path(parts))


@pytest.mark.long
@pytest.mark.parametrize(
    "topology",
    [
        {"nproc_per_node": 2, "zero_stage": 2},
        {"nproc_per_node": 2, "zero_stage": 3},
        {"nproc_per_node": 2, "zero_stage": 3, "lmbda": 0.5},
        {"nproc_per_node": 2, "expert_parallel_size": 2},
        {"nproc_per_node": 2, "zero_stage": 3, "tuning": "full"},
        {"nproc_per_node": 2, "zero_stage": 3, "is_own_teacher": True},
        pytest.param({"nproc_per_node": 4, "zero_stage": 3, "dtype": "bfloat16"}, marks=pytest.mark.matrix),
        pytest.param({"nproc_per_node": 4, "zero_stage": 3, "lmbda": 1.0}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_ranks_compute_what_one_does(distill: dict[str, Any], tmp_path: Path, topology: dict[str, Any]) -> None:
    """Seven rows a step: one rank has fewer than the other."""
    topology = dict(topology)
    shared = {name: topology[name] for name in ("tuning", "dtype", "lmbda") if name in topology}
    settings = {**distill, "eval_fraction": 0.2, "learning_rate": 1e-3, "teacher_top_k": 5, **shared}
    if "lmbda" in topology:
        settings["max_completion_length"] = 6
    if "tuning" in topology:
        del settings["lora_rank"]
    if topology.pop("is_own_teacher", False):
        settings |= {"teacher_model": settings["model"], "learning_rate": 0.01, "sft_weight": 1.0}
    surefoot.train(settings, screen=False)
    config = tmp_path / "several.yaml"
    config.write_text(yaml.safe_dump({**settings, **topology, "output_dir": str(tmp_path / "several")}))
    several = command("train", str(config))
    assert several.returncode == 0, several.stderr
    tolerance = 3e-2 if "dtype" in topology else 1e-3
    one, other = numbers(Path(distill["output_dir"])), numbers(tmp_path / "several")
    for line, same in zip(one, other, strict=True):
        for name in ("loss", "grad_norm") if "loss" in line else ("eval_loss",):
            assert line[name] == pytest.approx(same[name], rel=tolerance, abs=1e-5), name


def copy_with(teacher: Path, folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(teacher, folder)
    values = json.loads((folder / file).read_text())
    change(values)
    (folder / file).write_text(json.dumps(values))
    return folder


@pytest.mark.slow
def test_a_teacher_with_another_vocabulary_is_refused_before_data_are_read(
    distill: dict[str, Any], teacher: Path, tmp_path: Path, here: Callable[..., Any]
) -> None:
    def swap(values: dict[str, Any]) -> None:
        vocab = values["model"]["vocab"]
        names = [name for name, _ in sorted(vocab.items(), key=lambda item: item[1])]
        vocab[names[100]], vocab[names[101]] = vocab[names[101]], vocab[names[100]]

    other = copy_with(teacher, tmp_path / "other", "tokenizer.json", swap)
    bad = str(write_jsonl(tmp_path / "bad.jsonl", [{"messages": 7}]))
    with pytest.raises(ConfigError, match=r"its vocabulary is another one; 2 of \d+ tokens differ: token 100 is .*"):
        surefoot.train({**distill, "teacher_model": str(other), "dataset": bad}, screen=False)
    config = tmp_path / "doctor.yaml"
    for folder, status in ((other, 3), (teacher, 0)):
        config.write_text(yaml.safe_dump({**distill, "teacher_model": str(folder)}))
        examined = here("doctor", str(config))
        assert examined.returncode == status, examined.stdout
        assert ("its vocabulary is another one" in examined.stdout) == bool(status)


def test_a_teacher_that_cannot_see_the_longest_samples_is_refused(
    distill: dict[str, Any], teacher: Path, tmp_path: Path
) -> None:
    def shorten(values: dict[str, Any]) -> None:
        values["max_position_embeddings"] = 100

    short = copy_with(teacher, tmp_path / "short", "config.json", shorten)
    with pytest.raises(ConfigError, match="it can see 100 tokens, and max_length=128 allow samples of 128"):
        surefoot.train({**distill, "teacher_model": str(short)}, screen=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_model": None}, "without a teacher. Set teacher_model"),
        ({"teacher_model": "/none/such"}, "teacher_model=/none/such: .*"),
        ({"top_p": 0.9}, "a setting of completions, but lmbda=0"),
        ({"lmbda": 1.0, "sft_weight": 0.1}, "no step trains on the answers"),
        ({"lmbda": 1.0, "truncation": "right"}, "would cut off the end of a prompt"),
        ({"lmbda": 0.5, "max_prompt_length": 9}, "rows have answers, and max_length limits them"),
        ({"lmbda": 0.5, "packing": True}, "packing=True is not available with method: distill and lmbda"),
        ({"compile": True}, "compile=True is not available with method: distill"),
        ({"method": "sft"}, "teacher_model"),
        ({"beta": 1.5}, "beta"),
    ],
)
def test_settings_that_exclude_each_other_are_named(
    distill: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    settings = {name: value for name, value in {**distill, **changes}.items() if value is not None}
    with pytest.raises(SurefootError, match=message):
        surefoot.train(settings, screen=False)


@pytest.mark.slow
def test_a_reward_model_is_no_teacher(distill: dict[str, Any], tmp_path: Path) -> None:
    pairs = str(write_jsonl(tmp_path / "pairs.jsonl", pair_rows(8)))
    settings = {name: value for name, value in distill.items() if name != "teacher_model"}
    reward = {**settings, "method": "reward", "dataset": pairs, "max_steps": 1, "output_dir": str(tmp_path / "reward")}
    scorer = surefoot.train(reward, screen=False).run_folder
    with pytest.raises(ConfigError, match="it is a reward model, which gives scores"):
        surefoot.train({**distill, "teacher_model": str(scorer)}, screen=False)


@pytest.mark.slow
def test_a_row_without_a_question_is_found_before_the_first_step(distill: dict[str, Any], tmp_path: Path) -> None:
    data = str(write_jsonl(tmp_path / "texts.jsonl", [{"text": "one two three"}] * 8))
    with pytest.raises(SurefootError, match=r"texts\.jsonl:\d+: nothing stands before the row's answer"):
        surefoot.train({**distill, "dataset": data, "lmbda": 0.1, "max_completion_length": 4}, screen=False)
    assert not (Path(distill["output_dir"]) / "metrics.jsonl").exists()


@pytest.mark.long
def test_the_plan_counts_the_teacher(distill: dict[str, Any]) -> None:
    settings = {name: value for name, value in distill.items() if name != "device"}
    model = AutoModelForCausalLM.from_pretrained(distill["teacher_model"])
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    for ranks, stage, part in ((1, 2, size), (4, 2, size), (4, 3, size // 4)):
        placed = {**settings, "nproc_per_node": ranks, "zero_stage": stage}
        placed["sft_weight"] = 1.0
        shared = surefoot.plan({**placed, "teacher_model": settings["model"]}, ["device=h100"]).forecast
        for name, phase in surefoot.plan(placed, ["device=h100"]).forecast.phases.items():
            assert phase.device_bytes - shared.phases[name].device_bytes == (0 if name == "load" else part), name
    offloaded = {**settings, "nproc_per_node": 4, "zero_stage": 3, "offload": "cpu"}
    at_rest = surefoot.plan(offloaded, ["device=h100"]).forecast.phases["save"]
    assert ("teacher" in at_rest.device, at_rest.host["teacher"]) == (False, size // 4)
    missing = surefoot.plan({**settings, "teacher_model": "some/where"}, ["device=h100"]).as_text()
    assert "the teacher some/where is not on this machine" in missing


@pytest.mark.long
def test_a_run_that_goes_on_with_another_teacher_says_so(
    distill: dict[str, Any], teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(teacher, tmp_path / "teacher")
    settings = {**distill, "teacher_model": str(tmp_path / "teacher")}
    surefoot.train(settings, max_steps=1)
    surefoot.train(settings, max_steps=2)
    assert "changed since step" not in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.lm_head.weight.data.mul_(1.1)
    model.save_pretrained(tmp_path / "teacher")
    surefoot.train(settings, max_steps=3)
    assert f"{tmp_path / 'teacher'}: changed since step 2" in capsys.readouterr().err
