"""How the routers use the experts over many steps: in one step few tokens may well leave an expert out."""

import torch
from torch import Tensor

from surefoot.events import ExpertsUsed

STEPS = 50
"""Over which it is counted."""


class ExpertUse:
    """Adds up the rows of each expert; after every `STEPS` steps it says how they were spread, and begins anew."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: Tensor | None = None
        self._tokens = 0
        self._steps = 0

    def add(self, step: int, counts: Tensor, tokens: int) -> ExpertsUsed | None:
        """Shapes: counts int64 [layers, E], the rows each expert got of the step's `tokens`."""
        self._rows = counts.clone() if self._rows is None else self._rows + counts
        self._tokens += tokens
        self._steps += 1
        if self._steps < STEPS:
            return None
        rows = self._rows
        busiest = rows.amax(1)
        layer = busiest.argmax()
        named = torch.stack([layer, busiest[layer], rows[layer].sum(), (rows == 0).sum()]).tolist()
        used = ExpertsUsed(
            rank=self._rank,
            step=step,
            layer=named[0],
            share=named[1] / self._tokens,
            even_share=named[2] / rows.shape[1] / self._tokens,
            silent=named[3],
            rows=named[2] / rows.shape[1],
        )
        self._rows, self._tokens, self._steps = None, 0, 0
        return used
