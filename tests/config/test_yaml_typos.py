"""The usual typos of a YAML file: each message names the true line and the corrected one."""

import time
from pathlib import Path

import pytest

from surefoot.config import load_config
from surefoot.config.yaml_typos import MOST_CHARACTERS
from surefoot.errors import ConfigError

FIRST, LAST = "model: some/model\n", "output_dir: out\n"
TYPOS = {
    "no space after the colon": ("dataset:train.jsonl", "dataset: train.jsonl"),
    "full-width colon": ("dataset：train.jsonl", "dataset: train.jsonl"),
    "full-width colon and a space": ("dataset： train.jsonl", "dataset: train.jsonl"),
    "no-break space": ("dataset:\u00a0train.jsonl", "dataset: train.jsonl"),
    "full-width space": ("dataset:\u3000train.jsonl", "dataset: train.jsonl"),
    "tab after the colon": ("dataset:\ttrain.jsonl", "dataset: train.jsonl"),
    "tab as indentation": ("\tdataset: train.jsonl", "dataset: train.jsonl"),
    "tab as indentation of an item": ("dataset:\n\t- path: train.jsonl", "  - path: train.jsonl"),
    "leading space": (" dataset: train.jsonl", "dataset: train.jsonl"),
    "colon in a value": ("dataset: a: b", "dataset: 'a: b'"),
    "full-width comma": ("target_modules: [attention，experts]", "[attention, experts]"),
    "Chinese enumeration comma": ("target_modules: [attention、experts]", "[attention, experts]"),
    "Chinese quotes": ("dataset: “train.jsonl”", '"train.jsonl"'),
    "corner brackets": ("dataset: 「train.jsonl」", '"train.jsonl"'),
    "full-width braces": ("dataset: ｛path: train.jsonl｝", "dataset: {path: train.jsonl}"),
    "lenticular brackets": ("dataset: 【train.jsonl】", "[train.jsonl]"),
    "full-width colon in braces": ("dataset: {path：train.jsonl}", "path: train.jsonl"),
    "full-width colon and comma in braces": ("columns: {query： a，response：b}", "query: a, response: b"),
    "full-width colon in a list": ("reward_funcs: [length，mine.py：score]", "[length, mine.py:score]"),
    "full-width comment": ("dataset: train.jsonl ＃ mine", "train.jsonl # mine"),
    "Chinese full stop": ("learning_rate: 0。001", "0.001"),
    "full-width letters": ("packing: ｔｒｕｅ", "true"),
    "full-width minus": ("learning_rate: 1e－4", "1e-4"),
    "full-width digits": ("max_steps: １０", "10"),
}
"""(line, corrected line) of each typo."""


def refusal(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(folder / "run.yaml")
    return str(refused.value)


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_is_refused_with_its_line_and_the_corrected_line(tmp_path: Path, typo: str) -> None:
    line, corrected = TYPOS[typo]
    message = refusal(tmp_path, f"{FIRST}{line}\n{LAST}")
    assert message.startswith(f"run.yaml:{2 + line.count(chr(10))}: ")
    assert f"`{corrected}`" in message


@pytest.mark.parametrize("name", [name for name, (_, corrected) in TYPOS.items() if corrected.startswith("dataset")])
def test_the_first_and_the_last_line_are_found_as_well(tmp_path: Path, name: str) -> None:
    line, corrected = TYPOS[name]
    assert refusal(tmp_path, f"{FIRST}{LAST}{line}\n").startswith("run.yaml:3: ")
    if "\t" not in line:
        message = refusal(tmp_path, f"{line}\n{FIRST}{LAST}")
        assert message.startswith("run.yaml:1: ")
        assert f"`{corrected}`" in message


def test_a_file_of_full_width_colons_is_refused_at_its_first_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, "model：some/model\ndataset：train.jsonl\n")
    assert message.startswith("run.yaml:1: ")
    assert "`model: some/model`" in message
    assert refusal(tmp_path, "：\n").startswith("run.yaml:1: ")


@pytest.mark.parametrize("line", ["dataset", "dataset: [a, b", "dataset: 'a", "some words http://address:80"])
def test_an_error_without_a_known_typo_names_the_line_where_it_begins(tmp_path: Path, line: str) -> None:
    assert refusal(tmp_path, f"{FIRST}{line}\n{LAST}").startswith("run.yaml:2: ")


def test_a_long_file_is_refused_at_once(tmp_path: Path) -> None:
    text = "".join(f"key-{number}: value\n" for number in range(MOST_CHARACTERS // 20))
    begin_s = time.monotonic()
    assert refusal(tmp_path, f"{text}dataset:train.jsonl\n{LAST}").startswith("run.yaml:")
    assert time.monotonic() - begin_s < 5.0
