"""Collation: packs samples end to end into batches of tensors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.data.dataset import Dataset, Sample, SampleKey
from surefoot.data.image_processor import PixelReader, Vision
from surefoot.data.images import Image
from surefoot.data.pairs import CHOSEN, REJECTED, take_images
from surefoot.system.pinned_copy import send


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass, laid end to end without padding.

    Shapes: T tokens, N trained. ids int64 [1, T]; position_ids int64 [1, T], or [3, 1, T] where the model reads images:
    time, row and column; target_positions int64 [N], the positions whose next token is trained; targets int64 [N],
    those next tokens; weights float32 [N], their loss weights, or None if all are 1; answer_of int64 [N], the number of
    the sequence that each is of, prefixes not counted (a prefix's tokens are of the first sequence that it begins);
    cu_seq_lens int32 [sequences + 1].
    """

    ids: Tensor
    position_ids: Tensor
    lengths: list[int]
    cu_seq_lens: Tensor
    target_positions: Tensor
    targets: Tensor
    weights: Tensor | None
    row_refs: tuple[str, ...]
    answer_of: Tensor
    prefix_of: tuple[int, ...] | None = None
    """Index of the earlier sequence that is the prefix of each sequence, or -1; None if no sequence has one."""
    vision: Vision | None = None
    """Pixels of the images; None for a model that reads text only."""
    is_dummy: bool = False
    """Whether this rank has no rows left while other ranks have: such a batch is computed, but counted nowhere."""
    is_question: Tensor | None = None
    """bool [N]: which of the trained tokens are of the question of a pair; None if none is."""
    sample_keys: tuple[SampleKey, ...] = ()
    """Places of the samples in their dataset; empty if they are of none."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with a prefix counted for each of its sequences, however often it is computed."""
        if self.is_dummy:
            return 0
        if self.prefix_of is None:
            return self.ids.shape[1]
        repeated = sum(self.lengths[prefix] for prefix in self.prefix_of if prefix >= 0)
        return self.ids.shape[1] + repeated - sum(self.lengths[prefix] for prefix in self._prefixes)

    @property
    def num_sequences(self) -> int:
        """Number of sequences; a prefix is none of its own."""
        return 0 if self.is_dummy else len(self.lengths) - len(self._prefixes)

    @property
    def _prefixes(self) -> set[int]:
        return {prefix for prefix in self.prefix_of or () if prefix >= 0}

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


class _Sequence(NamedTuple):
    """A sequence of a batch: a sample, an answer of a pair with its question, or one of both."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    """[n]: loss weight of each token."""
    positions: Tensor
    place: str
    images: tuple[Image, ...] = ()
    prefix: int = -1
    """Index of the sequence that is its beginning, or -1."""
    question: int = 0
    """Number of its tokens that are of the question of a pair."""


def collate(
    samples: Sequence[Sample], reader: PixelReader | None = None, *, shares_questions: bool = False
) -> MicroBatch:
    """Lay samples end to end; positions restart with each. A pair is two sequences: the question with each answer.

    With `shares_questions`, a pair's question stands in the batch once, as the prefix of its answers.
    Raises: DataError for a bad image, with its row's place.
    """
    sequences: list[_Sequence] = []
    for sample in samples:
        if sample.parts is None:
            positions = _positions_of(sample.ids, reader, sample.place, sample.images)
            sequences.append(_Sequence(sample.ids, sample.weights, positions, sample.place, sample.images))
        else:
            sequences += _split_pair(sample, len(sequences), reader, shares_questions=shares_questions)
    lengths = [len(sequence.ids) for sequence in sequences]
    begins = [0, *accumulate(lengths)]
    ids = torch.from_numpy(np.concatenate([sequence.ids for sequence in sequences]).astype(np.int64))
    # A token is predicted at the one before it; the first of an answer is so at the end of its question.
    targets: list[NDArray[np.int64]] = []
    positions_of_targets: list[NDArray[np.int64]] = []
    weights: list[NDArray[np.float32]] = []
    is_question: list[NDArray[np.bool_]] = []
    for begin, sequence in zip(begins, sequences, strict=False):
        trained = np.flatnonzero(sequence.weights)
        if sequence.prefix < 0:
            trained = trained[trained > 0]  # nothing predicts the first token
        predicting = begin + trained - 1
        if sequence.prefix >= 0:
            predicting[trained == 0] = begins[sequence.prefix + 1] - 1
        targets.append(begin + trained)
        positions_of_targets.append(predicting)
        weights.append(sequence.weights[trained])
        is_question.append(trained < sequence.question)
    target_weights = torch.from_numpy(np.concatenate(weights))
    prefixes = tuple(sequence.prefix for sequence in sequences)
    shared = set(prefixes)
    is_answer = np.array([index not in shared for index in range(len(sequences))])
    answer_of = np.repeat(np.cumsum(is_answer) - is_answer, [len(each) for each in targets])
    of_questions = torch.from_numpy(np.concatenate(is_question))
    return MicroBatch(
        ids=ids[None],
        position_ids=torch.cat([sequence.positions for sequence in sequences], dim=-1).unsqueeze(-2),
        lengths=lengths,
        cu_seq_lens=torch.tensor(begins, dtype=torch.int32),
        target_positions=torch.from_numpy(np.concatenate(positions_of_targets)),
        targets=ids[torch.from_numpy(np.concatenate(targets))],
        weights=None if bool((target_weights == 1).all()) else target_weights,
        answer_of=torch.from_numpy(answer_of),
        row_refs=tuple(sequence.place for sequence in sequences),
        prefix_of=prefixes if max(prefixes) >= 0 else None,
        vision=reader.read([(sequence.place, sequence.images) for sequence in sequences])
        if reader is not None
        else None,
        is_question=of_questions if bool(of_questions.any()) else None,
        sample_keys=tuple(sample.key for sample in samples if sample.key is not None),
    )


def _split_pair(
    sample: Sample, index: int, reader: PixelReader | None, *, shares_questions: bool
) -> Iterator[_Sequence]:
    """Yield the sequences of a pair, of which the first has the index `index` in the batch."""
    assert sample.parts is not None
    question, chosen, _ = sample.parts
    ids = np.split(sample.ids, [question, question + chosen])
    weights = np.split(sample.weights, [question, question + chosen])
    images: list[tuple[Image, ...]] = []
    token = reader.settings.token_id if reader is not None else None
    for tokens in ids:
        images.append(take_images(tokens, sample.images[sum(map(len, images)) :], token))
    if shares_questions:
        positions = _positions_of(ids[0], reader, sample.place, images[0])
        yield _Sequence(ids[0], weights[0], positions, sample.place, images[0], question=question)
    for part in (CHOSEN, REJECTED):
        if not len(ids[part]):
            continue  # an answer that stands alone
        whole, all_images = np.concatenate([ids[0], ids[part]]), (*images[0], *images[part])
        positions = _positions_of(whole, reader, sample.place, all_images)
        if shares_questions:
            yield _Sequence(
                ids[part], weights[part], positions[..., question:], sample.place, images[part], prefix=index
            )
        else:
            # The question is trained once, with the first of its answers.
            of_question = weights[0] if part == CHOSEN or not chosen else np.zeros_like(weights[0])
            whole_weights = np.concatenate([of_question, weights[part]])
            yield _Sequence(whole, whole_weights, positions, sample.place, all_images, question=question)


def _positions_of(ids: NDArray[np.int32], reader: PixelReader | None, place: str, images: tuple[Image, ...]) -> Tensor:
    """Return the positions of a sequence's tokens; see `MicroBatch.position_ids`."""
    return torch.arange(len(ids)) if reader is None else reader.positions(ids, images, place)


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
    *,
    shares_questions: bool = False,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of a step's sequences, in micro-batches of at most `rows_each` sequences.

    Sequences are dealt to the ranks in turn. All ranks get equally many micro-batches; the last ones may be dummies.
    """
    rows_per_rank = -(-len(rows) // num_ranks)
    local_rows = rows[rank::num_ranks]
    for begin in range(0, rows_per_rank, rows_each):
        samples = [dataset.sample(*key) for row in local_rows[begin : begin + rows_each] for key in row]
        yield collate(samples, reader, shares_questions=shares_questions) if samples else dummy_batch(reader)


def unpacked_batches(
    keys: Iterable[SampleKey],
    dataset: Dataset,
    rows_each: int,
    rank: int = 0,
    num_ranks: int = 1,
    reader: PixelReader | None = None,
    *,
    shares_questions: bool = False,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of some samples in their order, one a sequence; each rank gets as many batches."""
    rest = iter(keys)
    while rows := [[key] for key in islice(rest, rows_each * num_ranks)]:
        yield from micro_batches(rows, dataset, rows_each, rank, num_ranks, reader, shares_questions=shares_questions)
