"""Configs that no one should write: each is refused with its line, and ends in no other exception."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import RunConfig, changed_fields, known_fields, load_config
from surefoot.config.documents import MOST_BYTES, parse_json, parse_yaml
from surefoot.config.methods import methods_with
from surefoot.config.paths import FOLDERS
from surefoot.errors import ConfigError
from tests.support.processes import surefoot

BASE = "model: some/model\ndataset: train.jsonl\noutput_dir: out\n"
WORKING = {"model": "some/model", "dataset": "train.jsonl", "output_dir": "out"}
PATHS = (
    "model dataset output_dir chat_template init_adapter image_dir dataset_dir eval_dataset reward_funcs "
    "resume_from_checkpoint deepspeed"
).split()
BOMB = "[&a [x,x,x,x,x,x,x,x,x], &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], " + ", ".join(
    f"&{name} [{','.join([f'*{before}'] * 9)}]" for before, name in zip("bcdefgh", "cdefghi", strict=True)
) + "]"  # fmt: skip
"""Nine aliases of nine aliases, and so on: 9 to the power of 9 values in 400 characters."""
VALUES = {
    "month 13": "2024-13-45",
    "hexadecimal without digits": "0x_",
    "5,000 digits": "7" * 5000,
    "5,000 digits in quotes": f'"{"7" * 5000}"',
    "5,000 hexadecimal digits": f"0x{'7' * 5000}",
    "64 bits": str(2**63),
    "integer tag": "!!int abc",
    "empty integer": "!!int ''",
    "float tag": "!!float abc",
    "float of a list": "!!float [1]",
    "boolean tag": "!!bool abc",
    "null tag": "!!null [1]",
    "timestamp tag": "!!timestamp abc",
    "binary tag": "!!binary 'a'",
    "binary": "!!binary aGVsbG8=",
    "set": "!!set {a, b}",
    "set of a text": "!!set a",
    "map of a text": "!!map a",
    "sequence of a text": "!!seq a",
    "ordered map": "!!omap [a]",
    "pairs": "!!pairs [a]",
    "date": "2024-01-01",
    "time": "2024-01-01 10:00:00",
    "python tag": "!!python/object/apply:os.system [ls]",
    "unhashable key": "{[a]: b}",
    "mapping as a key": "{{a: b}: c}",
    "key twice": "{a: 1, a: 2}",
    "merge of a text": "{<<: a}",
    "merge of itself": "&x {<<: *x}",
    "list in itself": "&x [*x]",
    "mapping in itself": "&x {a: *x}",
    "alias of nothing": "*nothing",
    "500 brackets": "[" * 500 + "]" * 500,
    "500 open brackets": "[" * 500,
    "500 mappings": "{a: " * 500 + "}" * 500,
    "aliases that multiply": BOMB,
    "not a number": ".nan",
    "infinity": ".inf",
    "minus infinity": "-.inf",
    "1e999": "1e999",
    "half a surrogate pair": r'"\ud83d"',
    "halves in the wrong order": r'"\ude00\ud83d"',
    "NUL": r'"a\0b"',
    "base 60": "1:30",
    "base 60 with a point": "1:30.5",
    "octal": "010",
    "bell": "\a",
    "escape beyond Unicode": r'"\U00110000"',
    "escape of 32 bits": r'"\UFFFFFFFF"',
    "20,001 values": "[" + "x," * 20_001 + "]",
}


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    (tmp_path / "run.yaml").write_text(BASE + text)
    begin_s = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "run.yaml", overrides)
    assert time.monotonic() - begin_s < 5.0
    message = str(refused.value)
    assert len(message) < 2000
    return message


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_cannot_be_is_refused_with_its_line(tmp_path: Path, kind: str) -> None:
    assert "run.yaml:4" in refusal(tmp_path, f"seed: {VALUES[kind]}\n")


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_of_the_command_line_that_cannot_be_is_refused(tmp_path: Path, kind: str) -> None:
    message = refusal(tmp_path, "", f"seed={VALUES[kind]}")
    assert "command line" in message


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("field", ["dataset", "chat_template_kwargs", "stop", "reward_funcs", "phase_timeout_s"])
def test_settings_of_any_type_refuse_or_take_any_value(tmp_path: Path, field: str, kind: str) -> None:
    """No other exception, and what is taken can be written down."""
    text = "".join(f"{name}: {value}\n" for name, value in WORKING.items() if name != field)
    (tmp_path / "run.yaml").write_text(f"{text}method: grpo\n{field}: {VALUES[kind]}\n")
    with suppress(ConfigError):
        json.dumps(load_config(tmp_path / "run.yaml").as_json(), allow_nan=False).encode()


def test_no_number_of_a_config_is_infinite_or_none(tmp_path: Path) -> None:
    rewards = {"grpo": "reward_funcs: [length]\n"}
    for name, field in known_fields().items():
        if field.annotation is float or field.annotation == float | None:
            for value in (".nan", ".inf", "-.inf", "1e999"):
                method = "sft" if name in RunConfig.model_fields else methods_with(name)[0]
                own = f"method: {method}\n{rewards.get(method, '')}"
                assert f"{name}=" in refusal(tmp_path, f"{own}{name}: {value}\n")
    assert "phase_timeout_s" in refusal(tmp_path, "phase_timeout_s: {save: .nan}\n")
    assert "reward_weights" in refusal(tmp_path, "method: grpo\nreward_funcs: [length]\nreward_weights: [.nan]\n")


@pytest.mark.parametrize("value", [r'"a\0b"', "~nosuchuser/x", "a" * 256, "b/" * 2000, r'"\ud83d"'])
@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_cannot_be_is_refused_with_its_line(tmp_path: Path, name: str, value: str) -> None:
    text = "".join(f"{key}: {it}\n" for key, it in WORKING.items() if key != name)
    number = 4 if name not in WORKING else 3
    if name == "reward_funcs":
        value = f'"{value.strip(chr(34))}.py:f"'
    (tmp_path / "run.yaml").write_text(f"{text}{name}: {value}\n")
    with pytest.raises(ConfigError, match=rf"run\.yaml:{number}") as refused:
        load_config(tmp_path / "run.yaml")
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("name", [name for name in PATHS if name != "model"])
def test_what_is_no_file_at_rest_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {it}\n" for key, it in WORKING.items()))
    for path in ("/dev/zero", str(tmp_path / "pipe.py")):
        value = f"{path}:f" if name == "reward_funcs" else path
        if not value.startswith("/dev/zero:"):
            wanted = "folder" if name in FOLDERS else "file"
            with pytest.raises(ConfigError, match=rf"(device|pipe).* a {wanted}\b.*\(command line\)"):
                load_config(tmp_path / "run.yaml", [f"{name}={value}"])


def test_a_chat_template_that_is_huge_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "huge.jinja", "wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert "run.yaml:4" in refusal(tmp_path, "chat_template: huge.jinja\n")


def test_a_config_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero .* 1 MiB"):
        load_config("/dev/zero")


def test_a_config_whose_name_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        load_config("a" * 300)


@pytest.mark.parametrize("key", ["? [a, b]\n: 1\n", "? {a: b}\n: 1\n", f"? {'a' * 5000}\n: 1\n", "<<: {seed: 1}\n"])
def test_a_key_that_is_no_name_is_refused_with_its_line(tmp_path: Path, key: str) -> None:
    message = refusal(tmp_path, key)
    assert "run.yaml:4" in message
    assert len(message) < 300


def test_a_character_outside_the_first_plane_may_be_a_surrogate_pair(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE + 'method: grpo\nreward_funcs: length\nstop: ["\\ud83d\\ude00"]\n')
    assert load_config(tmp_path / "run.yaml").run.stops == ["\U0001f600"]
    assert load_config(tmp_path / "run.yaml", [r'stop="\ud83d\ude00"']).run.stops == ["\U0001f600"]
    values = {**WORKING, "output_dir": "\U0001f600"}
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    assert load_config(tmp_path / "run.yaml").run.output_dir == str(tmp_path / "\U0001f600")


def test_aliases_and_merges_that_mean_one_thing_are_taken(tmp_path: Path) -> None:
    text = "eval_dataset: [&x {path: a.jsonl, weight: 2}, {<<: *x, weight: 3}, *x]\n"
    (tmp_path / "run.yaml").write_text(BASE + text)
    items = load_config(tmp_path / "run.yaml").run.eval_dataset or []
    assert [item.weight for item in items] == [2.0, 3.0, 2.0]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 500 + "]" * 500,
        '{"zero_optimization": {"stage": ' + "7" * 5000 + "}}",
        '{"zero_optimization": {"stage": 1e999}}',
        '{"a": "\\ud83d"}',
        '{"optimizer": {"params": {"lr": NaN}}}',
    ],
)
def test_a_deepspeed_json_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    assert "ds.json" in refusal(tmp_path, "deepspeed: ds.json\n")


def test_arguments_of_python_are_checked_as_the_file_is() -> None:
    for value in ("a\0b", "a" * 256, "~nosuchuser/x", "\ud83d", 2**70):
        with pytest.raises(ConfigError, match="argument"):
            load_config(None, values={**WORKING, "chat_template": value})


@pytest.mark.parametrize("parse", [parse_yaml, parse_json])
def test_a_text_of_any_kind_is_parsed_or_refused(parse: Callable[[str, str], Any]) -> None:
    for text in VALUES.values():
        with suppress(ConfigError):
            parse(text, "name")


@pytest.mark.long
def test_the_command_line_says_so_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE + "seed: 2024-13-45\n")
    (tmp_path / "bomb.yaml").write_text(f"base_model: x\ndatasets: {BOMB}\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for arguments in (
        ["train", "run.yaml"],
        ["plan", "run.yaml"],
        ["train", "run.yaml", f"seed={BOMB}"],
        ["import", "bomb.yaml"],
        ["import", "deep.json"],
        ["import", "--to", "a" * 300, "run.yaml"],
        ["explain", "a" * 300],
        ["report", "a" * 300],
    ):
        done = surefoot(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        assert len(done.stderr) < 1000


def test_a_saved_config_that_is_none_is_refused() -> None:
    run = load_config(None, values=WORKING).run
    with pytest.raises(ConfigError, match=r"\['a'\]"):
        changed_fields(["a"], run)  # type: ignore[arg-type]
    odd = {name: {"a": "b"} for name in known_fields()}
    assert all(len(change) < 300 for change in changed_fields({**odd, "global_batch_size": "x" * 500}, run))


def test_a_version_of_yaml_with_digits_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"%YAML 1.{'9' * 5000}\n---\nmodel: m\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:1"):
        load_config(path, ())


def test_a_byte_that_is_no_utf_8_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(BASE.encode() + b"run_name: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:4: .*UTF-8.* 0xe9"):
        load_config(path, ())


def test_a_config_in_the_encoding_of_chinese_systems_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(BASE.encode() + "system: 你是一个有用的助手，请回答我的问题\n".encode("gb18030"))
    with pytest.raises(ConfigError, match=r"run\.yaml:4: .*It looks like GB18030.* iconv -f GB18030"):
        load_config(path, ())


def test_a_date_is_a_text_on_the_command_line() -> None:
    """A shell takes quotes away."""
    settings = {name: value for name, value in WORKING.items() if name != "output_dir"}
    assert Path(load_config(None, ["output_dir=2024-11-26"], settings).run.output_dir).name == "2024-11-26"
