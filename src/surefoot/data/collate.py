"""Collation: packs samples end to end into batches of tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.data.dataset import Dataset, Sample
from surefoot.data.image_processor import PixelReader, Vision
from surefoot.data.sampler import SampleKey
from surefoot.system.pinned_copy import send


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass, laid end to end without padding.

    Shapes: T tokens, N trained. ids int64 [1, T]; position_ids int64 [1, T], or [3, 1, T] where the model reads images:
    time, row and column; target_positions int64 [N], the positions whose next token is trained; targets int64 [N],
    those next tokens; weights float32 [N], their loss weights, or None if all are 1; cu_seq_lens int32 [samples + 1].
    """

    ids: Tensor
    position_ids: Tensor
    lengths: list[int]
    cu_seq_lens: Tensor
    target_positions: Tensor
    targets: Tensor
    weights: Tensor | None
    row_refs: tuple[str, ...]
    prefix_of: tuple[int, ...] | None = None
    """Index of the earlier sequence that is the prefix of each sequence, or -1; None if no sequence has one."""
    vision: Vision | None = None
    """Pixels of the images; None for a model that reads text only."""
    is_dummy: bool = False
    """Whether this rank has no rows left while other ranks have: such a batch is computed, but counted nowhere."""

    @property
    def num_tokens(self) -> int:
        return 0 if self.is_dummy else self.ids.shape[1]

    @property
    def num_sequences(self) -> int:
        return 0 if self.is_dummy else len(self.lengths)

    @property
    def num_trained(self) -> int:
        return 0 if self.is_dummy else self.targets.shape[0]

    @property
    def trained_weight(self) -> float:
        """Sum of the trained tokens' weights, by which the loss is divided."""
        if self.is_dummy:
            return 0.0
        return float(self.num_trained if self.weights is None else self.weights.sum())

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the batch with its tensors on `device`, without waiting for the copies."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: send(tensor, device) for name, tensor in tensors.items()}
        return replace(self, **moved, vision=self.vision.to(device) if self.vision is not None else None)


def collate(samples: Sequence[Sample], reader: PixelReader | None = None) -> MicroBatch:
    """Lay samples end to end; positions restart with each. Raises: DataError for a bad image, with its row's place."""
    lengths = [len(sample.ids) for sample in samples]
    ids = torch.from_numpy(np.concatenate([sample.ids for sample in samples]).astype(np.int64))
    # Token i is predicted at position i - 1 of its own sample; its first token is never predicted.
    target_weights = np.concatenate([np.append(sample.weights[1:], np.float32(0)) for sample in samples])
    target_positions = torch.from_numpy(np.flatnonzero(target_weights))
    weights = torch.from_numpy(target_weights)[target_positions]
    position_ids = [
        torch.arange(len(sample.ids)) if reader is None else reader.positions(sample.ids, sample.images, sample.place)
        for sample in samples
    ]
    return MicroBatch(
        ids=ids[None],
        position_ids=torch.cat(position_ids, dim=-1).unsqueeze(-2),
        lengths=lengths,
        cu_seq_lens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        target_positions=target_positions,
        targets=ids[target_positions + 1],
        weights=None if bool((weights == 1).all()) else weights,
        row_refs=tuple(sample.place for sample in samples),
        vision=reader.read([(sample.place, sample.images) for sample in samples]) if reader is not None else None,
    )


def dummy_batch(reader: PixelReader | None) -> MicroBatch:
    """Return the batch that a rank computes while only other ranks have rows left."""
    sample = Sample(np.zeros(2, np.int32), np.ones(2, np.float32), place="")
    return replace(collate([sample], reader), row_refs=(), is_dummy=True)


def micro_batches(
    rows: Sequence[Sequence[SampleKey]],
    dataset: Dataset,
    rows_each: int,
    rank: int = 0,
    num_ranks: int = 1,
    reader: PixelReader | None = None,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of a step's sequences, in micro-batches of at most `rows_each` sequences.

    Sequences are dealt to the ranks in turn. All ranks get equally many micro-batches; the last ones may be dummies.
    """
    rows_per_rank = -(-len(rows) // num_ranks)
    local_rows = rows[rank::num_ranks]
    for begin in range(0, rows_per_rank, rows_each):
        samples = [dataset.sample(*key) for row in local_rows[begin : begin + rows_each] for key in row]
        yield collate(samples, reader) if samples else dummy_batch(reader)


def all_batches(
    dataset: Dataset, rows_each: int, rank: int = 0, num_ranks: int = 1, reader: PixelReader | None = None
) -> Iterator[MicroBatch]:
    """Yield this rank's share of the dataset in file order, one sample a sequence; each rank gets as many batches."""
    keys = dataset.sample_keys()
    while rows := [[key] for key in islice(keys, rows_each * num_ranks)]:
        yield from micro_batches(rows, dataset, rows_each, rank, num_ranks, reader)
