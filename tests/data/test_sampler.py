"""The order is a pure function of (seed, epoch, position): any step can be asked for without those before it."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from surefoot.data import sampler
from surefoot.data.dataset import ChunkRef
from surefoot.data.sample_selection import ChunkSamples
from surefoot.data.sampler import GlobalOrder, Position, SampleKey, StepBatch

LENGTHS = [5, 9, 2, 7, 7, 3, 8, 1, 4, 6]


class Chunks:
    """A dataset of so many tokens per sample, four rows a chunk. `seen` notes which chunks were read."""

    def __init__(self, lengths: Sequence[int], rows: int = 4, weight: float = 1.0) -> None:
        self._lengths, self._rows, self._weight = list(lengths), rows, weight
        self.seen: list[int] = []

    @cached_property
    def chunks(self) -> list[ChunkRef]:
        firsts = range(0, len(self._lengths), self._rows)
        return [ChunkRef(0, 0, n, first, min(self._rows, len(self._lengths) - first)) for n, first in enumerate(firsts)]

    def chunk_samples(self, number: int) -> ChunkSamples:
        self.seen.append(number)
        ref = self.chunks[number]
        lengths = np.array(self._lengths[ref.first_row : ref.first_row + ref.num_rows])
        none = np.zeros(len(lengths), np.bool_)
        return ChunkSamples(
            *(np.arange(len(lengths)) for _ in range(3)), lengths, lengths, none, none, [], len(lengths)
        )

    def weight(self, _: int) -> float:
        return self._weight


def order(data: Chunks | None = None, **changes: Any) -> GlobalOrder:
    options = {"sequences_per_step": 4, "seed": 1, "shuffle": True, "pack_length": None, **changes}
    return GlobalOrder(data or Chunks(LENGTHS), **options)


def steps(made: GlobalOrder, count: int, position: Position | None = None) -> list[StepBatch]:
    found = []
    for _ in range(count):
        found.append(made.step(position or Position()))
        position = found[-1].next_position
    return found


def epoch_of(made: GlobalOrder, epoch: int) -> list[SampleKey]:
    found, position = [], Position(epoch)
    while position.epoch == epoch:
        step = made.step(position)
        found += [key for sequence in step.sequences for key in sequence]
        position = step.next_position
    return found


@pytest.mark.parametrize("window_rows", [1, 4, 8, 10_000])
@pytest.mark.parametrize("pack_length", [None, 12])
def test_each_epoch_visits_every_sample_once_in_its_own_order(
    pack_length: int | None, window_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "WINDOW_ROWS", window_rows)
    made = order(pack_length=pack_length)
    epochs = [epoch_of(made, epoch) for epoch in range(3)]
    everything = [(index // 4, index % 4) for index in range(10)]
    assert all(sorted(keys) == everything for keys in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("window_rows", [1, 8, 10_000])
@pytest.mark.parametrize("pack_length", [None, 12])
def test_any_position_can_be_asked_for_first(
    pack_length: int | None, window_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "WINDOW_ROWS", window_rows)
    walked = steps(order(pack_length=pack_length), 9)
    for before, after in pairwise(walked):
        assert order(pack_length=pack_length).step(before.next_position) == after


def test_a_step_never_spans_two_epochs_and_epochs_are_counted() -> None:
    walked = steps(order(), 7)
    assert [len(step.sequences) for step in walked] == [4, 4, 2, 4, 4, 2, 4]
    assert [round(step.epoch, 2) for step in walked] == [0.4, 0.8, 1, 1.4, 1.8, 2, 2.4]
    assert [order().steps_in(epochs) for epochs in (1, 2, 0.5, 0.01, 2.4)] == [3, 6, 2, 1, 8]
    assert order(Chunks([1] * 10), sequences_per_step=1, shuffle=False).steps_in(1.1) == 11


def test_only_the_window_that_is_needed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "WINDOW_ROWS", 8)
    data = Chunks([1] * 400)
    order(data).step(Position(3, 40, 4))
    assert len(set(data.seen)) == 2, "two chunks of four rows are a window"


def test_without_shuffle_the_order_is_the_files() -> None:
    assert epoch_of(order(shuffle=False), 3) == [(index // 4, index % 4) for index in range(10)]


def test_seed_changes_the_order() -> None:
    assert epoch_of(order(), 0) != epoch_of(order(seed=2), 0)


@pytest.mark.parametrize(("weight", "wanted"), [(2.0, 80), (0.5, 20), (1.25, 50), (0.1, 4)])
def test_weights_say_how_often_a_row_comes(weight: float, wanted: int) -> None:
    made = order(Chunks([1] * 40, weight=weight))
    first, second = Counter(epoch_of(made, 0)), Counter(epoch_of(made, 1))
    assert first.total() == second.total() == wanted
    assert max(first.values()) == int(np.ceil(weight))
    if weight < 1:
        assert first != second, "another part of the rows comes in each epoch"


def test_a_share_of_many_small_chunks_comes_round_to_all_of_them() -> None:
    made = order(Chunks([1] * 8, rows=1, weight=0.25))
    epochs = [epoch_of(made, epoch) for epoch in range(40)]
    assert {len(keys) for keys in epochs} == {2}
    assert {chunk for keys in epochs for chunk, _ in keys} == set(range(8))


def test_packs_never_exceed_their_length_and_waste_little() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4.5, 0.8, 5000).astype(int) + 10, 2048).tolist()
    made = order(Chunks(lengths, rows=1000), pack_length=2048)
    sizes = [
        sum(lengths[chunk * 1000 + row] for chunk, row in pack) for step in steps(made, 40) for pack in step.sequences
    ]
    assert max(sizes) <= 2048
    assert 1 - sum(sizes) / (len(sizes) * 2048) < 0.02
