"""Batches say exactly what is predicted where, and with which weight."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from surefoot.data.collate import collate, unpacked_batches
from surefoot.data.dataset import Sample
from tests.data.opening import prepared
from tests.support.data import counting_rows, write_jsonl


def sample(ids: list[int], weights: list[float], place: str) -> Sample:
    return Sample(np.array(ids, np.int32), np.array(weights, np.float32), place)


def test_collate_predicts_each_trained_token_from_the_one_before_in_its_own_sample() -> None:
    batch = collate([sample([10, 11, 12], [0, 1, 1], "a:1"), sample([20, 21], [1, 1], "a:2")])
    assert batch.ids.tolist() == [[10, 11, 12, 20, 21]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.target_positions.tolist() == [0, 1, 3]
    assert batch.targets.tolist() == [11, 12, 21], "token 20 starts its sample: nothing predicts it"
    assert batch.weights is None
    assert batch.cu_seq_lens.tolist() == [0, 3, 5]
    assert batch.row_refs == ("a:1", "a:2")
    assert (batch.num_tokens, batch.num_trained, batch.trained_weight) == (5, 3, 3.0)
    assert batch.to(torch.device("cpu")).lengths == [3, 2]


def test_weights_travel_with_their_tokens() -> None:
    batch = collate([sample([10, 11, 12], [1, 0.5, 0], "a:1"), sample([20, 21], [0, 2], "a:2")])
    assert batch.targets.tolist() == [11, 21]
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5, 2]
    assert batch.trained_weight == pytest.approx(2.5)


def test_unpacked_batches_are_the_file_in_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = prepared(write_jsonl(tmp_path / "a.jsonl", counting_rows(7)), tokenizer)
    assert [batch.row_refs for batch in unpacked_batches(dataset.sample_keys(), dataset, 3)] == [
        ("a.jsonl:1", "a.jsonl:2", "a.jsonl:3"),
        ("a.jsonl:4", "a.jsonl:5", "a.jsonl:6"),
        ("a.jsonl:7",),
    ]
