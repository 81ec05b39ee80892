"""The sampler: the samples of each step as a pure function of (seed, epoch, position), so resuming replays nothing.

An epoch visits the dataset's chunks in an order drawn from (seed, epoch), a window of them at a time. The samples of a
window are shuffled and, with packing, packed; steps are cut from the windows' sequences one after the other. A dataset
of up to WINDOW_ROWS rows is one window: its order is a plain permutation. Only the chunks of one window need to be
prepared, so training can start before the others are prepared.

Batches are formed globally, over the whole order, and then dealt to the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import ceil, floor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from surefoot.data.dataset import ChunkRef, SampleKey
from surefoot.data.packing import best_fit
from surefoot.data.sample_selection import ChunkSamples
from surefoot.errors import DataError
from surefoot.system.json_files import is_size

WINDOW_ROWS = 65_536


class Samples(Protocol):
    """The interface of a dataset that the order uses."""

    @property
    def chunks(self) -> Sequence[ChunkRef]: ...

    def chunk_samples(self, number: int) -> ChunkSamples: ...

    def weight(self, number: int) -> float: ...


@dataclass(frozen=True)
class Position:
    """A position in the order: the number of used sequences in a window of an epoch."""

    epoch: int = 0
    window: int = 0
    used: int = 0

    @classmethod
    def is_json(cls, value: Any) -> bool:
        """Return whether a JSON value is a position."""
        names = {field.name for field in fields(cls)}
        return isinstance(value, dict) and value.keys() == names and all(map(is_size, value.values()))


@dataclass(frozen=True)
class StepBatch:
    """The global batch of one optimizer step, as places in the data."""

    epoch: float
    """Epochs completed when this step is done, as a fraction."""
    sequences: list[list[SampleKey]]
    """Samples of each sequence: one, or several when packing."""
    next_position: Position
    """Position of the next step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the batch source, by name."""


@dataclass(frozen=True)
class _Visit:
    """A visit to a chunk in an epoch, which uses the fraction `share` of its rows."""

    chunk: int
    share: float


class GlobalOrder:
    """The order of sequences over epochs, and the steps cut from it. A step never spans two epochs."""

    def __init__(
        self, data: Samples, *, sequences_per_step: int, seed: int, shuffle: bool, pack_length: int | None
    ) -> None:
        self._data = data
        self._per_step = sequences_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._pack_length = pack_length
        self._windows_of = lru_cache(maxsize=2)(self._build_windows)
        self._sequences_of = lru_cache(maxsize=2)(self._build_sequences)

    def step(self, position: Position, count: int | None = None) -> StepBatch:
        """Return the sequences of the step at `position`; `count` overrides their number.

        It does not depend on earlier calls, and waits for the shards of its window. Raises: DataError for bad shards.
        """
        self._find_windows(position)
        epoch, window, used = position.epoch, position.window, position.used
        chosen: list[list[SampleKey]] = []
        num_sequences = count or self._per_step
        while len(chosen) < num_sequences:
            sequences = self._sequences_of(epoch, window)
            taken = sequences[used : used + num_sequences - len(chosen)]
            chosen += taken
            used += len(taken)
            if used < len(sequences):
                break
            window, used = window + 1, 0
            if window == len(self._windows_of(epoch)):
                if chosen:
                    return StepBatch(epoch + 1.0, chosen, Position(epoch + 1))
                if epoch > position.epoch:
                    raise DataError("no sample is left to train on: see the skipped rows (`surefoot data` lists them).")
                epoch, window = epoch + 1, 0
        return StepBatch(epoch + self._compute_progress(epoch, window, used), chosen, Position(epoch, window, used))

    def _compute_progress(self, epoch: int, window: int, used: int) -> float:
        """Return the fraction of an epoch before a position, by rows."""
        rows = [sum(self._count_rows(visit) for visit in visits) for visits in self._windows_of(epoch)]
        within = used / len(self._sequences_of(epoch, window)) * rows[window] if used else 0
        return (sum(rows[:window]) + within) / sum(rows)

    def _count_rows(self, visit: _Visit) -> float:
        return self._data.chunks[visit.chunk].num_rows * visit.share

    def steps_in(self, epochs: float) -> int:
        """Return the optimizer steps in `epochs`, at least one; a part of an epoch counts in proportion.

        It reads the lengths of all samples, so everything must be prepared.
        """
        full = int(epochs)
        steps = sum(self._count_steps(epoch) for epoch in range(full))
        if epochs > full:
            steps += ceil(self._count_steps(full) * (epochs - full) - 1e-9)  # 10 x (1.1 - 1) is a little over 1
        return max(steps, 1)

    def _count_steps(self, epoch: int) -> int:
        windows = self._windows_of(epoch)
        if self._pack_length is None:  # counted without shuffling
            visits = (visit for visits in windows for visit in visits)
            count = sum(
                len(self._select_samples(visit, epoch, self._data.chunk_samples(visit.chunk))) for visit in visits
            )
        else:
            count = sum(len(self._sequences_of(epoch, window)) for window in range(len(windows)))
        return ceil(count / self._per_step)

    def windows_from(self, position: Position) -> list[list[int]]:
        """Return the chunks of each window from a position to the end of its epoch."""
        windows = self._find_windows(position)
        return [list(dict.fromkeys(visit.chunk for visit in visits)) for visits in windows[position.window :]]

    def _find_windows(self, position: Position) -> list[list[_Visit]]:
        """Return the windows of a position's epoch. Raises: DataError if the position is in none of them."""
        windows = self._windows_of(position.epoch)
        if position.window >= len(windows):
            raise DataError(
                f"the checkpoint continues at window {position.window} of data with {len(windows)} windows. Its "
                "counters are damaged: resume from an older one with resume_from_checkpoint."
            )
        return windows

    def _build_windows(self, epoch: int) -> list[list[_Visit]]:
        """Return the visits of an epoch, cut into windows of about WINDOW_ROWS rows."""
        visits = []
        for number in range(len(self._data.chunks)):
            weight = self._data.weight(number)
            visits += [_Visit(number, 1.0)] * floor(weight)
            if weight > floor(weight):
                visits.append(_Visit(number, weight - floor(weight)))
        if self._shuffle:
            visits = [visits[i] for i in np.random.default_rng([self._seed, epoch]).permutation(len(visits))]
        windows: list[list[_Visit]] = [[]]
        rows = 0.0
        for visit in visits:
            if windows[-1] and rows + self._count_rows(visit) > WINDOW_ROWS:
                windows.append([])
                rows = 0.0
            windows[-1].append(visit)
            rows += self._count_rows(visit)
        return windows

    def _build_sequences(self, epoch: int, window: int) -> list[list[SampleKey]]:
        """Return the sequences of a window, in order."""
        keys: list[NDArray[np.int64]] = []
        lengths: list[NDArray[np.int64]] = []
        for visit in self._windows_of(epoch)[window]:
            part = self._data.chunk_samples(visit.chunk)
            chosen = self._select_samples(visit, epoch, part)
            keys.append(np.stack([np.full(len(chosen), visit.chunk), part.samples[chosen]], axis=1))
            lengths.append(part.lengths[chosen])
        if not keys:
            return []
        all_keys, all_lengths = np.concatenate(keys), np.concatenate(lengths)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch, window + 1]).permutation(len(all_keys))
            all_keys, all_lengths = all_keys[order], all_lengths[order]
        pairs: list[SampleKey] = [(chunk, sample) for chunk, sample in all_keys.tolist()]
        if self._pack_length is None:
            return [[pair] for pair in pairs]
        return [[pairs[index] for index in pack] for pack in best_fit(all_lengths.tolist(), self._pack_length)]

    def _select_samples(self, visit: _Visit, epoch: int, part: ChunkSamples) -> NDArray[np.int64]:
        """Return the indices of a chunk's usable samples that a visit takes: all, or a share drawn anew each epoch."""
        count = len(part.samples)
        if visit.share == 1.0:
            return np.arange(count)
        # Rounded over the source, not over the chunk, and shifted each epoch: small chunks get their share in turn.
        shift = np.random.default_rng([self._seed, epoch]).random()
        ref = self._data.chunks[visit.chunk]
        end = ref.first_row + ref.num_rows
        quota = floor(end * visit.share + shift) - floor(ref.first_row * visit.share + shift)
        drawn = np.random.default_rng([self._seed, epoch, visit.chunk, 1]).permutation(ref.num_rows)[:quota]
        return np.flatnonzero(np.isin(part.rows, drawn))
