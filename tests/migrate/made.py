"""What becomes of a file or a command line of another program, for the tests."""

import shlex
from pathlib import Path
from typing import Any

from surefoot.migrate.convert import convert
from surefoot.migrate.output import Imported
from surefoot.migrate.parse_input import read


def imported(path: Path, text: str) -> Imported:
    path.write_text(text)
    return convert(read(str(path)))


def values(made: Imported) -> dict[str, Any]:
    return {name: value for name, (value, _) in made.settings.items()}


ZERO3 = {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
SWIFT = "swift sft --model m --dataset d "

SWIFT_GRPO = "swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy"

TRL_GRPO = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --use_vllm true"


def of_words(words: str) -> Imported:
    return convert(read(shlex.split(words)))
