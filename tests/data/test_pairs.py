"""Rows of preference data in every form, and the tokens of their pairs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot
from surefoot.config.schema import DatasetItem
from surefoot.data.collate import collate
from surefoot.data.conversation import BadRow, Conversation
from surefoot.data.dataset import Sample
from surefoot.data.row_formats import FormatSpec, Reader, format_of
from surefoot.data.sources import find_sources
from surefoot.errors import DataError
from tests.methods.test_dpo import pair_rows
from tests.support.data import write_jsonl

QUESTION = {"role": "user", "content": "q"}
CHOSEN, REJECTED = ({"role": "assistant", "content": content} for content in ("yes", "no"))


def read(row: dict[str, Any], **spec: Any) -> Conversation:
    found = FormatSpec(pairs=True, **spec)
    return Reader(found, format_of(found, row)).read(row)


def turns(conversation: Conversation | None) -> list[tuple[str, str]]:
    assert conversation is not None
    return [(message.role, message.content) for message in conversation.messages]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "chosen": [CHOSEN], "rejected": [REJECTED]},
        {"chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]},
        {"prompt": "q", "chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED], "messages": [QUESTION, CHOSEN],
         "score_chosen": 8.0},
        {"prompt": "q", "chosen": [CHOSEN], "rejected": [REJECTED]},
        {"prompt": [QUESTION], "chosen": "yes", "rejected": "no"},
        {"instruction": "q", "input": "", "chosen": "yes", "rejected": "no"},
        {"query": "q", "chosen": "yes", "rejected": "no"},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "yes"},
         "rejected": {"from": "gpt", "value": "no"}},
        {"messages": [QUESTION, CHOSEN], "rejected_response": "no"},
        {"query": "q", "response": "yes", "rejected_response": "no"},
        {"messages": [QUESTION, CHOSEN], "rejected_messages": [QUESTION, REJECTED]},
        {"chosen": "\n\nHuman: q\n\nAssistant: yes", "rejected": "\n\nHuman: q\n\nAssistant: no"},
    ],
    ids=lambda row: "+".join(f"{name}:{type(value).__name__}" for name, value in row.items()),
)  # fmt: skip
def test_every_form_is_the_same_pair(row: dict[str, Any]) -> None:
    pair = read(row)
    assert turns(pair) == [("user", "q"), ("assistant", "yes")]
    assert turns(pair.rejected) == [("user", "q"), ("assistant", "no")]
    assert (pair.kind, pair.first_trained) == ("chat", 1)
    assert pair.rejected is not None
    assert pair.rejected.first_trained == 1


def test_texts_alone_are_joined_without_the_template() -> None:
    pair = read({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"})
    assert (pair.kind, turns(pair.rejected)) == ("completion", [("user", "2 + 2 ="), ("assistant", " 5")])


def test_a_conversation_parts_where_the_answers_differ() -> None:
    """The first answer is context, and is not compared."""
    before = [{"role": "system", "content": "s"}, QUESTION, CHOSEN, QUESTION]
    pair = read({"chosen": [*before, CHOSEN], "rejected": [*before, REJECTED]})
    assert pair.first_trained == 4
    assert turns(read({"chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]}, system="s"))[0] == (
        "system",
        "s",
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [QUESTION], "chosen": [CHOSEN]}, "fit no known format"),
        ({"prompt": [QUESTION], "chosen": [CHOSEN], "rejected": None}, "'rejected' is null: a pair needs both"),
        ({"prompt": [QUESTION], "chosen": [CHOSEN], "rejected": [CHOSEN]}, "are equal"),
        ({"query": "q", "chosen": "yes", "rejected": ""}, "the rejected answer is empty"),
        ({"chosen": "yes", "rejected": "no"}, "none of prompt, messages.* is there"),
        ({"query": "q", "instruction": "i", "chosen": "yes", "rejected": "no"}, "instruction, query are there"),
        ({"prompt": "other", "chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]}, "is not the question"),
        ({"chosen": "\n\nHuman: q\n\nHuman: r", "rejected": "\n\nHuman: q\n\nAssistant: no"}, "do not alternate"),
        (
            {
                "prompt": [{"role": "system", "content": "s"}, QUESTION],
                "chosen": [QUESTION, CHOSEN],
                "rejected": [QUESTION, REJECTED],
            },
            "is not the question",
        ),
        (
            {"query": "q", "chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]},
            "`query` .*not the question",
        ),
        ({"chosen": [QUESTION, CHOSEN], "rejected": [{"role": "user", "content": "r"}, REJECTED]}, "other questions"),
        ({"system": "s", "prompt": "q", "chosen": "y", "rejected": "n"}, "which `system` and `history` need"),
        ({"rejected_response": "no"}, "needs `messages`, or `query`"),
        ({"messages": [QUESTION], "rejected_response": "no"}, "the chosen answer is empty"),
        ({"prompt": [QUESTION], "completion": [CHOSEN], "label": True}, r"preference \(rejected \+ chosen\)"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        read(row)


def test_an_entry_of_llama_factory_is_read_as_pairs(tmp_path: Path) -> None:
    row = {"asked": "q", "more": "", "good": "yes", "rejected": "no", "history": [["ignored", "column"]]}
    write_jsonl(tmp_path / "pairs.jsonl", [row])
    columns = {"prompt": "asked", "query": "more", "chosen": "good"}
    talk = {"chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}}
    write_jsonl(tmp_path / "talk.jsonl", [{"conversations": [{"from": "human", "value": "q"}], **talk}])
    entries = {
        "alpaca": {"file_name": "pairs.jsonl", "ranking": True, "columns": columns},
        "sharegpt": {"file_name": "talk.jsonl", "ranking": True, "formatting": "sharegpt"},
    }
    info = tmp_path / "dataset_info.json"
    info.write_text(json.dumps(entries))
    for name in entries:
        (source,) = find_sources([DatasetItem(path=str(info), name=name)])
        spec = replace(source.spec, pairs=True)
        (line,) = source.files[0].read_text().splitlines()
        pair = Reader(spec, format_of(spec, json.loads(line))).read(json.loads(line))
        assert (turns(pair), turns(pair.rejected)) == (
            [("user", "q"), ("assistant", "yes")], [("user", "q"), ("assistant", "no")],
        )  # fmt: skip
        with pytest.raises(BadRow, match="single answers"):
            format_of(source.spec, json.loads(line))


def test_pairs_are_named_where_one_answer_is_expected() -> None:
    row = {"prompt": [QUESTION], "chosen": [CHOSEN], "rejected": [REJECTED]}
    with pytest.raises(BadRow, match=r"preference data: `method: dpo`"):
        format_of(FormatSpec(), row)
    with pytest.raises(BadRow, match=r"is preference \(dataset_format\), and the method trains on single answers"):
        format_of(FormatSpec("preference"), row)
    with pytest.raises(BadRow, match=r"is messages .*trains on pairs of answers"):
        format_of(FormatSpec("messages", pairs=True), row)


def test_a_pair_is_two_sequences_of_the_same_tokens_shared_or_not() -> None:
    ids = np.arange(10, 20, dtype=np.int32)
    sample = Sample(ids, np.array([0, 0, 0, 0, 1, 1, 0, 1, 1, 1], np.float32), "x:1", parts=(4, 2, 4))
    plain = Sample(np.array([5, 6, 7], np.int32), np.array([0, 1, 1], np.float32), "x:2")
    apart, shared = (collate([plain, sample], shares_questions=shares) for shares in (False, True))
    assert apart.ids[0].tolist() == [5, 6, 7, 10, 11, 12, 13, 14, 15, 10, 11, 12, 13, 16, 17, 18, 19]
    assert shared.ids[0].tolist() == [5, 6, 7, *range(10, 20)]
    assert (apart.prefix_of, shared.prefix_of) == (None, (-1, -1, 1, 1))
    assert shared.position_ids[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    for batch in (apart, shared):
        assert batch.targets.tolist() == [6, 7, 14, 15, 17, 18, 19]
        assert batch.answer_of.tolist() == [0, 0, 1, 1, 2, 2, 2]
        assert (batch.num_sequences, batch.num_tokens) == (3, 17)
        before = batch.ids[0][batch.target_positions].tolist()
        assert before == [5, 6, 13, 14, 16, 17, 18]


def test_pairs_are_cut_alike_and_counted(tmp_path: Path, model_folder: Any) -> None:
    data = str(write_jsonl(tmp_path / "pairs.jsonl", pair_rows(24)))
    base = {"method": "dpo", "model": str(model_folder("llama")), "dataset": data, "output_dir": str(tmp_path / "o")}
    whole = surefoot.describe_data({**base, "max_length": 128}, show=24)
    longest = max(len(sample.input_ids) for sample in whole.samples)
    with pytest.raises(DataError, match=r"truncation: drop"):
        surefoot.train({**base, "max_length": 60, "max_steps": 1, "device": "cpu"}, screen=False)
    left = surefoot.describe_data({**base, "max_length": 60, "truncation": "left"}, show=24)
    assert left.counts.truncated > 0
    assert left.trained_tokens == whole.trained_tokens, "only the question is cut"
    right = surefoot.describe_data({**base, "max_length": 42, "truncation": "right"}, show=24)
    assert right.counts.skipped > 0
    assert all("its answers are equal, or nothing of one is left" in reason for _, reason in right.skipped)
    assert all(len(sample.input_ids) < longest for sample in right.samples)


def test_what_the_report_shows_is_what_is_trained(tmp_path: Path, model_folder: Any, tokenizer: Any) -> None:
    rows = [{"prompt": [QUESTION], "chosen": [CHOSEN], "rejected": [REJECTED]}]
    data = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    settings = {"method": "dpo", "model": str(model_folder("llama")), "dataset": data, "output_dir": "o"}
    (sample,) = surefoot.describe_data(settings, show=1).samples
    marked = [text for text, is_trained in sample.trained_text if is_trained]
    assert marked == ["yes<|im_end|>", "no<|im_end|>"]
    trained = [token for token, weight in zip(sample.input_ids, sample.loss_mask, strict=True) if weight]
    assert tokenizer.decode(trained) == "yes<|im_end|>no<|im_end|>"
    assert torch.tensor(sample.loss_mask).sum() == len(trained)
