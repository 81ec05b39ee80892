"""Packing: every sample once, no pack too full, and nothing left to chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.packing import best_fit


@given(st.lists(st.integers(1, 64), max_size=200), st.integers(64, 128), st.integers(1, 50))
def test_every_sample_is_in_one_pack_that_holds_it(lengths: list[int], capacity: int, window: int) -> None:
    packs = best_fit(lengths, capacity, window)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= capacity for pack in packs)
    assert all(pack == sorted(pack) for pack in packs)
    assert all(max(pack) // window == min(pack) // window for pack in packs), "packs stay within their window"
    assert packs == best_fit(lengths, capacity, window)


def test_it_wastes_little() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.7, 4000).astype(int).clip(1, 1024).tolist()
    packs = best_fit(lengths, 1024)
    assert sum(lengths) / (1024 * len(packs)) > 0.98


def test_a_sample_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 1 .* 9 .* 8\b"):
        best_fit([8, 9], 8)


def test_room_that_no_sample_can_fill_takes_no_memory() -> None:
    assert best_fit([3, 4, 5], 2**60) == [[0, 1, 2]]
