"""A finished run whose rows had a system text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from tests.support.data import counting_rows, write_jsonl


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    settings: dict[str, Any] = {
        "model": str(model_folder("qwen2_moe")), "dataset": str(write_jsonl(folder / "rows.jsonl", counting_rows(40))),
        "output_dir": str(folder / "count"), "max_steps": 4, "max_length": 128, "learning_rate": 1e-2, "lora_rank": 4,
        "device": "cpu", "report": True, "system": "Be brief.",
    }  # fmt: skip
    return surefoot.train(settings, screen=False).run_folder
