"""How the routers use the experts over many steps: in one step few tokens may well leave an expert out."""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.events import ExpertsUsed
from surefoot.models.routing import router_names

STEPS = 50
"""Over which it is counted."""
FAIR_SHARE = 0.5
"""Of an even part: an expert that had less may well be left out by chance."""


def trains_routers(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether any of the trained `parameters` belongs to a router."""
    routers = router_names(model)
    return any(name.startswith(f"{router}.") for name in parameters for router in routers)


class ExpertUse:
    """Adds up the rows of each expert; after every `STEPS` steps it says how they were spread, and begins anew."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: Tensor | None = None
        self._was_used: Tensor | None = None
        """Experts that got a fair part of the rows in an earlier count."""
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
        chosen = max(1, round(int(rows[0].sum()) / self._tokens))
        """Experts that a token chooses."""
        shares = rows.topk(chosen).values.sum(1) / rows.sum(1)
        layer = int(shares.argmax())
        is_fair = rows >= FAIR_SHARE * rows.sum(1, keepdim=True) / rows.shape[1]
        before = self._was_used if self._was_used is not None else is_fair
        self._was_used = before | is_fair
        used = ExpertsUsed(
            rank=self._rank,
            step=step,
            layer=layer,
            share=float(shares[layer]),
            even_share=chosen / rows.shape[1],
            silent=int((before & (rows == 0)).sum()),
            rows=chosen * self._tokens / rows.shape[1],
        )
        self._rows, self._tokens, self._steps = None, 0, 0
        return used
