"""Two ranks of which one finds what the other does not: both end, with the row."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.data import counting_rows, write_jsonl
from tests.support.vision import draw, picture_rows
from tests.support.vision_families import write_family

pytestmark = pytest.mark.slow
GRPO = {
    "method": "grpo",
    "reward_funcs": [{"func": "regex", "args": {"pattern": "[aeiou]"}}],
    "num_generations": 2,
    "max_completion_length": 6,
}


def started(settings: dict[str, Any], folder: Path) -> "subprocess.CompletedProcess[str]":
    config = folder / "run.json"
    config.write_text(json.dumps(settings))
    return subprocess.run(
        [sys.executable, "-m", "surefoot", "train", str(config)], capture_output=True, text=True, timeout=150
    )


def break_unseen(path: Path) -> None:
    """Other bytes under the same size and time, as a failing disk might give: no look at the file tells."""
    about = path.stat()
    path.write_bytes(b"?" * about.st_size)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "tuning"),
    [
        ("gemma4", "lora"),
        ("glm4v", "full"),
        ("idefics3", "full"),
        ("internvl", "lora"),
        ("llava_onevision", "full"),
        ("qwen3_5_moe", "lora"),
    ],
)
def test_a_rank_without_images_computes_with_one_that_has_some(kind: str, tuning: str, tmp_path: Path) -> None:
    pictures = picture_rows(tmp_path / "data")
    with_images, text = pictures[1::3], pictures[2::3]
    rows = [row for pair in zip(with_images, text, strict=True) for row in pair]
    settings: dict[str, Any] = {
        "model": str(write_family(kind, tmp_path / "model")),
        "dataset": str(write_jsonl(tmp_path / "data" / "rows.jsonl", rows)),
        "max_length": 512,
        "global_batch_size": 2,
        "packing": False,
        "shuffle": False,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "device": "cpu",
        "report": False,
        "zero_stage": 3,
        **({"tuning": "full", "freeze_vision_tower": False} if tuning == "full" else {}),
        **({"target_modules": ["attention", "vision"], "lora_rank": 4} if tuning == "lora" else {}),
    }
    losses = []
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        result = started({**settings, "output_dir": str(run), "nproc_per_node": ranks}, tmp_path)
        assert result.returncode == 0, result.stderr
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize(("part", "zero_stage"), [("sft", 2), ("evaluation", 3), ("grpo", 3)])
def test_an_image_that_one_rank_cannot_read_ends_both(part: str, zero_stage: int, vision: Any, tmp_path: Path) -> None:
    draw(tmp_path / "data" / "only.png", "red")
    rows = [*counting_rows(9), {**counting_rows(1)[0], "images": ["only.png"]}]
    mixed = write_jsonl(tmp_path / "data" / "mixed.jsonl", rows)
    text = write_jsonl(tmp_path / "data" / "text.jsonl", counting_rows(9))
    more = {"grpo": GRPO, "evaluation": {"eval_dataset": str(mixed), "eval_steps": 1}}.get(part, {})
    settings = vision(
        dataset=str(text if part == "evaluation" else mixed),
        nproc_per_node=2,
        zero_stage=zero_stage,
        global_batch_size=4,
        target_modules=["all", "vision"],
        shuffle=False,
        **more,
    )
    assert started({**settings, "max_steps": 6}, tmp_path).returncode == 0  # and one rank sees a picture, one text
    break_unseen(tmp_path / "data" / "only.png")
    failed = started({**settings, "overwrite_output_dir": True, "max_steps": 6}, tmp_path)
    assert failed.returncode == 2, failed.stderr
    said = re.search(r"^error: rank \d: mixed\.jsonl:10: image .*only\.png was changed ", failed.stderr, re.MULTILINE)
    assert said, failed.stderr
    assert "Traceback" not in failed.stderr
