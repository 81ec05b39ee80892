"""Whole runs and `surefoot data` on data of all kinds: what is trained is what is shown."""

import gzip
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import surefoot
from surefoot.data import prepare_pool, sampler
from surefoot.data.inspect import as_text
from surefoot.errors import DataError
from surefoot.events import DataCounted, Event, StepEnded
from tests.models.architectures import tiny_model
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import surefoot as command

TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
ALPACA = {"instruction": "add", "input": "1 2", "output": "3"}


class Seen:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.counted: list[DataCounted] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, StepEnded):
            self.losses.append(event.loss)
            self.rates.append(event.learning_rate)
        elif isinstance(event, DataCounted):
            self.counted.append(event)


def run(settings: dict[str, Any], **changes: Any) -> tuple[Any, Seen]:
    from surefoot.config import load_config
    from surefoot.training.trainer import train

    seen = Seen()
    return train(load_config(None, (), {**settings, **changes}), [seen], screen=False), seen


def config_file(folder: Path, settings: dict[str, Any]) -> str:
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "run.yaml")


def test_weights_of_turns_weigh_in_the_loss(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The weighted mean over the global batch, whatever it is cut into."""
    rows = counting_rows(4)
    weights = [1.0, 0.25, 0.0, 2.0]
    for row, weight in zip(rows, weights, strict=True):
        row["messages"][1]["loss_weight"] = weight
    data = write_jsonl(tmp_path / "weighted.jsonl", rows)
    folder = model_folder("llama")
    model, total, count = AutoModelForCausalLM.from_pretrained(folder), 0.0, 0.0
    for row, weight in zip(rows, weights, strict=True):
        turns = [{key: turn[key] for key in ("role", "content")} for turn in row["messages"]]
        ids = tokenizer.apply_chat_template(turns, return_dict=False)
        start = len(tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        for i in range(start, len(ids) - 1):
            total += weight * F.cross_entropy(logits[i - 1], torch.tensor(ids[i])).item()
            count += weight
    for each in (1, 3):
        base = {**settings, "model": str(folder), "dataset": str(data), "max_steps": 1, "global_batch_size": 3}
        result, seen = run(base, per_device_train_batch_size=each, output_dir=str(tmp_path / f"run{each}"))
        assert seen.losses[0] == pytest.approx(total / count, abs=1e-5)
        assert result.examples == {"read": 4, "trained": 3, "truncated": 0, "skipped": 1}


def _written(path: Path, rows: list[dict[str, Any]]) -> str:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode(), 1))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(lines)
    return str(path)


@pytest.fixture
def prepared_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few megabytes are handled as large ones are."""
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare_pool, "SMALL_BYTES", 0)
    monkeypatch.setattr(sampler, "WINDOW_ROWS", 4096)


@pytest.mark.long
@pytest.mark.usefixtures("prepared_beside")
@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("big.jsonl", {"max_steps": None, "num_train_epochs": 3e-4, "packing": True}),
        pytest.param("big.jsonl.gz", {"max_steps": None, "num_train_epochs": 3e-4}, marks=pytest.mark.matrix),
        pytest.param("big.parquet", {"max_steps": 3}, marks=pytest.mark.matrix),
    ],
)
def test_training_begins_before_all_data_are_prepared_and_sees_the_same(
    settings: dict[str, Any], tmp_path: Path, name: str, length: dict[str, Any]
) -> None:
    count = 40_000
    data = _written(tmp_path / name, counting_rows(count))
    base = {**settings, "dataset": data, "dataset_num_proc": 1, **length}
    early, seen_early = run(base, output_dir=str(tmp_path / "early"))
    assert not seen_early.counted[0].is_complete, "the first step did not wait for the last row"
    assert seen_early.counted[0].rows["read"] < count
    surefoot.describe_data(base)  # prepares the rest
    again, seen_again = run(base, output_dir=str(tmp_path / "again"))
    assert again.examples == {"read": count, "trained": count, "truncated": 0, "skipped": 0}
    assert again.examples_are_complete
    assert len(seen_again.losses) == again.steps == early.steps >= 1
    assert seen_again.losses == seen_early.losses
    assert seen_again.rates == seen_early.rates, "a schedule over epochs does not need the number of steps"


@pytest.mark.long
@pytest.mark.usefixtures("prepared_beside")
def test_a_bad_row_ends_the_run_when_preparing_comes_to_it(settings: dict[str, Any], tmp_path: Path) -> None:
    """Long before training does; and what was learned until then is kept."""
    data = _written(tmp_path / "big.jsonl", [*counting_rows(20_000), {"messages": []}])
    base = {**settings, "dataset": data, "dataset_num_proc": 1, "max_steps": None, "shuffle": False}
    with pytest.raises(DataError, match=r"big\.jsonl:20001: 'messages'"):
        run(base)
    folder = Path(base["output_dir"])
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    assert 0 < steps < 4000
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == f"step-{steps:08d}"


def test_a_schedule_over_epochs_is_the_one_over_as_many_steps(settings: dict[str, Any], tmp_path: Path) -> None:
    base = {**settings, "dataset": str(write_jsonl(tmp_path / "a.jsonl", counting_rows(24))), "warmup_steps": 2}
    _, by_steps = run(base, max_steps=12)
    _, by_epochs = run(base, max_steps=None, num_train_epochs=2, output_dir=str(tmp_path / "epochs"))
    assert len(by_epochs.rates) == 12
    assert by_epochs.rates == pytest.approx(by_steps.rates)


def test_no_sample_is_longer_than_a_table_of_positions(
    settings: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Without RoPE there is nothing that could be scaled. A row of several samples may be longer."""
    tiny_model("gpt2", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    changes = {"model": str(tmp_path / "gpt2"), "target_modules": "all", "max_length": 128, "max_steps": 1}
    with pytest.raises(DataError, match="table of positions=64"):
        surefoot.train({**settings, **changes}, screen=False)
    result = surefoot.train({**settings, **changes, "truncation": "drop"}, screen=False)
    assert result.examples["skipped"] > 0


@pytest.mark.parametrize(
    ("max_length", "characters", "advice"),
    [
        (32, 64, r"Set max_length: \d+, or truncation: drop"),
        (32, 512, "Set max_length: 256, which is all that the model has positions for, and truncation: drop"),
        (256, 512, "The model has positions for 256 tokens, so truncation: drop"),
    ],
)
def test_the_advice_on_long_rows_stays_within_the_models_positions(
    settings: dict[str, Any], tmp_path: Path, max_length: int, characters: int, advice: str
) -> None:
    rows = [{"query": "how", "response": "x" * characters}, {"query": "how", "response": "so"}]
    data = str(write_jsonl(tmp_path / "long.jsonl", rows))
    report = surefoot.describe_data({**settings, "dataset": data, "max_length": max_length})
    assert report.refusal is not None
    assert re.search(rf"the longest long\.jsonl:1 .*{advice}", report.refusal), report.refusal


def test_a_part_of_the_data_is_held_out(settings: dict[str, Any], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "all.jsonl", counting_rows(60))
    result, seen = run(settings, dataset=str(data), eval_fraction=0.25, max_steps=1)
    assert seen.counted[0].held_out == 60 - result.examples["read"]
    shorter = {"max_length": 60, "truncation": "drop", "max_steps": 1, "dataset": str(data)}
    everything, _ = run(settings, **shorter, output_dir=str(tmp_path / "all"))
    part, seen = run(settings, **shorter, eval_fraction=0.25, output_dir=str(tmp_path / "part"))
    assert everything.examples["skipped"] > part.examples["skipped"] > 0
    assert seen.counted[0].held_out == everything.examples["trained"] - part.examples["trained"]
    lines = [json.loads(line) for line in (result.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert any("eval_loss" in line for line in lines)
    assert 30 < result.examples["read"] < 60
    assert result.findings == []


def test_findings_of_the_data_are_in_the_summary(settings: dict[str, Any], data_file: Path) -> None:
    result, _ = run(settings, eval_dataset=str(data_file), max_steps=1)
    assert [finding.code for finding in result.findings] == ["SF507"]


@pytest.mark.long
def test_data_as_json_is_what_is_trained(
    settings: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast, here: Callable[..., Any]
) -> None:
    rows = counting_rows(6)
    rows[1]["messages"][1]["content"] += "<|im_end|>"
    data = write_jsonl(tmp_path / "a.jsonl", [*rows, rows[0], {"messages": []}])
    done = here("data", config_file(tmp_path, {**settings, "dataset": str(data)}), "--json", "--show", "2")
    assert done.returncode == 2, "training would stop at the bad row"
    report = json.loads(done.stdout)
    assert report["format"] == "messages"
    assert report["rows"] == {"read": 8, "trained": 7, "truncated": 0, "skipped": 1}
    assert report["duplicates"] == 1
    assert report["skipped"][0]["source"] == "a.jsonl:8"
    assert "a.jsonl:8: 'messages'" in report["refusal"]
    assert {finding["code"] for finding in report["findings"]} == {"SF502", "SF508"}
    first, second = report["samples"]
    assert first["source"] == "a.jsonl:1"
    assert first["text"] == tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert first["input_ids"] == tokenizer.apply_chat_template(rows[0]["messages"], return_dict=False)
    trained = [i for i, m in zip(first["input_ids"], first["loss_mask"], strict=True) if m == 1]
    assert tokenizer.decode(trained) == rows[0]["messages"][1]["content"] + "<|im_end|>"
    assert second["text"].endswith("<|im_end|><|im_end|>\n")
    assert second["input_ids"].count(tokenizer.eos_token_id) == 3, "system, user, assistant: not the text in the answer"

    shown = here("data", config_file(tmp_path, {**settings, "dataset": str(data)}))
    assert "8 read = 7 trained + 0 truncated + 1 skipped" in shown.stdout
    assert f"⟦{rows[0]['messages'][1]['content']}<|im_end|>⟧" in shown.stdout


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_a_cut_sample_is_shown_as_it_is_cut(
    settings: dict[str, Any], truncation: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    report = surefoot.describe_data(settings, show=40, max_length=50, truncation=truncation)
    cut = [sample for sample in report.samples if len(sample.input_ids) == 50]
    assert cut
    for sample in report.samples:
        assert tokenizer.decode(sample.input_ids) == sample.text
        assert "".join(text for text, _ in sample.trained_text) == sample.text
    assert report.counts.truncated > 20
    assert any(finding.code == "SF506" for finding in report.findings)


def test_bad_rows_of_one_kind_are_listed_together(settings: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "robot", "content": "a"}]}] * 3 + [{"messages": []}, *counting_rows(8)]
    path = write_jsonl(tmp_path / "some.jsonl", rows)
    report = surefoot.describe_data(settings, dataset=str(path), show=0, on_bad_row="skip")
    lines = as_text(report, color=False).splitlines()
    at = lines.index("skipped rows (4):")
    assert [line.split(":")[0].strip() for line in lines[at + 1 : at + 4]] == ["some.jsonl", "the same", "some.jsonl"]
    assert lines[at + 2] == "    the same: some.jsonl:2, some.jsonl:3"


def test_lengths_are_counted_in_whole_tokens(settings: dict[str, Any]) -> None:
    report = surefoot.describe_data(settings, show=0)
    bins = report.histogram
    assert (bins[0][0], bins[-1][1]) == (report.lengths["min"], report.lengths["max"])
    assert all(later[0] == earlier[1] + 1 for earlier, later in itertools.pairwise(bins))
    assert sum(count for *_, count in bins) == report.counts.trained


@pytest.mark.long
def test_data_that_cannot_be_trained_are_named_and_end_with_status_2(
    settings: dict[str, Any], tmp_path: Path, here: Callable[..., Any]
) -> None:
    done = here("data", config_file(tmp_path, {**settings, "max_length": 5, "truncation": "right"}))
    assert done.returncode == 2
    assert "SF501" in done.stdout


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "broken line": ("a.jsonl", json.dumps(ALPACA).encode() + b"\n{", r"a\.jsonl:2: .*JSON"),
    "cut array": ("a.json", b"[\n" + json.dumps(ALPACA).encode() + b",\n", r"a\.json:\d: .*JSON array"),
    "not utf-8": ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: .*UTF-8"),
    "nul": ("a.jsonl", b'{"text": "a\\u0000"}\n', r"a\.jsonl:1: text .*NUL"),
    "huge row": ("a.jsonl", b'{"text": "' + b"x" * 50_000_000 + b'"}\n', r"a\.jsonl:1: .*47\.7 MiB"),
    "mixed": ("a.jsonl", f"{json.dumps(ALPACA)}\n{json.dumps(SHAREGPT)}\n".encode(), r"a\.jsonl:2: .*sharegpt.*alpaca"),
    "ambiguous": ("a.jsonl", json.dumps({**ALPACA, **SHAREGPT}).encode(), "formats: sharegpt, alpaca"),
    "many columns": ("a.jsonl", json.dumps({f"c{n}": n for n in range(10_000)}).encode(), r"\(10000 columns\)"),
    "undeclared tool": (
        "a.jsonl",
        b'{"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": '
        b'"{\\"name\\": \\"f\\", \\"arguments\\": {}}"}]}',
        r"a\.jsonl:1: .*'f'.*`tools`",
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_stop_training_before_it_begins(settings: dict[str, Any], tmp_path: Path, kind: str) -> None:
    name, content, message = BAD_FILES[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        run(settings, dataset=str(tmp_path / name))
    assert re.search(message, str(caught.value))
    assert not (Path(settings["output_dir"]) / "adapter").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nul", "cut array"])
def test_data_shows_what_is_wrong_without_a_traceback(
    settings: dict[str, Any], tmp_path: Path, kind: str, here: Callable[..., Any]
) -> None:
    """A row that is bad is shown; a file that is bad as a whole is refused."""
    name, content, message = BAD_FILES[kind]
    (tmp_path / name).write_bytes(content)
    done = here("data", config_file(tmp_path, {**settings, "dataset": str(tmp_path / name)}))
    assert done.returncode == 2
    assert re.search(message, done.stdout + done.stderr)
    assert "Traceback" not in done.stderr


def test_bad_rows_can_be_left_out(settings: dict[str, Any], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [{"messages": []}, *counting_rows(10), {"text": "x"}])
    with open(data, "ab") as file:
        file.write(b'{"messages": "\xff"}\n{"messa')
    result, _ = run(settings, dataset=str(data), on_bad_row="skip", max_steps=1)
    assert result.examples == {"read": 14, "trained": 10, "truncated": 0, "skipped": 4}


@pytest.mark.matrix
def test_a_template_in_an_endless_loop_ends_with_status_2(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "loop.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    done = command("train", config_file(tmp_path, {**settings, "chat_template": str(tmp_path / "loop.jinja")}))
    assert done.returncode == 2
    assert re.search(r"train\.jsonl:1: .*chat template .*\b3 s\b", done.stderr)


@pytest.mark.long
def test_an_interrupt_while_data_are_prepared_leaves_no_worker(settings: dict[str, Any], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "big.jsonl", [{**row, "n": n} for n, row in enumerate(counting_rows(80_000))])
    config = config_file(tmp_path, {**settings, "dataset": str(data), "max_steps": None, "dataset_num_proc": 2})
    process = subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", config], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    supervisor = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while not (workers := [worker for job in supervisor.children() for worker in job.children()]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    assert process.returncode == 1
    assert not any(worker.is_running() for worker in workers)
