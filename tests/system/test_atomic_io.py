"""Files are there whole or not at all."""

import ctypes
import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import InputError, StorageError
from surefoot.system.atomic_io import new_folder, repair_folder, sha256_of, storage_error, write_json, write_text


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


def cannot_exchange(*_: Any, **__: Any) -> None:
    """Stand for a system without renameat2, as NFS and Lustre behave."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_folder_is_there_at_every_moment_of_its_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "made"
    target.mkdir()
    (target / "file").write_text("old")
    texts: list[str] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            texts.append((target / "file").read_text())
            return result

        return watch

    for name in ("replace", "rename", "unlink", "rmdir", "fsync", "mkdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    with new_folder(target) as folder:
        (folder / "file").write_text("new")
    assert set(texts) == {"old", "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_replacement_that_was_cut_short_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system cannot exchange two names at once."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("old")
    rename = os.replace

    class Killed(BaseException):
        """Nothing runs after a kill, not even the code that undoes things."""

    def die_after(source: Path, target: Path) -> None:
        rename(source, target)
        monkeypatch.setattr(os, "replace", rename)
        raise Killed

    monkeypatch.setattr(ctypes, "CDLL", cannot_exchange)
    monkeypatch.setattr(os, "replace", die_after)
    with pytest.raises(Killed), new_folder(tmp_path / "made") as folder:
        (folder / "file").write_text("new")
    assert not (tmp_path / "made").exists()
    repair_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made" / "file").read_text() == "old"


@pytest.mark.parametrize("refused", [1, 2])
def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("old")
    rename, calls = os.replace, 0

    def refuse(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == refused:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(ctypes, "CDLL", cannot_exchange)
    refusal = pytest.raises(StorageError, match="/made: .*Input/output error.*touched")
    with refusal, new_folder(tmp_path / "made") as folder:
        (folder / "file").write_text("new")
    assert (tmp_path / "made" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_cannot_be_read_is_no_full_disk(tmp_path: Path) -> None:
    refusal = pytest.raises(InputError, match=r"/there: .*No such file or .*/made ")
    with refusal, new_folder(tmp_path / "made") as folder:
        (folder / "file").write_bytes((tmp_path / "there").read_bytes())
    (tmp_path / "file").touch()
    refusal = pytest.raises(StorageError, match="/file.*: .*File exists ")
    with refusal, new_folder(tmp_path / "file" / "made"):
        pass
    refusal = pytest.raises(StorageError, match="/file: .*Not a directory")
    with refusal, new_folder(tmp_path / "file"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_refusal_names_the_file_and_the_room_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/below/a\.txt: .*written: .* MiB "):
        write_text(tmp_path / "file" / "below" / "a.txt", "x")


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a").startswith("ba7816bf8f01cfea")


def test_a_mount_that_is_gone_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    error = storage_error(tmp_path / "a", OSError(errno.ESTALE, "Stale file handle"))
    assert re.search(r"/a: .*Stale file handle\.", str(error))


def test_a_file_over_the_limit_of_the_process_is_refused_with_that_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = OSError(errno.EFBIG, "File too large")
    for limit, is_named in (((123_456, 10**9), True), ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limit=limit: limit)
        text = str(storage_error(tmp_path / "a", refusal))
        assert ("123456" in text, "ulimit -f" in text) == (is_named, is_named)


def test_only_what_this_program_left_is_repaired(tmp_path: Path) -> None:
    mine = [".notes.bak.old", ".adapter.v1.old", ".draft.tmp", ".adapter.7.old"]
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / "notes").write_text("x")
    (tmp_path / ".report.html.7-0123abcd.tmp").write_text("half")
    (tmp_path / ".model.7-0123abcd.old").mkdir()
    repair_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*mine, "notes", "model"])


def test_processes_of_one_number_on_two_machines_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_text(tmp_path / "a", str(number) * 1000), range(200)))
    assert len(set((tmp_path / "a").read_text())) <= 3
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_to_a_folder_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("theirs")
    (tmp_path / "made").symlink_to(tmp_path / "other")
    with new_folder(tmp_path / "made") as folder:
        (folder / "file").write_text("new")
    assert not (tmp_path / "made").is_symlink()
    assert (tmp_path / "made" / "file").read_text() == "new"
    assert (tmp_path / "other" / "file").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "other"]
