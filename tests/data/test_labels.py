"""Rows with a label: read from the columns of peers, marked from the last question on, or refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from surefoot.config import DatasetItem
from surefoot.data.checks import count_labels, data_findings
from surefoot.data.conversation import BadRow, Conversation
from surefoot.data.inspect import as_text, report_on
from surefoot.data.row_formats import FormatSpec, Reader, format_of
from surefoot.data.sources import find_sources
from tests.data.opening import prepared
from tests.support.data import write_jsonl

QUESTION = {"role": "user", "content": "Two and two?"}
ANSWER = {"role": "assistant", "content": "Four."}
SHAREGPT = [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]
FIRST = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]


def read(row: dict[str, Any], **spec: Any) -> Conversation:
    found = FormatSpec(labels=True, **spec)
    return Reader(found, format_of(found, row)).read(row)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER], "label": False},
        {"messages": [QUESTION, ANSWER], "kto_tag": False},
        {"messages": [QUESTION, ANSWER], "label": 0},
        {"prompt": [QUESTION], "completion": [ANSWER], "label": False},
        {"instruction": "Two and two?", "output": "Four.", "kto_tag": False},
        {"query": "Two and two?", "response": "Four.", "label": False},
        {"conversations": SHAREGPT, "label": False},
    ],
    ids=lambda row: "+".join(row),
)  # fmt: skip
def test_labels_stand_beside_the_formats_of_answers(row: dict[str, Any]) -> None:
    conversation = read(row)
    assert [message.content for message in conversation.messages] == ["Two and two?", "Four."]
    assert conversation.is_desired is False
    assert conversation.first_trained == 1
    positive = {name: True if name in ("label", "kto_tag") else value for name, value in row.items()}
    assert read(positive).is_desired is True


@pytest.mark.parametrize(("labels", "code"), [([True] * 4, "SF513"), ([False] * 4, "SF513"), ([True, False] * 2, None)])
def test_data_with_one_kind_of_label_are_found(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, labels: list[bool], code: str | None
) -> None:
    rows = [
        {"messages": [QUESTION, {"role": "assistant", "content": f"Four {n}."}], "label": label}
        for n, label in enumerate(labels)
    ]
    dataset = prepared(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, labels=True)
    assert count_labels(dataset) == (sum(labels), len(labels) - sum(labels))
    assert [finding.code for finding in data_findings(dataset)] == ([code] if code else [])
    report = report_on(dataset, None, show=0)
    assert f"labels      {sum(labels)} desired, {len(labels) - sum(labels)} not desired" in as_text(report, color=False)


def test_a_label_is_of_the_last_answer() -> None:
    conversation = read({"messages": [*FIRST, QUESTION, ANSWER], "label": True})
    assert conversation.first_trained == 3


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [QUESTION, ANSWER]}, "no label. The answer needs `label`"),
        ({"messages": [QUESTION, ANSWER], "label": None}, "no label"),
        ({"messages": [QUESTION, ANSWER], "label": "good"}, "label is 'good'; it must be true"),
        ({"messages": [QUESTION, ANSWER], "label": 2}, "label is 2; it must be true"),
        ({"messages": [QUESTION, ANSWER], "label": True, "kto_tag": True}, "several labels: label, kto_tag"),
    ],
)
def test_what_is_no_label_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow, match=said):
        read(row)


def test_pairs_are_for_another_method() -> None:
    with pytest.raises(BadRow, match="method: dpo"):
        read({"prompt": "x", "chosen": "y", "rejected": "z", "label": True})


@pytest.mark.parametrize("column", ["label", "kto_tag"])
def test_an_answer_that_is_not_desired_is_not_trained_by_sft(column: str) -> None:
    spec = FormatSpec()
    row = {"prompt": "x", "completion": "y", column: False}
    with pytest.raises(BadRow, match="method: kto"):
        Reader(spec, format_of(spec, row)).read(row)


def test_a_sample_is_a_pair_with_one_side(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"messages": [*FIRST, QUESTION, ANSWER], "label": label} for label in (True, False)]
    dataset = prepared(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, labels=True)
    desired, other = dataset
    assert desired.parts is not None
    question, answer, nothing = desired.parts
    assert nothing == 0
    assert other.parts == (question, 0, answer)
    assert desired.ids.tolist() == other.ids.tolist()
    assert not desired.weights[:question].any(), "the earlier answer is part of the question"
    assert "Four" in tokenizer.decode(desired.ids[question:])
    assert "Two and two" in tokenizer.decode(desired.ids[:question])


def test_the_tag_of_llama_factory_may_have_any_name(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"messages": [QUESTION, ANSWER], "good": False}])
    columns = {"messages": "messages", "kto_tag": "good"}
    entry = {"file_name": "a.jsonl", "formatting": "openai", "columns": columns}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"kto": entry}))
    items = [DatasetItem(path=str(tmp_path / "dataset_info.json"), name="kto")]
    assert find_sources(items)
    (sample,) = prepared(items, tokenizer, labels=True)
    assert sample.parts is not None
    assert sample.parts[1] == 0


def test_a_long_answer_is_cut(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    long = {**ANSWER, "content": "four " * 50}
    rows = [{"messages": [QUESTION, long], "label": True}, {"messages": [QUESTION, ANSWER], "label": False}]
    dataset = prepared(
        write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, labels=True, max_length=40, truncation="right"
    )
    first, second = dataset
    assert len(first.ids) == 40
    assert first.parts is not None
    assert sum(first.parts) == 40
    assert len(second.ids) < 40
    assert dataset.counts().truncated == 1
