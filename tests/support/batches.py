"""Batches that are made by hand."""

import torch

from surefoot.data.collate import MicroBatch

LENGTHS = [96, 160]


def batch() -> MicroBatch:
    tokens = sum(LENGTHS)
    return MicroBatch(
        ids=torch.randint(0, 40, (1, tokens)),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        lengths=LENGTHS,
        cu_seq_lens=torch.tensor([0, LENGTHS[0], tokens], dtype=torch.int32),
        target_positions=torch.arange(tokens - 2),
        targets=torch.randint(0, 40, (tokens - 2,)),
        weights=None,
        row_refs=(),
    )
