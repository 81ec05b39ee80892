"""Files are there whole or not at all."""

import json
from pathlib import Path

import pytest

from surefoot.errors import StorageError
from surefoot.storage import new_folder, sha256_of, write_json, write_text


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    write_text(target, "one")
    write_text(target, "two 中")
    assert target.read_text() == "two 中"
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"]


def test_json_without_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", float("nan"))
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with new_folder(target) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "file").write_text("x")
        assert not target.exists()
    assert (target / "part" / "file").read_text() == "x"

    def fail() -> None:
        with new_folder(target) as folder:
            (folder / "other").write_text("y")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (target / "part" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_refusal_names_the_file_and_the_room_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/below/a.txt: could not be written: .*MiB free"):
        write_text(tmp_path / "file" / "below" / "a.txt", "x")


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a").startswith("ba7816bf8f01cfea")
