"""The doctor reads the first rows of a run's data: what is no row is named before a run starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import load_config
from surefoot.diagnostics.preflight.check import Check
from surefoot.diagnostics.preflight.dataset_sample import ROWS_PER_FILE, first_rows
from tests.support.data import counting_rows, write_jsonl


def said(settings: dict[str, Any], **changes: Any) -> Check:
    return first_rows(load_config(None, (), {**settings, **changes}))


def test_rows_of_text(settings: dict[str, Any], tmp_path: Path) -> None:
    check = said(settings)
    assert (check.status, "images" in check.text) == ("ok", False)
    bad = write_jsonl(tmp_path / "late.jsonl", [*counting_rows(ROWS_PER_FILE), {"messages": []}])
    check = said(settings, dataset=str(bad))
    assert (check.status, check.text.split()[0]) == ("ok", str(ROWS_PER_FILE)), "no more are looked at"


@pytest.mark.parametrize(("truncation", "status"), [("error", "failed"), ("left", "ok"), ("drop", "ok")])
@pytest.mark.parametrize("method", [{}, {"method": "grpo", "reward_funcs": ["length"], "num_generations": 2}])
def test_rows_that_are_too_long_are_named(
    settings: dict[str, Any], method: dict[str, Any], truncation: str, status: str
) -> None:
    if method and truncation != "error":
        pytest.skip("prompts may be cut on one side only")
    check = said(settings, max_length=10, truncation=truncation, **method)
    assert check.status == status
    assert ("longer than max_length=10: train.jsonl:1 has " in check.text) == (status == "failed")


@pytest.mark.parametrize(("on_bad_row", "status"), [("error", "failed"), ("skip", "warning")])
def test_a_bad_row_is_named(settings: dict[str, Any], tmp_path: Path, on_bad_row: str, status: str) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [*counting_rows(3), {"messages": []}])
    check = said(settings, dataset=str(bad), on_bad_row=on_bad_row)
    code = "SF743" if on_bad_row == "error" else "SF747"
    assert (check.status, check.finding and check.finding.code) == (status, code)
    assert "bad.jsonl:4: 'messages' " in check.text


@pytest.mark.parametrize(("on_bad_row", "status"), [("error", "failed"), ("skip", "warning")])
def test_a_row_that_the_chat_template_cannot_render_is_named(
    settings: dict[str, Any], tmp_path: Path, on_bad_row: str, status: str
) -> None:
    refuses = tmp_path / "refuses.jinja"
    refuses.write_text("{{ raise_exception('no system message') }}")
    check = said(settings, chat_template=str(refuses), on_bad_row=on_bad_row)
    code = "SF743" if on_bad_row == "error" else "SF747"
    assert (check.status, check.finding and check.finding.code) == (status, code)
    assert "train.jsonl:1: " in check.text
    assert "no system message" in check.text


def test_a_chat_template_that_is_broken_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}")
    for on_bad_row in ("error", "skip"):
        check = said(settings, chat_template=str(broken), on_bad_row=on_bad_row)
        assert (check.status, check.finding and check.finding.code) == ("failed", "SF743")


def test_rows_are_read_without_a_tokenizer_and_not_called_sound(settings: dict[str, Any], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(Path(settings["model"], "config.json"), bare)
    (bare / "tokenizer.json").write_text("{")
    check = said(settings, model=str(bare))
    assert (check.status, check.text.split()[0]) == ("not applicable", "40")
    bad = write_jsonl(tmp_path / "bad.jsonl", [*counting_rows(3), {"messages": []}])
    assert said(settings, model=str(bare), dataset=str(bad)).status == "failed"


def test_columns_of_no_known_format_are_named(settings: dict[str, Any], tmp_path: Path) -> None:
    check = said(settings, dataset=str(write_jsonl(tmp_path / "odd.jsonl", [{"title": "a", "body": "b"}])))
    assert check.status == "failed"
    assert "odd.jsonl:1: " in check.text
    assert "(body, title)" in check.text


def test_a_file_that_is_broken_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and nothing more")
    check = said(settings, dataset=str(tmp_path / "rows.parquet"))
    assert check.status == "failed"
    assert "rows.parquet" in check.text


def test_data_of_the_hub_are_not_fetched(settings: dict[str, Any]) -> None:
    assert said(settings, dataset="someone/rows").status == "not applicable"
    assert said(settings, model="someone/model").status == "not applicable"


def test_rows_beyond_a_split_are_not_the_runs(settings: dict[str, Any], tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [*counting_rows(30), {"messages": []}, *counting_rows(9)])
    check = said(settings, dataset=[{"path": str(bad), "split": "[:10]"}])
    assert (check.status, check.text.split()[0]) == ("ok", "10")
    assert said(settings, dataset=[{"path": str(bad), "split": "[:35]"}]).status == "failed"
    for split in ("[35:]", "[:-9]", "[:20%]"):
        assert said(settings, dataset=[{"path": str(bad), "split": split}]).status == "not applicable", split


def test_a_tokenizer_with_more_tokens_than_the_model_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(settings["model"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    check = said(settings, model=str(folder))
    assert check.status == "failed"
    assert "train.jsonl:1: token id " in check.text
