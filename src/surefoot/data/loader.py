"""Which samples each step sees: a pure function of the settings and the step's number, so resuming replays nothing.

Batches are formed globally, over the whole order; dealing them to ranks comes after.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
import torch
from torch import Tensor

from surefoot.data.dataset import Dataset
from surefoot.data.pack import best_fit
from surefoot.data.render import Sample


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward, laid end to end without padding.

    Shapes: T tokens, N trained. ids and position_ids int64 [1, T]; predict_at int64 [N], the positions whose next token
    is trained; targets int64 [N], those next tokens; cu_seq_lens int32 [samples + 1].
    """

    ids: Tensor
    position_ids: Tensor
    lengths: list[int]
    cu_seq_lens: Tensor
    predict_at: Tensor
    targets: Tensor
    places: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[1]

    @property
    def num_trained(self) -> int:
        return self.targets.shape[0]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same batch with its tensors on `device`, copied without waiting where possible."""
        moved = (
            t.to(device, non_blocking=True)
            for t in (self.ids, self.position_ids, self.cu_seq_lens, self.predict_at, self.targets)
        )
        ids, position_ids, cu_seq_lens, predict_at, targets = moved
        return MicroBatch(ids, position_ids, self.lengths, cu_seq_lens, predict_at, targets, self.places)


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Lay samples end to end; positions restart with each."""
    lengths = [len(sample.ids) for sample in samples]
    ids = torch.from_numpy(np.concatenate([sample.ids for sample in samples]).astype(np.int64))
    learned = []
    for sample in samples:
        # Token i is predicted at position i - 1 of its own sample; its first token is predicted nowhere.
        learned.append(np.append(sample.trained[1:], False))
    predict_at = torch.from_numpy(np.flatnonzero(np.concatenate(learned)))
    return MicroBatch(
        ids=ids[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        lengths=lengths,
        cu_seq_lens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        predict_at=predict_at,
        targets=ids[predict_at + 1],
        places=tuple(sample.place for sample in samples),
    )


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step, over all ranks."""

    epoch: float
    """Share of the data seen when this step is done."""
    rows: list[list[int]]
    """Sample indices per sequence: one each, or several when packing."""


class GlobalOrder:
    """The order of sequences over epochs, and the steps cut from it. A step never spans two epochs."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        sequences_per_step: int,
        seed: int,
        shuffle: bool,
        pack_length: int | None,
    ) -> None:
        self._lengths = lengths
        self._per_step = sequences_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._pack_length = pack_length
        self.epoch_rows = lru_cache(maxsize=2)(self._epoch_rows)
        self._steps_in = lru_cache(maxsize=None)(lambda epoch: ceil(len(self.epoch_rows(epoch)) / self._per_step))

    def _epoch_rows(self, epoch: int) -> list[list[int]]:
        """All sequences of one epoch, in order."""
        count = len(self._lengths)
        order = range(count)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(count).tolist()
        if self._pack_length is None:
            return [[index] for index in order]
        packs = best_fit([self._lengths[index] for index in order], self._pack_length)
        return [[order[position] for position in pack] for pack in packs]

    def steps_in(self, epochs: float) -> int:
        """Optimizer steps in so many epochs; a part of an epoch counts in proportion, at least one step."""
        whole = int(epochs)
        steps = sum(self._steps_in(epoch) for epoch in range(whole))
        if epochs > whole:
            steps += ceil(self._steps_in(whole) * (epochs - whole) - 1e-9)  # 10 x (1.1 - 1) is a little over 1
        return max(steps, 1)

    def step(self, index: int) -> StepBatch:
        """The sequences of optimizer step `index` (from 0), whatever was read before."""
        epoch = 0
        while index >= (steps := self._steps_in(epoch)):
            index -= steps
            epoch += 1
        rows = self.epoch_rows(epoch)
        end = min((index + 1) * self._per_step, len(rows))
        return StepBatch(epoch + end / len(rows), rows[index * self._per_step : end])


def micro_batches(rows: Sequence[Sequence[int]], dataset: Dataset, rows_each: int) -> Iterator[MicroBatch]:
    """Cut sequences (sample indices) into forwards of at most `rows_each` sequences."""
    for begin in range(0, len(rows), rows_each):
        yield collate([dataset.samples[index] for row in rows[begin : begin + rows_each] for index in row])
