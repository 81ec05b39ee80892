"""A teacher, and a small run of distillation from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.data import write_jsonl
from tests.support.distill import conversations


@pytest.fixture(scope="module")
def teacher(
    model_folder: Callable[[str], Path], tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a model that is larger than the students, and has learned something else."""
    path = tmp_path_factory.mktemp("teacher")
    config = AutoModelForCausalLM.from_pretrained(model_folder("llama")).config
    config.hidden_size = 64
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(4.0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def distill(model_folder: Callable[[str], Path], teacher: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "method": "distill", "model": str(model_folder("qwen2_moe")), "teacher_model": str(teacher),
        "dataset": str(write_jsonl(tmp_path / "rows.jsonl", conversations(24))),
        "output_dir": str(tmp_path / "run"), "max_length": 128, "max_steps": 4, "global_batch_size": 7,
        "per_device_train_batch_size": 2, "learning_rate": 0.01, "lr_scheduler_type": "constant", "lora_rank": 4,
        "device": "cpu", "report": False,
    }  # fmt: skip
