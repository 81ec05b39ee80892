"""The doctor says what becomes of images beside text."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import load_config
from surefoot.diagnostics.preflight.check import Check, CheckContext
from surefoot.diagnostics.preflight.dataset_sample import first_rows
from surefoot.diagnostics.preflight.resources import check_lengths
from surefoot.system.machine_snapshot import collect
from tests.support.data import write_jsonl
from tests.support.vision import picture_rows


def said(settings: dict[str, Any]) -> Check:
    return first_rows(load_config(None, (), settings))


def test_text_beside_images(vision: Callable[..., dict[str, Any]], settings: dict[str, Any], tmp_path: Path) -> None:
    mixed = said(vision())
    assert mixed.status == "ok"
    assert re.search("8 of 12 .*images .*4 .*text", mixed.text)
    seen = [row for row in picture_rows(tmp_path / "more") if row.get("images")]
    all_seen = said(vision(dataset=str(write_jsonl(tmp_path / "more" / "seen.jsonl", seen))))
    assert re.fullmatch("8 of 8 .*images.*all", all_seen.text)
    blind = said({**vision(), "model": settings["model"]})
    assert blind.status == "failed"
    assert re.search("8 of 12 .*images; .*text only", blind.text)


def test_an_image_file_that_is_missing_is_named_before_a_run(
    vision: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    rows = [row for row in picture_rows(tmp_path / "more") if row.get("images")]
    rows[1]["images"][-1] = "nowhere.png"
    check = said(vision(dataset=str(write_jsonl(tmp_path / "more" / "lost.jsonl", rows))))
    assert check.status == "failed"
    assert re.search(r"lost\.jsonl:2: .*nowhere\.png", check.text)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_the_largest_image_is_known_from_either_file_of_a_processor(
    vision: Callable[..., dict[str, Any]], tmp_path: Path, name: str
) -> None:
    settings = vision(max_length=64)
    folder = shutil.copytree(settings["model"], tmp_path / "model")
    limits = {"size": {"shortest_edge": 784, "longest_edge": 784 * 300}}
    (folder / name).write_text(json.dumps(limits if name.startswith("pre") else {"image_processor": limits}))
    context = CheckContext(collect(), load_config(None, (), {**settings, "model": str(folder)}))
    assert "an image may be up to 300 tokens" in check_lengths(context).text
