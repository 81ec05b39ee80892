"""Which files a dataset setting means."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.config import DatasetItem
from surefoot.data.row_formats import FormatSpec
from surefoot.data.sources import RowRange, find_sources, may_list
from surefoot.errors import DataError
from tests.support.data import write_jsonl

ROW = {"prompt": "a", "completion": "b"}


def find(path: Path | str, **item: Any) -> Any:
    (source,) = find_sources([DatasetItem(path=str(path), **item)], "run.yaml:2")
    return source


def test_a_folder_gives_its_data_files_in_order_and_links_cannot_loop(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.json", "sub/c.parquet", ".hidden.jsonl", "notes.txt", "dataset_info.json", "state.json"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    found = find(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found.files] == ["a.json", "b.jsonl", "sub/c.parquet"]
    assert found.names == ("a.json", "b.jsonl", "c.parquet")


def test_files_of_one_name_are_shown_with_their_folders(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "train.jsonl", [ROW])
    assert find(tmp_path / "*" / "train.jsonl").names == ("x/train.jsonl", "y/train.jsonl")


def test_a_split_picks_files_by_name_and_a_range_of_rows(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "train-00001.jsonl", "test.jsonl", "training.jsonl"):
        write_jsonl(tmp_path / name, [ROW])
    found = find(tmp_path, split="train[10%:20%]")
    assert found.names == ("train-00000.jsonl", "train-00001.jsonl")
    assert found.rows.of(1000) == (100, 200)
    assert RowRange(None, "-5").of(20) == (0, 15)
    assert RowRange("90%", None).of(7) == (6, 7)
    with pytest.raises(DataError, match=r"split 'dev'"):
        find(tmp_path, split="dev")
    with pytest.raises(DataError, match=r"split=train\["):
        find(tmp_path, split="train[")


def llamafactory(folder: Path) -> Path:
    entries = {
        "plain": {"file_name": "alpaca.jsonl"},
        "mapped": {
            "file_name": "alpaca.jsonl",
            "num_samples": 5,
            "columns": {"prompt": "q", "query": "more", "response": "a", "system": "who"},
        },
        "talk": {
            "file_name": "talk.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "turns", "tools": "functions"},
            "tags": {"role_tag": "speaker", "content_tag": "said", "user_tag": "Q", "assistant_tag": "A"},
        },
        "gone": {"file_name": "gone.jsonl"},
        "nulls": {"file_name": "talk.jsonl", "formatting": "sharegpt", "columns": None, "tags": None},
        "corpus": {"file_name": "talk.jsonl", "columns": {"prompt": "body"}},
        "typo": {"file_name": "talk.jsonl", "columns": {"promt": "a"}},
        "pictures": {"file_name": "talk.jsonl", "formatting": "sharegpt", "columns": {"images": "photos"}},
        "films": {"file_name": "talk.jsonl", "formatting": "sharegpt", "columns": {"videos": "videos"}},
        "many": {"file_name": "talk.jsonl", "num_samples": "many"},
        "hub": {"hf_hub_url": "someone/something"},
        "ranked": {"file_name": "alpaca.jsonl", "ranking": True, "columns": {"prompt": "asked", "chosen": "good"}},
        "scripted": {"script_url": "x"},
        "odd": {"file_name": "alpaca.jsonl", "formatting": "dolly"},
    }
    for name in ("alpaca.jsonl", "talk.jsonl"):
        write_jsonl(folder / name, [ROW])
    path = folder / "dataset_info.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("rows.jsonl", r"rows\.jsonl:1: .*\(antwort, frage\).*\(argument\)\.$"),
        ("empty.jsonl", r"empty\.jsonl is empty .*\(argument\)\.$"),
        ("dataset_info.json:gone", r"gone\.jsonl .*\(argument\)\.$"),
    ],
)
def test_files_are_checked_before_the_model_is_fetched(tmp_path: Path, dataset: str, message: str) -> None:
    llamafactory(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [{"frage": "a", "antwort": "b"}])
    (tmp_path / "empty.jsonl").touch()
    settings = {"model": "nobody/nothing", "output_dir": str(tmp_path / "run"), "health": False}
    for begin in (surefoot.train, surefoot.describe_data):
        with pytest.raises(DataError, match=message):
            begin({**settings, "dataset": str(tmp_path / dataset)})


def test_entries_of_dataset_info_json(tmp_path: Path) -> None:
    info = llamafactory(tmp_path)
    assert find(f"{info}:plain").spec == FormatSpec()
    mapped = find(tmp_path, name="mapped")
    assert mapped.spec.columns == {"instruction": "q", "input": "more", "output": "a", "system": "who"}
    assert mapped.rows.of(100) == (0, 5)
    talk = find(info, name="talk")
    assert (talk.spec.format, talk.spec.columns) == ("sharegpt", {"conversations": "turns", "tools": "functions"})
    assert talk.spec.tags["role_tag"] == "speaker"
    assert find(info, name="nulls").spec.format == "sharegpt"
    assert find(info, name="corpus").spec.columns == {"text": "body"}, "its form for pre-training"
    assert talk.files == (tmp_path / "talk.jsonl",)
    assert find(info, name="pictures").spec.columns == {"images": "photos"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", r"entry 'gone': .*file_name .*gone\.jsonl .*\(run\.yaml:2\)"),
        ("none", r" 'none'.*: corpus, films, gone, hub, many, mapped"),
        ("scripted", r"entry 'scripted' .*script_url.*file_name"),
        ("typo", r"columns .*'promt'.*: prompt, query"),
        ("films", r"entry 'films' has videos"),
        ("many", r"num_samples .*'many'"),
        ("odd", r"formatting 'dolly' .*: alpaca, sharegpt, openai"),
    ],
)
def test_entries_that_cannot_be_used_are_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find(llamafactory(tmp_path), name=name)


def test_a_dataset_info_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="several .*: corpus, films"):
        find(llamafactory(tmp_path))
    (tmp_path / "dataset_info.json").write_text("[1]")
    with pytest.raises(DataError, match="JSON object"):
        find(tmp_path / "dataset_info.json")
    (tmp_path / "dataset_info.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="is no dataset_info.json"):
        find(tmp_path / "dataset_info.json")
    for content in ("{", "[" * 2000, '{"a": {}, "a": {}}'):
        (tmp_path / "dataset_info.json").write_text(content)
        with pytest.raises(DataError, match=r"dataset_info\.json.*JSON"):
            find(tmp_path / "dataset_info.json")
    (tmp_path / "dataset_info.json").unlink()
    os.mkfifo(tmp_path / "dataset_info.json")
    with pytest.raises(DataError, match="is not a file"):
        find(tmp_path / "dataset_info.json")


@pytest.mark.parametrize("entry", [{"formatting": ["q"]}, {"num_samples": True}, {"num_samples": -1}])
def test_values_of_an_entry_that_cannot_be_are_named(tmp_path: Path, entry: dict[str, Any]) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.jsonl", **entry}}))
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=f"entry 'a': {next(iter(entry))}"):
        find(tmp_path / "dataset_info.json")


@pytest.mark.parametrize("split", ["[:" + "9" * 5000 + "]", "[:" + "9" * 400 + "%]", "[:²]"])
def test_a_split_whose_bound_is_no_number_of_rows_is_refused(tmp_path: Path, split: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="split="):
        find(tmp_path / "a.jsonl", split=split)


def test_a_pattern_that_links_lead_around_in_gives_each_file_once(tmp_path: Path) -> None:
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [ROW])
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [path.name for path in find(tmp_path / "**" / "*.jsonl").files] == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_several_splits_in_a_folder_are_not_mixed(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train_sft-0.jsonl", "test.jsonl"):
        write_jsonl(tmp_path / name, [ROW])
    with pytest.raises(DataError, match="splits: train, test.*split: train"):
        find(tmp_path)
    assert find(tmp_path, split="train").names == ("train-0.jsonl",)
    assert find(tmp_path / "*.jsonl", split="test").names == ("test.jsonl",)
    with pytest.raises(DataError, match=r"split 'test'.*train-0\.jsonl"):
        find(tmp_path / "train-0.jsonl", split="test")


@pytest.mark.parametrize(
    "names", [("train_sft", "test_sft"), ("training", "validation"), ("gsm_train", "gsm_test"), ("x.train", "x.valid")]
)
def test_splits_are_told_in_any_of_their_spellings(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        write_jsonl(tmp_path / f"{name}.jsonl", [ROW])
    (tmp_path / "dataset_infos.json").write_text("{}")
    with pytest.raises(DataError, match="split: train"):
        find(tmp_path)
    if names[0] != "training":
        assert find(tmp_path, split="train").names == (f"{names[0]}.jsonl",)


def test_a_column_that_no_format_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"columns: 'inptu' .*'input'.*\(run\.yaml:2\)"):
        find(write_jsonl(tmp_path / "a.jsonl", [ROW]), columns={"inptu": "x"})


def test_what_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl .*exist.*\(run\.yaml:2\)"):
        find(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"exist\. '，' is part of the name: write a list as \[a\.jsonl, b\.jsonl\]"):
        find(tmp_path / "a.jsonl，b.jsonl")
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        find(tmp_path)
    with pytest.raises(DataError, match=r"\*\.jsonl: .*pattern"):
        find(tmp_path / "*.jsonl")
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(DataError, match=r"'\.docx' .*: \.jsonl"):
        find(tmp_path / "a.docx")
    (tmp_path / "self.jsonl").symlink_to(tmp_path / "self.jsonl")
    with pytest.raises(DataError, match=r"self\.jsonl .*Too many levels of symbolic links"):
        find(tmp_path / "self.jsonl")


def test_a_dataset_of_the_hub_that_cannot_be_fetched_is_named() -> None:
    with pytest.raises(DataError, match=r"nobody/nothing \(split train\): .*hub.*\(run\.yaml:2\)"):
        find("nobody/nothing")


def test_a_repository_of_the_hub_becomes_files_through_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` builds a local folder as it builds a repository of the hub."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "repo").mkdir()
    write_jsonl(tmp_path / "repo" / "train.jsonl", [ROW, ROW])
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda _, subset, split: load(str(tmp_path / "repo"), subset, split=split, cache_dir=str(tmp_path / "cache")),
    )
    found = find("someone/something")
    assert [path.suffix for path in found.files] == [".arrow"]
    assert found.names[0].startswith("someone/something/")


@pytest.mark.parametrize(
    ("source", "output", "is_listed"),
    [
        ("data", "data/run", True),
        ("data", "data/a/b", True),
        ("data/**/*.jsonl", "data/run", True),
        ("data/*/*.jsonl", "data/run", True),
        ("data", "run", False),
        ("data", "data-run", False),
        ("data/*.jsonl", "data/run", False),
        ("data/a.jsonl", "data/run", False),
        ("hub/name", "hub/name/run", False),
    ],
)
def test_sources_that_would_include_files_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str, is_listed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    assert may_list(source, Path(output)) == is_listed
    assert may_list(str(tmp_path / source), Path(output)) == is_listed


def test_a_file_whose_name_has_no_ending_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    for name, problem in (("train", "ending"), ("train.txt", r"'\.txt'")):
        (tmp_path / name).write_text("{}\n")
        with pytest.raises(DataError, match=rf"{name}: .*{problem}.*\.jsonl"):
            find(tmp_path / name)
