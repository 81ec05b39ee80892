"""Runs of distillation of other programs become runs with the same loss, or are refused."""

from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.migrate.imported_run import NOT_GIVEN
from tests.support.imports import get_values, import_command, import_file

SWIFT = "swift rlhf --rlhf_type gkd --model m --dataset d --teacher_model t"
TRL = "trl distillation --model_name_or_path m --dataset_name d --output_dir o --teacher_model_name_or_path t"
SCRIPT = """
from datasets import load_dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer
args = GKDConfig(output_dir="o", {})
trainer = GKDTrainer(model="m", teacher_model="t", args=args, train_dataset=load_dataset("d", split="train"))
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            SWIFT,
            {
                "method": "distill", "teacher_model": "t", "beta": 0.5, "lmbda": 0.5, "temperature": 0.9,
                "max_completion_length": 512, "divergence_temperature": None, "lora_dropout": None,
            },
        ),
        (
            f"{SWIFT} --lmbda 0 --use_vllm true --max_completion_length 9 --vllm_mode colocate --sft_alpha 0.1",
            {"lmbda": 0, "rollout_engine": None, "max_completion_length": None, "sft_weight": 0.1},
        ),
        (f"{SWIFT} --use_vllm true --temperature 1.0 --seq_kd false", {"rollout_engine": "vllm", "temperature": 1.0}),
        (
            "swift rlhf --rlhf_type gkd --model m --dataset d --teacher_model_server http://localhost:8000 "
            "--gkd_logits_topk 64 --lmbda 1 --beta 1.0",
            {
                "teacher_server": "http://localhost:8000", "teacher_top_k": 64, "teacher_top_k_tail": False,
                "teacher_model": None, "lmbda": 1, "beta": 1.0, "temperature": 0.9,
            },
        ),
        (
            TRL,
            {
                "method": "distill", "teacher_model": "t", "beta": 1.0, "lmbda": 1.0, "max_completion_length": 512,
                "learning_rate": 1e-6, "temperature": None, "train_on": None, "max_length": None, "tuning": "full",
            },
        ),
        (f"{TRL} --beta 0.3 --temperature 0.7 --use_peft --lora_dropout 0.1", {"beta": 0.3, "temperature": 0.7,
         "tuning": "lora", "lora_dropout": None}),
    ],
)  # fmt: skip
def test_commands_carry_their_loss(words: str, expected: dict[str, Any]) -> None:
    values = get_values(import_command(words))
    assert {name: values.get(name) for name in expected} == expected


def test_a_script_with_trls_trainer_carries_its_loss(tmp_path: Path) -> None:
    """TRL divides logits by the temperature when it samples, and not in the loss."""
    values = get_values(import_file(tmp_path / "gkd.py", SCRIPT.format("lmbda=0.3, max_new_tokens=64")))
    expected = {
        "method": "distill", "model": "m", "teacher_model": "t", "lmbda": 0.3, "beta": 0.5, "temperature": 0.9,
        "divergence_temperature": 1.0, "max_completion_length": 64, "train_on": "last_assistant",
    }  # fmt: skip
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seq_kd true", "seq_kd.*write the teacher's texts first"),
        ("--teacher_adapters a", "give the folder of the adapter as teacher_model"),
        ("""--teacher_model_server '[{"url": "http://a:1"}]'""", "one address: a run has one teacher"),
        ("--teacher_model_server http://localhost:8000", "a server gives the likeliest tokens"),
        ("--beta 2", "a number from 0 to 1"),
    ],
)
def test_what_would_learn_something_else_is_refused(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_command(f"{SWIFT} {options}")


def test_a_missing_teacher_is_named() -> None:
    left_out = import_command(SWIFT.replace(" --teacher_model t", "")).left_out
    assert left_out[f"teacher_model{NOT_GIVEN}"] == "required: add it to this file"
    assert f"teacher_model{NOT_GIVEN}" not in import_command(SWIFT).left_out


def test_notes_are_those_of_what_the_run_does() -> None:
    """A limit of prompts is asked for where rows are prompts, and sampling is spoken of where something is sampled."""
    notes = {lmbda: import_command(f"{SWIFT} --lmbda {lmbda}").left_out for lmbda in ("0", "0.5", "1")}
    for name, expected in (("max_prompt_length", ["1"]), ("top_p", ["0.5", "1"])):
        assert [lmbda for lmbda, left_out in notes.items() if f"{name}{NOT_GIVEN}" in left_out] == expected, name


def test_what_older_trainers_and_other_placements_say_is_carried_or_told() -> None:
    values = get_values(import_command(f"{TRL} --loss_top_k 10 --loss_add_tail false"))
    assert (values["teacher_top_k"], values["teacher_top_k_tail"]) == (10, False)
    left_out = import_command(f"{SWIFT} --teacher_deepspeed zero3").left_out
    assert "zero_stage: 3 cuts the teacher" in left_out["teacher_deepspeed = zero3"]
    with pytest.raises(ConfigError, match="name the folder of that revision as teacher_model"):
        import_command(f"{TRL} --teacher_model_revision v2")


def test_a_written_file_names_the_teacher_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "t").mkdir(parents=True)
    imported = import_command(SWIFT.replace("--teacher_model t", "--teacher_model there/t"))
    imported.move_to(tmp_path / "there")
    assert get_values(imported)["teacher_model"] == "t"
