"""Small random vision-language models with their processors, and pictures drawn for the tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.data import write_jsonl
from tests.support.vision import make_processor, make_vision_model, picture_rows, vision_tokenizer


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> a folder with a tiny random model of that kind, its tokenizer and its image processor."""
    root = tmp_path_factory.mktemp("vision-models")

    def folder(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            tokenizer = vision_tokenizer()
            make_vision_model(kind, tokenizer).save_pretrained(path)
            tokenizer.save_pretrained(path)
            make_processor(kind).save_pretrained(path)
        return path

    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data" / "pictures.jsonl", picture_rows(tmp_path / "data"))


@pytest.fixture
def vision(vision_folder: Callable[[str], Path], pictures: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def settings(kind: str = "qwen2_5_vl", **more: Any) -> dict[str, Any]:
        return {
            "model": str(vision_folder(kind)),
            "dataset": str(pictures),
            "output_dir": str(tmp_path / "run"),
            "max_length": 256,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "lora_rank": 4,
            "device": "cpu",
            "report": False,
            **more,
        }

    return settings
