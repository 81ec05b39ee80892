"""Batches that are made by hand."""

import torch

from surefoot.data.collate import MicroBatch

LENGTHS = [96, 160]


def batch(lengths: list[int] = LENGTHS) -> MicroBatch:
    tokens = sum(lengths)
    return MicroBatch(
        ids=torch.randint(0, 40, (1, tokens)),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        lengths=lengths,
        cu_seq_lens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        target_positions=torch.arange(tokens - 2),
        targets=torch.randint(0, 40, (tokens - 2,)),
        weights=None,
        row_refs=(),
        answer_of=torch.zeros(tokens - 2, dtype=torch.int64),
    )
