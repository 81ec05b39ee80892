"""Imports of files and command lines of other programs."""

import shlex
from pathlib import Path
from typing import Any

from surefoot.migrate.convert import convert
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.parse_input import parse_run

ZERO3 = {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
SWIFT = "swift sft --model m --dataset d "
SWIFT_GRPO = "swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy"
TRL_GRPO = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --use_vllm true"


def import_file(path: Path, text: str) -> ImportedRun:
    """Write a file of another program, and import it."""
    path.write_text(text)
    return convert(parse_run(str(path)))


def import_command(words: str) -> ImportedRun:
    return convert(parse_run(shlex.split(words)))


def get_values(run: ImportedRun) -> dict[str, Any]:
    return {name: value for name, (value, _) in run.settings.items()}
