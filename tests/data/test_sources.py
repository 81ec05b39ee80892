"""Rows from files, and what is said of files that are broken."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from surefoot.data.sources import read_rows
from surefoot.errors import DataError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ü", "completion": "中文"}]


def places(path: Path) -> list[tuple[str, object]]:
    return [(row.place, row.columns) for row in read_rows(str(path))]


def test_json_lines_json_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet"):
        assert places(tmp_path / name) == [(f"{name}:1", ROWS[0]), (f"{name}:2", ROWS[1])]


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    found = read_rows([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")])
    assert [row.place for row in found] == ["b.jsonl:1", "a.jsonl:1"]


def test_a_blank_line_keeps_later_line_numbers_right(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(ROWS[0]))
    assert places(tmp_path / "a.jsonl")[0][0] == "a.jsonl:2"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a.jsonl:2: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a.jsonl:2: expected a JSON object .* found a list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', r"a.jsonl:2: not UTF-8: byte 0xe9 at byte 8"),
        ("a.jsonl", b"", r"a.jsonl is empty \(0 bytes\) \(run.yaml:2\)"),
        ("a.jsonl", b"\n \n", r"a.jsonl holds no rows"),
        ("a.json", b'[{"a": 1},\n{"a": }]', r"a.json:2: not valid JSON"),
        ("a.json", b'{"a": 1}', r"expected a JSON array of objects, found a dict"),
        ("a.json", b"[]", r"holds no rows"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl:1: (not valid JSON|JSON nested too deeply)"),
        ("a.parquet", b"PAR1 nonsense", r"not a readable Parquet file"),
        ("a.docx", b"x", r"'.docx' files are not read. Known: .jsonl"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(str(tmp_path / name), "run.yaml:2"))


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.jsonl does not exist.*\(run.yaml:2\)"):
        list(read_rows(str(tmp_path / "none.jsonl"), "run.yaml:2"))
    with pytest.raises(DataError, match="is a folder"):
        list(read_rows(str(tmp_path)))
