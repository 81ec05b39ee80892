"""Samples are cut, weighted and counted as the settings say; every row read is trained, truncated or skipped."""

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from surefoot.config import DatasetItem
from surefoot.data import file_readers
from surefoot.data.cache import renderer_key
from surefoot.data.checks import data_findings
from surefoot.data.dataset import Counts, Dataset
from surefoot.data.images import ImageSettings
from surefoot.data.renderer_source import RendererSource
from surefoot.data.template_source import TemplateSource
from surefoot.errors import DataError
from tests.data.families import tokenizer_of
from tests.data.opening import open_dataset, prepared
from tests.support.data import counting_rows, write_jsonl
from tests.support.models import VOCAB_SIZE


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", counting_rows(12))


def lengths(dataset: Dataset) -> list[int]:
    return [len(sample.ids) for sample in dataset]


def trained_text(dataset: Dataset, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(sample.ids[sample.weights > 0]) for sample in dataset]


def talk(*answers: Any, **columns: Any) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for answer in answers:
        extra = answer if isinstance(answer, dict) else {"content": answer}
        turns += [{"role": "user", "content": "go on"}, {"role": "assistant", **extra}]
    return {"messages": turns, **columns}


def test_rows_read_are_trained_truncated_or_skipped(counting: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = prepared(counting, tokenizer)
    assert whole.counts() == Counts(12, 12)
    limit = sorted(lengths(whole))[6]
    for truncation in ("drop", "right", "left"):
        cut = prepared(counting, tokenizer, max_length=limit, truncation=truncation)
        counts = cut.counts()
        assert counts.read == 12 == counts.trained + counts.truncated + counts.skipped
        assert max(lengths(cut)) <= limit
        assert (counts.skipped > 0) == (truncation == "drop")
        assert len(list(cut.skipped())) == counts.skipped
        for sample, full in zip(cut, (s for s in whole if truncation != "drop" or len(s.ids) <= limit), strict=True):
            kept = slice(-limit, None) if truncation == "left" else slice(limit)
            assert sample.ids.tolist() == full.ids[kept].tolist()
            assert sample.weights.tolist() == full.weights[kept].tolist()
    assert prepared(counting, tokenizer, max_length=limit, truncation="right").counts().cut_inside > 0
    assert prepared(counting, tokenizer, max_length=limit, truncation="left").counts().cut_inside == 0


def test_long_texts_are_split_into_samples(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [" ".join(f"{n}" for n in range(first, first + 7 * first)) for first in range(1, 12)]
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    path = write_jsonl(tmp_path / "texts.jsonl", rows)
    whole = prepared(path, tokenizer, train_on="all", max_length=4096)
    split = prepared(path, tokenizer, train_on="all", max_length=50, truncation="split")
    assert split.counts() == Counts(11, 11)
    pieces = list(split)
    assert len(pieces) > 20
    by_row: dict[str, list[int]] = {}
    for piece in pieces:
        assert 1 < len(piece.ids) <= 50
        assert piece.weights.tolist() == [1.0] * len(piece.ids)
        by_row.setdefault(piece.place, []).extend(piece.ids.tolist())
    for sample in whole:
        alone = len(sample.ids) % 50 == 1  # a last token alone would predict nothing
        assert by_row[sample.place] == sample.ids.tolist()[: -1 if alone else None]
    # Trained: all but the first token of each piece.
    trained = sum(int(split.chunk_samples(0).trained[n]) for n in range(len(pieces)))
    assert trained == sum(len(piece.ids) - 1 for piece in pieces)
    assert [split.sample(*piece.key).ids.tolist() for piece in pieces] == [piece.ids.tolist() for piece in pieces]
    with pytest.raises(
        DataError, match=r"truncation: drop \(leave them out\) or split \(make several samples of each\)"
    ):
        prepared(path, tokenizer, train_on="all", max_length=50).check()


def test_pieces_without_a_trained_token_are_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    silent = {"content": "one two three four five six seven eight nine ten " * 5, "weight": 0}
    path = write_jsonl(tmp_path / "rows.jsonl", [talk(silent, "one two"), talk("one two three")])
    whole = list(prepared(path, tokenizer, train_on="all", max_length=4096))
    split = prepared(path, tokenizer, train_on="all", max_length=24, truncation="split")
    kept = [
        (sample.place, begin)
        for sample in whole
        for begin in range(0, len(sample.ids), 24)
        if sample.weights[begin + 1 : begin + 24].any()
    ]
    assert len(kept) < sum(-(-len(sample.ids) // 24) for sample in whole)
    assert [piece.place for piece in split] == [place for place, _ in kept]
    assert split.counts() == Counts(2, 2)


def test_a_row_cut_until_nothing_is_trained_is_skipped(counting: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r" 12 .* 12 .*data\.jsonl:1\b"):
        prepared(counting, tokenizer, max_length=10, truncation="right")


def test_rows_too_long_are_an_error_by_default(counting: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"\d+ of 12 .*max_length=60: .*data\.jsonl:\d.* \(max_length\)\.$"):
        prepared(counting, tokenizer, max_length=60)


def test_a_tokenizer_of_another_model_is_noticed(counting: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:\d+: .* \d+ .*vocabulary .* ?50\b"):
        prepared(counting, tokenizer, vocab_size=50)
    dataset = open_dataset(counting, tokenizer, vocab_size=50, is_lenient=True)
    dataset.preparation.run()
    assert [finding.code for finding in data_findings(dataset)] == ["SF505"]


def test_what_is_trained_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [talk("one", "two", "three")])
    read = {train_on: trained_text(prepared(path, tokenizer, train_on=train_on), tokenizer)
            for train_on in ("assistant", "last_assistant", "all")}  # fmt: skip
    assert read["assistant"] == ["one<|im_end|>two<|im_end|>three<|im_end|>"]
    assert read["last_assistant"] == ["three<|im_end|>"]
    assert read["all"][0].startswith("<|im_start|>system")


def test_weights_of_rows_win(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [talk({"content": "one", "loss": False}, {"content": "two", "loss_weight": 0.25}, "three"),
            talk({"content": "four", "weight": 0})]  # fmt: skip
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    dataset = prepared(path, tokenizer)
    assert dataset.counts() == Counts(2, 1, 0, 1)
    ((place, reason),) = dataset.skipped()
    assert place == "a.jsonl:2"
    assert "trained" in reason
    (sample,) = dataset
    for weight, text in ((0.25, "two<|im_end|>"), (1.0, "three<|im_end|>")):
        assert tokenizer.decode(sample.ids[sample.weights == weight]) == text


@pytest.mark.parametrize("train_on", ["all", "last_assistant"])
def test_weights_of_rows_win_over_what_is_trained_on(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, train_on: str
) -> None:
    turns = (
        {"content": "one", "loss": True},
        {"content": "two", "loss": False},
        "three",
        {"content": "4", "loss": 0.5},
    )
    path = write_jsonl(tmp_path / "a.jsonl", [talk(*turns)])
    dataset = prepared(path, tokenizer, train_on=train_on)
    (sample,) = dataset
    at = {text: tokenizer(text + "<|im_end|>")["input_ids"] for text in ("one", "two", "three", "4")}
    ids = sample.ids.tolist()
    found = {}
    for text, wanted in at.items():
        begin = next(i for i in range(len(ids)) if ids[i : i + len(wanted)] == wanted)
        (found[text],) = set(sample.weights[begin : begin + len(wanted)].tolist())
    assert found == {"one": 1.0, "two": 0.0, "three": float(train_on == "all"), "4": 0.5}
    assert dataset.chunk_samples(0).trained.tolist() == [int((sample.weights[1:] > 0).sum())]


def test_bad_rows_stop_the_run_or_are_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [talk("one"), {"messages": []}, talk("two"), {"instruction": "a", "output": "b"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:2: 'messages' .*\b2 .* 4 rows .*on_bad_row: skip \(run\.yaml:2\)"):
        prepared(path, tokenizer)
    dataset = prepared(path, tokenizer, skip_bad_rows=True)
    assert dataset.counts() == Counts(4, 2, 0, 2)
    assert [place for place, _ in dataset.skipped()] == ["a.jsonl:2", "a.jsonl:4"]
    assert [sample.place for sample in dataset] == ["a.jsonl:1", "a.jsonl:3"]


def test_a_range_of_rows_and_several_sources(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_readers, "CHUNK_ROWS", 4)
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [talk(f"{name}{n}") for n in range(10)])
    items = [
        DatasetItem(path=str(tmp_path / "b.jsonl"), split="[80%:]"),
        DatasetItem(path=str(tmp_path / "a.jsonl"), split="[3:5]"),
    ]
    dataset = prepared(items, tokenizer)
    assert [sample.place for sample in dataset] == ["b.jsonl:9", "b.jsonl:10", "a.jsonl:4", "a.jsonl:5"]
    assert dataset.counts() == Counts(4, 4)


def test_held_out_samples_are_told_by_content(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [talk(f"answer {n % 50}") for n in range(200)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    train, held_out = (prepared(path, tokenizer, eval_fraction=0.3, side=side) for side in ("train", "eval"))
    texts = [set(trained_text(side, tokenizer)) for side in (train, held_out)]
    assert not texts[0] & texts[1], "equal samples fall on one side"
    assert train.counts().read + held_out.counts().read == 200
    assert 20 < held_out.counts().read < 100
    assert data_findings(train, held_out) == []


def test_a_held_out_share_or_a_range_without_rows_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [talk("same")] * 3)
    with pytest.raises(DataError, match=r"eval_fraction=0\.001 "):
        prepared(path, tokenizer, eval_fraction=0.001, side="eval")
    with pytest.raises(DataError, match=r"`split` .*eval_fraction"):
        prepared([DatasetItem(path=str(path), split="[5:]")], tokenizer)


def test_a_row_too_long_stops_an_early_start_too(counting: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = open_dataset(counting, tokenizer, max_length=60)
    dataset.preparation.run()
    with pytest.raises(DataError, match=r"data\.jsonl:\d+: \d+ tokens.* max_length=60"):
        dataset.chunk_samples(0)


def test_other_columns_are_kept_when_asked(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [talk("one", solution=[1, {"a": "é"}]), talk("two")])
    dataset = prepared(path, tokenizer, keep_columns=True)
    assert [dataset.columns(0, sample) for sample in (0, 1)] == [{"solution": [1, {"a": "é"}]}, {}]


def test_a_prompt_of_one_token_can_be_answered(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "one two"}])
    dataset = prepared(path, tokenizer, prompts=True, train_on="all")
    assert [len(sample.ids) > 1 for sample in dataset] == [False, True]
    assert list(dataset.skipped()) == []


def test_a_column_may_hold_what_is_no_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Half a surrogate pair, as tests of programs have them."""
    (tmp_path / "a.jsonl").write_text(json.dumps(talk("one", tests=["\ud800"])) + "\n")
    dataset = prepared(tmp_path / "a.jsonl", tokenizer, keep_columns=True)
    assert dataset.columns(0, 0) == {"tests": ["\ud800"]}


def test_findings_of_data_that_train_but_should_not(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    leak = "a long answer that is given away"
    rows = [
        talk("one<|im_end|>"),
        {"messages": [{"role": "user", "content": leak}, {"role": "assistant", "content": leak}]},
        talk({"content": "x", "reasoning_content": "because"}),
        talk(" "),
        *(talk(f"a rather long answer number {n} that goes on and on") for n in range(4)),
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    dataset = prepared(path, tokenizer, max_length=75, truncation="right", vocab_size=VOCAB_SIZE)
    found = {finding.code: finding for finding in data_findings(dataset, dataset)}
    assert set(found) == {"SF502", "SF504", "SF506", "SF507", "SF508", "SF509", "SF511"}
    assert found["SF502"].evidence == {"rows": 1, "of": 8, "first": "a.jsonl:1"}
    assert found["SF511"].evidence == {"rows": 1, "of": 8, "first": "a.jsonl:4"}
    assert found["SF504"].evidence["first"] == "a.jsonl:2"


def test_two_tokens_at_the_beginning_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A template that writes one itself, and so is given two."""
    twice = copy.deepcopy(tokenizer)
    twice.bos_token = "<|im_start|>"
    assert str(twice.chat_template).startswith("{%")
    twice.chat_template = "{{ bos_token }}" + str(tokenizer.chat_template)
    path = write_jsonl(tmp_path / "a.jsonl", [talk("one"), talk("two")])
    found = {finding.code: finding for finding in data_findings(prepared(path, twice), None)}
    assert found["SF503"].evidence == {"rows": 2, "of": 2, "first": "a.jsonl:1, a.jsonl:2"}
    assert "SF503" not in {finding.code for finding in data_findings(prepared(path, tokenizer), None)}


def test_a_thinking_model_that_is_taught_to_answer_at_once_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = str(tokenizer.chat_template).replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert thinking.chat_template != tokenizer.chat_template
    thought = talk("because</think>three")
    for answers, is_named in (([talk("one"), talk("two"), thought], True), ([talk("one"), thought], False)):
        path = write_jsonl(tmp_path / "a.jsonl", answers)
        found = {finding.code: finding for finding in data_findings(prepared(path, thinking), None)}
        assert ("SF512" in found) == is_named
        if is_named:
            assert found["SF512"].evidence == {"rows": 2, "of": 3, "first": "a.jsonl:1, a.jsonl:2"}
    assert "SF512" not in {finding.code for finding in data_findings(prepared(path, tokenizer), None)}


LINES = st.lists(
    st.one_of(
        st.sampled_from(["", "{", "[]", '{"messages": []}', '{"text": "plain"}', '{"messages": [{"role": "user"}]}']),
        st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=60), min_size=1, max_size=4).map(
            lambda answers: json.dumps(talk(*answers))
        ),
    ),
    max_size=12,
)


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.sampled_from(["drop", "left", "right"]), st.sampled_from(["assistant", "last_assistant", "all"]))
def test_whatever_a_file_holds_its_counts_add_up(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, lines: list[str], truncation: str, train_on: str
) -> None:
    path = tmp_path / "any.jsonl"
    path.write_text("\n".join([json.dumps(talk("first")), *lines]), "utf-8")
    dataset = prepared(path, tokenizer, skip_bad_rows=True, truncation=truncation, train_on=train_on, max_length=60)
    counts = dataset.counts()
    assert counts.read == 1 + sum(bool(line.strip()) for line in lines)
    assert counts.read == counts.trained + counts.truncated + counts.skipped
    samples = list(dataset)
    assert len(samples) == counts.trained + counts.truncated
    assert len(list(dataset.skipped())) == counts.skipped
    trained = dataset.chunk_samples(0).trained.tolist()
    assert trained == [int((sample.weights[1:] > 0).sum()) for sample in samples]
    assert all(count > 0 for count in trained)
    assert all(len(sample.ids) == len(sample.weights) <= 60 for sample in samples)


def test_healthy_data_have_no_finding(counting: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert data_findings(prepared(counting, tokenizer, vocab_size=VOCAB_SIZE)) == []


def test_the_same_content_has_the_same_fingerprint(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name, count in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "data.jsonl", counting_rows(count))
    a, b, c = (open_dataset(tmp_path / name / "data.jsonl", tokenizer).fingerprint() for name in "abc")
    assert a == b != c


def test_tokens_of_the_whole_file_are_those_of_its_rows(counting: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for row, sample in zip(counting_rows(12), prepared(counting, tokenizer), strict=True):
        assert sample.ids.tolist() == tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert sample.ids.dtype == np.int32


@pytest.mark.parametrize(("train_on", "codes"), [("assistant", ["SF509"]), ("last_assistant", [])])
def test_thoughts_that_a_template_drops_matter_where_their_turns_are_trained(
    tmp_path: Path, train_on: Any, codes: list[str]
) -> None:
    thinks = [{"role": "assistant", "content": text, "reasoning_content": f"for {text}"} for text in ("one", "two")]
    asks = [{"role": "user", "content": text} for text in ("q", "why")]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [asks[0], thinks[0], asks[1], thinks[1]]}])
    dataset = prepared(path, tokenizer_of("qwen3"), train_on=train_on)
    assert [finding.code for finding in data_findings(dataset)] == codes


def test_the_key_of_prepared_data_holds_all_that_changes_it() -> None:
    """It is in the cache and in every checkpoint: rows that are rendered otherwise have another key."""
    template = TemplateSource("t", None, {"eos_token": "e"}, ("c",), "e", False, {"k": 1}, parse_special_tokens=True)
    images = ImageSettings("<i>", 7, 14, 2, 3136, 12845056, None, False)
    source = RendererSource(template, "0" * 64, 1, images, "why")
    assert renderer_key(source) == renderer_key(replace(source))
    parts = {"template": template, "images": images}
    changed = [replace(source, **{field.name: "other"}) for field in fields(source)]
    for name, part in parts.items():
        changed += [replace(source, **{name: replace(part, **{field.name: "other"})}) for field in fields(part)]
    keys = {renderer_key(source), *map(renderer_key, changed)}
    assert len(keys) == len(changed) + 1
