"""The global order is a pure function of settings and step; batches say exactly what is predicted where."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from surefoot.data.dataset import load_dataset
from surefoot.data.loader import GlobalOrder, collate
from surefoot.data.render import Sample
from surefoot.errors import DataError
from tests.conftest import VOCAB_SIZE, counting_rows, write_jsonl

LENGTHS = [5, 9, 2, 7, 7, 3, 8, 1, 4, 6]


def order(**changes: object) -> GlobalOrder:
    options = {"sequences_per_step": 4, "seed": 1, "shuffle": True, "pack_length": None, **changes}
    return GlobalOrder(LENGTHS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pack_length", [None, 12])
def test_each_epoch_visits_every_sample_once_in_its_own_order(pack_length: int | None) -> None:
    made = order(pack_length=pack_length)
    epochs = [made.epoch_rows(epoch) for epoch in range(3)]
    for rows in epochs:
        assert sorted(index for row in rows for index in row) == list(range(10))
    assert epochs[0] != epochs[1] != epochs[2]


def test_any_step_can_be_asked_for_first() -> None:
    steps = [order().step(index).rows for index in range(7)]
    fresh = order()
    assert [fresh.step(index).rows for index in (6, 3, 0)] == [steps[6], steps[3], steps[0]]
    assert [len(rows) for rows in steps] == [4, 4, 2, 4, 4, 2, 4], "a step never spans two epochs"


def test_epochs_and_steps() -> None:
    made = order()
    assert [made.steps_in(epochs) for epochs in (1, 2, 0.5, 0.01, 2.4)] == [3, 6, 2, 1, 8]
    assert GlobalOrder([1] * 10, sequences_per_step=1, seed=0, shuffle=False, pack_length=None).steps_in(1.1) == 11
    assert made.step(2).epoch == 1.0
    assert made.step(4).epoch == 1.8


def test_without_shuffle_the_order_is_the_files() -> None:
    assert order(shuffle=False).epoch_rows(3) == [[index] for index in range(10)]


def test_seed_changes_the_order() -> None:
    assert order().epoch_rows(0) != order(seed=2).epoch_rows(0)


def test_collate_predicts_each_trained_token_from_the_one_before_in_its_own_sample() -> None:
    first = Sample(np.array([10, 11, 12], np.int32), np.array([False, True, True]), "a:1")
    second = Sample(np.array([20, 21], np.int32), np.array([True, True]), "a:2")
    batch = collate([first, second])
    assert batch.ids.tolist() == [[10, 11, 12, 20, 21]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.predict_at.tolist() == [0, 1, 3]
    assert batch.targets.tolist() == [11, 12, 21], "token 20 starts its sample: nothing predicts it"
    assert batch.cu_seq_lens.tolist() == [0, 3, 5]
    assert batch.places == ("a:1", "a:2")
    assert (batch.num_tokens, batch.num_trained) == (5, 3)
    assert batch.to(torch.device("cpu")).lengths == [3, 2]


def load(tmp_path, tokenizer, **changes):
    path = write_jsonl(tmp_path / "data.jsonl", counting_rows(12))
    options = {"max_length": 256, "truncation": "error", "vocab_size": VOCAB_SIZE, **changes}
    return load_dataset(str(path), tokenizer, **options)


def test_rows_read_are_trained_truncated_or_skipped(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = load(tmp_path, tokenizer)
    assert whole.counts.as_dict() == {"read": 12, "trained": 12, "truncated": 0, "skipped": 0}
    limit = sorted(whole.lengths)[6]
    for truncation in ("drop", "right", "left"):
        cut = load(tmp_path, tokenizer, max_length=limit, truncation=truncation)
        counts = cut.counts
        assert counts.read == 12 == counts.trained + counts.truncated + counts.skipped
        assert max(cut.lengths) <= limit
        assert (counts.skipped > 0) == (truncation == "drop")
        assert len(cut.skipped_places) == counts.skipped
        assert cut.fingerprint() != whole.fingerprint()


def test_a_row_cut_until_nothing_is_trained_is_skipped(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="no row of 12 is left to train on: 12 were skipped, the first at data.jsonl:1"):
        load(tmp_path, tokenizer, max_length=10, truncation="right")


def test_rows_too_long_are_an_error_by_default(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"\d+ of 12 rows are longer than max_length=60: the first is data.jsonl:\d"):
        load(tmp_path, tokenizer, max_length=60)


def test_a_tokenizer_of_another_model_is_noticed(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:1: token id \d+ is outside the model's vocabulary of 50"):
        load(tmp_path, tokenizer, vocab_size=50)
